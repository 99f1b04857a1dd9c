"""The main process evaluates alone between two updates of a sharded policy. As a script: serves the ranks."""

import os

import pytest
import torch
import torch.distributed as dist

from somaspeed_patch import testing_distributed as ranks


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


if __name__ == "__main__":
    ranks.serve({1: {"alone": alone}, 2: {"sharded": sharded}})
