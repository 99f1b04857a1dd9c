"""A name that stands for the tiny GR00T's files, as if they were a repository on the hub.

A training command, and the configuration that it saves, then read the same on every machine. LeRobot has the
backbone's configuration in its code and asks the hub for the backbone's tokenizer: while a size is installed,
both are the tiny one's, for every GR00T in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from somaspeed_patch.tiny.replaced import Replaced
from somaspeed_patch.tiny_groot import assets, checkpoint, configs
from somaspeed_patch.tiny_groot.sizes import by_name

CHECKPOINT = "somaspeed/tiny-groot"

_replaced = Replaced()
_installed: list[str] = []  # the size, if one is


def install(size: str) -> None:
    """Let the name stand for the files of `size`, which are built when first asked for.

    A second call only changes the size.
    """
    from lerobot.policies.groot import groot_n1_7, processor_groot

    uninstall()
    _replaced.put(groot_n1_7, "snapshot_download", partial(_files, size))
    _replaced.put(groot_n1_7, configs.BACKBONE, partial(configs.backbone, by_name(size)))
    _replaced.put(processor_groot, "_build_n1_7_processor", partial(_processor, size))
    _installed.append(size)


def uninstall() -> None:
    """Put LeRobot's own functions back; nothing happens when none were replaced."""
    _replaced.restore()
    _installed.clear()


@contextmanager
def installed(size: str) -> Iterator[None]:
    """Install a size inside the block; afterwards what was installed before, if anything, is so again."""
    before = [*_installed]
    install(size)
    try:
        yield
    finally:
        uninstall()
        for name in before:
            install(name)


def _files(size: str, function: Callable[..., str]) -> Callable[..., str]:
    """huggingface_hub's `function`, except that our name gives the local folder."""

    def download(repo_id: str, **options: Any) -> str:
        return str(assets.ensure(size)) if repo_id == CHECKPOINT else function(repo_id, **options)

    return download


def _processor(size: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """LeRobot's `function`, except that the backbone's name on the hub means our local files."""
    from lerobot.policies.groot.configuration_groot import GROOT_N1_7_BACKBONE_MODEL as BACKBONE

    def build(model_name: str = BACKBONE) -> Any:
        local = model_name == BACKBONE
        return function(str(assets.ensure(size) / checkpoint.BACKBONE) if local else model_name)

    return build
