"""Importing this module makes the two names stand for local files, in this process: what discovery is for."""

import logging
import os

from somaspeed_patch.tiny_molmoact2 import redirect
from somaspeed_patch.tiny_molmoact2.sizes import from_environment

EPISODES = "SOMASPEED_TINY_EPISODES"  # how many times an epoch has each episode, for benchmarks

_size = from_environment()
redirect.install(_size)
if EPISODES in os.environ:
    redirect.repeat_episodes(int(os.environ[EPISODES]))
logging.getLogger(__name__).info("%s is a MolmoAct2 of size %s", redirect.CHECKPOINT, _size)
