"""What an RL run is made of, as a frozen dataclass; `recipe_file` reads it from YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from somaspeed_patch.rl.env_process import LIBERO, EnvSpec
from somaspeed_patch.rl.settings import Settings

TASKS: Mapping[str, int] = {
    "libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90,
}  # fmt: skip
"""How many tasks a suite has; here, because importing LIBERO takes seconds."""
FREE = ("name", "description", "iterations", "log", "checkpoint", "evaluate", "timeouts", "layout")
"""What a resumed run may have otherwise: none of it decides what is learned."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policy that learns."""

    type: Literal["pi05", "molmoact2", "groot"] | None = None
    path: str | None = None
    """a LeRobot checkpoint's folder or its id on the hub; None: random weights, built from `config`"""
    config: Mapping[str, Any] = field(default_factory=dict)
    """fields of LeRobot's configuration of this type, over the checkpoint's"""
    stats: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """without a path: statistics to normalise by, as in a LeRobot data set's meta/stats.json"""
    autocast: Literal["bfloat16", "float16"] | None = None
    """None: as the policy's own inference computes"""
    device: str | None = None
    """None: a CUDA GPU where there is one"""
    rename: Mapping[str, str] = field(default_factory=dict)
    """names of observations that the policy has others for"""
    plugin: str | None = None
    """a module to import before anything else, for what its import does"""
    factory: str | None = None
    """`module:name` of what makes another policy than LeRobot's, see `build.Parts`; instead of `type`"""
    pool: Literal["valid", "all"] = "valid"
    """pi0.5: tokens whose mean the critic reads; `all` takes padding, too"""
    critic: tuple[int, ...] = (1024, 512, 256)
    """sizes of the value head's hidden layers"""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environments, one process a slot."""

    suite: str = "libero_spatial"
    tasks: tuple[int, ...] | None = None
    """dealt round the slots; None, in a recipe `all`: every task of a LIBERO suite"""
    slots: int = 8
    image_size: int | None = 256
    horizon: int = 240
    gl: str | None = None
    software_gl_profile: bool = False
    egl_devices: tuple[int, ...] = ()
    """GPUs to render on by EGL's numbers, dealt round the slots"""
    cores: int | None = None
    """CPU cores for all environments together; None: every one"""
    factory: str = LIBERO

    def specs(self) -> list[EnvSpec]:
        """One a slot."""
        tasks = tuple(range(TASKS[self.suite])) if self.tasks is None else self.tasks
        gpus = self.egl_devices
        return [
            EnvSpec(
                suite=self.suite,
                task=tasks[slot % len(tasks)],
                image_size=self.image_size,
                horizon=self.horizon,
                gl=self.gl,
                egl_device=gpus[slot % len(gpus)] if gpus else None,
                software_gl_profile=self.software_gl_profile,
                cores=self.cores,
                factory=self.factory,
            )
            for slot in range(self.slots)
        ]


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What is played between two versions."""

    episodes: int = 8
    """of every slot"""
    init_states: tuple[int, ...] = tuple(range(50))
    """of each task; in a recipe also a number: so many, the first ones"""
    lockstep: bool = True
    """False: slots that are ready act at once, which is faster; sums may round otherwise"""
    ignore_last: bool = False
    """the last step of the flow is never the stochastic one"""
    shared_step: bool = False
    """all that act at once have the same stochastic step"""
    bootstrap: bool = False
    """an episode that is cut is worth what comes after it, see `collect.Plan`"""


@dataclass(frozen=True, kw_only=True)
class Ray:
    """With `backend: ray`: the actors that the slots are dealt to."""

    workers: int = 1
    num_cpus: float = 1.0
    """of each, environments included"""
    num_gpus: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When the run is written down."""

    every: int = 10
    """iterations"""
    keep: int = 3
    """the newest ones; 0: all"""


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """When the policy plays without noise."""

    every: int = 10
    """iterations; also before the first and after the last one; 0: never"""
    episodes: int = 1
    """of every slot"""
    videos: int = 0
    """episodes filmed of each evaluation"""


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = False
    wandb: str | None = None
    """the project's name"""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds after which something is taken for dead."""

    step: float = 120.0
    """for an answer of an environment"""
    start: float = 300.0
    """for an environment to build its scene"""
    stall: float = 600.0
    """side by side: without a rollout"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What `somaspeed rl` runs."""

    name: str
    """the file's name without .yaml"""
    description: str
    policy: Policy
    env: Environment = field(default_factory=Environment)
    rollout: Rollouts = field(default_factory=Rollouts)
    ppo: Settings = field(default_factory=Settings)
    iterations: int
    lag: int | None = None
    """versions that a sample may be behind, side by side; None: one behind the other"""
    memory: Literal["host", "device", "recompute"] = "host"
    """where features wait for the learner"""
    backend: Literal["processes", "ray"] = "processes"
    """where the rollouts are played"""
    ray: Ray = field(default_factory=Ray)
    layout: Mapping[str, Any] | None = None
    """how what trains lies on the ranks that a launcher starts: keys as of `layouts.layout`; None: each rank
    has all of it"""
    parity: Literal["none", "rlinf"] = "none"
    """`rlinf`: what differs from RLinf is as it is there, see `parity.rlinf`, whatever the keys say"""
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    evaluate: Evaluations = field(default_factory=Evaluations)
    log: Logs = field(default_factory=Logs)
    timeouts: Timeouts = field(default_factory=Timeouts)
    seed: int = 0
    threads: int | None = None
    """of torch on the CPU; None: as the process has them"""

    @property
    def layout_text(self) -> str | None:
        """As `layouts.layout.parse` reads it."""
        return None if self.layout is None else ",".join(f"{key}={each}" for key, each in self.layout.items())

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        found: dict[str, Any] = _plain(asdict(self))
        return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What two plain recipes differ in, but for what is free to change: "ppo.gamma: 0.99, now 0.9"."""
    old, new = dict(_flat(before)), dict(_flat(after))
    odd = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [
        f"{name}: {old.get(name, 'absent')!r}, now {new.get(name, 'absent')!r}"
        for name in odd
        if name.split(".")[0] not in FREE
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
