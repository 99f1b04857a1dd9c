"""What the tests of layouts share: the real lerobot-train on several ranks, and what each saw.

    # in the test file, which is also the script that imports LeRobot once and forks the ranks:
    RUNS = {"fsdp": LayoutRun(policy="pi05", layout="dp_shard=2"), ...}
    if __name__ == "__main__":
        serve_runs(RUNS)
    found = run_all(__file__, tmp_path)["fsdp"]   # a Found

All runs of a policy see the same samples, noise and times, however many ranks share them: a batch of 4 on one
rank, or 2 on two. So their losses, norms and weights can be compared with one process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import torch
from safetensors.torch import load_file
from torch import Tensor

import somaspeed_patch
from somaspeed_patch import testing_frames, testing_ranks
from somaspeed_patch.layouts.layout import parse
from somaspeed_patch.tiny import help_texts

GLOBAL_BATCH = 4
STEPS = 10
LIMIT = 150.0  # seconds a run may take; they need 2 to 6
_COMMON = [
    "--dataset.repo_id=somaspeed/libero_spatial_tiny", f"--dataset.root={testing_frames.FRAMES}",
    "--dataset.video_backend=pyav", "--num_workers=0", "--env_eval_freq=0", "--log_freq=1", "--seed=7",
    "--policy.push_to_hub=false", "--policy.chunk_size=4",
    "--policy.n_action_steps=4",
    "--dataset.episodes=[0]",  # one instruction: hosts pad to a rank's longest, which changes its numbers
]  # fmt: skip
# What a run imports on its way, 0.5 s a rank.
_LATE = (
    "scipy.io", "torch.distributed.checkpoint", "torch.distributed.elastic.multiprocessing",
    "torch.utils.flop_counter", "torchcodec", "somaspeed_patch.optim.fused_adamw",
    "somaspeed_patch.pi05.forward",
)  # fmt: skip
_TRAINER = ("lerobot_train", "lerobot_optimizer", "accelerate_clip")


@dataclass(frozen=True, kw_only=True)
class LayoutRun:
    """One run of lerobot-train."""

    policy: str
    """a key of POLICIES"""
    ranks: int = 1
    layout: str | None = None
    """None: the host's own data parallelism"""
    patched: bool = True
    """with the policy's adapter and FusedAdamW; False: only what the layout needs"""
    arguments: tuple[str, ...] = ()
    """the host's, behind the common ones"""
    steps: int = STEPS
    features: tuple[tuple[str, Any], ...] = ()
    adapters: tuple[str, ...] = ()
    """more of ours"""
    resumes: str | None = None
    """the run whose last checkpoint it goes on from, up to `steps` updates"""

    @property
    def replicas(self) -> int:
        """How many ranks work on different samples."""
        if self.layout is None:
            return self.ranks
        layout = parse(self.layout)
        return self.ranks // (layout.tp * layout.pp)

    def replica(self, rank: int) -> int:
        """Which samples a rank works on."""
        tp = parse(self.layout).tp if self.layout else 1
        return rank // tp % self.replicas


@dataclass(frozen=True)
class Found:
    """What a run left."""

    folder: Path
    ranks: int

    @property
    def error(self) -> str:
        """What rank 0 raised, or nothing."""
        file = self.folder.with_suffix(".error")
        return file.read_text() if file.exists() else ""

    def updates(self, rank: int = 0) -> list[dict[str, Any]]:
        """Every update as a rank's recorder saw it."""
        suffix = f".steps.jsonl.rank{rank}" if self.ranks > 1 else ".steps.jsonl"
        return [json.loads(line) for line in self.folder.with_suffix(suffix).read_text().splitlines()]

    @property
    def losses(self) -> Tensor:
        """[updates], the mean over ranks."""
        return torch.tensor(
            [[update["loss"] for update in self.updates(rank)] for rank in range(self.ranks)]
        ).mean(0)

    @property
    def norms(self) -> Tensor:
        """[ranks, updates], before clipping."""
        return torch.tensor(
            [[update["grad_norm"] for update in self.updates(rank)] for rank in range(self.ranks)]
        )

    @property
    def checkpoint(self) -> Path:
        """The last one."""
        return (self.folder / "checkpoints" / "last").resolve()

    @property
    def weights(self) -> dict[str, Tensor]:
        """The policy's at the end, by name."""
        return dict(load_file(next((self.checkpoint / "pretrained_model").glob("*model.safetensors"))))

    @property
    def state(self) -> dict[str, Tensor]:
        """The optimizer's: "state/<parameter>/<name>"."""
        return dict(load_file(self.checkpoint / "training_state" / "optimizer_state.safetensors"))

    def site(self, name: str) -> dict[str, Any]:
        """One site of rank 0's report."""
        report = json.loads((self.folder / "somaspeed_report.json").read_text())
        return next(site for site in report["sites"] if site["site"] == name)


def difference(run: Found, alone: Found, updates: int = STEPS, *, state: bool = False) -> str:
    """Where a run is not as one process on the same samples: 1e-5 of losses and norms, of weights and state.

    Args:
        state: compare the optimizer's too.
    Returns: words for the first difference; nothing if there is none.
    """
    if run.error or not len(run.losses) == len(alone.losses) == updates:
        return run.error or f"{len(run.losses)} and {len(alone.losses)} updates, expected {updates}"
    for name, found, expected in (("losses", run.losses, alone.losses), ("norms", run.norms, alone.norms)):
        if not torch.allclose(found, expected.expand_as(found), rtol=1e-5):
            return f"{name}: {found}, expected {expected}"
    return _far(run.weights, alone.weights) or (_far(run.state, alone.state) if state else "")


def _far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    if found.keys() != expected.keys():
        return f"names: {found.keys() ^ expected.keys()}"
    for name, value in expected.items():
        mine = found[name]
        if mine.shape != value.shape or mine.dtype != value.dtype:
            return f"{name}: {mine.shape} {mine.dtype}, expected {value.shape} {value.dtype}"
        if value.numel() and not (mine - value).abs().max() <= 1e-5:
            return f"{name}: off by {(mine - value).abs().max():.3g}"
    return ""


def run_all(script: str, folder: Path, *names: str, device: str = "cpu") -> dict[str, Found]:
    """Run the script's RUNS (or the named ones), one after the other, in one process that imports once.

    Args:
        device: `cpu`, or `cuda`, a GPU each rank.

    Raises: RuntimeError: the script itself failed; a run that failed has an `error`.
    """
    ranks = testing_ranks.run_script(script, folder, *names, timeout=900, device=device)
    return {name: Found(folder / name, count) for name, count in ranks.items()}


def serve_runs(runs: Mapping[str, LayoutRun]) -> None:
    """In the script of `run_all`."""
    testing_ranks.import_once("lerobot.scripts.lerobot_train", *_LATE)
    with testing_frames.decoded_once():
        testing_frames.read(episode=0)
        testing_ranks.serve(runs, _rank, before=lambda *_: None, limit=LIMIT)


def _rank(rank: int, run: LayoutRun, folder: Path, name: str) -> None:
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with ExitStack() as stack:
        stack.enter_context(POLICIES[run.policy].tiny())
        stack.enter_context(POLICIES[run.policy].draws(run.replica(rank), run.replicas))
        _train(run, folder, name)


def _train(run: LayoutRun, folder: Path, name: str) -> None:
    from lerobot.scripts.lerobot_train import main

    help_texts.drop()
    out = folder / name
    adapters = [POLICIES[run.policy].adapter] if run.patched else POLICIES[run.policy].needed
    targets = [
        "step_recorder",
        "layouts",
        *run.adapters,
        *adapters,
        *(_TRAINER if run.patched else ("lerobot_train",)),
    ]
    features = {"record_steps": str(out.with_suffix(".steps.jsonl")), **dict(run.features)}
    if not run.patched and POLICIES[run.policy].needed:
        features |= {"frozen_prefix": False, "frozen_vision": False}
    sys.argv = ["lerobot-train", *_arguments(run, folder), f"--steps={run.steps}", f"--output_dir={out}"]
    with somaspeed_patch.patched(*targets, **features):
        main()


def _arguments(run: LayoutRun, folder: Path) -> list[str]:
    size = f"--batch_size={GLOBAL_BATCH // run.replicas}"
    flags = [] if run.layout is None else [f"--somaspeed.layout={run.layout}"]
    if run.resumes is not None:
        config = folder / run.resumes / "checkpoints" / "last" / "pretrained_model" / "train_config.json"
        return [f"--config_path={config}", "--resume=true", size, *flags, *run.arguments]
    own = [f"--policy.device={testing_ranks.device()}", *POLICIES[run.policy].arguments()]
    return [*_COMMON, *own, size, f"--save_freq={run.steps}", *flags, *run.arguments]


@dataclass(frozen=True)
class Policy:
    """How to train one policy in its least size."""

    adapter: str
    needed: tuple[str, ...]
    """adapters that a layout needs on the native path"""
    arguments: Callable[[], list[str]]
    tiny: Callable[[], Any]
    draws: Callable[[int, int], Any]
    """draws(replica, replicas): its part of the random numbers that one process draws for the whole batch"""


def _part(drawn: Tensor, replica: int, replicas: int) -> Tensor:
    size = len(drawn) // replicas
    return drawn[replica * size : (replica + 1) * size]


@contextmanager
def _pi05_draws(replica: int, replicas: int) -> Iterator[None]:
    from lerobot.policies.pi05.modeling_pi05 import PI05Pytorch

    noise, time = PI05Pytorch.sample_noise, PI05Pytorch.sample_time

    def sample_noise(model: Any, shape: Any, device: Any) -> Tensor:
        return _part(noise(model, (shape[0] * replicas, *shape[1:]), device), replica, replicas)

    def sample_time(model: Any, bsize: int, device: Any) -> Tensor:
        return _part(time(model, bsize * replicas, device), replica, replicas)

    one = replaced.object(PI05Pytorch, "sample_noise", sample_noise)
    with one, replaced.object(PI05Pytorch, "sample_time", sample_time):
        yield


@contextmanager
def _molmoact2_draws(replica: int, replicas: int) -> Iterator[None]:
    from lerobot.policies.molmoact2 import modeling_molmoact2 as host

    prepare, times = host.MolmoAct2Policy._prepare_flow_matching_tensors, host._sample_beta_timesteps

    def sample_times(*, batch_size: int, **options: Any) -> Tensor:
        return _part(times(batch_size=batch_size * replicas, **options), replica, replicas)

    def prepared(policy: Any, *, noise: Any = None, **given: Any) -> Any:
        actions = given["actions"]
        shape = (len(actions) * replicas, policy.config.num_flow_timesteps, *actions.shape[1:])
        drawn = torch.randn(shape, device=actions.device)
        return prepare(policy, noise=_part(drawn, replica, replicas), **given)

    one = replaced.object(host, "_sample_beta_timesteps", sample_times)
    with one, replaced.object(host.MolmoAct2Policy, "_prepare_flow_matching_tensors", prepared):
        yield


@contextmanager
def _groot_draws(replica: int, replicas: int) -> Iterator[None]:
    from lerobot.policies.groot import groot_n1_7 as host
    from lerobot.policies.groot import processor_groot

    time = host.GR00TN17ActionHead.sample_time

    def noise(shape: torch.Size, **options: Any) -> Tensor:
        return _part(torch.randn((shape[0] * replicas, *shape[1:]), **options), replica, replicas)

    def sample_time(self: Any, batch_size: int, device: Any, dtype: Any) -> Tensor:
        return _part(time(self, batch_size * replicas, device, dtype), replica, replicas)

    class Random:
        """Every crop in the middle: a rank would draw its first samples' for its own."""

        def random(self) -> float:
            return 0.5

    one, crops = (
        replaced.object(host, "torch", testing_ranks.TorchBut(noise)),
        replaced.object(processor_groot, "random", Random()),
    )
    with one, crops, replaced.object(host.GR00TN17ActionHead, "sample_time", sample_time):
        yield


def _tiny_pi05() -> Any:
    from somaspeed_patch.testing_lerobot import tiny

    return tiny()


@contextmanager
def _tiny_pi05_deep() -> Iterator[None]:
    """Two layers, which two stages can share."""
    from somaspeed_patch.testing_lerobot import LEAST, tiny
    from somaspeed_patch.tiny_pi05.shrink import shrunk

    with tiny(), shrunk(replace(LEAST, depth=2)):
        yield


@contextmanager
def _tiny_molmoact2() -> Iterator[None]:
    from somaspeed_patch.tiny_molmoact2 import redirect

    redirect.install("micro")
    try:
        yield
    finally:
        redirect.uninstall()


def _tiny_groot() -> Any:
    from somaspeed_patch.tiny_groot import redirect

    return redirect.installed("micro")


def _pi05_arguments() -> list[str]:
    return [
        "--policy.type=pi05", "--policy.image_resolution=[28,28]", "--policy.train_expert_only=true",
        "--policy.tokenizer_max_length=96", "--policy.optimizer_lr=1e-3",
    ]  # fmt: skip


def _molmoact2_arguments() -> list[str]:
    from somaspeed_patch.tiny_molmoact2 import redirect

    return [
        "--policy.type=molmoact2", f"--policy.checkpoint_path={redirect.CHECKPOINT}",
        f"--policy.discrete_action_tokenizer={redirect.FAST_TOKENIZER}", "--policy.model_dtype=float32",
        "--policy.action_mode=continuous", "--policy.train_action_expert_only=true",
        "--policy.num_flow_timesteps=2",
    ]  # fmt: skip


def _groot_arguments() -> list[str]:
    from somaspeed_patch.tiny_groot import redirect

    return [
        "--policy.type=groot", f"--policy.base_model_path={redirect.CHECKPOINT}", "--policy.use_bf16=false",
        "--policy.max_state_dim=16", "--policy.max_action_dim=16", "--policy.embodiment_tag=libero_sim",
    ]  # fmt: skip


POLICIES = {
    "pi05": Policy("pi05", ("pi05",), _pi05_arguments, _tiny_pi05, _pi05_draws),
    "pi05 deep": Policy("pi05", ("pi05",), _pi05_arguments, _tiny_pi05_deep, _pi05_draws),
    "molmoact2": Policy("molmoact2", (), _molmoact2_arguments, _tiny_molmoact2, _molmoact2_draws),
    "groot": Policy("groot", (), _groot_arguments, _tiny_groot, _groot_draws),
}
