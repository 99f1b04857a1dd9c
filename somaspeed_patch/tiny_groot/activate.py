"""Importing this module makes the name stand for local files, in this process: what discovery is for."""

import logging

from somaspeed_patch.tiny import episodes, help_texts
from somaspeed_patch.tiny_groot import redirect
from somaspeed_patch.tiny_groot.sizes import from_environment

_size = from_environment()
help_texts.drop()
redirect.install(_size)
episodes.repeat_from_environment()
logging.getLogger(__name__).info("%s is a GR00T N1.7 of size %s", redirect.CHECKPOINT, _size)
