"""What our forward keeps of a sample for the backward, in bytes, from the model's dimensions.

The frozen side runs without gradient and leaves its keys and values (GR00T: its features). Of the trained
layers the numbers below are counted tensor by tensor, with W the hidden size, M the inner size of the
feed-forward, Q all query heads and D one head:
    eager      as autograd saves them: bf16 inputs of every product, fp32 inputs of every norm
    compiled   what Inductor's partitioner keeps: inputs of products and of attention, the rest again
    recompute  GR00T's 18 of 41 bytes fewer, see `somaspeed_patch.recompute`
GR00T's 41 is that module's own count; its split into heads, inner width and rest is by the eager one.
No number is fitted. Bytes a sample here, and in one H200's peaks (recipes/results) from their slope over the
batch, in MB: pi0.5 80 and 83 eager, 58 and 59 compiled; MolmoAct2 340 and 339 compiled; GR00T 175 and 183
eager, 157 and 159 compiled, 83 and 85 with recompute. The whole predicted peak is within 4 % of each of
those cells but one, which is 8 % low: pi0.5 compiled at batch 8 was measured before our optimizer got rid
of 1 GiB of scratch. Nothing on more than one GPU is measured yet.
The native forward is not modelled: it differentiates the frozen side or keeps its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from somaspeed_patch.ab import flops_molmoact2, flops_pi05
from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.pi05.prefix import BUCKETS
from somaspeed_patch.tiny_groot import sizes as groot_sizes
from somaspeed_patch.tiny_molmoact2 import sizes as molmoact2_sizes
from somaspeed_patch.tiny_pi05 import sizes as pi05_sizes

EAGER, COMPILED, RECOMPUTE = "eager", "compiled", "recompute"
_PIXEL = 4  # bytes of an fp32 number of an image
_HALF = 2  # bytes of a bf16 number


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes a sample."""

    whole: float = 0
    """on every rank of a tensor-parallel group"""
    split: float = 0
    """for the heads and inner widths that tensor parallelism splits"""

    def on(self, tp: int) -> float:
        """Of one of `tp` ranks."""
        return self.whole + self.split / tp


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes a sample."""

    stacks: tuple[Part, ...]
    """of the blocks, for each entry of the family's `stacks`"""
    ends: Part
    """of what is no block, and of a block's gradients"""
    working: float
    """at most alive at once in the frozen side's forward, when nothing of the trained part exists yet"""
    reduced: float
    """of the hidden states, and their gradients, that tensor parallelism sums"""
    passed: float
    """of the hidden states, and their gradients, that a stage of a pipeline hands on"""

    def peak(self, batch: int, tp: int = 1, shares: tuple[float, ...] | None = None) -> float:
        """Bytes of a batch.

        Args:
            shares: of each stack the part that is on this stage; None: all.
        """
        own = shares or (1.0,) * len(self.stacks)
        blocks = sum(share * stack.on(tp) for share, stack in zip(own, self.stacks, strict=True))
        return batch * max(self.ends.on(tp) + blocks, self.working)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Bytes that one layer keeps of one token."""

    whole: int
    split: int = 0


def of(recipe: Synthetic, forward: str) -> Kept:
    """What a sample of the recipe keeps.

    Args:
        forward: EAGER, COMPILED or RECOMPUTE.
    Raises: ValueError: the model has no such forward, or it does not compute in bf16.
    """
    if recipe.dtype != "bfloat16" and recipe.model != "groot":  # which computes under autocast anyway
        raise ValueError(
            f"layout plan: {recipe.name}: only bfloat16 is modelled, but dtype is {recipe.dtype}"
        )
    if forward == RECOMPUTE and recipe.model != "groot":
        raise ValueError(f"layout plan: only groot has the feature recompute, but this is {recipe.model}")
    return _MODELS[recipe.model](recipe, forward)


def _stack(*layers: tuple[int, float, _Layer]) -> Part:
    """The sum over layers, each given as how many, tokens, and bytes of a token."""
    return Part(
        whole=sum(count * tokens * layer.whole for count, tokens, layer in layers),
        split=sum(count * tokens * layer.split for count, tokens, layer in layers),
    )


def _ends(tokens: float, last: _Layer, others: float) -> Part:
    """What is no block's, and once more the block that runs last: its gradients, when the backward begins."""
    return Part(whole=others + tokens * last.whole, split=tokens * last.split)


def _pi05(recipe: Synthetic, forward: str) -> Kept:
    full = recipe.size == "full"
    size = flops_pi05.FULL if full else pi05_sizes.by_name(recipe.size)
    side = 224 if full else 28
    slots = next((bucket for bucket in BUCKETS if recipe.tokens <= bucket < recipe.slots), recipe.slots)
    prefix = recipe.cameras * (side // 14) ** 2 + slots
    width, inner, head, queries = size.expert_width, size.expert_mlp, size.head_dim, 8 * size.head_dim
    if forward == EAGER:  # norms 16 W in fp32, their outputs and the residual stream 12 W in bf16
        row = _Layer(whole=28 * width + 4 * head, split=8 * inner + 4 * queries)
    else:
        row = _Layer(whole=12 * width + 4 * head, split=6 * inner + 4 * queries)
    cache = _Layer(whole=2 * head * _HALF)
    images = 2 * recipe.cameras * 3 * side**2 * _PIXEL  # as the loader gives them, and normalized
    frozen = prefix * size.vlm_width
    working = _frozen_layer(prefix, size.vlm_width, size.vlm_mlp, forward)
    return Kept(
        stacks=(_stack((size.depth, recipe.chunk, row), (size.depth, prefix, cache)),),
        ends=_ends(recipe.chunk, row, images),
        working=images + size.depth * prefix * cache.whole + working,
        reduced=_HALF * (2 * (size.depth - 1) * frozen + 4 * size.depth * recipe.chunk * width),
        passed=_HALF * (frozen + 2 * recipe.chunk * width),
    )


def _molmoact2(recipe: Synthetic, forward: str) -> Kept:
    size = molmoact2_sizes.by_name(recipe.size)
    image = flops_molmoact2.image_of(recipe.size, size)
    context, rows = recipe.tokens + recipe.cameras * (image.pooled + image.marks), _TIMES * recipe.chunk
    width, cache = size.expert_width, size.llm_kv_heads * size.head_dim
    inner = -(-int(width * size.expert_mlp_ratio) // 16) * 16
    if forward == EAGER:  # of the context two norms' and one head norm's inputs in fp32: 12 W
        row, keys = _Layer(whole=32 * width, split=24 * width + 8 * inner), 16 * width + 4 * cache
    else:
        row, keys = _Layer(whole=18 * width, split=20 * width + 6 * inner), 8 * width + 4 * cache
    block = _Layer(  # of a sample
        whole=context * keys + rows * row.whole + _TIMES * 20 * width, split=rows * row.split
    )
    images = recipe.cameras * image.patches * 3 * 14**2 * _PIXEL
    working = _frozen_layer(context, size.llm_width, size.llm_mlp, forward)
    return Kept(
        stacks=(_stack((size.depth, 1, block)),),
        ends=_ends(1, block, images),
        working=images + 2 * size.depth * context * cache * _HALF + working,
        reduced=_HALF * size.depth * width * (6 * rows + 2 * context),
        passed=_HALF * (context * size.llm_width + 2 * rows * width),
    )


def _groot(recipe: Synthetic, forward: str) -> Kept:
    size = groot_sizes.by_name(recipe.size)
    patches = recipe.cameras * (size.image_side // 16) ** 2
    tokens, rows, width = recipe.tokens + patches // 4, 41, size.dit_heads * size.dit_head_dim
    self_, cross, features = _GROOT[forward]
    half = size.dit_depth // 2
    keys = _Layer(whole=0, split=2 * _HALF * width)  # K and V of text in half of the cross blocks, or images
    images = patches * 2 * 3 * 16**2 * _PIXEL
    stream = tokens * size.llm_width * (2 * _HALF + _PIXEL)  # backbone's output, its norm's input in fp32
    return Kept(
        stacks=(
            Part(),  # the language model keeps nothing
            _stack((size.vl_depth, tokens, _times(features, size.llm_width))),
            _stack(
                (half, rows, _times(self_, width)),
                (half, rows, _times(cross, width)),
                (half // 2, tokens, keys),
            ),
        ),
        ends=_ends(rows, _times(self_, width), stream + images),
        working=images + stream + _frozen_layer(tokens, size.llm_width, size.llm_mlp, forward),
        reduced=4 * _HALF * (size.dit_depth * rows * width + size.vl_depth * tokens * size.llm_width),
        passed=_HALF * 3 * tokens * size.llm_width + 2 * _PIXEL * rows * width,
    )


def _times(layer: _Layer, width: int) -> _Layer:
    return _Layer(whole=layer.whole * width, split=layer.split * width)


def _frozen_layer(tokens: int, width: int, inner: int, forward: str) -> float:
    """A gated feed-forward's gate, up and product (compiled: two of them), and three hidden states."""
    return tokens * _HALF * ((3 if forward == EAGER else 2) * inner + 3 * width)


_TIMES = 8  # flow timesteps that MolmoAct2 draws for a sample
# Of GR00T's blocks in multiples of their width: self and cross blocks of the DiT, blocks over the features.
_GROOT: Mapping[str, tuple[_Layer, _Layer, _Layer]] = {
    EAGER: (_Layer(whole=22, split=28), _Layer(whole=18, split=24), _Layer(whole=18, split=28)),
    COMPILED: (_Layer(whole=13, split=28),) * 3,
    RECOMPUTE: (_Layer(whole=7, split=16), _Layer(whole=7, split=16), _Layer(whole=7, split=8)),
}
_MODELS: Mapping[str, Callable[[Synthetic, str], Kept]] = {
    "pi05": _pi05,
    "molmoact2": _molmoact2,
    "groot": _groot,
}
