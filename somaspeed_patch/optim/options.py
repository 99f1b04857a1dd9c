"""What FusedAdamW can do beyond torch.optim.AdamW; not in param_groups, which go into checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from somaspeed_patch.kernels import adamw

NONFINITE = ("propagate", "skip", "raise")
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The opt-in behaviour of one FusedAdamW."""

    moments_dtype: torch.dtype | None = None
    """Of exp_avg and exp_avg_sq; None: the parameter's, as in torch."""
    master_weights: bool = False
    """Keep an fp32 copy of bf16 and fp16 parameters in the state, as `master`, and update that."""
    stochastic_rounding: bool = False
    """Round bf16 parameters up or down at random, right on average."""
    rounding_seed: int = 0
    nonfinite: str = "propagate"
    """A gradient norm of inf or NaN: "propagate" as torch does, "skip" the step, or "raise"."""
    grad_divisor: float = 1.0
    """Gradients are divided by it; accelerate, DDP and FSDP have averaged them already."""

    def __post_init__(self) -> None:
        if self.nonfinite not in NONFINITE:
            raise ValueError(f"FusedAdamW: nonfinite must be one of {NONFINITE}, but is {self.nonfinite!r}")
        if self.moments_dtype is not None and self.moments_dtype not in adamw.CODES:
            raise ValueError(
                f"FusedAdamW: moments_dtype must be None or one of {list(adamw.CODES)}, "
                f"but is {self.moments_dtype}"
            )
        if self.master_weights and self.stochastic_rounding:
            raise ValueError(
                "FusedAdamW: master_weights and stochastic_rounding solve the same problem; choose one"
            )
        if not self.grad_divisor > 0:
            raise ValueError(f"FusedAdamW: grad_divisor must be positive, but is {self.grad_divisor}")

    @property
    def beyond_torch(self) -> list[str]:
        """The options that torch's own step cannot serve."""
        names = [
            name for name in ("moments_dtype", "master_weights", "stochastic_rounding") if getattr(self, name)
        ]
        if self.nonfinite == "skip":
            names.append("nonfinite='skip'")
        return names + ["grad_divisor"] * (self.grad_divisor != 1)

    def moments(self, param: torch.dtype) -> torch.dtype:
        """The dtype of a parameter's moments."""
        return self.moments_dtype or param

    def has_master(self, param: torch.dtype) -> bool:
        """Whether a parameter of this dtype has an fp32 master."""
        return self.master_weights and param in _LOW
