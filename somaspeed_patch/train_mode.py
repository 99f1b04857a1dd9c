"""`module.train(mode)` at every step, for a module that is in that mode already.

LeRobot's loop calls `policy.train()` before each update. `nn.Module.train` then sets one attribute on each
module, through `__setattr__`; MolmoAct2 does so three times for its 1,763 modules: 12 to 20 ms of an H200's
host in which the GPU has nothing to do, because the loop has just read the loss. Looking whether anything
changed takes 0.3 ms.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


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
