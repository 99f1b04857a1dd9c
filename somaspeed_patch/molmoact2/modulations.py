"""Actions from the weights as they are now: the host's cached modulations, and its CUDA graph with a copy.

For inference the host keeps the expert's modulations of its norms by number of steps, batch, device and
dtype. A weight that changes is not part of that: after the first evaluation of a training run every later
one would see the modulations of the first.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from somaspeed_patch import features, sites
from somaspeed_patch.frozen import versions
from somaspeed_patch.layouts import units

_cached_for: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # expert: weights its cache was made from
_captured_for: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # graph manager: weights of its graph


def release() -> None:
    """Forget what was seen."""
    _cached_for.clear()
    _captured_for.clear()


def prepare(wrapped: Any, expert: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ActionExpert.get_or_prepare_modulation_cache: made again when a weight of the expert has changed."""
    if features.value("fresh_modulations") and _changed(_cached_for, expert, expert):
        expert._modulation_cache_key = None
    return wrapped(*args, **kwargs)


def replay(wrapped: Any, manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ActionCudaGraphManager.run_action_flow: captured again, for a replay does not take new modulations."""
    expert = manager.model._require_action_expert()
    if features.value("fresh_modulations") and _changed(_captured_for, manager, expert):
        manager.action_flow_graph = None
    return wrapped(*args, **kwargs)


def _changed(known: WeakKeyDictionary[Any, Any], owner: Any, expert: Any) -> bool:
    """Whether a weight of the expert was replaced or written to since the last time."""
    before, now = known.get(owner), (versions(expert), units.shard_versions(expert))
    known[owner] = now
    if before == now:
        return False
    sites.site("molmoact2/fresh_modulations").ran()
    return True
