"""A FAST action tokenizer for chunks of up to 30 actions in [-1, 1]: one token a DCT coefficient.

Coefficients are multiplied by 10 and rounded, and -64 to 63 are the ids 0 to 127: the orthonormal DCT of 30
actions stays within 10 * sqrt(30) = 54.8. Only equal neighbours from 20 on are merged, two and four at a
time. A chunk of random actions hardly ever has such a pair, so that every sample of a batch is equally long;
a chunk that stays at 1 has them and is shorter, so that a batch can be made ragged.
"""

from __future__ import annotations

import json
from pathlib import Path

SCALE = 10
LOWEST = -64  # the coefficient with the id 0
MERGED = range(20, 56)  # coefficients whose runs are merged


def write(folder: Path) -> None:
    """Write what LeRobot's UniversalActionProcessor reads to `folder`, which is made if need be."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [split.pre_tokenize_str(chr(code))[0][0] for code in range(128)]
    runs = [letters[value - LOWEST] for value in MERGED]
    pairs = [(letter, letter) for letter in runs] + [(letter * 2, letter * 2) for letter in runs]
    tokens = [*letters, *(left + right for left, right in pairs)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    fast.save_pretrained(folder)
    config = {"scale": SCALE, "vocab_size": len(tokens), "min_token": LOWEST}
    (folder / "processor_config.json").write_text(json.dumps(config, indent=2) + "\n")
