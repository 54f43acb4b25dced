"""File names of saved rollouts, without torch."""


def rollouts_name(step: int) -> str:
    return f"step-{step:06d}.pt"
