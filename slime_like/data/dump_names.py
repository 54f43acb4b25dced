"""File names of kept rollouts, without torch."""


def rollouts_name(step: int) -> str:
    """File name of the rollouts of ``step``."""
    return f"step-{step:06d}.pt"
