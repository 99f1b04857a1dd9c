"""MolmoAct2's compiled layers with dynamo and AOTAutograd for real; Inductor is left to the GPU."""

from functools import cache

import pytest
import torch
from torch._dynamo.utils import counters

import somaspeed_patch
from somaspeed_patch import compiled, sites
from somaspeed_patch.testing_molmoact2 import make_batch, make_policy
from somaspeed_patch.testing_parity import assert_same_step, lively, step

FROZEN = dict(action_mode="continuous", train_action_expert_only=True)


@cache
def policy_of(**config):
    return lively(make_policy(**config))


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    sites.clear()


def compile_site():
    return sites.site("molmoact2/compile")


def compiled_steps(policy, batches):
    """Steps, and the number of graphs after each; nothing ran eagerly."""
    found, graphs = [], []
    with somaspeed_patch.patched("molmoact2", compile=True):
        for batch in batches:
            found.append(step(policy, batch))
            graphs.append(counters["stats"]["unique_graphs"])
    assert (compile_site().fallbacks, compile_site().native_calls) == (0, 0)
    assert not counters["graph_break"]
    return found, graphs


def test_one_graph_serves_all_layers_and_a_second_one_all_lengths():
    policy = policy_of(**FROZEN)
    tasks = ["go", "pick up the cube", "put the very large red bowl on the plate"]
    batches = [make_batch(policy, tasks=[task, "go"]) for task in tasks]  # all but the first are padded
    assert len({batch["input_ids"].shape for batch in batches}) == 3
    ours, graphs = compiled_steps(policy, [*batches, batches[0]])
    assert graphs == [2, 4, 4, 4]  # language layer and expert layer, then both for any length
    assert compile_site().calls == 4 * 3  # of the last language layer only K and V are computed, eagerly
    for batch, mine in zip(batches, ours, strict=False):
        assert_same_step(step(policy, batch), mine)


def test_the_joint_way_with_padding_and_checkpointing():
    """The expert's layers are compiled, recomputed ones too; the host's decoder layers are not."""
    policy = policy_of(action_mode="both", gradient_checkpointing=True)
    batch = make_batch(policy, tasks=["pick up the cube", "go"], valid_actions=[2, 4])
    ours, _ = compiled_steps(policy, [batch])
    assert sites.site("molmoact2/shared_context").calls == 1
    assert compile_site().calls == 2 * 2
    assert_same_step(step(policy, batch), ours[0], tolerance=1e-5)


def test_a_compiler_that_fails_leaves_the_layers_eager_and_is_reported(monkeypatch):
    def no_compiler(graph, inputs):
        raise RuntimeError("no C compiler")

    policy = policy_of(**FROZEN)
    batch = make_batch(policy)
    native = step(policy, batch)
    monkeypatch.setattr(compiled, "BACKEND", no_compiler)
    with somaspeed_patch.patched("molmoact2", compile=True):
        ours = step(policy, batch)
        assert compile_site().fallbacks > 0
        assert "no C compiler" in compile_site().last_fallback
        assert sites.site("molmoact2/frozen_prefix").calls == 1
    assert_same_step(native, ours)


def test_off_by_default():
    policy = policy_of(**FROZEN)
    with somaspeed_patch.patched("molmoact2"):
        step(policy, make_batch(policy))
    assert compile_site().calls == 0
    assert not counters["stats"]["unique_graphs"]
