"""Process-wide settings that must be in place before torch and triton are imported."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a tiny pi0.5 step takes 0.05 s with it, 5 s without
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
startup = [str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, startup))

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated


# The files that take longest, 1 to 3.5 minutes each, first: begun last they would run beside an idle core.
SLOWEST = (
    "test_ways_in.py", "test_ab_end_to_end.py", "test_optim_parity.py", "test_optim_lerobot.py",
    "test_lerobot_train_parity.py", "test_optim_trainer.py", "test_patch_order.py",
    "test_molmoact2_train_parity.py", "test_optim_distributed.py", "test_ab_synthetic.py",
    "test_rl_end_to_end.py", "test_rl_ray.py", "test_rl_checkpoints.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first; skip what is marked `gpu` on a machine without one."""
    ranks = {name: rank for rank, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(SLOWEST)))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def without_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Inductor but its last step: graphs are interpreted, which takes a tenth of the C++ compiler."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx

    whole = compile_fx.compile_fx
    interpreted = partial(whole, inner_compile=lambda graph, inputs, **_: make_boxed_func(graph))
    monkeypatch.setattr(compile_fx, "compile_fx", interpreted)


@pytest.fixture
def unpatched() -> Iterator[None]:
    """What runs of RL have patched in this process comes off again."""
    import somaspeed_patch

    yield
    somaspeed_patch.unpatch()


@pytest.fixture
def steps_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """FusedAdamW as without the interpreter, which takes its kernels 25 ms a parameter and update."""
    monkeypatch.setattr("somaspeed_patch.kernels.adamw.INTERPRETED", False)
