"""The tiny MolmoAct2's tokenizer: one id a byte and one for each word of a LIBERO prompt, no network.

With the words a prompt is about as long as with the real vocabulary, 80 ids beside the images', so that a
benchmark's steps cost what real ones do, and LeRobot's bound of the sequence length holds.

Ids: 0 to 255 the bytes, then the words and their beginnings, SPECIAL, `<action_0>` ..., `<state_0>` ..., and
last IMAGE, whose embeddings MolmoAct2 keeps in a second table. It pads on the left: after padding on the
right LeRobot's processor would mark the padding as text.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from somaspeed_patch.tiny import vocabulary

ACTIONS = 256  # ids of the FAST tokenizer that have a token
STATES = 256  # LeRobot's default num_state_tokens
END = "<|endoftext|>"  # also begins a text and pads it
SPECIAL = (
    END, "<|im_start|>", "<|im_end|>", "<action_output>", "<action_start>", "<action_end>", "<state_start>",
    "<state_end>", "<setup_start>", "<setup_end>", "<control_start>", "<control_end>",
)  # fmt: skip
IMAGE = (
    "<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>", "<frame_end>",
    "<im_low>",
)  # fmt: skip
_WORDS_AFTER_A_SPACE = (
    "Given The a action and arm between black bowl box center complete control cookie current delta "
    "effector end expected franka from given in is it libero mode next of on pick place plate pose ramekin "
    "robot robotic setup should single state stove table take task the these to up what"
)
_WORDS = "Image The assistant user"


def ids() -> dict[str, int]:
    """The id of every token, in ascending order."""
    actions = [f"<action_{i}>" for i in range(ACTIONS)]
    states = [f"<state_{i}>" for i in range(STATES)]
    return {token: i for i, token in enumerate([*_text(), *SPECIAL, *actions, *states, *IMAGE])}


def write(folder: Path) -> None:
    """Write what Qwen2Tokenizer.from_pretrained reads to `folder`, which must exist."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    text = {token: i for i, token in enumerate(_text())}
    special = {"bos_token": END, "eos_token": END, "pad_token": END}
    pairs = list(_merges())
    tokenizer = Qwen2Tokenizer(vocab=text, merges=pairs, unk_token=None, **special, padding_side="left")
    added = [token for token in ids() if token not in text]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    tokenizer.save_pretrained(folder)


def _text() -> list[str]:
    """The bytes, then what `_merges` makes of them."""
    return vocabulary.tokens(_merges())


@cache
def _merges() -> vocabulary.Pairs:
    return vocabulary.merges(_WORDS_AFTER_A_SPACE, _WORDS)
