"""Records episodes of the scripted expert on LIBERO-Spatial as a LeRobotDataset v3.0.

    python -m somaspeed_patch.libero.record --out DIR --tasks 0,1,2 --episodes-per-task 1

One row is one simulator step at 20 Hz, not every second step at 10: then each action is exactly what one
`env.step` of LeRobot's LiberoEnv takes, and a policy trained on the rows can be run there as it is. Names and
values are LeRobot's: `observation.images.image` (agentview) and `.image2` (wrist) turned by 180 degrees,
`observation.state` [8] = hand position in m, its rotation as axis-angle in rad, two finger positions in m,
all through LeRobot's own LiberoProcessorStep; `action` [7] in [-1, 1] as in `expert`.

An initial state is first played without rendering from both sides of the bowl's rim (5 s), then the faster
side that succeeds is played once more with cameras (0.3 s a step on one core). Videos are h264 without
B-frames and with a key frame every `--gop` frames, so that a random frame costs at most that many decodes.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import RGBEncoderConfig
from lerobot.datasets import LeRobotDataset, LeRobotDatasetMetadata
from lerobot.processor.env_processor import LiberoProcessorStep
from lerobot.utils.constants import ACTION, OBS_STATE
from numpy.typing import NDArray

from somaspeed_patch.libero.expert import PickAndPlace
from somaspeed_patch.libero.sim import Observation, Simulator, load_task

logger = logging.getLogger(__name__)

FPS = 20
MAX_STEPS = 280  # LeRobot's limit for LIBERO-Spatial
CAMERAS = {
    "observation.images.image": "agentview_image",
    "observation.images.image2": "robot0_eye_in_hand_image",
}
STATE_NAMES = ("x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "finger_left", "finger_right")
ACTION_NAMES = ("x", "y", "z", "rotation_x", "rotation_y", "rotation_z", "gripper")


@dataclass(kw_only=True)
class Episode:
    """What one run of the expert saw and did; `solved` once the simulator says so."""

    observations: list[Observation] = field(default_factory=list)
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    solved: bool = False


def run_expert(sim: Simulator, init_state: int, side: float, *, images: bool) -> Episode:
    """Run the expert until the task is solved or MAX_STEPS have passed.

    Args:
        sim: the task's simulator.
        init_state: index of the initial state.
        side: +1 or -1, see `PickAndPlace`.
        images: False leaves the images black and is ten times faster; the physics is the same.
    """
    sim.images = images
    obs, episode = sim.reset(init_state), Episode()
    expert = PickAndPlace(obs, side=side)
    while not episode.solved and len(episode.actions) < MAX_STEPS:
        episode.observations.append(obs)
        episode.actions.append(expert.act(obs))
        obs, episode.solved = sim.step(episode.actions[-1])
    return episode


def faster_side(sim: Simulator, init_state: int) -> float | None:
    """The side of the rim from which the expert solves the task in fewer steps, None if from neither."""
    runs = {side: run_expert(sim, init_state, side, images=False) for side in (1.0, -1.0)}
    solved = {side: len(run.actions) for side, run in runs.items() if run.solved}
    return min(solved, key=solved.__getitem__) if solved else None


def to_frame(obs: Observation, action: NDArray[np.float32], language: str) -> dict[str, Any]:
    """One row for `LeRobotDataset.add_frame` from one of robosuite's observations."""
    raw: dict[str, Any] = {
        key: torch.from_numpy(obs[camera].copy()).permute(2, 0, 1)[None] for key, camera in CAMERAS.items()
    }
    hand = {"pos": obs["robot0_eef_pos"], "quat": obs["robot0_eef_quat"]}
    raw["observation.robot_state"] = {
        "eef": {key: torch.from_numpy(value)[None] for key, value in hand.items()},
        "gripper": {"qpos": torch.from_numpy(obs["robot0_gripper_qpos"])[None]},
    }
    row = {key: value[0] for key, value in LiberoProcessorStep().observation(raw).items()}
    images = {key: row[key].permute(1, 2, 0).numpy() for key in CAMERAS}  # stored as height, width, channels
    return {**images, OBS_STATE: row[OBS_STATE].numpy(), ACTION: action, "task": language}


def record_init_state(dataset: LeRobotDataset, sim: Simulator, init_state: int) -> bool:
    """Add one episode to `dataset` if the expert solves the task from here; returns whether it did."""
    side = faster_side(sim, init_state)
    episode = Episode() if side is None else run_expert(sim, init_state, side, images=True)
    where = f"task {sim.task.index}, initial state {init_state}"
    if not episode.solved:
        logger.info("%s: not solved", where)
        return False
    for obs, action in zip(episode.observations, episode.actions, strict=True):
        dataset.add_frame(to_frame(obs, action, sim.task.language))
    dataset.save_episode()
    logger.info("%s: solved in %d steps, side %+.0f", where, len(episode.actions), side)
    return True


def record_task(dataset: LeRobotDataset, index: int, *, episodes: int, spare: int, image_size: int) -> None:
    """Record `episodes` successes of one task, going on to the next initial state after a failure.

    Raises: ValueError: more than `spare` initial states failed.
    """
    sim = Simulator(load_task(index), image_size=image_size)
    recorded = 0
    for init_state in range(min(episodes + spare, len(sim.task.init_states))):
        if recorded < episodes:
            recorded += record_init_state(dataset, sim, init_state)
    sim.close()
    if recorded < episodes:
        raise ValueError(f"record: task {index} was solved {recorded} times, not {episodes}; leave it out")


def create_dataset(root: Path, repo_id: str, *, image_size: int, crf: int, gop: int) -> LeRobotDataset:
    """An empty dataset under `root`, which must not exist yet."""
    image = {"dtype": "video", "shape": (image_size, image_size, 3), "names": ["height", "width", "channels"]}
    vectors = {OBS_STATE: STATE_NAMES, ACTION: ACTION_NAMES}
    features = {key: dict(image) for key in CAMERAS}
    for key, names in vectors.items():
        features[key] = {"dtype": "float32", "shape": (len(names),), "names": list(names)}
    encoder = RGBEncoderConfig(vcodec="h264", g=gop, crf=crf, preset="slow", extra_options={"bf": 0})
    return LeRobotDataset.create(
        repo_id,
        FPS,
        features,
        root=root,
        robot_type="panda",
        video_backend="pyav",
        rgb_encoder=encoder,
        streaming_encoding=True,
        encoder_queue_maxsize=MAX_STEPS,  # holds any episode: a full queue drops frames
        encoder_threads=1,
    )


def summary(dataset: LeRobotDataset) -> str:
    """One line per episode, then the size on disk."""
    lines = [
        f"episode {row['episode_index']}: {row['length']} frames, {row['tasks'][0]}"
        for row in LeRobotDatasetMetadata(dataset.repo_id, root=dataset.root).episodes
    ]
    size = sum(file.stat().st_size for file in dataset.root.rglob("*") if file.is_file())
    return "\n".join([*lines, f"{len(lines)} episodes, {dataset.num_frames} frames, {size / 1e6:.2f} MB"])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Record LIBERO-Spatial episodes of the scripted expert.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the dataset; must not exist")
    parser.add_argument("--repo-id", default="somaspeed/libero_spatial_tiny")
    parser.add_argument("--tasks", default="0,1,2,3,5,6,7,8", help="indices in LIBERO-Spatial, with commas")
    parser.add_argument("--episodes-per-task", type=int, default=1)
    parser.add_argument("--spare", type=int, default=5, help="initial states that may fail in a task")
    parser.add_argument("--image-size", type=int, default=256, help="pixels")
    parser.add_argument("--crf", type=int, default=25, help="x264's quality; lower is larger")
    parser.add_argument("--gop", type=int, default=5, help="frames from key frame to key frame")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Record what the command line asks for and print a summary."""
    args = parse_args(argv)
    # force: importing lerobot has already put a handler on the root logger
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    dataset = create_dataset(args.out, args.repo_id, image_size=args.image_size, crf=args.crf, gop=args.gop)
    for index in map(int, args.tasks.split(",")):
        record_task(
            dataset, index, episodes=args.episodes_per_task, spare=args.spare, image_size=args.image_size
        )
    dataset.finalize()
    print(summary(dataset))


if __name__ == "__main__":
    main()
