"""Faster training of vision-language-action models, by patching the recipe you already have.

    import somaspeed_patch
    somaspeed_patch.patch()

import/patch:  patch() -> for each adapter: REQUIRES fits the installed host? -> PATCHES
               -> registry.apply (all or none) -> report
step:          host calls its own name -> adapter's hook -> kernels.<op>(...)
undo:          unpatch() -> ledger backwards -> vars() of every touched object as before
ab:            recipes/<run>.yaml -> arms as child processes, interleaved -> parity gate
               -> results JSON -> table

Importing this package imports neither torch nor any host.
"""

from somaspeed_patch._version import __version__
from somaspeed_patch.patching import patch, patched, unpatch
from somaspeed_patch.patching import snapshot as report
from somaspeed_patch.sites import Report

__all__ = ["Report", "__version__", "patch", "patched", "report", "unpatch"]
