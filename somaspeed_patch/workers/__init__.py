"""Preprocessing of LeRobot's training batches in the data-loader workers, and repeated batches for A/B runs.

steps           which steps of a preprocessor give the same in a worker, and why the others stay
collate         what runs in a worker, and what is left to do for its batches in the trainer
inline          small tensors on their way through a worker's queue
shared_memory   whether the queue to the trainer can hold such batches
trainer         the loop of LeRobot's train(), seen from the call that prepares its loaders
cached          the first batches of a run, again and again
hooks           what the adapter `lerobot_workers` puts into accelerate, torch and LeRobot
"""
