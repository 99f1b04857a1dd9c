"""torch.compile for the repeated layers, with a fall back to eager that the report shows.

A layer is compiled once and reused for all of a stack: its parameters are graph inputs. With `dynamic=False`
every (batch, length) is a static graph of its own, which suits lengths that come in few buckets; with None
the second length makes torch trace a graph for all of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import features, sites
from somaspeed_patch.sites import Site

log = logging.getLogger(__name__)

BACKEND = "inductor"
MAX_SHAPES = 8  # dynamo's recompile_limit: the ninth graph of one function would run eagerly without a word


class CompiledLayer:
    """`eager(layer, hidden, ...)` compiled; eager again, and said so, where that fails or shapes run out."""

    def __init__(self, eager: Callable[..., Any], site: Site, dynamic: bool | None = False) -> None:
        self.eager = eager
        self.site = site
        how = self.inductor(eager) if BACKEND == "inductor" else {"backend": BACKEND}
        self.compiled = torch.compile(eager, dynamic=dynamic, **how)
        self.most_shapes = MAX_SHAPES if dynamic is False else math.inf
        self.shapes: set[Hashable] = set()
        self.broken = False

    def inductor(self, eager: Callable[..., Any]) -> dict[str, Any]:
        """What torch.compile is told where Inductor compiles."""
        return {"backend": "inductor"}

    def __call__(self, layer: Any, hidden: Tensor, *rest: Any) -> Any:
        """Run one layer; the shapes of hidden and of the other tensors choose the graph."""
        shape = self._shape(hidden, rest)
        if shape in self.shapes:  # compiled before: what it raises now is not the compiler's
            self.site.ran()
            return self.compiled(layer, hidden, *rest)
        if self.broken or len(self.shapes) >= self.most_shapes:
            why = "failed before" if self.broken else f"met more than {self.most_shapes} shapes"
            self.site.declined(f"{self.eager.__name__} {why}; it runs eagerly")
            return self.eager(layer, hidden, *rest)
        return self._first(shape, layer, hidden, *rest)

    def _first(self, shape: Hashable, layer: Any, hidden: Tensor, *rest: Any) -> Any:
        try:
            with _backward_too():
                result = self.compiled(layer, hidden, *rest)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler raises, the eager layer computes the same
            self.broken = True
            self.site.failed(error)
            name = self.eager.__name__
            log.warning("%s: compiling %s failed, it runs eagerly: %s", self.site.site, name, error)
            return self.eager(layer, hidden, *rest)
        self.shapes.add(shape)
        self.site.ran()
        return result

    @staticmethod
    def _shape(hidden: Tensor, rest: tuple[Any, ...]) -> Hashable:
        shapes = tuple(x.shape if isinstance(x, Tensor) else x for x in (hidden, *rest))
        autocast = torch.is_autocast_enabled(hidden.device.type)
        return (shapes, hidden.dtype, hidden.requires_grad, torch.is_grad_enabled(), autocast)


class Layers:
    """The compiled layers of one place of a model, each made when it is first asked for."""

    def __init__(self, site: str, make: Callable[..., CompiledLayer] = CompiledLayer, **options: Any) -> None:
        """Take the report's name of the place, and what `make` takes beside the eager layer and the site."""
        self._site, self._make, self._options = site, make, options
        self._made: dict[Callable[..., Any], CompiledLayer] = {}

    def of(self, eager: Callable[..., Any]) -> Any:
        """The layer compiled, or as it is where the feature `compile` is off."""
        if not features.value("compile"):
            return eager
        if eager not in self._made:
            self._made[eager] = self._make(eager, sites.site(self._site), **self._options)
        return self._made[eager]

    def clear(self) -> None:
        """Drop all of them."""
        self._made.clear()


def _backward_too() -> contextlib.AbstractContextManager[Any]:
    """Compile a layer's backward with its forward: what the compiler raises is then raised where we can help.

    torch would do it inside the user's `loss.backward()`. Where this torch has no such option, it still does.
    """
    import torch._functorch.config as options

    if not hasattr(options, "force_non_lazy_backward_lowering"):
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[Any] = options.patch(force_non_lazy_backward_lowering=True)
    return patched


def compile_in_place(layers: Iterable[Any]) -> None:
    """Compile each layer of a working copy, once."""
    for layer in layers:
        if layer._compiled_call_impl is None:
            layer.compile(dynamic=False, backend=BACKEND)


def eager_again(layers: Iterable[Any]) -> None:
    """Undo `compile_in_place`."""
    for layer in layers:
        layer._compiled_call_impl = None
