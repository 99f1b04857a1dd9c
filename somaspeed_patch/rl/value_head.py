"""A critic over the frozen backbone's features: a masked mean and three hidden layers, in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_LAST_STD = 0.02  # of the last layer's weights, as RLinf starts it: values begin near 0


def masked_mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """[B, W] fp32, the mean over valid tokens; 0 where a sample has none.

    Args:
        hidden: [B, N, W], any floating dtype.
        mask: [B, N] bool; None: all are valid.
    """
    if mask is None:
        return hidden.float().mean(1)
    counted = mask[..., None]
    total = torch.where(counted, hidden.float(), 0.0).sum(1)  # where: padding may hold NaN
    return total / mask.sum(1).clamp(min=1)[:, None]


class ValueHead(nn.Module):
    """[B, W] features to [B] values, fp32 throughout whatever autocast says."""

    def __init__(self, width: int, hidden: Sequence[int] = (1024, 512, 256)) -> None:
        super().__init__()
        sizes = [width, *hidden]
        layers: list[nn.Module] = []
        for before, after in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(before, after, dtype=torch.float32), nn.ReLU()]
        last = nn.Linear(sizes[-1], 1, dtype=torch.float32)
        nn.init.normal_(last.weight, std=_LAST_STD)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, features: Tensor) -> Tensor:
        """[B] fp32 for features [B, W]."""
        with torch.autocast(features.device.type, enabled=False):
            found: Tensor = self.layers(features.float())[:, 0]
        return found
