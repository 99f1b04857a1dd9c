"""The scripted expert: its targets on a hand-made scene, and a task it solves in the real simulator."""

from importlib.util import find_spec

import numpy as np
import pytest

from somaspeed_patch.libero.expert import PHASES, PickAndPlace, Scene, action_towards, is_over

PHASE = {phase.name: phase for phase in PHASES}
SCENE = Scene(
    hand=np.array([0.0, 0.0, 1.2]),
    bowl=np.array([0.1, 0.2, 0.9]),
    plate=np.array([0.0, -0.2, 0.92]),
    bowl_start=np.array([0.1, 0.2, 0.9]),
    grasp=np.array([0.0, 0.045, 0.0]),
)


def _obs(hand, bowl=(0.1, 0.2, 0.9), plate=(0.0, -0.2, 0.92)):
    names = {"robot0_eef_pos": hand, "akita_black_bowl_1_pos": bowl, "plate_1_pos": plate}
    return {name: np.array(position, dtype=np.float64) for name, position in names.items()}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("approach", [0.1, 0.245, 1.02]),
        ("descend", [0.1, 0.245, 0.925]),
        ("lift", [0.1, 0.245, 1.15]),
        ("carry", [-0.1, -0.4, 1.17]),  # plate + (hand - bowl): the bowl, not the hand, goes over the plate
        ("lower", [-0.1, -0.4, 1.02]),
        ("retreat", [0.0, 0.0, 1.22]),
    ],
)
def test_target(name, target):
    np.testing.assert_allclose(PHASE[name].target(SCENE), target, atol=1e-12)


def test_the_gripper_is_closed_from_the_grasp_to_the_release():
    assert [phase.name for phase in PHASES if phase.gripper > 0] == ["grasp", "lift", "carry", "lower"]


def test_action_is_the_way_in_units_of_five_centimetres_clipped():
    action = action_towards(PHASE["approach"], SCENE)  # the way is 0.1, 0.245, -0.18 m
    np.testing.assert_array_equal(action, [1, 1, -1, 0, 0, 0, -1])
    near = Scene(**{**vars(SCENE), "hand": np.array([0.09, 0.245, 1.04])})
    np.testing.assert_allclose(
        action_towards(PHASE["approach"], near), [0.2, 0, -0.4, 0, 0, 0, -1], atol=1e-6
    )


def test_a_slow_expert_asks_for_less_of_a_step():
    action = PickAndPlace(_obs([0, 0, 1.2]), speed=0.6).act(_obs([0, 0, 1.2]))
    np.testing.assert_allclose(action, [0.6, 0.6, -0.6, 0, 0, 0, -1], atol=1e-6)


def test_action_without_a_target_holds_still():
    np.testing.assert_array_equal(action_towards(PHASE["grasp"], SCENE), [0, 0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize(
    ("name", "steps", "over"),
    [("grasp", 14, False), ("grasp", 15, True), ("approach", 60, False), ("approach", 61, True)],
)
def test_phase_ends_with_its_steps(name, steps, over):
    assert is_over(PHASE[name], SCENE, steps) is over


def test_phase_ends_within_twelve_millimetres_of_its_target():
    for off, over in ((0.011, True), (0.013, False)):
        scene = Scene(**{**vars(SCENE), "hand": np.array([0.1 + off, 0.245, 1.02])})
        assert is_over(PHASE["approach"], scene, 5) is over


def test_an_ideal_hand_goes_through_every_phase_in_order():
    """The hand goes exactly where it is told and the bowl follows a closed gripper."""
    hand, bowl = np.array([0.0, 0.0, 1.2]), np.array([0.1, 0.2, 0.9])
    expert, seen = PickAndPlace(_obs(hand)), []
    for _ in range(120):
        action = expert.act(_obs(hand, bowl))
        seen.append(expert.phase.name)
        move = 0.05 * action[:3].astype(np.float64)
        hand, bowl = hand + move, bowl + move * (action[6] > 0)
    assert list(dict.fromkeys(seen)) == [phase.name for phase in PHASES]
    assert (seen.count("grasp"), seen.count("release")) == (15, 8)
    np.testing.assert_allclose(bowl[:2], [0.0, -0.2], atol=0.012)


def test_the_other_side_of_the_rim():
    left, right = (PickAndPlace(_obs([0, 0, 1]), side=side).grasp for side in (1.0, -1.0))
    assert left[1] == -right[1] == 0.045


@pytest.fixture
def libero(monkeypatch, tmp_path):
    """LIBERO's config in a folder of its own; the user's stays as it is."""
    if find_spec("libero") is None:
        pytest.skip("needs the simulator: pip install hf-libero==0.1.4 mujoco==3.3.2")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    from somaspeed_patch.libero import record

    return record


def test_the_real_simulator_says_solved_and_says_it_again(libero):
    """Task 0 without cameras; the second run, after a soft reset, repeats the first bit for bit."""
    sim = libero.Simulator(libero.load_task(0))
    first, again = (libero.run_expert(sim, 0, side=-1.0, images=False) for _ in range(2))
    sim.close()
    assert first.solved and again.solved and len(first.actions) < 150
    np.testing.assert_array_equal(np.stack(first.actions), np.stack(again.actions))


def test_steps_without_images_leave_physics_and_later_images_alone(libero):
    sim = libero.Simulator(libero.load_task(0), image_size=128)
    views = []
    for flags in ((True, True, True), (False, False, True)):
        sim.images = flags[0]
        sim.reset(3)
        for sim.images in flags:
            obs, _ = sim.step([0.5, -0.5, -1, 0, 0, 0, -1])
        views.append(obs)
    sim.close()
    assert views[0]["agentview_image"].std() > 10
    for key in ("agentview_image", "robot0_eye_in_hand_image", "robot0_eef_pos", "robot0_joint_vel"):
        np.testing.assert_array_equal(views[0][key], views[1][key])
