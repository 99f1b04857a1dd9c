"""The shipped LIBERO-Spatial episodes: what LeRobot reads from them is what a robot did."""

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from lerobot.datasets import LeRobotDataset

ROOT = Path(__file__).parents[1] / "recipes" / "assets" / "libero_spatial_tiny"
REPO_ID = "somaspeed/libero_spatial_tiny"
EPISODES = 8
PLACES = {
    "between the plate and the ramekin",
    "next to the ramekin",
    "from table center",
    "on the cookie box",
    "in the top drawer of the wooden cabinet",
    "on the ramekin",
    "next to the cookie box",
    "on the stove",
    "next to the plate",
    "on the wooden cabinet",
}
CAMERAS = ("observation.images.image", "observation.images.image2")


@pytest.fixture(scope="module")
def dataset():
    return LeRobotDataset(REPO_ID, root=ROOT, video_backend="pyav")


@pytest.fixture(scope="module")
def columns(dataset):
    return {
        key: np.stack(dataset.hf_dataset.with_format("numpy")[key][:])
        for key in ("observation.state", "action")
    }


@pytest.fixture(params=range(EPISODES))
def episode(request, dataset, columns):
    """One episode: its rows in the dataset, states [T, 8] and actions [T, 7]."""
    meta = dataset.meta.episodes[request.param]
    rows = range(meta["dataset_from_index"], meta["dataset_to_index"])
    return meta, rows, columns["observation.state"][rows], columns["action"][rows]


def test_there_are_as_many_episodes_as_documented(dataset):
    assert dataset.num_episodes == EPISODES
    assert len({task for meta in dataset.meta.episodes for task in meta["tasks"]}) >= 4
    assert sum(meta["length"] for meta in dataset.meta.episodes) == len(dataset)


def test_the_task_is_an_instruction_of_libero_spatial(dataset, episode):
    meta, rows, _, _ = episode
    instructions = {f"pick up the black bowl {place} and place it on the plate" for place in PLACES}
    assert len(meta["tasks"]) == 1 and meta["tasks"][0] in instructions
    assert dataset[rows[0]]["task"] == dataset[rows[-1]]["task"] == meta["tasks"][0]


def test_actions_are_what_the_simulator_accepts(episode):
    _, _, _, action = episode
    assert np.abs(action).max() == 1.0  # the way to the bowl is longer than one step
    assert np.isin(action[:, 6], [-1.0, 1.0]).all()


def test_the_gripper_closes_then_opens(episode):
    _, _, state, action = episode
    commands = [command for command, _ in itertools.groupby(action[:, 6])]
    assert commands == [-1.0, 1.0, -1.0]
    width = state[:, 6] - state[:, 7]
    assert width[action[:, 6] > 0].min() < 0.5 * width[0]


def test_the_hand_moves_where_the_action_points(episode):
    _, _, state, action = episode
    moved = np.diff(state[:, :3], axis=0)
    assert np.corrcoef(moved.ravel(), action[:-1, :3].ravel())[0, 1] > 0.5


def test_the_bowl_was_lifted_and_put_down(episode):
    _, _, state, action = episode
    height = state[action[:, 6] > 0, 2]
    assert height.max() - height[0] > 0.15 and height.max() - height[-1] > 0.10


def test_both_cameras_show_a_scene_that_changes(dataset, episode):
    _, rows, _, _ = episode
    first, last = dataset[rows[0]], dataset[rows[-1]]
    for camera in CAMERAS:
        assert first[camera].shape == (3, 256, 256)
        assert first[camera].min() >= 0 and first[camera].max() <= 1
        assert first[camera].std() > 0.05
        assert (first[camera] - last[camera]).abs().mean() > 0.01
    assert (first[CAMERAS[0]] - first[CAMERAS[1]]).abs().mean() > 0.05


def test_a_chunk_of_actions_is_the_actions_that_follow(columns):
    steps = [i / 20 for i in range(5)]
    chunked = LeRobotDataset(REPO_ID, root=ROOT, video_backend="pyav", delta_timestamps={"action": steps})
    assert torch.equal(chunked[7]["action"], torch.from_numpy(columns["action"][7:12]))


@pytest.mark.parametrize("key", ["observation.state", "action"])
def test_statistics_are_those_of_the_rows(dataset, columns, key):
    stats = dataset.meta.stats[key]
    np.testing.assert_allclose(stats["mean"], columns[key].mean(0), atol=1e-5)
    np.testing.assert_allclose(stats["min"], columns[key].min(0), atol=1e-6)
    np.testing.assert_allclose(stats["max"], columns[key].max(0), atol=1e-6)
    moving = columns[key].std(0) > 0  # the expert never turns its hand: three action columns are 0
    assert moving.sum() == {"observation.state": 8, "action": 4}[key]
    assert (stats["q01"] < stats["q99"])[moving].all()


def test_it_is_small_and_holds_only_what_lerobot_reads():
    files = [file for file in ROOT.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 6e6
    assert {file.suffix for file in files} == {".md", ".json", ".parquet", ".mp4"}


def test_no_absolute_path_is_stored():
    values = [json.loads(file.read_text()) for file in ROOT.rglob("*.json")]
    for table in map(pq.read_table, ROOT.rglob("*.parquet")):
        values.append([table.to_pylist(), [v.decode() for v in (table.schema.metadata or {}).values()]])
    assert not [text for text in _strings(values) if text.startswith(("/", "~", "file:")) or ":\\" in text]


def _strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _strings(child)
