"""Frames of LeRobot's videos, decoded once a process: a tiny policy's run spends half its time on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

from torch import Tensor

FRAMES = Path(__file__).parent / "recipes" / "assets" / "libero_spatial_tiny"
_decoded: dict[Any, Tensor] = {}  # 0.2 MB each; tests see some 300 of the 1,708


@contextmanager
def decoded_once() -> Iterator[None]:
    """Inside the block the same frames of a video are decoded once; each reader has a copy."""
    from lerobot.datasets import dataset_reader

    decode = _remembering(dataset_reader.decode_video_frames)
    with replaced.object(dataset_reader, "decode_video_frames", decode):
        yield


def _remembering(decode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def remembered(path: Any, timestamps: list[float], *options: Any, **named: Any) -> Tensor:
        key = (str(path), tuple(timestamps), options, tuple(sorted(named.items())))
        if key not in _decoded:
            _decoded[key] = decode(path, timestamps, *options, **named)
        return _decoded[key].clone()

    return remembered


def read(episode: int) -> None:
    """Decode an episode of the shipped frames as lerobot-train will, for the forks of this process."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset(
        "somaspeed/libero_spatial_tiny", root=FRAMES, episodes=[episode], video_backend="pyav",
        return_uint8=True,
    )  # fmt: skip
    for index in range(len(dataset)):
        dataset[index]
