"""Positions and velocities once a substep: every array of MuJoCo's stays, in the real simulator."""

from importlib.util import find_spec

import numpy as np
import pytest

from somaspeed_patch.libero import bootstrap, sim, substeps

pytestmark = pytest.mark.skipif(find_spec("libero") is None, reason="needs the extra rl")
TASKS = [("libero_spatial", 0), ("libero_goal", 7), ("libero_10", 0)]
SCRATCH = ("efc_", "iefc_", "island")  # the solver's, behind the constraints of the moment


@pytest.fixture(autouse=True)
def libero(monkeypatch, tmp_path):
    """LIBERO's config in a folder of its own; the user's stays as it is."""
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    bootstrap.setup("osmesa")


def arrays(simulator):
    """MuJoCo's data, copied."""
    data = simulator._sim.data._data
    names = [name for name in dir(data) if not name.startswith("_") and not any(s in name for s in SCRATCH)]
    found = {name: getattr(data, name) for name in names}
    return {name: each.copy() for name, each in found.items() if isinstance(each, np.ndarray)}


def played(simulator, actions):
    simulator.reset(3)
    found = []
    for action in actions:
        simulator.step(action)
        found.append(arrays(simulator))
    return found


@pytest.mark.parametrize(("suite", "task"), TASKS)
def test_every_array_of_the_simulation_stays(suite, task):
    simulator = sim.Simulator(sim.load_task(task, suite))
    actions = np.random.default_rng(0).uniform(-1, 1, (40, 7)).astype(np.float32)
    assert simulator._reusable
    reusing = played(simulator, actions)
    simulator._reusable = False
    whole = played(simulator, actions)
    for step, (mine, theirs) in enumerate(zip(reusing, whole, strict=True)):
        odd = [name for name in theirs if not np.array_equal(mine[name], theirs[name], equal_nan=True)]
        assert not odd, f"step {step}: {odd}"
    assert not np.array_equal(whole[0]["qpos"], whole[-1]["qpos"]) and len(whole[0]) > 100


def test_a_state_that_somebody_moved_is_computed_anew(monkeypatch):
    simulator = sim.Simulator(sim.load_task(0))
    simulator.reset(0)
    mine, calls = simulator._sim, []
    data = mine.data._data
    with substeps.reused(mine):
        for count in (1, 1, 1):  # whole, and twice the rest
            substeps.forward(lambda: calls.append("whole"), mine)
            assert len(calls) == count
        data.qpos[0] += 1e-9
        substeps.forward(lambda: calls.append("whole"), mine)
        assert len(calls) == 2
        data.qvel[0] += 1e-9
        substeps.step(lambda: calls.append("step"), mine)
        assert calls == ["whole", "whole", "step"]
        substeps.forward(lambda: calls.append("after"), mine)
    substeps.forward(lambda: calls.append("outside"), mine)
    assert calls[3:] == ["after", "outside"]


def test_a_simulation_that_diverges_begins_anew_as_it_would(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log there
    ends = []
    for reusable in (True, False):
        simulator = sim.Simulator(sim.load_task(0))
        simulator.reset(0)
        simulator._reusable = reusable
        simulator._sim.data._data.qvel[3] = np.nan
        simulator.step(sim.NO_OP)
        assert simulator.diverged
        data = simulator._sim.data._data
        ends.append((data.qpos.tobytes(), data.time, [each.number for each in data.warning]))
    assert ends[0] == ends[1] and np.isfinite(np.frombuffer(ends[0][0])).all()


def test_a_simulator_with_forces_of_its_own_is_left_alone(monkeypatch):
    import mujoco

    simulator = sim.Simulator(sim.load_task(0))
    options = simulator._sim.model._model.opt
    assert substeps.why_not(simulator._sim) is None
    monkeypatch.setattr(options, "integrator", mujoco.mjtIntegrator.mjINT_RK4)
    assert substeps.why_not(simulator._sim) == "its integrator is not Euler's"
    monkeypatch.undo()
    mujoco.set_mjcb_control(lambda model, data: None)
    try:
        assert substeps.why_not(simulator._sim) == "somebody's callback computes forces"
    finally:
        mujoco.set_mjcb_control(None)
