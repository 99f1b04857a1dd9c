"""Layouts: how one training run lies on many devices, chosen by one string.

    layout.py     `dp_replicate=2,dp_shard=4` -> Layout, checked against the number of ranks
    mesh.py       the ranks in four axes, and whose batch is whose
    families.py   per model family, as data: which modules are gathered together
    units.py      run our own code in a unit's place, so that FSDP2 gathers what it reads
    shard.py      torch's fully_shard over a family's units
    launch.py     what accelerate is told, and what it calls instead of its own wrapping
    lerobot_flags.py  LeRobot's own --parallelism flags (0.6.2) over our units
    gathering.py  all weights at once, for what acts on an observation
    states.py     the host's checkpoint format out of sharded state, and back into it
    pipeline.py   pp: which blocks a rank keeps (partition, pipeline_refusals), and what of a step it changes
                  (pipeline_step: the loss that counts, gradients and norm over all stages)
    stages.py     pp at a forward's cuts, by transfer.py; collect.py brings the stages' state to rank 0
    tensor_parallel.py  tp: parallelize_module by the plans of tp_plans.py, with what tp_ops.py adds
    hf_trainer.py       the same under transformers.Trainer; hf_checkpoints, zero_config, zero_checkpoint
    pi05_layers.py  pi0.5 on its native path: one function reads two layers
    thawed.py     parameters that were frozen at the start and train now
    unused.py     trainable parameters that never get a gradient, by name
    evaluation.py the main process evaluates alone, with whole weights

The engine is the host's: accelerate's FSDP2, which is torch's.
"""
