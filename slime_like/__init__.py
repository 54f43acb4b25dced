"""slime-like: a Megatron-style 3D-parallel RL post-training backend."""

__version__ = "0.1.0"
