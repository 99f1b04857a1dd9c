"""Whether the shared memory between workers and trainer holds the batches that may wait in it.

Tensors cross a worker's queue in /dev/shm, 64 MB in a container by default; a write beyond it is a SIGBUS. A
preprocessed batch can be larger than the raw one (MolmoAct2: 1.7 MB of fp32 patches an image instead of 0.2
MB of uint8), so a run that fits natively might not fit here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_FOLDER = "/dev/shm"


def why_not(batch: Any, raw: Any, pending: int) -> str | None:
    """Why `pending` batches of this size will not fit into what is free now, or None.

    Nothing is said where there is no /dev/shm, nor of a batch that is no larger than the raw one.
    """
    size = tensor_bytes(batch)
    if size <= tensor_bytes(raw) or not os.path.isdir(_FOLDER):
        return None
    needed, free = size * pending, shutil.disk_usage(_FOLDER).free
    if needed <= free:
        return None
    return (
        f"{pending} preprocessed batches need {needed >> 20} MB of {_FOLDER}, {free >> 20} MB are free; "
        "enlarge it (docker: --shm-size) or lower prefetch_factor"
    )


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(tensor_bytes(one) for one in value.values())
    return sum(tensor_bytes(one) for one in value) if isinstance(value, (list, tuple)) else 0
