"""Necessary FLOPs: at full size, against PyTorch's own counter on tiny patched models, and how they grow."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from somaspeed_patch import patched
from somaspeed_patch.ab import (
    flops,
    flops_groot,
    flops_molmoact2,
    flops_parts,
    flops_pi05,
    peaks,
    synthetic,
    synthetic_recipe,
)
from somaspeed_patch.tiny_groot import sizes as groot_sizes
from somaspeed_patch.tiny_molmoact2 import sizes as molmoact2_sizes
from somaspeed_patch.tiny_pi05 import sizes as pi05_sizes

CAMERAS, TOKENS, CHUNK = 2, 64, 10  # of the tiny models; pi0.5 pads its prompts to 96 slots


def recipe(model, size="micro", **counts):
    values = {"cameras": CAMERAS, "slots": 96 if model == "pi05" else 0, "tokens": TOKENS, "chunk": CHUNK}
    shipped = synthetic_recipe.load(f"{model}_libero")
    return replace(shipped, size=size, dtype="float32", **{**values, **counts})


def counted(wanted, samples=2):
    """FLOPs a sample that PyTorch's counter sees in forward and backward of the patched model, in fp32."""
    subject = synthetic.SUBJECTS[wanted.model](wanted, torch.device("cpu"))
    batch, counter = subject.batch(samples), FlopCounterMode(display=False)
    # Attention as plain products: the counter sees neither into the kernels nor into the CPU's fused one.
    features = {"split_attention": False} if wanted.model == "pi05" else {}
    with patched(wanted.model, **features), sdpa_kernel(SDPBackend.MATH), subject.exact(), counter:
        subject.loss_and_gradients(batch)
    return counter.get_total_flops() / samples


def beyond_pi05(wanted):
    """The reference differentiates the prefix's K and V, too. And tables of rotary embeddings."""
    size = pi05_sizes.by_name(wanted.size)
    prefix = CAMERAS * 4 + TOKENS
    gradients = 4 * CHUNK * prefix * 8 * size.head_dim * size.depth
    return gradients + size.head_dim * (prefix / 2 + CHUNK)  # the prefix's table is one for both samples


def beyond_molmoact2(wanted):
    """Padding of the squares at an image's end is projected, too. Pooling's attention is elementwise."""
    size = molmoact2_sizes.by_name(wanted.size)
    image = flops_molmoact2.image_of(wanted.size, size)
    width = size.vision_width
    filled = 2 * 2 * (4 * image.pooled - image.patches) * 2 * width * width
    return CAMERAS * (filled - image.pooled * 4 * 4 * width)


def beyond_groot(wanted):
    """The state's output is made, though nobody reads it. And tables of rotary embeddings, in three axes."""
    size = groot_sizes.by_name(wanted.size)
    width, head = size.dit_heads * size.dit_head_dim, size.head_width
    tokens = TOKENS + CAMERAS * (size.image_side // 32) ** 2
    return 6 * head * (width + head + size.dims) + 3 * size.head_dim * tokens


@pytest.mark.parametrize("size", ["micro", "small"])
@pytest.mark.parametrize(
    ("model", "beyond"), [("pi05", beyond_pi05), ("molmoact2", beyond_molmoact2), ("groot", beyond_groot)]
)
def test_the_patched_model_computes_what_is_necessary(model, beyond, size):
    wanted = recipe(model, size)
    found, necessary = counted(wanted), flops.necessary(wanted)
    assert found == pytest.approx(necessary, rel=0.06 if size == "micro" else 0.02)
    assert found == necessary + beyond(wanted)  # and that is all


@pytest.mark.parametrize(
    ("name", "tokens", "tera"),
    [
        ("pi05_libero", 64, 2.750),
        ("molmoact2_libero", 63, 5.20),  # 487 tokens with the images'
        ("groot_libero", 52, 1.129),  # 180 tokens with the images'
    ],
)
def test_the_full_size_agrees_with_a_count_made_by_other_means(name, tokens, tera):
    full = replace(synthetic_recipe.load(name), tokens=tokens)
    assert (full.size, full.cameras) == ("full", 2)
    assert flops.necessary(full) == pytest.approx(tera * 1e12, rel=0.005)


@pytest.mark.parametrize(
    ("name", "tera"), [("pi05_libero", 2.748), ("molmoact2_libero", 5.322), ("groot_libero", 1.102)]
)
def test_the_shipped_recipes(name, tera):
    assert flops.necessary(synthetic_recipe.load(name)) == pytest.approx(tera * 1e12, rel=5e-4)


def test_the_full_size_of_pi05_is_the_hosts():
    from lerobot.policies.pi05.modeling_pi05 import PaliGemmaWithExpertModel, get_gemma_config

    with torch.device("meta"):
        host = PaliGemmaWithExpertModel(
            get_gemma_config("gemma_2b"), get_gemma_config("gemma_300m"), use_adarms=[False, True]
        )
    trunk, size = host.paligemma.model, flops_pi05.FULL
    tower = trunk.vision_tower.vision_model
    assert (len(tower.encoder.layers), len(trunk.language_model.layers)) == (size.vision_depth, size.depth)
    assert tower.encoder.layers[0].self_attn.num_heads == size.vision_heads
    assert tower.embeddings.num_patches == 256
    one = {"vision": linear_weights(tower) + linear_weights(trunk.multi_modal_projector)}
    one["language"] = linear_weights(trunk.language_model)
    one["expert"] = linear_weights(host.gemma_expert.model)
    patch = 3 * 14**2 * size.vision_width  # a convolution
    attention = flops_parts.attention(1, 1, size.vision_width)
    assert flops_pi05.vision(size, 1) == 2 * (one["vision"] + patch) + size.vision_depth * attention
    last = linear_weights(trunk.language_model.layers[-1])
    unread = last - 2 * size.vlm_width * size.head_dim
    attention = (size.depth - 1) * flops_parts.attention(1, 1, 8 * size.head_dim)
    assert flops_pi05.language(size, 1) == 2 * (one["language"] - unread) + attention
    width, heads = size.expert_width, 8 * size.head_dim
    attention = size.depth * flops_parts.attention(1, 1, heads, flops_parts.TRAINED)
    ends = 2 * (2 + 3) * (width * width + 32 * width)  # of time and actions: what they read first is frozen
    assert flops_pi05.expert(size, 1, 0) == 6 * one["expert"] + attention + ends


def linear_weights(module):
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


def test_it_counts_in_no_time_and_without_torch():
    code = (
        "import sys, time\n"
        "from somaspeed_patch.ab import flops, peaks, synthetic_recipe\n"
        "found = [synthetic_recipe.load(f'{name}_libero') for name in flops.COUNTS]\n"
        "begun = time.perf_counter()\n"
        "assert all(flops.necessary(recipe) > 1e12 for recipe in found)\n"
        "assert time.perf_counter() - begun < 0.1\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model", sorted(flops.COUNTS))
def test_a_camera_adds_its_vision_and_its_tokens(model):
    """Twice the images: the same as their vision, and as many more tokens of language and K and V."""
    one, two, four = (flops.necessary(recipe(model, "full", cameras=count)) for count in (1, 2, 4))
    assert 2 * (two - one) < four - two < 2.1 * (two - one)  # attention grows with the square


def test_each_camera_of_pi05_costs_its_vision():
    size = flops_pi05.FULL
    without = [flops.necessary(recipe("pi05", "full", cameras=n, tokens=600 - 256 * n)) for n in (0, 1, 2)]
    vision = flops_pi05.vision(size, 256)
    assert [later - before for before, later in zip(without, without[1:], strict=False)] == [vision] * 2


@pytest.mark.parametrize("model", sorted(flops.COUNTS))
def test_text_costs_the_same_a_token_but_for_attention(model):
    first, second, third = (flops.necessary(recipe(model, "full", tokens=n)) for n in (50, 100, 150))
    pairs = {  # 50 x 50 more pairs of tokens, twice, at 4 FLOPs a pair and number of the queries
        "pi05": 17 * 2048,
        "molmoact2": 35 * 4096,
        "groot": 16 * 2048 + 3 * 4 * 2048,
    }[model]
    assert (third - second) - (second - first) == 4 * 2 * 50**2 * pairs


def test_padding_is_not_counted():
    empty = recipe("pi05", "full", slots=64)
    assert flops.necessary(empty) == flops.necessary(replace(empty, slots=200))


def test_actions_cost_forward_and_backward_of_the_expert_alone():
    """MolmoAct2 draws 8 times a sample; GR00T's head has 40 action tokens whatever the chunk."""
    longer = flops.necessary(recipe("molmoact2", "full", chunk=30))
    shorter = flops.necessary(recipe("molmoact2", "full", chunk=10))
    size, context = molmoact2_sizes.by_name("full"), TOKENS + 2 * 212
    expert = [flops_molmoact2.expert(size, chunk, context) for chunk in (10, 30)]
    assert longer - shorter == expert[1] - expert[0] > 0
    assert flops.necessary(recipe("groot", "full", chunk=16)) == flops.necessary(
        recipe("groot", "full", chunk=40)
    )


def test_each_modality_of_groot_has_its_own_keys():
    """16 cross blocks: half read the text, half the images."""
    size = groot_sizes.by_name("full")
    text = flops_groot.dit(size, 1, 0) - flops_groot.dit(size, 0, 0)
    images = flops_groot.dit(size, 0, 1) - flops_groot.dit(size, 0, 0)
    assert text == images == 8 * 3 * (2 * 2 * 2048 * 1536 + 4 * 41 * 1536)


def test_an_unknown_model_or_size():
    with pytest.raises(ValueError, match="model must be one of groot, molmoact2, pi05, but is 'pi0'"):
        flops.necessary(replace(recipe("pi05"), model="pi0"))
    with pytest.raises(ValueError, match="size must be one of"):
        flops.necessary(recipe("groot", "huge"))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A40", 149.7),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_peaks(name, peak):
    assert peaks.peak_tflops(name) == peak


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA RTX A4000",
        "NVIDIA H20",
        "NVIDIA B300",
        "Quadro RTX 6000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "Tesla V100-SXM2-16GB",
        "cpu",
        "",
    ],
)
def test_no_peak_is_better_than_another_gpus(name):
    assert peaks.peak_tflops(name) is None
