"""The tiny MolmoAct2's files, built once a machine and user (`somaspeed_patch.tiny.files`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from somaspeed_patch.tiny import files, vocabulary
from somaspeed_patch.tiny_molmoact2.sizes import by_name

_HERE = Path(__file__).parent
_SOURCES = (
    *(_HERE / name for name in ("checkpoint.py", "fast_tokenizer.py", "tokenizer.py")),
    Path(vocabulary.__file__),
)
_PACKAGES = ("lerobot", "transformers", "tokenizers", "torch")


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
    inputs = (files.sources(_SOURCES, _PACKAGES), size, by_name(size), sorted(options.items()))
    name = f"somaspeed-tiny-molmoact2-{size}"
    return _inside(files.ensure(name, inputs, partial(_write, size, options)))


def _inside(folder: Path) -> Assets:
    return Assets(checkpoint=folder / "checkpoint", fast_tokenizer=folder / "fast_tokenizer")


def _write(size: str, options: dict[str, Any], folder: Path) -> None:
    from somaspeed_patch.tiny_molmoact2 import checkpoint, fast_tokenizer

    written = _inside(folder)
    dtype = torch.bfloat16 if size == "full" else torch.float32  # 10.9 GB are enough
    checkpoint.write(written.checkpoint, by_name(size), dtype=dtype, **options)
    fast_tokenizer.write(written.fast_tokenizer)
