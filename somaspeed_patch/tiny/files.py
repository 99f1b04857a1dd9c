"""Files made once a machine and user, in the folder for temporary files.

A folder is written under another name and renamed when it is whole: processes that build at the same time,
and builds that are killed, leave nothing half-written under the name that is read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path


def ensure(name: str, decided_by: Sequence[object], write: Callable[[Path], None]) -> Path:
    """The folder of one kind of files, written now if this machine has none.

    Args:
        name: how the folder's name begins.
        decided_by: all that decides what the files hold; others make another folder. Their reprs count.
        write: fills the folder it is given, which exists.
    Raises: OSError: as of `write`, when no other process has written the folder meanwhile.
    """
    folder = Path(tempfile.gettempdir()) / f"{name}-{_digest(decided_by)}"
    if not folder.is_dir():
        _build(folder, write)
    return folder


@cache
def sources(files: tuple[Path, ...], packages: tuple[str, ...]) -> str:
    """The text of `files` and the versions of `packages`: the code that writes, and what it calls."""
    return repr([[version(name) for name in packages], [file.read_text() for file in files]])


def _build(folder: Path, write: Callable[[Path], None]) -> None:
    """Write beside `folder`, then rename; whoever renames first wins."""
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        write(draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _digest(decided_by: Sequence[object]) -> str:
    """Also of the user, the only one who can read the folder."""
    told = repr((*decided_by, os.getuid()))
    return hashlib.sha256(told.encode()).hexdigest()[:12]
