"""`somaspeed rl RECIPE`: a whole RL run from one YAML file.

    recipe -> build -> run: iterations, checkpoints, evaluations, metrics -> results

The parts that learn are in `somaspeed_patch.rl`; here is what makes a run of them: what it is made of, what
is left of it on disk, and how it ends when somebody stops it.
"""
