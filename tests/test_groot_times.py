"""GR00T's flow times by way of the CPU, and its patches as one matrix product."""

import copy
from types import SimpleNamespace

import pytest
import torch
from lerobot.policies.groot.groot_n1_7 import GR00TN17ActionHead
from torch import nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchEmbed

from somaspeed_patch import constants, features, sites
from somaspeed_patch.groot import times, vision


@pytest.fixture
def head(monkeypatch):
    """What sample_time reads of the host's action head."""
    monkeypatch.setattr(features, "value", {"async_times": True}.get)
    sites.clear()
    config = SimpleNamespace(noise_s=0.999)
    yield SimpleNamespace(_beta_dist=None, _noise_beta_alpha=1.5, _noise_beta_beta=1.0, config=config)
    sites.clear()


def theirs(head, *args, **kwargs):
    return GR00TN17ActionHead.sample_time(head, *args, **kwargs)


def ours(head, *args, **kwargs):
    return times.sample_time(lambda *a, **k: theirs(head, *a, **k), head, args, kwargs)


def check(head, device, dtype):
    torch.manual_seed(4)
    expected, state = theirs(head, 32, device, dtype), torch.get_rng_state()
    torch.manual_seed(4)
    found = ours(head, 32, device=device, dtype=dtype)
    assert torch.equal(found, expected)
    assert found.device == expected.device and found.dtype == dtype
    assert torch.equal(torch.get_rng_state(), state)


def test_times_on_the_cpu_are_the_hosts(head):
    check(head, torch.device("cpu"), torch.float32)
    assert not sites.every()


def test_times_for_a_device_are_computed_before_they_are_sent(head, monkeypatch):
    sent = []
    monkeypatch.setattr(constants, "once", lambda device, values: sent.append((device, values)))
    torch.manual_seed(4)
    expected = theirs(head, 8, torch.device("cpu"), torch.bfloat16)
    torch.manual_seed(4)
    ours(head, 8, "cuda:1", torch.bfloat16)
    [(device, values)] = sent
    assert device == torch.device("cuda:1") and torch.equal(values, expected)
    assert sites.site("groot/async_times").calls == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_times_on_a_gpu_are_the_hosts(head, dtype):
    check(head, torch.device("cuda:0"), dtype)
    torch.cuda._sleep(10**9)  # half a second
    ours(head, 8, torch.device("cuda:0"), dtype)
    assert not torch.cuda.current_stream().query()  # the CPU is ahead of it


@pytest.fixture
def embed():
    torch.manual_seed(0)
    config = SimpleNamespace(patch_size=4, temporal_patch_size=2, in_channels=3, hidden_size=24)
    return Qwen3VLVisionPatchEmbed(config)


@pytest.mark.parametrize("autocast", [False, True])
def test_patches(embed, autocast):
    """In bf16 by a product: both round once, from sums in another order."""
    pixels = torch.randn(10, 96)
    weights = embed if autocast else copy.deepcopy(embed).bfloat16()
    given = pixels if autocast else pixels.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, theirs = vision._embedded(weights, given), weights(given)
    assert found.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(found, theirs, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(found.float(), embed(pixels), rtol=2**-6, atol=2e-2)


def test_patches_in_fp32_are_the_hosts(embed, monkeypatch):
    pixels = torch.randn(10, 96)
    monkeypatch.setattr(vision.F, "linear", None)
    assert torch.equal(vision._embedded(embed, pixels), embed(pixels))


@pytest.mark.parametrize("change", ["padding", "hook", "another module", "size"])
def test_patches_that_the_host_embeds(embed, change):
    if change == "padding":
        embed.proj = nn.Conv3d(3, 24, (2, 4, 4), stride=(2, 4, 4), padding=1)
    elif change == "hook":
        embed.proj.register_forward_hook(lambda *_: None)
    elif change == "another module":
        embed.proj = nn.Sequential(embed.proj)
    assert vision._is_linear(nn.Conv3d(3, 24, (2, 4, 4), stride=(2, 4, 4)), 96)
    assert not vision._is_linear(embed.proj, 48 if change == "size" else 96)
