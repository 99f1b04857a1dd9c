"""What the CPU knows of a batch's prompts: where the images' tokens are, and every token's position.

The host finds positions with Python loops over samples and images, reading numbers back from the device. A
prompt's positions depend on its row alone, and rows recur (a LIBERO suite has ten instructions), so the
host's own function computes each row once, on the CPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import constants, facts
from somaspeed_patch.cpu_threads import one_thread
from somaspeed_patch.guarded import Declined

_MOST_ROWS = 4096  # of 3 x 8 bytes a token: 17 MB at 172 tokens

_rows: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Of B prompts of S tokens with N images of one size; tensors are on the CPU."""

    ids: Tensor
    """[B, S]"""
    valid: Tensor
    """[B, S] bool, False where padded"""
    image: Tensor
    """[B, S] bool, an image's token"""
    grid: tuple[int, int, int]
    """frames, height and width in patches of every image"""
    images: int
    """N"""
    positions: Tensor
    """[image tokens] int64, in the flattened batch"""
    all_valid: bool
    """whether nothing is padded"""


@one_thread()
def read(qwen: Any, inputs: Mapping[str, Tensor]) -> Tokens:
    """The layout of a batch.

    Args:
        qwen: the host's Qwen3VLModel.
        inputs: input_ids and attention_mask [B, S], image_grid_thw [N, 3].
    Raises: Declined: images of several sizes, or tokens and images that contradict each other.
    """
    ids, grids = facts.on_cpu(inputs["input_ids"]), facts.on_cpu(inputs["image_grid_thw"])
    valid = facts.on_cpu(inputs["attention_mask"]) == 1
    sizes = set(map(tuple, grids.tolist()))
    if len(sizes) != 1:
        raise Declined("the batch has images of several sizes" if sizes else "the batch has no images")
    grid = sizes.pop()
    image = ids == qwen.config.image_token_id
    positions = image.flatten().nonzero().flatten()
    merge = qwen.visual.spatial_merge_size
    if len(positions) * merge**2 != len(grids) * grid[0] * grid[1] * grid[2]:
        raise Declined("the batch's images do not fit its tokens")
    return Tokens(
        ids=ids, valid=valid, image=image, grid=grid, images=len(grids), positions=positions,
        all_valid=bool(valid.all()),
    )  # fmt: skip


@one_thread()
def rope_positions(qwen: Any, tokens: Tokens, mask: Tensor, types: Tensor | None) -> Tensor:
    """[3, B, S] int64 on the CPU: each token's place in time, height and width, as the host counts.

    Args:
        qwen: the host's Qwen3VLModel.
        mask: [B, S], the host's attention mask, on the CPU.
        types: [B, S] 0 for text and 1 for an image, on the CPU; None: this host asks the ids.
    """
    keys = [
        (type(qwen).__module__, tokens.grid, ids.numpy().tobytes(), row.numpy().tobytes())
        for ids, row in zip(tokens.ids, mask, strict=True)
    ]
    missing = {key: index for index, key in enumerate(keys) if key not in _rows}
    if missing:
        wanted = list(missing.values())
        found = _hosts_positions(qwen, tokens, mask, types, torch.tensor(wanted))
        _rows.update(zip(missing, found, strict=True))
    rows = torch.stack([_rows[key] for key in keys], dim=1)
    for key in keys:
        _rows.move_to_end(key)
    while len(_rows) > _MOST_ROWS:
        _rows.popitem(last=False)
    return rows


def text_mask(tokens: Tokens, device: torch.device) -> Tensor | None:
    """[B, 1, S, S] bool, True where a token may look: at itself and at earlier ones that are not padding.

    None where nothing is padded: attention is then told to be causal. This is the host's mask, also in the
    rows of padding on the left, which may look nowhere.
    """
    if tokens.all_valid:
        return None
    valid = constants.once(device, tokens.valid)
    length = valid.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal & valid[:, None, None, :]


def release() -> None:
    """Forget all positions."""
    _rows.clear()


def _hosts_positions(
    qwen: Any, tokens: Tokens, mask: Tensor, types: Tensor | None, samples: Tensor
) -> list[Tensor]:
    """[3, S] for each of the samples."""
    tokens_an_image = len(tokens.positions) // tokens.images
    images = int(tokens.image[samples].sum()) // tokens_an_image
    found, _ = qwen.get_rope_index(
        input_ids=tokens.ids[samples],
        image_grid_thw=torch.tensor([tokens.grid] * images),
        attention_mask=mask[samples],
        **({} if types is None else {"mm_token_type_ids": types[samples]}),
    )
    return list(found.unbind(1))
