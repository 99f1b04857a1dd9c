"""What the functions of `testing_groot_contract` do, as far as the GR00T adapter takes it for granted.

Each behaviour is a sentence and a check on a built model, LeRobot's GR00TN17 or NVIDIA's Gr00tN1d7 of
`testing_nvidia_groot.model_settings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def misbehaving(model: Any) -> list[str]:
    """One line for each behaviour that is not as it was: the class, the sentence and the source file."""
    classes = {type(module).__name__: type(module) for module in model.modules()}
    return [
        f"{owner}: not true any more that {sentence}; see {inspect.getsourcefile(classes[owner])}"
        for (owner, sentence), holds in BEHAVIOURS.items()
        if not holds(model)
    ]


def example_inputs(model: Any) -> dict[str, Tensor]:
    """Two prompts of 9 and 14 tokens, padded on the left, with one and two images of 4 by 4 patches."""
    config = model.backbone.model.config
    image = [config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id]
    rows = [[*image, 5, 6, 7], [*image, *image, 8, 9]]
    longest = max(map(len, rows))
    padded = [[0] * (longest - len(row)) + row for row in rows]
    valid = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    rng = torch.Generator().manual_seed(0)
    head = model.action_head
    return {
        "input_ids": torch.tensor(padded),
        "attention_mask": torch.tensor(valid),
        "pixel_values": torch.randn(3 * 16, 3 * 2 * 16 * 16, generator=rng),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 3),
        "state": torch.randn(2, 1, head.config.max_state_dim, generator=rng),
        "action": torch.randn(2, head.action_horizon, head.action_dim, generator=rng),
        "action_mask": torch.ones(2, head.action_horizon, head.action_dim),
        "embodiment_id": torch.tensor([2, 10]),
    }


def _multiplies_by_category(model: Any) -> bool:
    layer, ids = model.action_head.state_encoder.layer1, torch.tensor([2, 10, 2])
    (count, width, _), rng = layer.W.shape, torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, width, generator=rng)
    expected = torch.stack([x[i] @ layer.W[c] + layer.b[c] for i, c in enumerate(ids)])
    return bool(count == layer.num_categories) and torch.allclose(layer(x, ids), expected, atol=1e-5)


def _is_the_last_layers_output(model: Any) -> bool:
    seen: list[Any] = [None]
    last = model.backbone.model.model.language_model.layers[-1]
    hook = last.register_forward_hook(lambda _, __, output: seen.append(output))
    inputs = example_inputs(model)
    try:
        found = model.backbone(model.backbone.prepare_input(dict(inputs)))
    finally:
        hook.remove()
    output = seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1]
    image = inputs["input_ids"] == model.backbone.model.config.image_token_id
    expected = {
        "backbone_features": output,
        "backbone_attention_mask": inputs["attention_mask"] == 1,
        "image_mask": image,
    }
    return set(found) == set(expected) and all(_same(found[key], expected[key]) for key in expected)


def _alternates(model: Any) -> bool:
    """Each block's keys: text, itself, images, itself, ..."""
    seen: list[Tensor | None] = []

    def keep(_: Any, __: Any, given: dict[str, Any]) -> None:
        seen.append(given["encoder_attention_mask"])

    blocks = model.action_head.model.transformer_blocks
    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
    inputs = example_inputs(model)
    try:
        model(inputs=dict(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    image = inputs["input_ids"] == model.backbone.model.config.image_token_id
    text = (inputs["attention_mask"] == 1) & ~image
    expected = (text, None, image, None)
    return len(seen) == len(expected) and all(map(_same, seen, expected))


def _same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return torch.equal(found, expected)


def _evaluates_what_is_frozen(model: Any) -> bool:
    backbone, before = model.backbone, model.training
    model.train()
    backbone.set_frozen_modules_to_eval_mode()
    parts = (backbone.model.model.language_model, backbone.model.model.visual)
    found = [part.training for part in parts]
    model.train(before)
    return found == [backbone.tune_llm, backbone.tune_visual]


BEHAVIOURS: dict[tuple[str, str], Callable[[Any], bool]] = {
    ("CategorySpecificLinear", "it is x @ W[c] + b[c], with W [C, I, O]"): _multiplies_by_category,
    ("Qwen3Backbone", "its features are the last layer's output"): _is_the_last_layers_output,
    ("Qwen3Backbone", "its frozen parts go to evaluation mode"): _evaluates_what_is_frozen,
    ("AlternateVLDiT", "its blocks attend text, themselves, images, themselves"): _alternates,
}
