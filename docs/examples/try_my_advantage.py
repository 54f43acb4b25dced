"""Compute the advantages of two groups."""

import torch

from slime_like.algorithms import compute_advantages

rewards, groups = torch.tensor([1.0, 0.0, 0.5, 3.0, 3.0]), [7, 7, 7, 9, 9]
assert compute_advantages(rewards, groups, "my_advantage:above_mean").tolist() == [0.5, 0.0, 0.0, 0.0, 0.0]
