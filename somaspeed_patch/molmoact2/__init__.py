"""MolmoAct2's training step when its language model and vision tower are frozen, and parts of it when not.

layout.py    which crops and pooled tokens belong to which sample, planned on the CPU
vision.py    vision tower and image pooling
attention.py attention of the tower, the pooling and the language model
context.py   the frozen language model: keys and values of every layer
expert.py    the action expert: one K/V a sample, flow timesteps folded into its query rows
forward.py   the flow-matching loss from these, in place of the host's
hooks.py     what also serves policies whose language model trains
"""
