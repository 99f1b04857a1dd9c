"""Stands in for PaliGemma's tokenizer, which is on the hub behind a licence: one id a byte, no network.

Ids: 0 <pad>, 1 <eos>, 2 <bos>, 3 <unk>, then the 256 bytes; encoding adds no special token.
`python -m somaspeed_patch.tiny_pi05.byte_tokenizer` wrote the files in `tokenizer/`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent / "tokenizer"
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}

_before: list[Any] = []  # LeRobot's own AutoTokenizer while the redirection is on


class LocalTokenizer:
    """AutoTokenizer, but a name on the hub gives the shipped tokenizer; a directory is loaded as it is."""

    @staticmethod
    def from_pretrained(name: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """As AutoTokenizer.from_pretrained."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name if os.path.isdir(name) else DIRECTORY, *args, **kwargs)


def install() -> None:
    """Send LeRobot's tokenizer step to the shipped tokenizer; a second call does nothing."""
    from lerobot.processor import tokenizer_processor as host

    if not _before:
        _before.append(host.AutoTokenizer)
        host.AutoTokenizer = LocalTokenizer


def uninstall() -> None:
    """Give the tokenizer step its AutoTokenizer back."""
    from lerobot.processor import tokenizer_processor as host

    if _before:
        host.AutoTokenizer = _before.pop()


def write(directory: Path) -> None:
    """Write the tokenizer's files to `directory`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    write(DIRECTORY)
