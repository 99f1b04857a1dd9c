"""GR00T's AlternateVLDiT: each cross-attention block projects the tokens of its own modality only.

The host hands every block all S tokens and masks those of the other modality, so half of what the K and V
projections compute is thrown away. Here the text's and the images' tokens are gathered once a step. Where
they are is known on the CPU; where only the device knows, the host runs, because asking it would wait.

Self blocks, norms, dropout (which draws by the action tokens' shape alone) and output are the host's modules,
in the host's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from somaspeed_patch import compiled, constants, facts, features, frozen, guarded, recompute, sites
from somaspeed_patch.cpu_threads import one_thread
from somaspeed_patch.guarded import Declined
from somaspeed_patch.layouts import stages, units

_processors: dict[type, Any] = {}

_PLAIN = "AttnProcessor2_0"  # diffusers' attention by torch's own function


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One modality's tokens of every sample, for all blocks that attend to it."""

    states: Tensor
    """[B, n, D], n those of the sample with the most"""
    mask: Tensor | None
    """[B, n] bool, False for a token of another modality that fills a shorter sample up; None: all full"""
    cast: Tensor | None
    """`states` in autocast's dtype, where that is another"""


def forward(wrapped: Any, dit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """AlternateVLDiT.forward."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return wrapped(*args, **kwargs)
    site = sites.site("groot/modality_kv")
    off = None if features.value("modality_kv") else "modality_kv is off"
    why = off or guarded.why_not(dit, site.site)
    if why is not None:
        site.declined(why)
        return wrapped(*args, **kwargs)
    return guarded.or_hosts(site, dit, partial(run, dit), wrapped, args, kwargs)


def self_attention(wrapped: Any, transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """SelfAttentionTransformer.forward with compiled blocks, or cut ones; without either it is the host's."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return wrapped(*args, **kwargs)
    if not features.value("compile") and not stages.piped(transformer.transformer_blocks):
        return wrapped(*args, **kwargs)
    return _self_attention(transformer, *args, **kwargs)


def release() -> None:
    """Drop compiled blocks."""
    _layers.clear()
    _lean.clear()
    _processors.clear()


def cross_block(block: Any, hidden: Tensor, tokens: Tensor, mask: Tensor | None, temb: Tensor) -> Tensor:
    """One cross-attention block: hidden [B, T, W], tokens [B, n, D], mask [B, n] bool, temb [B, W]."""
    result: Tensor = units.body(block)(
        hidden, attention_mask=None, encoder_hidden_states=tokens, encoder_attention_mask=mask, temb=temb
    )
    return result


def self_block(block: Any, hidden: Tensor, temb: Tensor) -> Tensor:
    """One self-attention block of the DiT: hidden [B, T, W], temb [B, W]."""
    result: Tensor = units.body(block)(
        hidden, attention_mask=None, encoder_hidden_states=None, encoder_attention_mask=None, temb=temb
    )
    return result


def backbone_block(block: Any, hidden: Tensor) -> Tensor:
    """One block over the backbone's features: hidden [B, S, D]."""
    result: Tensor = units.body(block)(hidden)
    return result


@one_thread()
def places(chosen: Tensor) -> tuple[Tensor, Tensor | None]:
    """Where a modality's tokens are.

    Args:
        chosen: [B, S] bool, on the CPU; every row has one.
    Returns:
        [B * n] int64, in the flattened batch, rising, each once; shorter samples are filled up with others
            of their tokens.
        [B, n] bool, which are chosen; None where all are.
    """
    counts = chosen.sum(1, keepdim=True)
    most = counts.max()
    if counts.min() == most:
        return chosen.flatten().nonzero().flatten(), None
    others = ~chosen
    taken = chosen | (others & (others.cumsum(1) <= most - counts))
    positions = taken.flatten().nonzero().flatten()
    return positions, chosen.flatten()[positions].view(len(chosen), -1)


def run(
    dit: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    timestep: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,  # the host does not read it either
    return_all_hidden_states: bool = False,
    image_mask: Tensor | None = None,
    backbone_attention_mask: Tensor | None = None,
) -> Any:
    """What the host's forward returns, with its arguments.

    Raises: Declined: the masks, [B, S] bool, have no twins on the CPU, or the host refuses the model.
    """
    if not dit.config.interleave_self_attention:
        raise Declined("interleave_self_attention is off, which the host refuses")
    text, images = _modalities(encoder_hidden_states, image_mask, backbone_attention_mask)
    temb = dit.timestep_encoder(timestep)
    hidden = hidden_states.contiguous()
    passed = [hidden]
    hidden = stages.tied(dit.transformer_blocks, hidden, encoder_hidden_states)
    with stages.apart(dit.transformer_blocks):
        for index, block in enumerate(dit.transformer_blocks):
            (hidden,) = stages.enter(block, hidden)
            if stages.elsewhere(block):
                pass
            elif index % 2:
                hidden = _through(self_block, block, hidden, temb)
            else:
                tokens = text if index % (2 * dit.attend_text_every_n_blocks) == 0 else images
                hidden = _through(cross_block, block, hidden, _projected(tokens, block), tokens.mask, temb)
            passed.append(hidden)
    hidden = stages.leave(dit.transformer_blocks, hidden)
    shift, scale = dit.proj_out_1(F.silu(temb)).chunk(2, dim=1)
    result = dit.proj_out_2(dit.norm_out(hidden) * (1 + scale[:, None]) + shift[:, None])
    return (result, passed) if return_all_hidden_states else result


def _self_attention(transformer: Any, hidden_states: Tensor, return_all_hidden_states: bool = False) -> Any:
    hidden = hidden_states.contiguous()
    passed = [hidden]
    with stages.apart(transformer.transformer_blocks):
        for block in transformer.transformer_blocks:
            (hidden,) = stages.enter(block, hidden)
            if not stages.elsewhere(block):
                hidden = _through(backbone_block, block, hidden)
            passed.append(hidden)
    hidden = stages.leave(transformer.transformer_blocks, hidden)
    return (hidden, passed) if return_all_hidden_states else hidden


def _through(eager: Callable[..., Any], block: Any, *args: Any) -> Any:
    """A block's call, compiled or not."""
    layer = _layer_of(eager)
    # A shard's hooks are its call's: of an eager block they run in it, of a compiled one around it.
    return layer(block, *args) if layer is eager else units.call(block, layer, *args)


def _modalities(states: Tensor, image_mask: Any, valid: Any) -> tuple[Tokens, Tokens]:
    """The text's and the images' tokens.

    Args:
        states: [B, S, D].
        image_mask, valid: [B, S] bool.
    Raises: Declined: the masks are not of that kind, only the device knows them, or a sample has none.
    """
    for mask in (image_mask, valid):
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != states.shape[:2]:
            raise Declined("image_mask or backbone_attention_mask is not a bool tensor of the tokens' shape")
        if not facts.has_twin(mask):
            raise Declined("the tokens' modalities are only on the device")
    image, valid = facts.on_cpu(image_mask), facts.on_cpu(valid)
    found = {"text": ~image & valid, "image": image & valid}
    for name, chosen in found.items():
        if not bool(chosen.any(1).all()):
            raise Declined(f"a sample has no {name} token")
    rows = states.flatten(0, 1)
    text, images = (_gathered(rows, chosen) for chosen in found.values())
    return text, images


def _gathered(rows: Tensor, chosen: Tensor) -> Tokens:
    """The chosen of all tokens [B * S, D]."""
    positions, mask = places(chosen)
    states = _rows(rows, constants.on(rows.device, positions)).view(len(chosen), -1, rows.shape[1])
    dtype = frozen.autocast_dtype(rows.device)
    needs_cast = dtype is not None and states.dtype not in (dtype, torch.float64)
    return Tokens(
        states=states,
        mask=None if mask is None else constants.on(rows.device, mask),
        cast=states.detach().to(dtype) if needs_cast else None,
    )


def _projected(tokens: Tokens, block: Any) -> Tensor:
    """What a block's K and V projections read."""
    if tokens.cast is None or not _only_projects(block.attn1):
        return tokens.states
    return _shared_cast(tokens.states, tokens.cast)


def _only_projects(attention: Any) -> bool:
    """Whether the tokens go into two linear layers and nowhere else, so that autocast would cast them all."""
    linear = type(attention.to_k) is nn.Linear and type(attention.to_v) is nn.Linear
    return linear and not attention.norm_cross and type(attention.processor).__name__ == _PLAIN


class _Rows(torch.autograd.Function):
    """Distinct rows of a matrix; their gradients are written back, not added atomically as index_select's."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.rows = len(matrix)
        return matrix.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        whole = upstream.new_zeros(ctx.rows, upstream.shape[1])
        return whole.index_copy_(0, positions, upstream), None


class _Cast(torch.autograd.Function):
    """The one cast of the tokens that all blocks share, with each block's gradient cast back on its own.

    Autocast would cast, and keep for the backward, a copy for every projection: 32 of them, 15 GB at batch
    640 and 180 tokens. The gradients still add up in the tokens' own dtype, as natively.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = states.dtype
        return cast.detach()  # a tensor of its own on the same memory

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream.to(ctx.dtype), None


_rows: Callable[[Tensor, Tensor], Tensor] = _Rows.apply
_shared_cast: Callable[[Tensor, Tensor], Tensor] = _Cast.apply


class _CompiledBlock(compiled.CompiledLayer):
    """A compiled block whose dropout draws the masks, and leaves the generator, as the eager block does.

    Inductor fuses a generator of its own into its kernels, unless told to call torch's.
    """

    def inductor(self, eager: Callable[..., Any]) -> dict[str, Any]:
        """See the base class."""
        return {"backend": "inductor", "options": {"fallback_random": True}}

    def __call__(self, layer: Any, hidden: Tensor, *rest: Any) -> Any:
        with _shared_processor(getattr(layer, "attn1", None)):
            return super().__call__(layer, hidden, *rest)


class _LeanBlock(_CompiledBlock):
    """One that keeps less for its backward; the products of the backbone's tokens are the largest."""

    def inductor(self, eager: Callable[..., Any]) -> dict[str, Any]:
        """See the base class."""
        return {"backend": recompute.inductor(products=eager is backbone_block)}


@contextmanager
def _shared_processor(attention: Any) -> Iterator[None]:
    """Let all blocks' attention run by one processor object while they are called.

    diffusers gives each block one of its own, without state. torch 2.7 compiles a graph for each such object
    and gives up at the ninth: half of the DiT's 32 blocks would run eagerly.
    """
    own = getattr(attention, "processor", None)
    if type(own).__name__ != _PLAIN or vars(own):
        yield
        return
    attention.processor = _processors.setdefault(type(own), own)
    try:
        yield
    finally:
        attention.processor = own


def _layer_of(eager: Callable[..., Any]) -> Any:
    """The block's function, compiled as the features say."""
    if not features.value("recompute"):
        return _layers.of(eager)
    site = sites.site("groot/recompute")
    if features.value("compile"):
        site.ran()
    else:
        site.declined("compile is off, and only compiled blocks choose what they keep")
    return _lean.of(eager)


_layers = compiled.Layers("groot/compile", make=_CompiledBlock, dynamic=None)
_lean = compiled.Layers("groot/compile", make=_LeanBlock, dynamic=None)
