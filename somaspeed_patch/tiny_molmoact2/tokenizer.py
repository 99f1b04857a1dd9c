"""The tiny MolmoAct2's tokenizer: one id a byte, then the model's special tokens; no merges, no network.

Ids: 0 to 255 the bytes, then SPECIAL, `<action_0>` ..., `<state_0>` ..., and last IMAGE, whose embeddings
MolmoAct2 keeps in a second table. It pads on the left: after padding on the right LeRobot's processor would
mark the padding as text.
"""

from __future__ import annotations

from pathlib import Path

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


def ids() -> dict[str, int]:
    """The id of every token, in ascending order."""
    from tokenizers import pre_tokenizers

    actions = [f"<action_{i}>" for i in range(ACTIONS)]
    states = [f"<state_{i}>" for i in range(STATES)]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL, *actions, *states, *IMAGE]
    return {token: i for i, token in enumerate(tokens)}


def write(folder: Path) -> None:
    """Write what Qwen2Tokenizer.from_pretrained reads to `folder`, which must exist."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    known = ids()
    special = {"bos_token": END, "eos_token": END, "pad_token": END}
    letters = {token: i for token, i in known.items() if i < 256}
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[], unk_token=None, **special, padding_side="left")
    added = [token for token, i in known.items() if i >= 256]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    tokenizer.save_pretrained(folder)
