"""The tiny GR00T's tokenizer: one id a byte and one for each word of a LIBERO instruction, no network.

With the words an instruction is about as long as with the real vocabulary, so that a benchmark's steps cost
what real ones do. LeRobot puts it in lower case and takes its punctuation away; the chat template puts the
images before it, so that its first word has no space before it.

Ids: 0 to 255 the bytes, then the words and their beginnings, then SPECIAL.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from somaspeed_patch.tiny import vocabulary

END, PADDING = "<|im_end|>", "<|endoftext|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
SPECIAL = (END, PADDING, "<|im_start|>", VISION_START, VISION_END, "<|vision_pad|>", IMAGE, VIDEO)
CHAT = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
<|im_end|>
{% endfor -%}
"""
_WORDS_AFTER_A_SPACE = (
    "and between black bowl box cabinet center cookie drawer from in it next of on place plate ramekin stove "
    "table the to top up wooden"
)
_WORDS = "user pick put open push turn"


def ids() -> dict[str, int]:
    """The id of every token, in ascending order."""
    return {token: i for i, token in enumerate([*_text(), *SPECIAL])}


def write(folder: Path) -> None:
    """Write what AutoTokenizer.from_pretrained reads to `folder`, which must exist."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    text = {token: i for i, token in enumerate(_text())}
    special = {"bos_token": None, "eos_token": END, "pad_token": PADDING}
    tokenizer = Qwen2Tokenizer(vocab=text, merges=list(_merges()), unk_token=None, **special)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


def _text() -> list[str]:
    """The bytes, then what `_merges` makes of them."""
    return vocabulary.tokens(_merges())


@cache
def _merges() -> vocabulary.Pairs:
    return vocabulary.merges(_WORDS_AFTER_A_SPACE, _WORDS)
