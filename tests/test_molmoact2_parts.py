"""The parts of MolmoAct2's step on their own: layout of images, embedding, attention of one query."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lerobot.policies.molmoact2.molmoact2_hf_model import modeling_molmoact2 as host
from torch import nn

from somaspeed_patch import constants
from somaspeed_patch.molmoact2 import attention, embedding, inputs, layout, vision
from somaspeed_patch.testing import assert_no_worse_than_native

PATCHES, PIXELS, POOL = 9, 5, 4
END = 3  # the id of image-end tokens


def images(seed, *, samples=4, most=3, doubled=False, even=False):
    """Model inputs of `samples` samples with 1 to `most` images each, of differing crops and grids."""
    rng = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=rng)

    counts = torch.full((samples,), most) if even else draw(1, most, samples)
    total = int(counts.sum())
    num_crops = torch.ones(total, dtype=torch.int64) if even else draw(1, 3, total)
    low, high = (torch.full((total, 2), 2), torch.zeros(total, 2)) if even else (draw(1, 3, total, 2), None)
    high = draw(0, 3, total, 2) if high is None else high.long()
    grids = torch.cat([low, high], 1)
    pooled = int((grids[:, :2].prod(1) + grids[:, 2:].prod(1)).sum())
    ends = counts * 2 if doubled else counts
    ids = torch.zeros(samples, 8, dtype=torch.int64)
    for row, number in zip(ids, ends.tolist(), strict=True):
        row[torch.randperm(8, generator=rng)[:number]] = END
    return dict(
        input_ids=ids,
        pixel_values=torch.randn(int(num_crops.sum()), PATCHES, PIXELS, generator=rng),
        image_token_pooling=draw(-1, PATCHES - 1, pooled, POOL),
        image_grids=grids,
        image_num_crops=num_crops,
    )


BACKBONE = SimpleNamespace(config=SimpleNamespace(image_end_token_id=END))


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_images_are_laid_out_as_by_the_host(seed, doubled):
    batch = images(seed, samples=1 + seed % 5, doubled=doubled)
    theirs = host.MolmoAct2Model.build_batched_images(BACKBONE, **batch)
    plan = inputs.plan(BACKBONE, batch)
    ours = layout.batched(plan, batch["pixel_values"], batch["image_token_pooling"])
    for expected, found in zip(theirs, ours, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_equal_samples_need_no_padding_and_no_copy():
    batch = images(0, even=True)
    plan = inputs.plan(BACKBONE, batch)
    assert plan.crop_rows is None and plan.pooled_rows is None
    found, _ = layout.batched(plan, batch["pixel_values"], batch["image_token_pooling"])
    assert found.data_ptr() == batch["pixel_values"].data_ptr()
    assert vision.token_rows(plan, batch["image_token_pooling"].clamp(min=0)) is None


def test_the_gradient_of_the_pixels_goes_where_they_came_from():
    batch = images(3)
    pixels = batch["pixel_values"].double().requires_grad_()
    plan = inputs.plan(BACKBONE, batch)
    found, _ = layout.batched(plan, pixels, batch["image_token_pooling"])
    weights = torch.randn(found.shape, dtype=torch.float64)
    (found * weights).sum().backward()
    theirs = batch["pixel_values"].double().requires_grad_()
    expected, _ = host.MolmoAct2Model.build_batched_images(BACKBONE, **{**batch, "pixel_values": theirs})
    (expected * weights).sum().backward()
    assert torch.equal(pixels.grad, theirs.grad)


def test_tokens_without_patches_are_left_out():
    batch = images(5)
    batch["image_token_pooling"][[1, 4]] = -1
    plan, pooling = inputs.plan(BACKBONE, batch), batch["image_token_pooling"]
    rows = vision.token_rows(plan, pooling)
    _, padded = host.MolmoAct2Model.build_batched_images(BACKBONE, **batch)
    assert torch.equal(rows, (padded >= 0).any(-1).flatten().nonzero().flatten())


@pytest.mark.parametrize("key", ["pixel_values", "image_token_pooling", "image_grids", "image_num_crops"])
def test_a_batch_that_contradicts_itself_has_no_layout(key):
    batch = images(1, even=True)
    batch[key] = batch[key][:-1]
    assert inputs.plan(BACKBONE, batch) is None


def test_odd_numbers_of_end_tokens_have_no_layout():
    ends = torch.tensor([1, 3])  # twice as many as images in all, but not in each sample
    assert layout.plan(ends, torch.ones(2, 4, dtype=torch.int64), torch.ones(2), PATCHES) is None


def table(rows, width=6, dtype=torch.float64):
    wte = host.MolmoAct2Embedding(rows, 3, width).to(dtype)
    for parameter in wte.parameters():
        nn.init.normal_(parameter)
    return wte


@pytest.mark.parametrize("frozen", [(), ("embedding",), ("new_embedding",)])
def test_embedding_and_its_gradients_with_repeated_ids(frozen):
    wte = table(7)
    for name in frozen:
        getattr(wte, name).requires_grad_(False)
    ids = torch.tensor([[0, 6, 7, 9, 6], [6, 9, 9, 3, 8]])  # 7, 8 and 9 are the added rows
    upstream = torch.randn(2, 5, 6, dtype=torch.float64)
    found = []
    for rows in (wte(ids), embedding.embed(wte, ids)):
        wanted = [p for p in wte.parameters() if p.requires_grad]
        found.append([rows, *torch.autograd.grad(rows, wanted, upstream)])
    for expected, mine in zip(*found, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("ids", [[0, 10], [-1, 2]])
def test_ids_outside_of_the_tables_are_refused_as_by_the_host(ids):
    wte = table(7)
    errors = []
    for call in (wte, lambda ids: embedding.embed(wte, ids)):
        with pytest.raises(IndexError) as caught:
            call(torch.tensor(ids))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def problems(*, groups=1, heads=4, count=6, keys=5, size=8, masked=True):
    """Query [B, 1, H, D], key and value [B, K, HK, D], mask [B, 1, 1, K] with rows of all kinds."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(count, 1, heads, size), *[(count, keys, heads // groups, size)] * 2]
    tensors = [torch.randn(shape, generator=rng) for shape in shapes]
    mask = torch.rand(count, 1, 1, keys, generator=rng) > 0.5 if masked else None
    if masked:
        mask[0], mask[1], mask[2] = True, False, torch.arange(keys) == 2
    return tensors, mask


def exact(query, key, value, mask):
    """Softmax attention in the dtype it is given; a query without keys gives zeros."""
    groups = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(groups, 2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e30)
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights * mask
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_query_is_as_exact_as_plain_attention(dtype, masked, groups):
    tensors, mask = problems(groups=groups, masked=masked)

    def ours(query, key, value):
        return attention._one_query(query, key, value, mask, groups)

    def theirs(query, key, value):
        return exact(query, key, value, mask)

    assert_no_worse_than_native(ours, theirs, [x.to(dtype) for x in tensors])


def test_one_query_without_keys_is_zero_and_has_no_gradient():
    tensors, mask = problems()
    query, key, value = (x.requires_grad_() for x in tensors)
    found = attention._one_query(query, key, value, mask, 1)
    fused = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors), attn_mask=mask)
    assert torch.equal(found[1], torch.zeros_like(found[1]))
    assert torch.allclose(found, fused.transpose(1, 2), atol=1e-6)
    found.sum().backward()
    for gradient in (query.grad, key.grad, value.grad):
        assert torch.isfinite(gradient).all()
        assert (gradient[1] == 0).all() and (gradient[0] != 0).any()


IMPLEMENTATIONS = list(itertools.product(["eager", "sdpa"], [1, 3], [False, True]))


@pytest.mark.parametrize(("kind", "queries", "masked"), IMPLEMENTATIONS)
def test_vision_attention_equals_the_hosts(kind, queries, masked):
    torch.manual_seed(0)
    module = host.ViTMultiHeadDotProductAttention(8, 4, 2, 2, input_dim=6, attn_implementation=kind)
    query, source = torch.randn(5, queries, 6), torch.randn(5, 4, 6)
    mask = (torch.rand(5, 1, 1, 4) > 0.3) if masked else None
    expected = module(query, source, mask)
    assert torch.allclose(attention.vision_attention(module, query, source, mask), expected, atol=1e-6)
    alone = module(source)
    assert torch.allclose(attention.vision_attention(module, source), alone, atol=1e-6)


def test_constants_on_the_cpu_are_the_values_themselves():
    values = torch.arange(3)
    assert constants.on(torch.device("cpu"), values) is values
    assert not constants._sent
