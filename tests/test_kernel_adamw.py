"""The AdamW kernels on their own: every combination of dtypes in one launch, addresses, skipping, scaling."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from somaspeed_patch.kernels import adamw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = list(adamw.CODES)
HYPER: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


class Problem:
    """Slots with parameter, gradient, moments and perhaps master weight, and the launches over them."""

    def __init__(
        self, specs: list[tuple[torch.dtype, torch.dtype, torch.dtype, bool, int]], shift: int = 0
    ) -> None:
        torch.manual_seed(0)
        self.specs = specs
        self.rows: list[list[Tensor | None]] = [
            [],
            [],
            [],
            [],
            [],
        ]  # param, exp_avg, exp_avg_sq, master, grad
        for param, grad, moments, master, numel in specs:
            weight = torch.randn(numel)
            values = (
                placed(weight, param, shift), placed(torch.randn(numel) * 0.1, moments, shift),
                placed(torch.rand(numel) * 0.1, moments, shift),
                placed(weight.to(param), torch.float32, shift) if master else None,
                placed(torch.randn(numel), grad, shift),
            )  # fmt: skip
            for row, value in zip(self.rows, values, strict=True):
                row.append(value)
        slots = [
            adamw.Slot(numel=n, kind=adamw.kind(p, g, m, master), group=0, identity=i)
            for i, (p, g, m, master, n) in enumerate(specs)
        ]
        self.tables = adamw.make_tables(slots, DEVICE)
        self.steps = torch.full((len(specs),), 4.0, device=DEVICE)  # four steps were taken
        row = [HYPER["lr"], *HYPER["betas"], HYPER["eps"], HYPER["weight_decay"], 1.0, 0.0, 0.0]
        self.hyper = torch.tensor([row], dtype=torch.float64, device=DEVICE)
        addresses = [[0 if x is None else x.data_ptr() for x in row] for row in self.rows]
        self.pointers, self.grads = (
            torch.tensor(addresses[:4]).to(DEVICE),
            torch.tensor(addresses[4]).to(DEVICE),
        )

    def step(self, max_norm: float = math.inf, **scalars: Any) -> Tensor:
        norm = torch.full((), math.nan, device=DEVICE)
        adamw.tile_squares(self.tables, self.grads)
        adamw.scalars(self.tables, self.hyper, self.steps, norm=norm, max_norm=max_norm, **scalars)
        adamw.update(self.tables, self.pointers, self.grads, self.steps)
        return norm

    def kept(self) -> list[list[Tensor | None]]:
        return [[None if x is None else x.clone() for x in row] for row in self.rows]


def placed(value: Tensor, dtype: torch.dtype, shift: int) -> Tensor:
    """A copy on the device, `shift` elements behind an aligned address, with NaN on both sides."""
    storage = torch.full((value.numel() + 2 * shift + 16,), math.nan, dtype=dtype, device=DEVICE)
    inside = storage[shift : shift + value.numel()]
    inside.copy_(value)
    return inside


def exact(problem: Problem, before: list[list[Tensor | None]], factor: float) -> list[tuple[Tensor, ...]]:
    found = []
    for param, avg, sq, master, grad in zip(*before, strict=True):
        weight = param if master is None else master
        values = [x.double() for x in (weight, grad, avg, sq) if x is not None]
        found.append(adamw.adamw_ref(*values, 5, **HYPER, factor=factor))  # type: ignore[misc]
    return found


def assert_rounded(got: Tensor, expected: Tensor) -> None:
    """The exact values rounded once to `got`'s dtype; fp32 has the update's roundings, in the sums' scale."""
    if not got.numel():
        return
    info = torch.finfo(got.dtype)
    if got.dtype == torch.float32:
        allowed = 4 * info.eps * expected.abs().max()
    else:
        allowed = 0.51 * info.eps * expected.abs() + info.smallest_normal * info.eps + 1e-8
    assert ((got.double() - expected).abs() <= allowed).all()


def combinations(param: torch.dtype) -> list[tuple[torch.dtype, torch.dtype, torch.dtype, bool, int]]:
    """All of one parameter dtype in the interpreter; a GPU's compiler takes minutes for those nobody has."""
    others = [param, torch.float32] if DEVICE.type == "cuda" else DTYPES
    found = itertools.product(dict.fromkeys(others), dict.fromkeys(others), (False, True))
    return [(param, grad, moments, master, 5 + i) for i, (grad, moments, master) in enumerate(found)]


@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "odd_addresses"])
@pytest.mark.parametrize("param", DTYPES)
def test_every_combination_of_dtypes_in_one_launch(param: torch.dtype, shift: int) -> None:
    specs = combinations(param)
    problem = Problem(specs, shift)
    assert problem.tables.kinds.bit_count() == len(specs)
    before = problem.kept()
    total = math.sqrt(sum(float(g.double().square().sum()) for g in before[4] if g is not None))
    norm = problem.step(max_norm=total / 2)
    assert float(norm) == pytest.approx(total, rel=2e-7)
    for i, (weight, avg, sq) in enumerate(exact(problem, before, 0.5)):
        rounded, got_avg, got_sq, master = (row[i] for row in problem.rows[:4])
        if master is not None:
            assert_rounded(master, weight)
            assert torch.equal(rounded, master.to(rounded.dtype))
        else:
            assert_rounded(rounded, weight)
        assert_rounded(got_avg, avg)
        assert_rounded(got_sq, sq)
    assert all(torch.equal(a, b) for a, b in zip(problem.rows[4], before[4], strict=True))
    assert problem.steps.tolist() == [5.0] * len(specs)


SIZES = [1, adamw.TILE - 1, adamw.TILE, adamw.TILE + 1, 2 * adamw.TILE, 0]


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "odd_addresses"])
def test_tile_boundaries(shift: int) -> None:
    problem = Problem([(torch.float32,) * 3 + (False, n) for n in SIZES], shift)
    before = problem.kept()
    norm = problem.step()
    grads = torch.cat([g.double() for g in before[4] if g is not None])
    assert float(norm) == pytest.approx(float(grads.norm()), rel=2e-7)
    for i, (weight, avg, sq) in enumerate(exact(problem, before, 1.0)):
        for got, expected in zip(
            (problem.rows[0][i], problem.rows[1][i], problem.rows[2][i]), (weight, avg, sq), strict=True
        ):
            assert_rounded(got, expected)
    for row in problem.rows[:3]:  # nothing beside the tensors was written
        for value in row:
            storage = value.untyped_storage()
            whole = torch.empty(0, dtype=value.dtype, device=DEVICE).set_(storage)
            assert int(whole.isnan().sum()) == len(whole) - value.numel()


def test_a_slot_without_gradient_is_left_alone() -> None:
    problem = Problem([(torch.float32,) * 3 + (False, 40)] * 3)
    problem.tables.slots[1].kind = adamw.UNUSED
    problem.tables = adamw.make_tables(problem.tables.slots, DEVICE)
    before = problem.kept()
    norm = problem.step()
    used = torch.cat([before[4][0], before[4][2]]).double()
    assert float(norm) == pytest.approx(float(used.norm()), rel=2e-7)
    assert all(torch.equal(row[1], kept[1]) for row, kept in zip(problem.rows[:3], before[:3], strict=True))
    assert problem.steps.tolist() == [5.0, 4.0, 5.0]


def test_found_inf_skips_and_grad_scale_divides() -> None:
    specs = [(torch.float32,) * 3 + (False, 300)]
    problem, scaled = Problem(specs), Problem(specs)
    before = problem.kept()
    problem.step(found_inf=torch.ones(1, device=DEVICE))
    assert torch.equal(problem.rows[0][0], before[0][0]) and problem.steps.tolist() == [4.0]
    scaled.rows[4][0].mul_(8)
    scaled.step(grad_scale=torch.full((1,), 8.0, device=DEVICE), found_inf=torch.zeros(1, device=DEVICE))
    problem.step()
    assert torch.equal(problem.rows[0][0], scaled.rows[0][0]) and scaled.steps.tolist() == [5.0]


def test_stochastic_rounding_is_right_on_average_and_repeatable() -> None:
    """Weights a third of the way between two bf16 numbers: a third goes up, within five standard errors."""
    numel = 60_000
    ends = []
    for seed in (0, 0, 1):
        problem = Problem([(torch.bfloat16, torch.float32, torch.float32, False, numel)])
        for row, value in ((0, 1.0), (1, 0.0), (2, 0.0), (4, 0.0)):
            problem.rows[row][0].fill_(value)
        problem.hyper[0, 0], problem.hyper[0, 4] = 1.0, -(2**-7) / 3  # decay of 1 + a third of an ulp
        adamw.tile_squares(problem.tables, problem.grads)
        adamw.scalars(problem.tables, problem.hyper, problem.steps)
        adamw.update(
            problem.tables,
            problem.pointers,
            problem.grads,
            problem.steps,
            stochastic_rounding=True,
            seed=seed,
        )
        ends.append(problem.rows[0][0].float())
    assert set(ends[0].tolist()) == {1.0, 1.0 + 2**-7}
    share = float((ends[0] > 1).double().mean())
    assert share == pytest.approx(1 / 3, abs=5 * math.sqrt(2 / 9 / numel) + 1e-4)
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])
