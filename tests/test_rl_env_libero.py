"""Environment processes with LIBERO in them: the real simulator, stepped by hand beside its child."""

from importlib.util import find_spec

import numpy as np
import pytest

from somaspeed_patch.rl.env_pool import EnvPool
from somaspeed_patch.rl.env_process import EnvSpec


def one(pool):
    """The result of slot 0, which owes one."""
    [(slot, result)] = pool.ready(240)
    assert slot == 0
    return result


@pytest.fixture
def libero(monkeypatch, tmp_path):
    """LIBERO's config in a folder of its own; the user's stays as it is."""
    if find_spec("libero") is None:
        pytest.skip("needs the simulator: pip install hf-libero==0.1.4 mujoco==3.3.2")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))


def test_a_chunk_without_cameras_is_the_simulator_stepped_by_hand(libero):
    """Two episodes in the child, of which the first is cut by the horizon within its second chunk."""
    from somaspeed_patch.libero.sim import Simulator, load_task
    from somaspeed_patch.rl.env_libero import state_of

    actions = np.random.default_rng(0).uniform(-1, 1, (16, 7)).astype(np.float32)
    results = []
    with EnvPool([EnvSpec(task=0, horizon=13, gl="osmesa")]) as pool:
        for init_state in (4, 2):
            pool.submit_reset(0, init_state, seed=init_state)
            results.append([one(pool)])
            for part in (actions[:8], actions[8:]):
                pool.submit_step(0, part)
                results[-1].append(one(pool))
    sim = Simulator(load_task(0))
    assert sim.objects == ("akita_black_bowl_1", "plate_1")
    for init_state, (first, *chunks) in zip((4, 2), results, strict=True):
        raw, step = sim.reset(init_state, init_state), 0
        np.testing.assert_array_equal(first["state"], state_of(raw))
        for result in chunks:
            for _ in range(result.executed):
                raw, step = sim.step(actions[step])[0], step + 1
            poses = np.concatenate([sim.pose(name) for name in sim.objects]).astype(np.float32)
            np.testing.assert_array_equal(result.observation["state"], state_of(raw))
            np.testing.assert_array_equal(result.observation["objects"], poses)
            # Robosuite samples its own a substep of 2 ms earlier.
            np.testing.assert_allclose(poses[:3], raw["akita_black_bowl_1_pos"], atol=0.02)
        assert [result.executed for result in chunks] == [8, 5]
        assert chunks[1].truncated.tolist() == [False] * 4 + [True] + [False] * 3
        assert first["state"].shape == (8,) and set(first) == {"state", "objects", "instruction"}
        assert str(first["instruction"]) == sim.task.language
    sim.close()


def test_images_at_the_chunks_end_are_those_of_rendering_every_step(libero):
    """Task 0, solved by the expert in the middle of a chunk: the images of its last step are exact, too."""
    from somaspeed_patch.libero.record import run_expert
    from somaspeed_patch.libero.sim import Simulator, load_task
    from somaspeed_patch.rl.env_libero import upright

    sim = Simulator(load_task(0), image_size=64, software_gl=True)
    run = run_expert(sim, 0, side=-1.0, images=False)
    actions, tail = np.stack(run.actions), len(run.actions) - 11
    sim.images = False
    sim.reset(0)
    for action in actions[:tail]:
        sim.step(action)
    sim.images, shown = True, []
    for action in actions[tail:]:
        shown.append(upright(sim.step(action)[0]))
    sim.close()
    assert run.solved and shown[-1]["image"].std() > 10
    spec = EnvSpec(task=0, horizon=280, image_size=64, gl="osmesa", software_gl_profile=True)
    with EnvPool([spec]) as pool:
        pool.submit_reset(0, 0)
        assert one(pool)["image"].shape == (64, 64, 3)
        chunks = []
        for part in (actions[:tail], actions[tail : tail + 8], np.vstack([actions[-3:], actions[-3:]])):
            pool.submit_step(0, part)
            chunks.append(one(pool))
    assert [result.executed for result in chunks] == [tail, 8, 3]
    assert chunks[2].rewards.tolist() == [0, 0, 1, 0, 0, 0]
    assert chunks[2].terminated.tolist() == [False, False, True, False, False, False]
    for result, expected in zip(chunks[1:], (shown[7], shown[10]), strict=True):
        for camera in ("image", "image2"):
            np.testing.assert_array_equal(result.observation[camera], expected[camera])
    assert (shown[7]["image2"] != shown[10]["image2"]).any()


def test_a_simulation_that_diverges_is_an_error(libero, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where MuJoCo leaves its MUJOCO_LOG.TXT
    from somaspeed_patch.rl.env_libero import LiberoWorld

    world = LiberoWorld(EnvSpec(task=0, horizon=10))
    world.reset(0, 0)
    world.step(np.zeros(7, np.float32))
    world.sim._sim.data.qvel[:] = 1e30
    with pytest.raises(ValueError, match="the simulation has diverged"):
        world.step(np.zeros(7, np.float32))
    world.reset(0, 0)
    world.step(np.zeros(7, np.float32))
    world.sim.close()


def test_a_region_of_the_task_moves_with_its_drawer(libero):
    """LIBERO-Goal's task 0 is about a drawer alone, which is neither an object nor a whole fixture."""
    from somaspeed_patch.libero.sim import Simulator, load_task

    sim = Simulator(load_task(0, "libero_goal"))
    sim.reset(0)
    assert sim.objects == ("wooden_cabinet_1_middle_region",)
    poses = []
    for joint in (0.0, -0.1):
        sim._env.env.object_states_dict[sim.objects[0]].set_joint(joint)
        sim._sim.forward()
        poses.append(sim.pose(sim.objects[0]))
    cabinet = sim.pose("wooden_cabinet_1")
    sim.close()
    np.testing.assert_allclose(np.linalg.norm((poses[1] - poses[0])[:3]), 0.1, atol=1e-9)
    np.testing.assert_array_equal(poses[0][3:], poses[1][3:])
    assert abs(np.linalg.norm(poses[0][3:]) - 1) < 1e-9 and np.linalg.norm((poses[0] - cabinet)[:3]) < 0.3


def test_a_horizon_beyond_robosuites_is_refused(libero):
    from somaspeed_patch.rl.env_libero import LiberoWorld

    with pytest.raises(ValueError, match="horizon must be 1 to 990 steps, but is 991"):
        LiberoWorld(EnvSpec(horizon=991))
