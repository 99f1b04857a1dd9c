"""A pi0.5 small enough for a CPU: the same LeRobot code, other widths and depths.

For lerobot-train, name this package as a discovery plugin; it then shrinks pi0.5 for the whole process:

    lerobot-train --tiny.discover_packages_path=somaspeed_patch.tiny_pi05 --policy.type=pi05 ...

`SOMASPEED_TINY_PI05=small` picks another size (`sizes.py`). Importing this package changes nothing: discovery
imports its submodules, and `activate.py` is the one that acts. `shrink.shrunk()` limits it to a `with` block.
"""
