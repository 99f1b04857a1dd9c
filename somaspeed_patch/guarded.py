"""Run our code in a host's place; where it raises, the host takes over, for that model from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from somaspeed_patch.sites import Site

log = logging.getLogger(__name__)


class Declined(Exception):
    """Raised by our code, before it has changed anything, where the host has to serve the call."""


_failed: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()  # by model, then site: why


def or_hosts(
    site: Site,
    model: Any,
    ours: Callable[..., Any],
    hosts: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Our function's result; if it raises, the host's with the same random numbers, now and from now on."""
    random_state = _RandomState()
    try:
        result = ours(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Declined as reason:
        site.declined(str(reason))
        random_state.restore()
        return hosts(*args, **kwargs)
    except Exception as error:  # never break the host: it can still compute this step itself
        random_state.restore()
        result = hosts(*args, **kwargs)  # raises too where the batch is bad; then it is not our failure
        why = f"failed once and stays native: {type(error).__name__}: {error}"
        _failed.setdefault(model, {})[site.site] = why
        site.failed(error)
        log.warning("%s failed, this model stays native there", site.site, exc_info=error)
        return result
    site.ran()
    return result


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _RandomState:
    """Torch's generators as they are now, on the CPU and on the current GPU."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if _cuda_in_use() else None

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


def why_not(model: Any, site: str) -> str | None:
    """What went wrong at this site of this model before, or None."""
    return _failed.get(model, {}).get(site)


def release(adapter: str) -> None:
    """Give the sites of an adapter another try."""
    for failures in _failed.values():
        for site in [site for site in failures if site.startswith(f"{adapter}/")]:
            del failures[site]
