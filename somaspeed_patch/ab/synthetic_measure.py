"""One repeat of one cell of `--synthetic`: an arm's updates at one batch, or why there are none."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch

from somaspeed_patch import patched, report
from somaspeed_patch.ab import synthetic_profile
from somaspeed_patch.ab.child import OUT_OF_MEMORY
from somaspeed_patch.ab.synthetic_recipe import SyntheticArm
from somaspeed_patch.ab.synthetic_subject import Subject

TARGETS = ("accelerate_clip", "lerobot_optimizer")  # what else touches the step that is measured
_COUNTS = ("calls", "native_calls", "fallbacks")


def failure(error: Exception) -> str:
    """It in words."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {error}"[:400]


def arranged(subject: Subject, arm: SyntheticArm) -> ExitStack:
    """The arm's patches and the host's switches, for a with block."""
    with ExitStack() as stack:
        if arm.patched:
            stack.enter_context(patched(subject.recipe.model, *TARGETS, **arm.features))
        stack.enter_context(subject.switched(arm.policy))
        return stack.pop_all()


def measure(
    subject: Subject, arm: SyntheticArm, batch: int, *, warmup: int, steps: int, profiled: bool
) -> dict[str, Any]:
    """Its updates' seconds, losses and norms, peak memory, sites and profile; or `failure`, in words."""
    _clean(subject.device)
    before = counts()
    try:
        with arranged(subject, arm), subject.optimized():
            data, begun = subject.batch(batch, padding=arm.padding), time.perf_counter()
            for _ in range(warmup):
                subject.update(data)
            warm = time.perf_counter() - begun
            updates = [subject.update(data) for _ in range(steps)]
            found: dict[str, Any] = {"sites": ran_since(before), "peak_gib": peak(subject.device)}
            if profiled:
                step = statistics.median(update["total"] for update in updates)
                found["profile"] = synthetic_profile.largest(subject, data, step)
    except Exception as error:  # an arm that fails is a result; the others still run
        return {"failure": failure(error)}
    return {"updates": updates, "warmup_seconds": warm, **found}


def fits(subject: Subject, arm: SyntheticArm, batch: int) -> bool:
    """Whether two updates run: the first allocates the optimizer's state, the second runs beside it."""
    found = measure(subject, arm, batch, warmup=1, steps=1, profiled=False)
    return "failure" not in found


def counts() -> dict[str, dict[str, Any]]:
    """Every site as it is now, by name."""
    keys = ("site", "status", "reason", *_COUNTS, "last_fallback")
    return {site.site: {key: getattr(site, key) for key in keys} for site in report().sites}


def ran_since(before: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Per site: calls through our code, calls left to the host, fallbacks, since `before`."""
    ran = []
    for name, now in counts().items():
        then = before.get(name, dict.fromkeys(_COUNTS, 0))
        since = {key: now[key] - then[key] for key in _COUNTS}
        if any(since.values()):
            ran.append({**now, **since})
    return ran


def _clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: torch.device) -> float | None:
    """GiB; None on a CPU, where the process holds all arms."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
