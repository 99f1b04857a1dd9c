"""Which layout to take: memory and communication of a recipe on so many GPUs, before anything runs.

meta.py         the recipe's model without memory, as its host builds it
sizes.py        its parameters, unit by unit
activations.py  what a sample's forward keeps for its backward
traffic.py      bytes that each rank sends a step
plan.py         layouts for a number of GPUs, what each needs, which to take
table.py        the same as a table
cli.py          `somaspeed layout plan`
"""
