"""Bounds on the gap of engine and trainer logprobs, on the fixed tokens of a sync's probe."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_FLOAT32_BOUND = 1e-4
_BFLOAT16_BOUND = 0.15
_LEAST_SPREAD = 0.05


@dataclass(frozen=True, slots=True)
class ProbeGap:
    """Result of the probe.

    In float32 the largest difference counts. In bfloat16 it says little: a logit of 16 is rounded to eighths, a trained
    model's logprobs of random tokens are off by 0.2 where both sides are sound, and an untrained model's by a
    thousandth. There the root mean square of the differences counts, as a share of how much the logprobs themselves
    vary from token to token: 0.01 to 0.03 for a sound small model, 0.35 to 2 where one matrix of it is wrong.

    Attributes:
        largest: largest difference of a token's logprob, in nats.
        share: root mean square of the differences over the standard deviation of the trainer's logprobs (or 0.05).
        bound: on ``largest`` in float32, on ``share`` in bfloat16.
        in_float32: which of both counts.
    """

    largest: float
    share: float
    bound: float
    in_float32: bool

    @classmethod
    def between(cls, got: np.ndarray, expected: np.ndarray, dtype: str, bound: float | None) -> ProbeGap:
        """Of an engine's logprobs (n,) and the trainer's; ``bound`` of ``None`` is the one of the model's ``dtype``."""
        in_float32 = dtype == "float32"
        gaps = np.abs(got.astype(np.float64) - expected)
        share = float(np.sqrt(np.mean(gaps**2)) / max(float(np.std(expected)), _LEAST_SPREAD))
        usual = _FLOAT32_BOUND if in_float32 else _BFLOAT16_BOUND
        return cls(float(gaps.max()), share, usual if bound is None else bound, in_float32)

    @property
    def is_sound(self) -> bool:
        """False for what is not a number, too."""
        return (self.largest if self.in_float32 else self.share) <= self.bound

    def __str__(self) -> str:
        if self.in_float32:
            return f"by up to {self.largest:.2e} (bound {self.bound:.0e})"
        return (
            f"by up to {self.largest:.2e}, with a root mean square of {self.share:.2f} of how much the trainer's vary "
            f"(bound {self.bound:g})"
        )
