"""The tiny GR00T's checkpoint, built once a machine and user (`somaspeed_patch.tiny.files`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from somaspeed_patch.tiny import files, vocabulary
from somaspeed_patch.tiny_groot.sizes import by_name

_HERE = Path(__file__).parent
_SOURCES = (
    *(_HERE / name for name in ("checkpoint.py", "configs.py", "tokenizer.py")),
    Path(vocabulary.__file__),
)
_PACKAGES = ("lerobot", "transformers", "tokenizers", "diffusers", "torch")


def ensure(size: str = "micro", *, seed: int = 0, dtype: torch.dtype | None = None, **changed: Any) -> Path:
    """The folder of one tiny GR00T's checkpoint, built now if this machine has none.

    Args:
        size: a key of `sizes.SIZES`.
        seed, changed: as of `checkpoint.write`; other ones are another folder.
        dtype: of the stored weights; None: bf16 for the full size, whose 6.3 GB are enough, else fp32.
    Raises: ValueError: no such size.
    """
    stored = dtype or (torch.bfloat16 if size == "full" else torch.float32)
    options = {"seed": seed, "dtype": stored, **changed}
    inputs = (files.sources(_SOURCES, _PACKAGES), size, by_name(size), sorted(options.items()))
    return files.ensure(f"somaspeed-tiny-groot-{size}", inputs, partial(_write, size, options))


def _write(size: str, options: dict[str, Any], folder: Path) -> None:
    from somaspeed_patch.tiny_groot import checkpoint

    checkpoint.write(folder, by_name(size), **options)
