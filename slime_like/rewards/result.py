"""What a reward function returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RewardResult:
    """One function's word on one response.

    Attributes:
        reward: finite number, unweighted.
        success: the function counts the sample as solved.
        metadata: whatever explains the reward; small, and expressible in JSON.
    """

    reward: float
    success: bool
    metadata: dict[str, Any] = field(default_factory=dict)
