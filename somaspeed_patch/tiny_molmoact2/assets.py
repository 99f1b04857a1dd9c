"""The tiny MolmoAct2's files, built once a machine and user, in the folder for temporary files.

A folder is written under another name and renamed when it is whole: processes that build at the same time,
and builds that are killed, leave nothing half-written under the name that is read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from somaspeed_patch.tiny_molmoact2.sizes import by_name


@dataclass(frozen=True)
class Assets:
    """Where the files are."""

    checkpoint: Path
    """for --policy.checkpoint_path"""
    fast_tokenizer: Path
    """for --policy.discrete_action_tokenizer"""


def ensure(
    size: str = "micro",
    *,
    seed: int = 0,
    attn_implementation: str | None = None,
    layers: int | None = None,
    crop_mode: str = "resize",
) -> Assets:
    """The files of one tiny MolmoAct2, built now if this machine has none.

    Args:
        size: a key of `sizes.SIZES`.
        seed, attn_implementation, layers, crop_mode: as of `checkpoint.write`; other ones are other files.
    Raises: ValueError: no such size or crop_mode.
    """
    options = {
        "seed": seed,
        "attn_implementation": attn_implementation,
        "layers": layers,
        "crop_mode": crop_mode,
    }
    folder = Path(tempfile.gettempdir()) / f"somaspeed-tiny-molmoact2-{size}-{_digest(size, options)}"
    if not folder.is_dir():
        _build(folder, size, options)
    return _inside(folder)


def _inside(folder: Path) -> Assets:
    return Assets(checkpoint=folder / "checkpoint", fast_tokenizer=folder / "fast_tokenizer")


def _build(folder: Path, size: str, options: dict[str, Any]) -> None:
    """Write beside `folder`, then rename; whoever renames first wins."""
    from somaspeed_patch.tiny_molmoact2 import checkpoint, fast_tokenizer

    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        written = _inside(draft)
        dtype = torch.bfloat16 if size == "full" else torch.float32  # 10.9 GB are enough
        checkpoint.write(written.checkpoint, by_name(size), dtype=dtype, **options)
        fast_tokenizer.write(written.fast_tokenizer)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _digest(size: str, options: dict[str, Any]) -> str:
    """Of all that decides what the files hold, and of the user, the only one who can read the folder."""
    told = repr((size, by_name(size), sorted(options.items()), os.getuid()))
    return hashlib.sha256((_sources() + told).encode()).hexdigest()[:12]


@cache
def _sources() -> str:
    """The code that writes the files, and the versions of what it calls."""
    here = Path(__file__).parent
    names = ("checkpoint.py", "fast_tokenizer.py", "tokenizer.py")
    versions = [version(name) for name in ("lerobot", "transformers", "tokenizers", "torch")]
    return repr([versions, *((here / name).read_text() for name in names)])
