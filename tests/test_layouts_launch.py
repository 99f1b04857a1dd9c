"""`accelerate launch` with LeRobot's plugin discovery and `--somaspeed.layout`; a rank that dies in it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

FRAMES = Path(__file__).parents[1] / "recipes" / "assets" / "libero_spatial_tiny"
PLUGIN = """\
import os, signal
from torch.optim.optimizer import register_optimizer_step_pre_hook

updates = []

def look(*_):
    updates.append(1)
    if len(updates) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_pre_hook(look)
"""
COMMAND = [
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2",
    "-m", "lerobot.scripts.lerobot_train",
    "--tiny.discover_packages_path=somaspeed_patch.tiny_pi05", "--fault.discover_packages_path=dies",
    "--somaspeed.discover_packages_path=somaspeed_patch.lerobot_plugin", "--somaspeed.layout", "dp_shard=-1",
    "--policy.type=pi05", "--policy.device=cpu", "--policy.train_expert_only=true", "--policy.chunk_size=4",
    "--policy.n_action_steps=4", "--policy.image_resolution=[28,28]", "--policy.tokenizer_max_length=96",
    "--policy.push_to_hub=false", "--dataset.repo_id=somaspeed/libero_spatial_tiny",
    f"--dataset.root={FRAMES}", "--dataset.video_backend=pyav", "--steps=6", "--batch_size=2",
    "--num_workers=0", "--seed=7", "--log_freq=1", "--save_checkpoint=false", "--env_eval_freq=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Exit code, output, and the seconds from the last update to the end."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "dies").mkdir()
    (folder / "dies" / "__init__.py").write_text(PLUGIN)
    environment = {
        "PYTHONPATH": str(folder), "SOMASPEED_TINY_PI05": "micro", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
        "TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [*COMMAND, f"--output_dir={folder / 'out'}"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines, last = [], time.monotonic()
    for line in process.stdout:
        lines.append(line)
        last = time.monotonic() if "loss:" in line else last
    return process.wait(timeout=60), "".join(lines), time.monotonic() - last


def test_the_recipe_trains_under_the_layout(launched):
    _, said, _ = launched
    assert "layout: pi05, 1 x 2 ranks, 4 units" in said
    losses = [float(loss) for loss in re.findall(r"step:\d .*? loss:([\d.]+)", said)]
    assert len(losses) == 2 and all(0.5 < loss < 5 for loss in losses)


def test_a_killed_rank_ends_the_job_and_is_named(launched):
    code, said, seconds = launched
    assert code != 0
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)\n\s*exitcode\s*: -9", said)
    assert seconds < 60
