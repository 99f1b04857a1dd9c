"""A MolmoAct2 small enough for a CPU: the same LeRobot code on a checkpoint of other widths and depths.

For lerobot-train, name this package as a discovery plugin; two names then stand for files on this machine:

    lerobot-train --tiny.discover_packages_path=somaspeed_patch.tiny_molmoact2 --policy.type=molmoact2 \
        --policy.checkpoint_path=somaspeed/tiny-molmoact2 \
        --policy.discrete_action_tokenizer=somaspeed/tiny-molmoact2-fast ...

The files have random weights and are built once, in a cache folder (`assets.py`).
`SOMASPEED_TINY_MOLMOACT2=small` picks another size (`sizes.py`). Importing this package changes nothing:
discovery imports its submodules, and `activate.py` is the one that acts.
"""
