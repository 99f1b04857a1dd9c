"""The main process evaluates alone between two updates of a sharded policy. As a script: serves the ranks."""

import importlib
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from somaspeed_patch import testing_distributed as ranks

ACTING = {  # what make_policy is told
    "pi05": {"train_expert_only": True},
    "molmoact2": {"train_action_expert_only": True, "action_mode": "continuous"},
    "groot": {},
}


def as_launched() -> None:
    """What a launcher tells accelerate of the group that exists already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")


def actions(_env, policy, batch):
    """What the policy would do, from fixed noise."""
    policy.eval()
    torch.manual_seed(5)
    with torch.no_grad():
        found = policy.predict_action_chunk(batch)
    policy.train()
    return found


def update(policy, optimizer, batch) -> float:
    """One update from fixed noise; its loss."""
    torch.manual_seed(7)
    loss, _ = policy.forward(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def alone():
    from somaspeed_patch.testing_pi05 import make_batch, make_policy

    policy = make_policy(train_expert_only=True)
    batch = make_batch(policy)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    losses = [update(policy, optimizer, batch)]
    acted = actions(None, policy, batch)
    return {"losses": [*losses, update(policy, optimizer, batch)], "actions": acted}


def sharded():
    from accelerate import Accelerator

    import somaspeed_patch
    from somaspeed_patch.layouts import evaluation
    from somaspeed_patch.testing_pi05 import make_batch, make_policy

    as_launched()
    policy = make_policy(train_expert_only=True)
    batch = make_batch(policy)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    acted = None
    with somaspeed_patch.patched("layouts", "pi05", layout="dp_shard=2,reshard=always"):
        accelerator = Accelerator(cpu=True)
        policy, optimizer = accelerator.prepare(policy, optimizer)
        losses = [update(policy, optimizer, batch)]
        if accelerator.is_main_process:
            acted = evaluation.eval_policy(actions, None, (None, policy, batch), {})
        accelerator.wait_for_everyone()
        held = sum(p.to_local().numel() if hasattr(p, "to_local") else 0 for p in policy.parameters())
        losses.append(update(policy, optimizer, batch))
    return {"losses": losses, "actions": acted, "held": held}


def acting(family: str, layout: str | None):
    """Actions of a policy before and after an update, and the update's loss; all ranks act."""
    import somaspeed_patch
    from somaspeed_patch.layouts import families, launch
    from somaspeed_patch.layouts.layout import parse

    made = importlib.import_module(f"somaspeed_patch.testing_{family}")
    policy = made.make_policy(**ACTING[family])
    batch = made.make_batch(policy)
    if layout is not None:
        launch.spread(policy, families.of(policy), parse(layout), torch.device("cpu"))
    # No Adam: it makes steps of the rounding of gradients that are zero by construction.
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    with somaspeed_patch.patched(family):  # LeRobot's MolmoAct2 acts by modulations of before the update
        first = actions(None, policy, batch)
        loss = update(policy, optimizer, batch)
        return {"actions": torch.cat([first, actions(None, policy, batch)]), "loss": loss}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return ranks.run_ranks(__file__, tmp_path_factory.mktemp("evaluation"))


def test_the_main_process_acts_as_the_whole_policy_would_and_training_goes_on(found):
    (expected,), several = found["alone"], found["sharded"]
    assert torch.allclose(several[0]["actions"], expected["actions"], atol=1e-6)
    assert several[1]["actions"] is None
    for rank in several:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert expected["losses"][0] != pytest.approx(expected["losses"][1], rel=1e-3)  # the update showed


def test_every_rank_holds_its_shards_again(found):
    first, second = (rank["held"] for rank in found["sharded"])
    assert first > 0 and second > 0
    assert abs(first - second) < 0.1 * first  # halves, up to what 2 does not divide


@pytest.mark.parametrize("family", ACTING)
def test_a_policy_in_shards_acts_on_every_rank(found, family):
    (expected,) = found[f"{family} alone"]
    for rank in found[f"{family} in shards"]:
        assert torch.allclose(rank["actions"], expected["actions"], atol=1e-5)
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-5)


if __name__ == "__main__":
    one = {f"{family} alone": partial(acting, family, None) for family in ACTING}
    two = {f"{family} in shards": partial(acting, family, "dp_shard=2,frozen=sharded") for family in ACTING}
    ranks.serve({1: {"alone": alone, **one}, 2: {"sharded": sharded, **two}})
