"""File names of saved rollouts, without torch."""


def rollouts_name(step: int) -> str:
    """Return the file name of the rollouts of ``step``."""
    return f"step-{step:06d}.pt"
