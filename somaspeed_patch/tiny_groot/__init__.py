"""A GR00T N1.7 small enough for a CPU: the same LeRobot code on a checkpoint of other widths and depths.

For lerobot-train, name this package as a discovery plugin; one name then stands for files on this machine:

    lerobot-train --tiny.discover_packages_path=somaspeed_patch.tiny_groot --policy.type=groot \
        --policy.base_model_path=somaspeed/tiny-groot --policy.max_state_dim=16 --policy.max_action_dim=16 ...

The files have random weights and are built once, in a cache folder (`assets.py`).
`SOMASPEED_TINY_GROOT=small` picks another size (`sizes.py`); "full" has the 132 dimensions that LeRobot takes
by default. Importing this package changes nothing: discovery imports its submodules, and `activate.py` is the
one that acts. It acts in one process: data-loader workers that preprocess must be forked, not spawned.
"""
