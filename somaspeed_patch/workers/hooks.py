"""The hooks of the adapter `lerobot_workers`, and what becomes of a run under way when they are taken off.

`prepare` finds LeRobot's loaders and preprocessor and gives the loaders a `Collate`; `preprocess` completes
what they send. Whether a batch needs that is written in the batch, so raw ones (simulator, inference) take
the host's path through the same preprocessor.

unpatch() gives every loader its collate function back. Iterators that have begun go on with workers that
stage: their preprocessor alone keeps completing, through its class, until the last such iterator is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from somaspeed_patch import features, sites
from somaspeed_patch.workers import cached, trainer
from somaspeed_patch.workers.collate import DECLINED, STAGE, Collate, finish
from somaspeed_patch.workers.steps import Split, split

_Weak = Callable[[], Any]


@dataclass(frozen=True)
class _Run:
    """What one call of train() was given. All weak: it ends with that call."""

    pipeline: _Weak
    loaders: tuple[_Weak, ...]
    in_use: tuple[_Weak, ...]
    """The collates and the cache: alive while a loader, or an iterator, has them."""


_runs: list[_Run] = []


class _StayError(Exception):
    """Nothing moves, for the reason that is its text."""


def prepare(wrapped: Any, accelerator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Accelerator.prepare: train()'s loaders get their collate before accelerate copies it."""
    loaders = [one for one in args if isinstance(one, DataLoader)]
    loop = _loop() if loaders else None
    if loop is None:
        return wrapped(*args, **kwargs)
    collates = _stage(accelerator, loop, loaders)
    prepared = wrapped(*args, **kwargs)
    several = prepared if isinstance(prepared, (tuple, list)) else (prepared,)  # a list under FSDP2
    bases = [getattr(one, "base_dataloader", one) for one in several if isinstance(one, DataLoader)]
    kept = cached.watch(bases[0])  # train() names the training loader before the one for evaluation
    _runs[:] = [run for run in _runs if any(loader() is not None for loader in run.loaders)]
    _runs.append(_Run(weakref.ref(loop.preprocessor), _weak(*loaders, *bases), _weak(*collates, kept)))
    return prepared


def preprocess(wrapped: Any, pipeline: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DataProcessorPipeline.__call__: complete what the workers began; anything else is the host's."""
    return _serve(pipeline, args[0] if args else kwargs["data"], wrapped)


def release() -> None:
    """Give the loaders their own collate functions, and let runs under way end as they are."""
    cached.release()
    for run in _runs:
        _give_back(run.loaders)
        _finish_what_is_on_the_way(run.pipeline(), run.in_use)
    _runs.clear()


def _loop() -> trainer.Loop | None:
    try:
        return trainer.of_caller()
    except trainer.UnknownLoopError as why:
        _site().declined(f"{why}: nothing moves")
        return None


def _stage(accelerator: Any, loop: trainer.Loop, loaders: Sequence[Any]) -> tuple[Collate, ...]:
    """Give each loader a Collate. Returns: them; none where nothing moves, which the report explains."""
    if not features.value("worker_preprocess"):
        return ()
    site = _site()
    try:
        parts = _split(accelerator, loop.preprocessor, loaders)
        collates = tuple(
            Collate(
                loader.collate_fn,
                loop.preprocessor.to_transition,
                parts,
                cameras=loop.cameras,
                device=accelerator.device.type,
                training=index == 0,  # LeRobot evaluates under no_grad
                pending=loader.num_workers * (loader.prefetch_factor or 2),
            )
            for index, loader in enumerate(loaders)
        )
    except _StayError as why:
        site.declined(str(why))
        return ()
    except Exception as error:  # the run goes on natively
        site.failed(error)
        return ()
    for loader, collate in zip(loaders, collates, strict=True):
        loader.collate_fn = collate
    site.reason = str(parts)
    return collates


def _split(accelerator: Any, pipeline: Any, loaders: Sequence[Any]) -> Split:
    """Cut the pipeline. Raises: _StayError."""
    from lerobot.processor.converters import batch_to_transition
    from lerobot.processor.pipeline import DataProcessorPipeline

    device = accelerator.device.type
    if any(loader.num_workers == 0 for loader in loaders):
        raise _StayError("num_workers=0: there are no workers")
    if device not in ("cpu", "cuda"):
        raise _StayError(f"device {device}: its rounding is not known to be a CPU's")
    if accelerator.num_processes > 1 and any(isinstance(one.dataset, IterableDataset) for one in loaders):
        raise _StayError("a streamed dataset: accelerate reads it in one process and deals the batches out")
    if type(pipeline) is not DataProcessorPipeline:
        raise _StayError(f"the preprocessor is a {type(pipeline).__name__}, not LeRobot's pipeline")
    if pipeline.before_step_hooks or pipeline.after_step_hooks:
        raise _StayError("the preprocessor has step hooks, which belong in the trainer")
    if pipeline.to_transition is not batch_to_transition:
        raise _StayError("the preprocessor has a to_transition of its own")
    parts = split(pipeline.steps, device)
    if not parts.moved:
        raise _StayError(str(parts))
    return parts


def _serve(pipeline: Any, batch: Any, native: Callable[[Any], Any]) -> Any:
    if not isinstance(batch, dict):
        return native(batch)
    ticket = cached.take_ticket(batch)
    again = cached.repeated(ticket)
    if again is not None:
        return again
    if DECLINED in batch:
        _site().declined(batch.pop(DECLINED))
    if STAGE in batch:
        made = finish(pipeline, batch)
        _site().ran()
    else:
        made = native(batch)
    cached.record(ticket, made)
    return made


def _give_back(loaders: Sequence[_Weak]) -> None:
    for loader in (reference() for reference in loaders):
        if loader is not None and isinstance(loader.collate_fn, Collate):
            loader.collate_fn = loader.collate_fn.own


def _finish_what_is_on_the_way(pipeline: Any, references: Sequence[_Weak]) -> None:
    """Nothing, if no iterator holds a collate or the cache any more; else until the last of them is gone."""
    alive = [one for one in (reference() for reference in references) if one is not None]
    if pipeline is None or not alive:
        return
    native, left, waiting = type(pipeline), [len(alive)], weakref.ref(pipeline)
    pipeline.__class__ = _finishing(native)

    def gone() -> None:
        left[0] -= 1
        if not left[0] and waiting() is not None:
            waiting().__class__ = native

    for one in alive:
        weakref.finalize(one, gone).atexit = False


def _finishing(native: Any) -> Any:
    """The class of a preprocessor that was unpatched while batches were on their way to it."""

    def __call__(self: Any, data: Any) -> Any:
        return _serve(self, data, lambda batch: native.__call__(self, batch))

    return type(native.__name__, (native,), {"__call__": __call__})


def _weak(*objects: Any) -> tuple[_Weak, ...]:
    return tuple(weakref.ref(one) for one in objects)


def _site() -> sites.Site:
    return sites.site("lerobot_workers/worker_preprocess")
