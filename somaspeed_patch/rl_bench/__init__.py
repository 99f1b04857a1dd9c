"""What RL costs at full size on one GPU: the learner by itself, and whole iterations with real rollouts."""
