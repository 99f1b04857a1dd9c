"""Saves `somaspeed_report.json` in the output folder of a host's run, at its end or, if it dies, at exit."""

from __future__ import annotations

import atexit
import logging
import os
from pathlib import Path
from typing import Any

from somaspeed_patch import features, patching

log = logging.getLogger(__name__)

FILE_NAME = "somaspeed_report.json"  # of rank 0; rank 3 writes somaspeed_report.rank3.json

_folder: list[Path] = []  # at most one: where the current run writes


def validated(wrapped: Any, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """TrainPipelineConfig.validate: afterwards the run's output folder is known."""
    result = wrapped(*args, **kwargs)
    if config.output_dir is not None:
        if not _folder:
            atexit.register(save)
        _folder[:] = [Path(config.output_dir)]
    return result


def ended(wrapped: Any, accelerator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Accelerator.end_training: the report is complete; saved first, for what follows may hang."""
    save()
    for line in summary() if accelerator.is_main_process else ():
        log.info("somaspeed: %s", line)
    forget()
    return wrapped(*args, **kwargs)


def save() -> None:
    """Write this rank's report into the run's folder, where that exists, and to `report_file`."""
    wanted = features.value("report_file")
    places = [Path(str(wanted))] if wanted else []
    if _folder and _folder[0].is_dir():  # never made here: LeRobot refuses to start in a folder that exists
        places.append(_folder[0] / FILE_NAME)
    for place in places:
        patching.snapshot().save(_of_this_rank(place))


def _of_this_rank(path: Path) -> Path:
    rank = os.environ.get("RANK", "0")
    return path if rank == "0" else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def summary() -> list[str]:
    """One line for each site that ran, was left to the host or fell back."""
    return [
        f"{site.site}: {site.calls} calls, {site.native_calls} native, {site.fallbacks} fallbacks"
        + (f" ({site.last_fallback or site.reason})" if site.last_fallback or site.reason else "")
        for site in patching.snapshot().sites
        if site.calls or site.native_calls or site.fallbacks
    ]


def forget() -> None:
    """The run is over: nothing is saved at exit."""
    _folder.clear()
    atexit.unregister(save)
