"""What the tests of GR00T's action head share: prompts as masks, a small head of the host, and its step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.testing_parity import Step

CONTEXT, WIDTH, ACTIONS, ACTION_WIDTH = 24, 16, 5, 6
RAGGED = {"text": [4, 7, 1], "images": [1, 3, 2]}


def masks(text: Sequence[int], images: Sequence[int], left: bool = False) -> tuple[Tensor, Tensor]:
    """image_mask and backbone_attention_mask, both [B, S] bool, of prompts with a padded token or more.

    Args:
        text: tokens of each sample that are not of an image.
        images: of each sample; an image has two tokens.
        left: pad before the prompt.
    """
    kinds = [[0] + [1, 1] * n + [0] * (t - 1) for t, n in zip(text, images, strict=True)]
    longest = max(map(len, kinds)) + 1
    fills = [[-1] * (longest - len(kind)) for kind in kinds]
    kind = torch.tensor([f + k if left else k + f for f, k in zip(fills, kinds, strict=True)])
    return kind == 1, kind >= 0


def make_head(dropout: float) -> Any:
    """LeRobot's action head in training mode, in fp64 on the CPU: 4 DiT blocks, 1 over the backbone."""
    from lerobot.policies.groot import groot_n1_7

    torch.manual_seed(0)
    blocks = dict(positional_embeddings=None, num_attention_heads=2, dropout=dropout, final_dropout=True)
    dit = dict(
        blocks,
        num_layers=4,
        attention_head_dim=WIDTH // 2,
        norm_type="ada_norm",
        output_dim=12,
        interleave_self_attention=True,
    )
    config = groot_n1_7.GR00TN17Config(
        backbone_embedding_dim=CONTEXT,
        hidden_size=12,
        input_embedding_dim=WIDTH,
        max_state_dim=ACTION_WIDTH,
        max_action_dim=ACTION_WIDTH,
        action_horizon=ACTIONS,
        max_seq_len=16,
        max_num_embodiments=8,
        state_dropout_prob=dropout,
        diffusion_model_cfg=dit,
        vl_self_attention_cfg=dict(blocks, num_layers=1, attention_head_dim=CONTEXT // 2),
    )
    return groot_n1_7.GR00TN17ActionHead(config).double().train()


def head_step(
    head: Any, ids: Sequence[int], *, text: Sequence[int] = (4, 7, 1), autocast: bool = False
) -> Step:
    """The head's loss and gradients, the backbone features' among them, on three ragged samples.

    Args:
        ids: an embodiment for each sample.
        text: tokens of each sample that are not of an image; the images are RAGGED's.
        autocast: run the forward under torch.autocast to bfloat16.
    """
    from transformers.feature_extraction_utils import BatchFeature

    from somaspeed_patch import facts

    head.zero_grad()
    dtype, device = head.dtype, head.device
    rng = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(device, dtype)

    def known(values: Tensor) -> Tensor:
        moved = values.to(device)
        facts.moved(values, moved)
        return moved

    image, valid = masks(text, RAGGED["images"])
    states = numbers(*image.shape, CONTEXT).requires_grad_()
    context = dict(backbone_features=states, backbone_attention_mask=known(valid), image_mask=known(image))
    batch = dict(
        state=numbers(3, 1, ACTION_WIDTH),
        action=numbers(3, ACTIONS, ACTION_WIDTH),
        action_mask=torch.ones(3, ACTIONS, ACTION_WIDTH, device=device),
        embodiment_id=known(torch.tensor(ids)),
    )
    torch.manual_seed(3)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        loss = head(BatchFeature(data=context), BatchFeature(data=batch))["loss"]
    loss.backward()
    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    gradients = {name: p.grad for name, p in head.named_parameters()} | {"states": states.grad}
    return Step(loss=loss.detach(), gradients=gradients, random_state=state, shown={})


def assert_equal_steps(theirs: Step, ours: Step, tolerance: float = 1e-12) -> None:
    """The same random numbers drawn, and the same loss and gradients up to the order of sums.

    Args:
        tolerance: absolute and relative; the default is for fp64 and numbers near 1.
    """
    assert torch.equal(ours.random_state, theirs.random_state)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=tolerance, atol=tolerance)
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, expected in theirs.gradients.items():
        found = ours.gradients[name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=name)
