"""The RL learner on several gloo ranks, against one process that was given all of their trajectories.

As a script it serves the runs: see testing_rl_ranks.
"""

import math
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file

from somaspeed_patch.rl import ranks
from somaspeed_patch.testing_rl_ranks import Case, GivenRun, far, run_all, serve_runs

TWO = {"shards": "dp_shard=2", "replicas": "dp_replicate=2"}
WHERE = {"alone": (1, None), **{name: (2, layout) for name, layout in TWO.items()}}
PLAIN, RECOMPUTED = Case(name="plain"), Case(name="recomputed", stale=True)
STATE = (
    PLAIN,
    RECOMPUTED,
    Case(name="equal weights", settings=(("equal_weight", True), ("update_epoch", 2))),
    Case(name="interpolated", stale=True, settings=(("proximal", "interpolate"),)),
    Case(name="warm-up", settings=(("critic_warmup", 2),)),
)
SEVERAL = (("global_batch", 6), ("micro_batch", 2), ("update_epoch", 3))
COUNTED = Case(name="counted", settings=SEVERAL, work="counted")
PI05 = (PLAIN, RECOMPUTED, Case(name="kept", work="kept"), Case(name="one", work="once"))
BESIDE = tuple(Case(name=f"lag {lag}", work="side by side", lag=lag) for lag in (0, 1))
HERE = {"state": (*STATE, COUNTED), "pi05": PI05, "reach": BESIDE}
FAMILIES = ("groot", "molmoact2")
RUNS = {
    f"{policy} {where}": GivenRun(policy=policy, ranks=count, layout=layout, cases=cases)
    for policy, cases in (*HERE.items(), *((name, (PLAIN,)) for name in FAMILIES))
    for where, (count, layout) in WHERE.items()
    if policy not in FAMILIES or where != "replicas"
}
HSDP, UNITS = "dp_replicate=2,dp_shard=2,reshard=never", "dp_shard=2,checkpointing=full"
RUNS["state hsdp"] = GivenRun(policy="state", ranks=4, layout=HSDP, cases=(PLAIN,))
RUNS["pi05 units"] = GivenRun(policy="pi05", ranks=2, layout=UNITS, cases=(PLAIN,))
for _layout in ("dp_shard=3", "dp_replicate=3"):
    RUNS[f"state {_layout}"] = GivenRun(policy="state", ranks=3, layout=_layout, cases=(COUNTED,))
RESUMED = {  # of the same case's run: from which, and on how many ranks
    "pi05 to two": ("pi05 alone", 2, "dp_shard=2"),
    "pi05 to replicas": ("pi05 alone", 2, "dp_replicate=2"),
    "pi05 back": ("pi05 to two", 1, None),
    "pi05 to shards": ("pi05 to replicas", 2, "dp_shard=2"),
}
for _name, (_before, _count, _layout) in RESUMED.items():
    _once = Case(name="one", work="once", resumes=(_before, "one"))
    RUNS[_name] = GivenRun(policy="pi05", ranks=_count, layout=_layout, cases=(_once,))
EXACT = [
    (name, case.name)
    for name, run in RUNS.items()
    for case in run.cases
    if run.ranks > 1 and case.work == "iterate"
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_all(__file__, tmp_path_factory.mktemp("ranks"))


def found(runs, name, case):
    """What each rank left."""
    assert all(isinstance(each, dict) for each in runs[name]), runs[name][0]
    return [each[case] for each in runs[name]]


@pytest.mark.parametrize(("name", "case"), EXACT)
def test_iterations_are_those_of_one_process_with_all_trajectories(runs, name, case):
    expected = found(runs, f"{name.split()[0]} alone", case)[0]
    every = found(runs, name, case)
    for rank, mine in enumerate(every):
        assert not far(mine["weights"], expected["weights"], f"rank {rank}")
        assert not far(mine["metrics"], expected["metrics"], f"rank {rank}")
    assert not far(every[0]["state"], expected["state"])
    norms = [each["losses/grad_norm"] for each in expected["metrics"]]
    assert max(norms) > 0.5, "the clip has to bite"


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if COUNTED in run.cases])
def test_with_several_global_batches_each_sample_is_trained_update_epoch_times(runs, name):
    """17 samples in steps of 6: each rank's part is within one sample of its share, shares add up to 1."""
    every = found(runs, name, "counted")
    for rank in every:
        index = list(chain.from_iterable(i for step in rank["steps"] for share, i in step if share))
        assert torch.tensor(index).bincount().tolist() == [3] * (max(index) + 1)
    counts = [sum(len(i) for step in rank["steps"] for share, i in step if share) // 3 for rank in every]
    assert sum(counts) == 17 and len({len(rank["steps"]) for rank in every}) == 1
    for number, steps in enumerate(zip(*(rank["steps"] for rank in every), strict=True)):
        sizes = [sum(len(i) for share, i in step if share) for step in steps]
        assert sum(sizes) == (6, 6, 5)[number % 3] and len({len(step) for step in steps}) == 1
        assert all(abs(size - count * sum(sizes) / 17) < 1 for size, count in zip(sizes, counts, strict=True))
        assert sum(share for step in steps for share, _ in step) == pytest.approx(len(every))
    assert {rank["made"] for rank in every} == {9}
    assert all(rank["metrics"]["charts/samples"] == 17 for rank in every)


def test_a_rank_without_samples_left_takes_part_with_weight_zero(runs):
    """Of 17 samples the second rank of three has 2, in steps of 6."""
    every = found(runs, "state dp_shard=3", "counted")
    assert any(share == 0 and len(i) == 1 for step in every[1]["steps"] for share, i in step)
    assert all(math.isfinite(each) for each in every[1]["metrics"].values())


@pytest.mark.parametrize(
    ("counts", "batch"), [((5, 5), 4), ((1, 9), 1), ((3, 3, 3), 2), ((100, 1), 8), ((7,), 3), ((1, 1), 1)]
)
def test_steps_are_full_and_fair(counts, batch):
    steps = ranks.turns(counts, batch)
    assert [sum(each) for each in zip(*steps, strict=True)] == list(counts)
    total = sum(counts)
    assert [sum(each) for each in steps] == [min(batch, total - i) for i in range(0, total, batch)]
    for each in steps:
        assert all(abs(n - of * sum(each) / total) <= 1 for n, of in zip(each, counts, strict=True))


def test_a_run_goes_on_on_another_number_of_ranks(runs):
    """1 -> 2 -> 1: what was loaded is what was saved, bit for bit; and the iterations are those of one."""
    for name, (before, *_) in RESUMED.items():
        saved, mine = found(runs, before, "one")[0], found(runs, name, "one")[0]
        assert not far(mine["resumed"]["state"], saved["state"], at_most=0)
        assert not far(mine["resumed"]["weights"], saved["weights"], at_most=0)
    expected = found(runs, "pi05 alone", "plain")[0]
    for name in ("pi05 back", "pi05 to shards"):
        every = found(runs, name, "one")
        assert all(not far(each["weights"], expected["weights"]) for each in every)
        assert not far(every[0]["state"], expected["state"])


@pytest.mark.parametrize("where", WHERE)
def test_a_checkpoint_is_lerobots_whatever_the_layout(runs, where):
    """Every weight of the policy under its name, as the learner has it; written once, by rank 0."""
    every = found(runs, f"pi05 {where}", "kept")
    first = every[0]
    assert {each["path"] for each in every} == {each["again"] for each in every} == {first["path"]}
    policy = load_file(first["path"] / "pretrained_model" / "model.safetensors")
    expected = found(runs, "pi05 alone", "kept")[0]
    alone = load_file(expected["path"] / "pretrained_model" / "model.safetensors")
    assert not far(policy, alone) and set(policy) <= set(first["names"])
    trained = {name: each for name, each in first["weights"].items() if "value_head" not in name}
    assert len(trained) > 10 and not far({name: policy[name] for name in trained}, trained, at_most=0)
    state = torch.load(first["path"] / "training_state" / "state.pt", weights_only=True)
    assert not far(state["learner"], expected["state"]) and not far(state["heads"], expected["weights"])
    assert state["progress"]["played"] == (3, 3)


@pytest.mark.parametrize("where", TWO)
def test_side_by_side_without_lag_ranks_play_and_learn_what_one_process_does(runs, where):
    """Up to the rounding of batches of two observations or four."""
    expected, mine = found(runs, "reach alone", "lag 0")[0], found(runs, f"reach {where}", "lag 0")
    for number, one in enumerate(expected["played"]):
        assert sorted(chain.from_iterable(rank["played"][number] for rank in mine)) == sorted(one)
    for rank in mine:
        assert {slot for one in rank["played"] for slot, *_ in one} in ({0, 1}, {2, 3})
        assert not far(rank["weights"], expected["weights"], at_most=1e-4)


@pytest.mark.parametrize("where", TWO)
def test_side_by_side_no_rank_is_further_behind_than_the_lag(runs, where):
    mine = found(runs, f"reach {where}", "lag 1")
    for rank in mine:
        versions = [{version for _, _, version, *_ in one} for one in rank["played"]]
        assert all(
            len(each) == 1 and number - 1 <= max(each) <= number for number, each in enumerate(versions)
        )
        assert not far(rank["weights"], mine[0]["weights"], at_most=0)
        told = [{n: v for n, v in each.items() if n != "charts/queue"} for each in rank["metrics"]]
        others = [{n: v for n, v in each.items() if n != "charts/queue"} for each in mine[0]["metrics"]]
        assert not far(told, others, at_most=0)


def test_layouts_that_are_not_for_here_are_refused(monkeypatch):
    for text, words in (
        ("tp=2", "RL trains over dp_shard and dp_replicate only; use tp=1"),
        ("pp=2", "use pp=1"),
        ("dp_shard=2,frozen=sharded", "use frozen=whole"),
        ("dp_shart=2", "did you mean dp_shard"),
    ):
        with pytest.raises(ValueError, match=words):
            ranks.checked(text)
    with pytest.raises(ValueError, match="dp_shard=2 x tp=1 = 2 ranks, but 1 was started"):
        ranks.joined("dp_shard=2")
    monkeypatch.setattr(ranks.Ranks, "size", 5)
    with pytest.raises(ValueError, match="4 slots cannot be dealt to 5 ranks; start fewer"):
        ranks.Ranks().share(4)


if __name__ == "__main__":
    serve_runs(RUNS)
