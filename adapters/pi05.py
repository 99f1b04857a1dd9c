"""LeRobot's pi0.5 (`lerobot.policies.pi05`): the training forward when the PaliGemma side is frozen.

Hooks are class attributes, looked up at each call, so it does not matter whether the policy was built before
`patch()`. Inference (`sample_actions`, real-time chunking) is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from somaspeed_patch.features import CAST_ONCE, COMPILE, FROZEN_PREFIX, Feature
from somaspeed_patch.registry import Patch, function, with_parameters

REQUIRES = ["lerobot>=0.6.1,<0.7"]

FEATURES = [
    FROZEN_PREFIX,
    Feature(
        name="compact_tokens",
        changes="leave out absent cameras and padded language slots (lengths 64, 96, 128, all)",
        exact=True,
        default=True,
    ),
    Feature(
        name="split_attention",
        changes="attend to frozen and trainable K/V as two streams in a Triton kernel; off: plain PyTorch",
        exact=True,
        default=True,
    ),
    CAST_ONCE,
    Feature(
        name="frozen_vision",
        changes="with freeze_vision_encoder alone: one vision call for all cameras, without gradient",
        exact=True,
        default=True,
    ),
    COMPILE,
]

_MODEL = "lerobot.policies.pi05.modeling_pi05"
_TOKENIZER = "lerobot.processor.tokenizer_processor"
_DEVICE = "lerobot.processor.device_processor"


def _forward(original: Any) -> Any:
    from somaspeed_patch.pi05 import forward

    names = ["self", "images", "img_masks", "tokens", "masks", "actions", "noise", "time"]
    with_parameters(original, names, optional=forward.LATER_INPUTS)
    forward.remember_host()
    return wrapt.FunctionWrapper(original, forward.training_forward)


def _embed_prefix(original: Any) -> Any:
    from somaspeed_patch.pi05 import forward

    names = ["self", "images", "img_masks", "tokens", "masks"]
    with_parameters(original, names, optional=forward.LATER_INPUTS)
    return wrapt.FunctionWrapper(original, forward.frozen_vision)


def _through_units(original: Any) -> Any:
    from somaspeed_patch.layouts import pi05_layers

    names = ["inputs_embeds", "attention_mask", "position_ids", "adarms_cond", "layers", "rotary_emb"]
    with_parameters(original, names)
    return wrapt.FunctionWrapper(original, pi05_layers.joint_layers)


def _bypassing(original: Any) -> Any:
    from somaspeed_patch.pi05 import host_compile

    return function(original, host_compile.policy_forward)


def _hinting(hook: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        from somaspeed_patch.pi05 import hint_hooks

        return wrapt.FunctionWrapper(original, getattr(hint_hooks, hook))

    return make


def _carrying(original: Any) -> Any:
    from somaspeed_patch import fact_hooks

    return wrapt.FunctionWrapper(original, fact_hooks.to_device)


PATCHES = [  # compute_layer_complete first: the forward's hook notes it
    Patch(module=_MODEL, name="compute_layer_complete", make=_through_units, site="layers"),
    Patch(module=_MODEL, name="PI05Pytorch.forward", make=_forward, site="frozen_prefix"),
    Patch(module=_MODEL, name="PI05Pytorch.embed_prefix", make=_embed_prefix, site="frozen_vision"),
    Patch(module=_MODEL, name="PI05Policy.forward", make=_bypassing, site="host_compile"),
    Patch(
        module=_MODEL,
        name="PI05Policy._preprocess_images",
        make=_hinting("preprocess_images"),
        site="cameras",
    ),
    *(
        Patch(
            module=_TOKENIZER,
            name=f"TokenizerProcessorStep.{method}",
            make=_hinting(hook),
            site="prompt_lengths",
        )
        for method, hook in (("observation", "tokenizer_observation"), ("_tokenize_text", "tokenize_text"))
    ),
    Patch(
        module=_DEVICE,
        name="DeviceProcessorStep._process_tensor",
        make=_carrying,
        site="mask_moves",
    ),
]


def refresh() -> None:
    """Bring the attention kernel's own counts into the report."""
    import sys

    from somaspeed_patch import sites

    attention = sys.modules.get("somaspeed_patch.kernels.split_attention")
    if attention is None:
        return
    site = sites.site("pi05/split_attention")
    site.calls, site.native_calls = attention.CALLS["triton"], attention.CALLS["reference"]
    site.fallbacks = int(attention.KERNEL_ERROR is not None)
    site.last_fallback = attention.KERNEL_ERROR
    if attention.last_refusal:
        site.reason = f"plain PyTorch: {attention.last_refusal}"


def release() -> None:
    """Drop what the hooks cached."""
    import sys

    forward = sys.modules.get("somaspeed_patch.pi05.forward")
    if forward is not None:
        forward.release()
    attention: Any = sys.modules.get("somaspeed_patch.kernels.split_attention")
    if attention is not None:
        attention.last_refusal = None  # else the next patch's report gives the reason of this one's calls
