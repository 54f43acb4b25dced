"""Output scaling of a Hugging Face model, for a head that computes logits in chunks."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from slime_like.errors import ConfigError

_FACTORS = (("logits_scaling", -1), ("logit_scale", 1), ("lm_head_multiplier", 1))
"""Names of logit factors in configurations, and the power that each one is applied with."""

_COLUMNS = 8
"""Multiple that matrix products require of the hidden size."""


@dataclass(frozen=True, slots=True)
class Output:
    """``logits = cap * tanh((factor * (hidden @ weight.T + bias)) / cap)``; without a cap, only the factor applies.

    When the trainer starts, ``backends.fsdp.own_forward`` checks that the model's head computes this.

    Attributes:
        factor: factor of the logits, before the cap.
        cap: bound that logits approach.
    """

    factor: float
    cap: float | None

    @classmethod
    def of(cls, config: Any) -> Self:
        """Read factor and cap from a transformers configuration.

        Raises:
            ConfigError: both factor and cap are set, whose order is unknown; or one is not a number above 0.
        """
        factor = 1.0
        for name, power in _FACTORS:
            factor *= (_positive(config, name) or 1.0) ** power
        cap = _positive(config, "final_logit_softcapping")
        if cap is not None and factor != 1.0:
            raise ConfigError(
                f"model.path: final_logit_softcapping={cap:g} together with another factor of the logits is not "
                "supported; use another model"
            )
        return cls(factor, cap)

    def projection(self, head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and weights whose product is the logits. A bias becomes an additional column of both."""
        weight: Tensor = head.weight  # type: ignore[assignment]
        bias = getattr(head, "bias", None)
        if bias is None:
            return hidden, weight
        padding = hidden.new_zeros(hidden.shape[0], _COLUMNS)
        padding[:, 0] = 1
        columns = torch.cat([bias[:, None], bias.new_zeros(len(bias), _COLUMNS - 1)], dim=1)
        return torch.cat([hidden, padding], dim=1), torch.cat([weight, columns], dim=1)


def _positive(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"model.path: {name}={value!r} in its config.json is not above 0; correct that file")
    return float(value)
