"""What the tests of preprocessing in workers share: frames, a preprocessor, equal batches, a train()."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from somaspeed_patch.testing_frames import FRAMES
from somaspeed_patch.workers.collate import Collate, unit_floats
from somaspeed_patch.workers.steps import split


def frames() -> Any:
    """The shipped LIBERO frames as LeRobot's trainer reads them: uint8 images, chunks of 4 actions."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    chunk = {"action": [i / 20 for i in range(4)]}
    options = {"video_backend": "pyav", "return_uint8": True, "delta_timestamps": chunk}
    return LeRobotDataset("somaspeed/libero_spatial_tiny", root=FRAMES, **options)


def policy_features(meta: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Input and output features of a policy for a dataset."""
    from lerobot.configs import FeatureType
    from lerobot.utils.feature_utils import dataset_to_policy_features

    features = dataset_to_policy_features(meta.features)
    actions = {key: one for key, one in features.items() if one.type is FeatureType.ACTION}
    return {key: one for key, one in features.items() if key not in actions}, actions


def pi05_preprocessor(meta: Any, **config: Any) -> Any:
    """LeRobot's preprocessor of pi0.5 for a dataset; the byte tokenizer must be installed.

    Args:
        meta: the dataset's metadata.
        config: fields of PI05Config.
    """
    from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors

    from somaspeed_patch.testing_pi05 import make_config

    built = make_config(**{"tokenizer_max_length": 200, **config})
    built.input_features, built.output_features = policy_features(meta)
    return make_pi05_pre_post_processors(built, meta.stats)[0]


def natively(pipeline: Any, samples: Sequence[Any], cameras: Sequence[str], size: int) -> Iterator[Any]:
    """Batches as train() makes them in its own process: collate, uint8 to float, preprocess."""
    for start in range(0, len(samples), size):
        batch = default_collate([samples[i] for i in range(start, min(start + size, len(samples)))])
        for key in cameras:
            if key in batch and batch[key].dtype == torch.uint8:
                batch[key] = unit_floats(batch[key], "cpu")
        yield pipeline(batch)


def collate_for(pipeline: Any, cameras: Sequence[str], *, device: str = "cpu", **options: Any) -> Collate:
    """A Collate as the hook of `Accelerator.prepare` makes it."""
    options = {"training": True, "pending": 8, **options}
    parts = split(pipeline.steps, device)
    return Collate(default_collate, pipeline.to_transition, parts, cameras=cameras, device=device, **options)


def staging(
    dataset: Any, pipeline: Any, cameras: Sequence[str], size: int, *, device: str = "cpu", **loader: Any
) -> DataLoader[Any]:
    """A loader of staged batches for a trainer on `device`; `loader` goes to DataLoader."""
    collate = collate_for(pipeline, cameras, device=device)
    return DataLoader(dataset, batch_size=size, collate_fn=collate, **loader)


class Cheap(Dataset[dict[str, Any]]):
    """2,000 samples of a few bytes that tell of the worker: resident KiB, and if it has a CUDA context."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, Any]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "observation.state": torch.full((8,), index / len(self)),
            "action": torch.zeros(4, 7),
            "index": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
            "task_index": int(torch.cuda.is_initialized()),  # type: ignore[no-untyped-call]
            "task": "stack the cups",
        }


_HEAD = """
def train(preprocessor, dataset, prepare):
    return prepare()
"""


def train_function(folder: Path, edit: tuple[str, str] = ("", "")) -> Callable[..., Any]:
    """train(preprocessor, dataset, prepare) with LeRobot's name, place and loop, that only calls `prepare`.

    Args:
        folder: for its file, lerobot/scripts/lerobot_train.py.
        edit: text of the function, and what stands there instead.
    """
    path = folder / "lerobot" / "scripts" / "lerobot_train.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((_HEAD + "\n".join(_loops())).replace(*edit))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    train: Callable[..., Any] = names["train"]
    return train


def _loops() -> Iterator[str]:
    """What the installed LeRobot does from the loader to the preprocessor, in training and in evaluation."""
    from lerobot.scripts import lerobot_train

    lines = Path(lerobot_train.__file__).read_text().splitlines()
    for first, last in (("batch = next(dl_iter)", "batch = preprocessor(batch)"), _EVALUATION):
        begin = next(i for i, line in enumerate(lines) if line.strip() == first)
        end = next(i for i, line in enumerate(lines) if line.strip() == last)
        yield textwrap.indent(textwrap.dedent("\n".join(lines[begin : end + 1])), "    ")


_EVALUATION = ("for eval_batch in eval_dataloader:", "eval_batch = preprocessor(eval_batch)")


def assert_same_batch(ours: dict[str, Any], native: dict[str, Any], without: str | None = None) -> None:
    """The same keys in the same order with the same values, types and dtypes.

    Args:
        ours, native: batches as the preprocessor leaves them.
        without: a prefix of keys that only the native batch has.
    Raises: AssertionError: names the key.
    """
    expected = [key for key in native if without is None or not key.startswith(without)]
    if list(ours) != expected:
        raise AssertionError(f"keys {list(ours)}, expected {expected}")
    for key in expected:
        mine, theirs = ours[key], native[key]
        if type(mine) is not type(theirs) or not _equal(mine, theirs):
            raise AssertionError(f"{key}: {mine!r}, expected {theirs!r}")


def _equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, np.ndarray):
        return mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
    return bool(mine == theirs)
