"""Importing this module shrinks pi0.5 and redirects its tokenizer, in this process: what discovery is for."""

import logging

from somaspeed_patch.tiny import help_texts
from somaspeed_patch.tiny_pi05 import byte_tokenizer, shrink
from somaspeed_patch.tiny_pi05.sizes import from_environment

_size = from_environment()
help_texts.drop()
shrink.install(_size)
byte_tokenizer.install()
logging.getLogger(__name__).info("pi0.5 is shrunk to %s, with a byte tokenizer", _size)
