"""LeRobot's plugin discovery: `--somaspeed.discover_packages_path=somaspeed_patch.lerobot_plugin`.

LeRobot imports the named package, and all its submodules, before it parses the policy. `SOMASPEED=0`
switches it off.
"""

import os

from somaspeed_patch.patching import ENVIRONMENT, patch

if os.environ.get(ENVIRONMENT, "1") == "1":  # else off, or patched already by _boot with its own settings
    patch()
