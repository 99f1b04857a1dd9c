"""Byte-level tokens, and one for each of a few words: a prompt is about as long as with a real vocabulary."""

from __future__ import annotations

from itertools import accumulate

Pairs = tuple[tuple[str, str], ...]
"""The pairs that a byte-pair encoding merges, the first ones first."""
_SPACE = "Ġ"  # how a byte-level vocabulary writes a space


def merges(after_a_space: str, bare: str) -> Pairs:
    """The pairs that grow each word from its first character on.

    Args:
        after_a_space: words, apart by spaces, that a space comes before in a text.
        bare: words without a space before them.

    Those of words after a space come first: no pair inside such a word can then be merged before it is whole.
    """
    words = [_SPACE + word for word in after_a_space.split()] + bare.split()
    return tuple(
        dict.fromkeys(pair for word in words for pair in zip(accumulate(word), word[1:], strict=False))
    )


def tokens(pairs: Pairs) -> list[str]:
    """The 256 bytes, then what `pairs` make of them."""
    from tokenizers import pre_tokenizers

    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in pairs)]
