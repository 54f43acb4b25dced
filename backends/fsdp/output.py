"""Output scaling of a Hugging Face model, for a head that computes logits in chunks."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from slime_like.errors import ConfigError

_FACTORS = (("logits_scaling", -1), ("logit_scale", 1), ("lm_head_multiplier", 1))
"""Names under which configurations have a factor of the logits, and the power that it enters with."""

_COLUMNS = 8
"""What matrix products want the hidden size to be a multiple of."""


@dataclass(frozen=True, slots=True)
class Output:
    """``logits = cap * tanh((factor * (hidden @ weight.T + bias)) / cap)``; without a cap, its argument times ``cap``.

    Whether a model's own head is that is compared when the trainer starts (``backends.fsdp.own_forward``).

    Attributes:
        factor: of the logits, before the cap.
        cap: bound that logits approach.
    """

    factor: float
    cap: float | None

    @classmethod
    def of(cls, config: Any) -> Self:
        """From a transformers configuration.

        Raises:
            ConfigError: factor and cap at once, whose order is not known; or one that is not a number above 0.
        """
        factor = 1.0
        for name, power in _FACTORS:
            factor *= (_positive(config, name) or 1.0) ** power
        cap = _positive(config, "final_logit_softcapping")
        if cap is not None and factor != 1.0:
            raise ConfigError(
                f"model.path: final_logit_softcapping={cap:g} beside another factor of the logits is not computed"
            )
        return cls(factor, cap)

    def projection(self, head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states and weights whose product is the logits; a bias is a further column of both."""
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
        raise ConfigError(f"model.path: {name}={value!r} of its config.json must be above 0; correct that file")
    return float(value)
