"""How kept rollouts are named. Apart from reading them, since that needs torch."""

from __future__ import annotations


def rollouts_name(step: int) -> str:
    """File name of the rollouts of ``step``."""
    return f"step-{step:06d}.pt"
