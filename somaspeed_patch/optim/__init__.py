"""FusedAdamW: torch.optim.AdamW with the gradient clipping inside, in four launches.

    fused_adamw     the optimizer: what users and hosts call
    options         what it can do beyond torch.optim.AdamW
    native          when torch's own clipping and step run instead, and why
    pending         a clip factor between clip_grad_norm_ and step, and what may happen in between
    plan            where parameters, gradients, state and step counts are: the kernels' tables
    gradients       this step's gradients, as the kernels can read them
    moments         the state, made, adopted, and watched for changes from outside
    shards          DTensor: local parts, and the process groups over which a norm is summed
    launch, upload  the four launches, and the numbers that go to the device before them
    nonfinite       inf and NaN, noticed by every rank alike
    checkpoint      state dicts that torch.optim.AdamW wrote or will read
    hooks           what the adapters put in front of accelerate, LeRobot and transformers
    lerobot_config  --optimizer.type=somaspeed_adamw

clip_grad_norm_ -> Plan.refresh -> launch.measure (1, 2, all-reduce, 3) -> Pending
step            -> Plan.refresh, Pending.holds_for, Plan.bind -> launch.update (4)
"""

from somaspeed_patch.optim.fused_adamw import FusedAdamW

__all__ = ["FusedAdamW"]
