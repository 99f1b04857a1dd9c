"""A/B runs of a training recipe: does the patched arm learn the same, and how much faster is it?

    recipe.py    a YAML file -> Recipe: the host's command, the arms, the gate's tolerances
    runner.py    arms as child processes, interleaved A B B A; each leaves a steps file and a log
    recorder.py  inside the child: one line an update (loss, grad norm, seconds of each phase, memory)
    steps.py     reads those lines back
    gate.py      parity of loss and grad norm, step by step; red means no speed figure
    results.py   figures over repeats -> results.json
    table.py     results.json -> the terminal, results.md

Measured throughput is of the whole update as the user's run has it: real loader, real optimizer, equal batch.
"""
