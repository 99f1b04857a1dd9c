"""The gate of `--synthetic`: a patched arm's loss and gradients are within native's own rounding.

The truth is the same model in fp32. What is allowed is twice the native arm's distance from it, in the norm
of each parameter's gradient, plus one unit of rounding: the budget is derived from the host, not chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.ab.synthetic_subject import Subject

SLACK = 2.0


def truth(subject: Subject, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unpatched model in fp32, on the CPU."""
    with subject.exact():
        loss, gradients = subject.loss_and_gradients(batch)
        return loss.cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}


def judge(exact: Any, native: Any, ours: Any) -> dict[str, Any]:
    """The verdict as data: green, the loss of both arms, the parameter nearest to or beyond its allowance."""
    worst = max(
        (_share(name, exact[1], native[1], ours[1]) for name in exact[1]), key=lambda found: found["share"]
    )
    missing = sorted(set(native[1]) ^ set(ours[1]))
    loss = {"fp32": float(exact[0]), "native": float(native[0]), "patched": float(ours[0])}
    reasons = [*_loss_reasons(loss), *_gradient_reasons(worst, missing)]
    return {
        "green": not reasons,
        "reasons": reasons,
        "loss": loss,
        "worst_parameter": worst,
        "gradients_of_one_arm_only": missing,
        "against_native": _against(native[1], ours[1]),
        "budget": f"{SLACK} x native's distance from fp32 + one bf16 rounding, per parameter",
    }


def _loss_reasons(loss: dict[str, float]) -> Iterator[str]:
    """The same budget for the loss; a NaN is within none."""
    rounding = float(torch.finfo(torch.bfloat16).eps) * abs(loss["fp32"])
    allowed = SLACK * abs(loss["native"] - loss["fp32"]) + rounding
    error = abs(loss["patched"] - loss["fp32"])
    if not error <= allowed:
        ours, exact = loss["patched"], loss["fp32"]
        yield f"the loss {ours!r} is {error:.3g} from fp32's {exact!r}, allowed {allowed:.3g}"


def _gradient_reasons(worst: dict[str, Any], missing: list[str]) -> Iterator[str]:
    if not worst["share"] <= 1:
        error, allowed = f"{worst['error']:.3g}", f"{worst['allowed']:.3g}"
        yield f"the gradient of {worst['name']} is {error} from fp32's, in norm, allowed {allowed}"
    if missing:
        yield f"only one of the arms has a gradient for {', '.join(missing[:5])}"


def _share(name: str, exact: dict[str, Tensor], native: dict[str, Tensor], ours: dict[str, Tensor]) -> Any:
    if name not in native or name not in ours:
        return {"name": name, "share": 0.0}
    eps = float(torch.finfo(native[name].dtype).eps)
    allowed = SLACK * _distance(exact[name], native[name]) + eps * float(exact[name].norm())
    error = _distance(exact[name], ours[name])
    share = error / max(allowed, 1e-30)
    if not math.isfinite(share):  # a NaN compares as no larger than anything
        share = math.inf
    return {"name": name, "share": share, "error": error, "allowed": allowed}


def _against(native: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, Any]:
    """For the reader, not judged: the parameter whose gradient is farthest from the native arm's."""
    found: list[dict[str, Any]] = [{"name": None, "relative_difference": 0.0, "cosine": 1.0}]
    for name in native.keys() & ours.keys():
        theirs, mine = native[name].detach().float().flatten(), ours[name].detach().float().flatten()
        norm = max(float(theirs.norm()), 1e-30)
        cosine = float(torch.nn.functional.cosine_similarity(theirs, mine, dim=0))
        found.append(
            {"name": name, "relative_difference": float((mine - theirs).norm()) / norm, "cosine": cosine}
        )
    return max(found, key=lambda one: one["relative_difference"])


def _distance(exact: Tensor, found: Tensor) -> float:
    return float((found.detach().cpu().float() - exact).norm())
