"""Process-wide settings that must be in place before torch and triton are imported."""

import os
from functools import partial

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a tiny pi0.5 step takes 0.05 s with it, 5 s without
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without one."""
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
