"""`module.train(mode)` at every step, for a module that is in that mode already.

LeRobot's loop calls `policy.train()` before each update. `nn.Module.train` then sets one attribute on each
module, through `__setattr__`; MolmoAct2 does so three times for its 1,763 modules: 12 to 20 ms of an H200's
host in which the GPU has nothing to do, because the loop has just read the loss. Looking whether anything
changed takes 0.3 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from somaspeed_patch import frozen


def set_directly(module: nn.Module, mode: bool) -> bool:
    """Set the mode of a module and of all below, without `nn.Module.__setattr__` on each of them.

    For a tree whose modes change twice a step, where looking spares nothing: GR00T's 1,289 modules, of which
    the frozen ones are put back into evaluation in the forward, take 5 ms at once and 0.4 ms so.

    Returns: False, and nothing is set, where a module has a `train` of its own.
    """
    every = list(frozen.walk(module))
    if not isinstance(mode, bool) or not all(map(_has_torchs_train, every)):
        return False
    for child in every:
        vars(child)["training"] = mode
    return True


def _has_torchs_train(module: nn.Module) -> bool:
    """Whether `module.train` is nn.Module's, or transformers' where that does no more."""
    train = type(module).train
    if "train" in vars(module):
        return False
    if train is nn.Module.train:
        return True
    transformers = sys.modules.get("transformers.modeling_utils")
    own = None if transformers is None else vars(transformers.PreTrainedModel).get("train")
    return train is own and not getattr(module, "use_kernels", True)


@dataclass(frozen=True)
class _Left:
    """How one call left the tree. The root is not among the modules: it would keep itself alive."""

    setting: Hashable
    root: tuple[bool, tuple[nn.Module | None, ...]]
    flags: tuple[tuple[nn.Module, bool], ...]
    children: tuple[tuple[nn.Module, tuple[nn.Module | None, ...]], ...]
    """Of the modules that have any."""

    def still(self, root: nn.Module) -> bool:
        return (
            self.root == _root(root)
            and all(module.training is flag for module, flag in self.flags)
            and all(tuple(module._modules.values()) == children for module, children in self.children)
        )


_left: WeakKeyDictionary[nn.Module, _Left] = WeakKeyDictionary()


def already(module: nn.Module, setting: Hashable) -> bool:
    """Whether the tree is as the last call that `note` was told of has left it, and that had this setting."""
    left = _left.get(module)
    return left is not None and left.setting == setting and left.still(module)


def note(module: nn.Module, setting: Hashable) -> None:
    """Remember how `module.train` has left the tree.

    Args:
        setting: the mode, and what else decides which module gets which.
    """
    below = [child for child in module.modules() if child is not module]
    _left[module] = _Left(
        setting=setting,
        root=_root(module),
        flags=tuple((child, child.training) for child in below),
        children=tuple((child, tuple(child._modules.values())) for child in below if child._modules),
    )


def release() -> None:
    """Forget every module."""
    _left.clear()


def _root(module: nn.Module) -> tuple[bool, tuple[Any, ...]]:
    return module.training, tuple(module._modules.values())
