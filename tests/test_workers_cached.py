"""The first batches of a run, again and again, without the loader."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lerobot.processor.pipeline import DataProcessorPipeline
from lerobot.utils.utils import cycle
from torch.utils.data import DataLoader, Dataset

import somaspeed_patch
from somaspeed_patch import sites
from somaspeed_patch.testing_workers import train_function
from somaspeed_patch.workers import cached

SITE = "lerobot_workers/cached_batches"
EPOCH = 5  # batches of two samples


class Numbers(Dataset):
    """Samples that carry their number; `asked` counts how often the loader came."""

    def __init__(self):
        self.asked, self.meta = 0, SimpleNamespace(camera_keys=[])

    def __len__(self):
        return 2 * EPOCH

    def __getitem__(self, index):
        self.asked += 1
        return {"action": torch.tensor([float(index)]), "observation.state": torch.zeros(2)}


@pytest.fixture(autouse=True)
def fresh():
    sites.clear()
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    somaspeed_patch.unpatch()


def loop(folder, dataset, **options):
    """LeRobot's training loop: a function that takes one batch, its pipeline and its loader."""
    pipeline, loader = DataProcessorPipeline(), DataLoader(dataset, batch_size=2, **options)
    accelerator = Accelerator(cpu=True)
    prepared, _ = train_function(folder)(pipeline, dataset, lambda: accelerator.prepare(loader, None))
    batches = cycle(prepared)

    def step():
        made = pipeline(next(batches))
        first = made.pop("action")[0].item()  # as a policy that pops its keys
        return int(first) // 2

    return step, pipeline, prepared


@pytest.mark.parametrize("count", [1, 2, 4, EPOCH, EPOCH + 2])
def test_the_first_n_batches_come_again_in_order(tmp_path, count):
    dataset = Numbers()
    with somaspeed_patch.patched("lerobot_workers", cached_batches=str(count)):
        step = loop(tmp_path, dataset)[0]
        first = [step() for _ in range(count)]
        assert first == [index % EPOCH for index in range(count)]
        asked_before = dataset.asked
        assert [step() for _ in range(3 * count + EPOCH)] == [
            first[i % count] for i in range(3 * count + EPOCH)
        ]
        assert dataset.asked <= asked_before + 4  # accelerate is one batch ahead, and one may be unfinished
        site = sites.site(SITE)
        assert site.calls == 3 * count + EPOCH
        assert site.reason == f"trains on its first {count} batches again and again"


def test_with_workers_and_preprocessing_in_them(tmp_path):
    options = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    with somaspeed_patch.patched("lerobot_workers", cached_batches="2"):
        step, pipeline, _ = loop(tmp_path, Numbers(), **options)
        assert [step() for _ in range(12)] == [0, 1] * 6
        assert sites.site(SITE).calls == 10


def test_it_can_be_switched_off_and_unpatched_on_the_way(tmp_path):
    somaspeed_patch.patch("lerobot_workers", cached_batches="2")
    step, pipeline, _ = loop(tmp_path, Numbers())
    assert [step() for _ in range(4)] == [0, 1, 0, 1]
    somaspeed_patch.patch("lerobot_workers", cached_batches=None)
    after = [0, *range(EPOCH), *range(EPOCH)]  # accelerate had the first already
    assert [step() for _ in after] == after

    somaspeed_patch.patch("lerobot_workers", cached_batches="2")
    step, pipeline, _ = loop(tmp_path / "second", Numbers())
    assert [step() for _ in range(4)] == [0, 1, 0, 1]
    somaspeed_patch.unpatch()
    assert type(pipeline) is not DataProcessorPipeline
    assert [step() for _ in after] == after
    assert type(pipeline) is DataProcessorPipeline


def test_other_loaders_and_other_pipelines_are_not_touched(tmp_path):
    with somaspeed_patch.patched("lerobot_workers", cached_batches="1"):
        step, pipeline, _ = loop(tmp_path, Numbers())
        step(), step()
        evaluation = Accelerator(cpu=True).prepare(DataLoader(Numbers(), batch_size=2))
        assert [int(pipeline(batch)["action"][0]) // 2 for batch in evaluation] == list(range(EPOCH))


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_value_that_is_no_count_is_reported_and_trains_on_the_data(tmp_path, value):
    with somaspeed_patch.patched("lerobot_workers", cached_batches=value):
        step = loop(tmp_path, Numbers())[0]
        assert [step() for _ in range(EPOCH)] == list(range(EPOCH))
        assert f"must be a whole number of at least 1, but is {value!r}" in sites.site(SITE).reason


def test_it_is_off_by_default(tmp_path):
    with somaspeed_patch.patched("lerobot_workers"):
        step = loop(tmp_path, Numbers())[0]
        assert [step() for _ in range(2 * EPOCH)] == [*range(EPOCH), *range(EPOCH)]
        assert sites.site(SITE).calls == 0
        assert cached.wanted() == 0
