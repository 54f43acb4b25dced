"""The coefficient of the KL in the reward."""

from collections.abc import Mapping
from typing import Any

from slime_like.config.algorithm import KLRewardConfig

_KL = "kl_reward_coef"


class KLCoefficient:
    """The coefficient of the KL in the reward, which may adapt (Ziegler et al., arXiv:1909.08593, section 2.2).

    Attributes:
        value: the coefficient of the next step.
    """

    def __init__(self, settings: KLRewardConfig) -> None:
        self._settings = settings
        self.value = settings.coef

    def adapt(self, kl: float) -> None:
        """Raise the coefficient if a step's ``kl`` is above the target, and lower it below, by at most a fifth of
        ``gain``."""
        if (target := self._settings.target) is not None:
            self.value *= 1 + self._settings.gain * min(0.2, max(-0.2, kl / target - 1))

    def state_dict(self) -> dict[str, Any]:
        return {} if self._settings.target is None else {_KL: self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's value. One without a target starts at the setting."""
        if self._settings.target is not None:
            self.value = state.get(_KL, self.value)
