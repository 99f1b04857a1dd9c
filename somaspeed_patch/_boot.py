"""Imported by somaspeed_patch.pth at the start of an interpreter whose environment holds SOMASPEED.

`SOMASPEED=1` means `patch()`; what `patch()` itself exports to its children is JSON; `SOMASPEED=0` is off.
A child must start whatever happens here, so every problem becomes one warning.
"""

from __future__ import annotations

import json
import logging
import os

from somaspeed_patch.patching import ENVIRONMENT, patch

log = logging.getLogger(__name__)


def boot(text: str) -> None:
    """Patch as the text of the environment variable says."""
    if text.strip().lower() in ("", "0", "off", "false", "no"):
        return
    try:
        if text.strip().lower() in ("1", "on", "true", "yes"):
            patch()
        else:
            wanted = json.loads(text)
            patch(*wanted["targets"], **wanted["features"])
    except (ValueError, KeyError, TypeError) as error:
        log.warning(
            "%s=%s: %s; this process stays native. Use %s=1, or 0.", ENVIRONMENT, text, error, ENVIRONMENT
        )


boot(os.environ.get(ENVIRONMENT, ""))
