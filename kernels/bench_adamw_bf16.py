"""What becomes of bf16 weights at a fine-tuning learning rate: how much of an fp32 run's movement they make.

At |w| = 0.02 half a step of bf16 is some 4e-5, and an update at lr 2.5e-5 is at most 2.5e-5: most are rounded
away. Every arm starts from the same bf16 weights, N(0, 0.02), and sees the same gradients: each weight's has
one sign throughout and a magnitude of |N(0, 1)|, so AdamW moves each steadily. No clipping, no decay.
"""

from typing import Any

import torch
from torch import Tensor, nn

from somaspeed_patch.optim import FusedAdamW

LR = 2.5e-5
_HYPER: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def bf16_updates(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Each arm's movement against that of torch's AdamW on fp32 weights.

    Returns: `weights`, `steps`, `lr`, and `arms`, a list with of each
        fraction: its movement along the fp32 run's, over the fp32 run's; 1 is what it should be.
        distance: |w - w of fp32| over the fp32 run's movement, in norm.
        unmoved: share of the weights that are where they started.
    """
    weights, steps = (64, 4) if tiny else (1 << 20, 500)
    generator = torch.Generator(device).manual_seed(0)
    start = torch.randn(weights, generator=generator, device=device).mul_(0.02).bfloat16()
    sign = torch.randint(0, 2, (weights,), generator=generator, device=device) * 2 - 1
    wide = nn.Parameter(start.float())
    arms = _arms(start)
    optimizers = {"fp32": torch.optim.AdamW([wide], **_HYPER, fused=True), **arms}
    for _ in range(steps):
        magnitude = torch.randn(weights, generator=generator, device=device).abs_()
        for optimizer in optimizers.values():
            _update(optimizer, (sign * magnitude).bfloat16())
    rows = [{"arm": name, **_movement(_weight(arm), start, wide.detach())} for name, arm in arms.items()]
    return {"weights": weights, "steps": steps, "lr": LR, "arms": rows}


def _arms(start: Tensor) -> dict[str, torch.optim.AdamW]:
    def weight() -> list[nn.Parameter]:
        return [nn.Parameter(start.clone())]

    return {
        "torch fused": torch.optim.AdamW(weight(), **_HYPER, fused=True),
        "ours": FusedAdamW(weight(), **_HYPER),
        "ours, stochastic_rounding": FusedAdamW(weight(), **_HYPER, stochastic_rounding=True),
        "ours, master_weights": FusedAdamW(weight(), **_HYPER, master_weights=True),
    }


def _weight(optimizer: torch.optim.Optimizer) -> nn.Parameter:
    param: nn.Parameter = optimizer.param_groups[0]["params"][0]
    return param


def _update(optimizer: torch.optim.Optimizer, grad: Tensor) -> None:
    param = _weight(optimizer)
    param.grad = grad.to(param.dtype)
    optimizer.step()


def _movement(param: nn.Parameter, start: Tensor, wide: Tensor) -> dict[str, float]:
    origin, right = start.double(), wide.double()
    mine, whole = param.detach().double() - origin, right - origin
    return {
        "fraction": float((mine * whole).sum() / (whole * whole).sum()),
        "distance": float((mine - whole).norm() / whole.norm()),
        "unmoved": float((param.detach() == start).double().mean()),
    }
