"""Flow-SDE PPO that encodes each observation once.

    collect -> queue -> learner -> publish -> stage -> collect

Rollouts send the frozen backbone's features with each action chunk; the learner trains action expert and
value head from them and never runs the backbone. A queue slot is freed after the new heads are staged, so
no sample is born stale.
"""
