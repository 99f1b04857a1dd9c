"""LeRobot's trainer: the report beside the run's outputs, and our features as its flags, however it started.

`TrainPipelineConfig.validate` is where the trainer settles its output folder, `Accelerator.end_training` is
the last thing it does; both are class attributes, so console script, `-m` (where the trainer is `__main__`)
and `accelerate launch` reach them alike.
"""

from __future__ import annotations

from typing import Any

import wrapt

from somaspeed_patch.features import Feature
from somaspeed_patch.registry import Patch, with_parameters

REQUIRES = ["lerobot>=0.6.1,<0.7", "accelerate>=1.0"]

FEATURES = [
    Feature(
        name="report_file",
        changes="write the report to this file too; a run without an output folder has no other place for it",
        exact=True,
        default=None,
    ),
]


def _hooked(hook: str) -> Any:
    def make(original: Any) -> Any:
        from somaspeed_patch import run_report

        return wrapt.FunctionWrapper(original, getattr(run_report, hook))

    return make


def _flags(original: Any) -> Any:
    from somaspeed_patch import host_flags

    with_parameters(original, ["fields_to_filter", "args"])
    return wrapt.FunctionWrapper(original, host_flags.filter_path_args)


PATCHES = [
    Patch(
        module="lerobot.configs.train",
        name="TrainPipelineConfig.validate",
        make=_hooked("validated"),
        site="report",
    ),
    Patch(module="lerobot.configs.parser", name="filter_path_args", make=_flags, site="flags"),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator.end_training",
        make=_hooked("ended"),
        site="report_end",
    ),
]


def release() -> None:
    """Forget the run's output folder."""
    import sys

    run_report = sys.modules.get("somaspeed_patch.run_report")
    if run_report is not None:
        run_report.forget()
