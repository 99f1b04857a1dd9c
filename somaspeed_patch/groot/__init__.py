"""GR00T N1.7 of LeRobot and of NVIDIA's package: the hooks that the adapter `groot` puts in.

backbone  Qwen3-VL: a frozen one once, without gradient, logits or loops over images
tokens    what the CPU knows of a batch's prompts
vision    the vision tower over images of one size
language  the language model's layers
dit, category_linear  the action head
"""
