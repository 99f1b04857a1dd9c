"""Make LeRobot's pi0.5 build small models, by replacing three names in lerobot.policies.pi05.modeling_pi05.

Scaffolding for tests and the demo: it keeps its own record and is no part of `patch()` and `unpatch()`, for
undoing a speed-up must not turn the tiny model back into three billion parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from somaspeed_patch.tiny_pi05.sizes import VOCABULARY, Size

_VLM, _EXPERT = "PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM"
_before: dict[str, Any] = {}  # what the three names held; empty while nothing is installed


def install(size: Size) -> None:
    """Shrink pi0.5 in this process; a second call only changes the size."""
    from lerobot.policies.pi05 import modeling_pi05 as host

    uninstall()
    for name, replacement in _replacements(host, size).items():
        _before[name] = getattr(host, name)
        setattr(host, name, replacement)


def uninstall() -> None:
    """Put LeRobot's own names back; nothing happens when none were replaced."""
    from lerobot.policies.pi05 import modeling_pi05 as host

    while _before:
        name, value = _before.popitem()
        setattr(host, name, value)


@contextmanager
def shrunk(size: Size) -> Iterator[None]:
    """Shrink pi0.5 inside the block; an installed size comes back afterwards."""
    from lerobot.policies.pi05 import modeling_pi05 as host

    names = _replacements(host, size)
    outside = {name: getattr(host, name) for name in names}
    try:
        for name, replacement in names.items():
            setattr(host, name, replacement)
        yield
    finally:
        for name, value in outside.items():
            setattr(host, name, value)


def _replacements(host: Any, size: Size) -> Mapping[str, Callable[..., Any]]:
    """The three names and what stands in for them."""
    vlm_class, expert_class = (_before.get(name, getattr(host, name)) for name in (_VLM, _EXPERT))

    def get_gemma_config(variant: str) -> Any:
        vlm = variant == "gemma_2b"
        return host.GemmaConfig(
            width=size.vlm_width if vlm else size.expert_width,
            depth=size.depth,
            mlp_dim=size.vlm_mlp if vlm else size.expert_mlp,
            num_heads=8,
            num_kv_heads=1,
            head_dim=size.head_dim,
        )

    def vlm(config: Any) -> Any:
        _shrink_vision(config, size)
        _shrink_vocabulary(config)
        return vlm_class(config)

    def expert(config: Any) -> Any:
        config.vocab_size = VOCABULARY
        return expert_class(config)

    return {
        "get_gemma_config": get_gemma_config,
        _VLM: vlm,
        _EXPERT: expert,
    }


def _shrink_vision(config: Any, size: Size) -> None:
    """SigLIP and the projector to the width of the language model."""
    vision = config.vision_config
    vision.hidden_size, vision.intermediate_size = size.vision_width, size.vision_mlp
    vision.num_hidden_layers, vision.num_attention_heads = size.vision_depth, size.vision_heads
    vision.projection_dim = config.projection_dim = config.text_config.hidden_size


def _shrink_vocabulary(config: Any) -> None:
    """The shipped tokenizer's ids instead of 257152."""
    config.text_config.vocab_size = config._vocab_size = VOCABULARY
    config.image_token_index = config.image_token_id = VOCABULARY - 1
