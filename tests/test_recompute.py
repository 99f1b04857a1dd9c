"""What a compiled block keeps for its backward, and that it computes what the eager block computes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from somaspeed_patch import recompute

WIDTH, TOKENS = 64, 24


class Block(nn.Module):
    """Norm, a product, GELU, dropout, a product and dropout, as a transformer's second half."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        inner = F.dropout(F.gelu(self.up(self.norm(hidden)), approximate="tanh"), 0.2)
        return hidden + F.dropout(self.down(inner), 0.2)


def step(compiled, block):
    """The output, every gradient, the generator afterwards, and the bytes kept a token and channel."""
    torch.manual_seed(3)
    hidden = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    block.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = compiled(block, hidden)
    output.square().mean().backward()
    gradients = [hidden.grad, *(p.grad.clone() for p in block.parameters())]
    return output, gradients, torch.get_rng_state(), sum(kept.values()) / (2 * TOKENS * WIDTH)


@pytest.mark.parametrize("products", [False, True])
def test_a_block(products, without_codegen):
    torch.manual_seed(0)
    block = Block()
    plain = torch.compile(lambda b, x: b(x), options={"fallback_random": True})
    lean = torch.compile(lambda b, x: b(x), backend=recompute.inductor(products=products))
    theirs, ours = step(plain, block), step(lean, block)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=2e-5, atol=1e-6)
    assert torch.equal(ours[2], theirs[2])
    # fp32: input 4, product 16, masks 4/8 and 1/8; the norm's mean and deviation make 2 * 4 / 64
    assert theirs[3] > 40
    assert ours[3] == pytest.approx(4 + 0.625 + 0.125 + (0 if products else 16), abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.2, 0.37])
def test_dropout_is_torchs(dtype, p):
    """On the CPU torch's kernel multiplies twice, each time rounding to the dtype; its GPU kernel once."""
    x = (1 + torch.rand(3, 5, 40, dtype=torch.float64)).to(dtype).requires_grad_()
    torch.manual_seed(1)
    theirs, mask = torch.native_dropout(x, p, True)
    torch.manual_seed(1)
    ours = recompute.dropout(x, p)
    assert torch.equal(ours != 0, mask)
    torch.testing.assert_close(ours, (x.double() * mask / (1 - p)).to(dtype))
    (slope,) = torch.autograd.grad(ours.sum(), x)
    torch.testing.assert_close(slope, (mask / (1 - p)).to(dtype))


@pytest.mark.parametrize(
    ("width", "options"), [(16, {"training": False}), (16, {"p": 0.0}), (16, {"inplace": True}), (12, {})]
)
def test_dropout_that_torch_serves(width, options):
    x, options = torch.randn(2, width), {"p": 0.3, **options}
    torch.manual_seed(1)
    expected = F.dropout(x.clone(), **options)
    torch.manual_seed(1)
    assert torch.equal(recompute.dropout(x.clone(), **options), expected)


@pytest.mark.parametrize("shape", [(8,), (3, 2, 64), (0, 16)])
def test_bits(shape):
    mask = torch.rand(shape) < 0.5
    bits = recompute.packed(mask)
    assert bits.dtype == torch.uint8 and bits.shape == (*shape[:-1], shape[-1] // 8)
    assert torch.equal(recompute.unpacked(bits).bool(), mask)
