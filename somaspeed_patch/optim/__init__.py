"""FusedAdamW: torch.optim.AdamW with the gradient clipping inside, in four launches.

fused_adamw    the optimizer: arguments, state, checkpoints, when torch's own step runs instead
plan           where the tensors are: parameters, moments, step counts; the kernels' tables
gradients      what the parameters' gradients are in this step, and whether they can be read in place
pending        a clip factor between clip_grad_norm_ and step, and what may happen in between
shards         DTensor: local parts, and the process groups over which a norm is summed
nonfinite      what to do about inf and NaN, the same on every rank
hooks          what the adapters put in front of accelerate, LeRobot and transformers
"""

from somaspeed_patch.optim.fused_adamw import FusedAdamW

__all__ = ["FusedAdamW"]
