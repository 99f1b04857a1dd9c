"""`FusedAdamW`: torch.optim.AdamW whose clipping and update are four Triton launches over all parameters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from somaspeed_patch.kernels.adamw import Tables
from somaspeed_patch.optim import checkpoint, launch, native, shards
from somaspeed_patch.optim.nonfinite import SkippedSteps
from somaspeed_patch.optim.options import Options
from somaspeed_patch.optim.pending import Pending
from somaspeed_patch.optim.plan import Plan

log = logging.getLogger(__name__)

CALLS = Counter[str]()
"""Steps of this process: "triton", or the reason why torch's code ran; the report shows them."""


class FusedAdamW(torch.optim.AdamW):
    """Drop-in for `torch.optim.AdamW`: same arguments, param_groups, state and state_dict.

    `clip_grad_norm_` measures the global norm and leaves the clip factor on the device; `step` applies it
    while it reads the gradients. The gradients themselves are never written: after `step`, `p.grad` is what
    autograd left, not the clipped gradient. The update is computed in fp32 and rounded once.

    Where the kernels cannot serve (CPU tensors, fp64, amsgrad, differentiable, complex, tensor betas,
    parameters on several devices) torch's own clipping and step run, on a CPU its fused kernel;
    `native_reason` says why.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused:
            as in torch.optim.AdamW. `foreach` and `capturable` are only kept for checkpoints: every step can
            be captured in a CUDA graph, which holds until state is loaded or another set of parameters has
            gradients. `fused=True` also makes GradScaler leave unscaling to the kernels.
        moments_dtype: of exp_avg and exp_avg_sq; None: the parameter's dtype, as in torch.
        master_weights: keep an fp32 copy of bf16 and fp16 parameters, in the state as `master`.
        stochastic_rounding: round bf16 parameters up or down at random, right on average; the random bits
            depend on `rounding_seed`, step, parameter and element only, so replicas and resumed runs agree,
            and so do other numbers of shards if they are shards of dimension 0.
        nonfinite: what a gradient norm of inf or NaN does: "propagate" as torch does, "skip" the step, or
            "raise" a RuntimeError that names the first such parameter. "skip" and "raise" ask all ranks of
            `process_group`, and act on all of them alike.
        grad_divisor: the gradients are divided by it, before the norm. 1 under accelerate, DDP and FSDP,
            which have averaged them already.
        process_group: the ranks that `nonfinite` asks; None: all.

    Raises: ValueError: as torch.optim.AdamW, or a wrong option.
    Source: Loshchilov & Hutter 2019, arXiv:1711.05101.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        moments_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        nonfinite: str = "propagate",
        grad_divisor: float = 1.0,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.options = Options(
            moments_dtype=moments_dtype,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
            nonfinite=nonfinite,
            grad_divisor=grad_divisor,
        )
        self.process_group = process_group
        self.skipped = SkippedSteps()
        self._start()
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            maximize=maximize, foreach=foreach, capturable=capturable, differentiable=differentiable,
            fused=fused,
        )  # fmt: skip

    def _start(self) -> None:
        self._plan: Plan | None = None
        self._pending: Pending | None = None
        self._broken: str | None = None
        self._reason = ""
        self._in_graphs: list[tuple[Plan, Tables]] = []  # their memory must last as long as the graphs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of all parameters to a global 2-norm, as torch.nn.utils.clip_grad_norm_ does.

        The gradients stay as they are; the next `step` reads them clipped.

        Args:
            max_norm: infinity only measures.
            error_if_nonfinite: raise for a norm of inf or NaN.

        Returns: [] fp32 on the device, the global norm before clipping, the same on every rank.

        Raises:
            RuntimeError: the norm is not finite and shall be, or gradients that were clipped before, and not
                yet used by `step`, were written since.
        """
        plan = self._current_plan(with_state=False)
        raising = error_if_nonfinite or self.options.nonfinite == "raise"
        if plan is None:
            self._settle(self._local_gradients())
            return native.clip_grad_norm_(self.parameters(), max_norm, raising)
        found = plan.refresh()
        self._settle(plan.gradients.parts)
        if not found and not self._asks_other_ranks(plan):
            return torch.zeros((), dtype=torch.float32, device=plan.device)
        try:
            norm = self._measure(plan, plan.gradient_row(), max_norm, raising)
        except launch.KernelFailure as error:
            self._give_up(error)
            return native.clip_grad_norm_(self.parameters(), max_norm, raising)
        self._pending = Pending(plan.gradients.parts, plan.tables.shared)
        return norm

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One AdamW update of every parameter with a gradient, with the clip factor of `clip_grad_norm_`.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns: the closure's loss, or None.

        Raises: RuntimeError: gradients were written between `clip_grad_norm_` and `step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._current_plan(with_state=True)
        if plan is None:
            self._native_step()
        elif plan.refresh() or self._asks_other_ranks(plan):
            self._fused_step(plan)
            plan.release()
        self._pending = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; a clip factor that `step` did not use is dropped with the gradients it belongs to."""
        self._pending = None
        if self._plan is not None:
            self._plan.release()
        super().zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def settle_clip(self) -> None:
        """Write a clip factor that `step` has not used yet into the gradients, as torch does at once.

        For whoever is about to write to the gradients between clip and step. Free if there is no such factor.

        Raises: RuntimeError: the gradients were written already.
        """
        if self._pending is not None:
            self._settle(self._local_gradients())

    def native_reason(self) -> str | None:
        """Why torch's own step would run now instead of the kernels, or None."""
        reason = self._broken or native.group_reason(self.param_groups)
        if reason is None and self._plan is None:
            reason = native.tensor_reason(self.parameters())
        return reason

    def nonfinite_parameter(self) -> str | None:
        """The first parameter whose gradient was inf or NaN at the last clip; waits for the device."""
        if self._plan is None:
            return None
        return self._plan.name_nonfinite(self._plan.tables.squares, self.param_groups)

    def upload_hyperparameters(self) -> None:
        """Let a captured step see the learning rates as they are now; call it before each replay.

        An lr that is a tensor on the device is read at every replay anyhow.
        """
        if self._plan is not None:
            launch.write_hyper(self._plan, self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, and nothing else."""
        return checkpoint.export(super().state_dict())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class or torch.optim.AdamW saved."""
        super().load_state_dict(state_dict)
        if self.options.moments_dtype is not None or self.options.master_weights:
            checkpoint.restore_wide(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.setdefault("options", Options())
        self.__dict__.setdefault("process_group", None)
        self.__dict__.setdefault("skipped", SkippedSteps())
        self._start()

    def parameters(self) -> list[Tensor]:
        """The parameters of all groups, in order."""
        return [param for group in self.param_groups for param in group["params"]]

    def _local_gradients(self) -> list[Tensor]:
        return [shards.local(param.grad) for param in self.parameters() if param.grad is not None]

    def _current_plan(self, with_state: bool) -> Plan | None:
        """Tables that hold for the parameters as they are, or None where torch has to do it."""
        reason = self._broken or native.group_reason(self.param_groups)
        params = self.parameters()
        if reason is None and self._plan is not None and self._plan.holds(params, self.state, with_state):
            return self._plan
        reason = reason or native.tensor_reason(params)
        if reason is not None:
            native.refuse(reason, self.options)
            self._plan, self._reason = None, reason
            return None
        device = params[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "FusedAdamW: parameters or state moved since the last step; run one before capturing a graph"
            )
        self._plan = Plan(self.param_groups, self.state, self.options, device)
        return self._plan

    def _measure(self, plan: Plan, row: Tensor, max_norm: float, raising: bool) -> Tensor:
        """Launches 1 to 3, and what `nonfinite` asks for."""
        norm, bad = launch.measure(plan, row, self.param_groups, self.options, max_norm, self.process_group)
        if bad is not None and self.options.nonfinite == "skip":
            self.skipped.poll()
            self.skipped.note(bad, plan.tables.squares, self._namer(plan))
        if raising and bool(~torch.isfinite(norm) if bad is None else bad):
            raise RuntimeError(
                f"clip_grad_norm_: the total norm of the gradients is non-finite ({float(norm)}), first in "
                f"{self._namer(plan)(plan.tables.squares)}; nothing was updated"
            )
        return norm

    def _asks_other_ranks(self, plan: Plan) -> bool:
        """Whether a rank without any gradient has to take part all the same: the others wait for it."""
        return plan.distributed or self.options.nonfinite != "propagate"

    def _namer(self, plan: Plan) -> Callable[[Tensor], str]:
        groups = list(self.param_groups)
        return lambda squares: plan.name_nonfinite(squares, groups) or "a parameter of another rank"

    def _fused_step(self, plan: Plan) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        # a GradScaler that has not unscaled yet looks for inf by multiplying with one, in place
        pending = self._claim(plan.gradients.parts, writes=int(grad_scale is not None))
        measured = pending is not None
        plan.bind()
        row = plan.gradient_row(unchanged=measured)
        if pending is not None and pending.shared is not plan.tables.shared:
            plan.tables.shared.copy_(pending.shared)  # the plan was made anew since the clip
        try:
            if not measured and self.options.nonfinite != "propagate":
                self._measure(plan, row, float("inf"), self.options.nonfinite == "raise")
                measured = True
            launch.update(plan, row, self.param_groups, self.options, measured, grad_scale, found_inf)
        except launch.KernelFailure as error:
            self._give_up(error)
            if pending is not None:
                pending.settle(plan.gradients.parts)
            self._native_step()
            return
        # the kernels' writes, as autograd has to see them; torch's in-place operations do the same
        torch.autograd.graph.increment_version(plan.active)
        if plan.capturing():
            self._in_graphs.append((plan, plan.tables))
        plan.prepare_capture()
        CALLS["triton"] += 1

    def _native_step(self) -> None:
        """torch's step; a clip factor that still waits is applied in place first, as torch does."""
        self._settle(self._local_gradients())
        native.step(self)
        CALLS[self._reason] += 1

    def _claim(self, parts: Sequence[Tensor], writes: int) -> Pending | None:
        """The waiting clip factor, if it is of exactly these gradients."""
        pending = self._pending
        if pending is not None and pending.holds_for(parts, writes):
            self._pending = None
            return pending
        self._settle(parts)
        return None

    def _settle(self, parts: Sequence[Tensor]) -> None:
        """Clip in place those gradients whose clip factor is still waiting: torch did that at once."""
        pending = self._pending
        if pending is None:
            return
        place = pending.written(parts)
        if place is not None:
            raise RuntimeError(
                f"FusedAdamW: a gradient of shape {list(parts[place].shape)} was written between "
                "clip_grad_norm_ and step, which would clip all of it. Clip once, after the last backward; "
                "call optimizer.settle_clip() before writing; or optimizer.zero_grad() to start over"
            )
        pending.settle(parts)
        self._pending = None

    def _give_up(self, error: launch.KernelFailure) -> None:
        self._broken = self._reason = f"the kernels failed: {error}"
        log.warning("FusedAdamW: %s; torch's own step runs from now on", self._broken)
