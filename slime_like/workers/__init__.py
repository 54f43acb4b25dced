"""Processes for what nobody vouches for: reward functions and environments, with bounds on time, memory and CPU."""
