"""Which trainable parameters a model's own update leaves without a gradient."""

import torch
from torch import nn

from somaspeed_patch import sites
from somaspeed_patch.layouts import unused


class Half(nn.Module):
    """Uses `used` and not `spare`."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).sum()


def update(net: nn.Module) -> None:
    net(torch.ones(3, 2)).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def test_another_models_update_says_nothing_of_this_one() -> None:
    watched, other = Half(), Half()
    unused.watch(watched)
    calls = sites.site(unused.SITE).calls
    update(other)
    assert sites.site(unused.SITE).calls == calls
    update(watched)
    assert sites.site(unused.SITE).calls == calls + 1
    assert sites.site(unused.SITE).reason == (
        "2 of 4 trainable parameters get no gradient: spare.weight, spare.bias"
    )
    update(watched)
    assert sites.site(unused.SITE).calls == calls + 1
