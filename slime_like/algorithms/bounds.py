"""Bounds of logprobs and log ratios, so that no difference, product or exponential of them overflows float32.

Values inside the bounds don't change. A value outside becomes the bound, with gradient 0. So a token that a masked
vocabulary forbids (logprob -inf) has finite ratios and trains nothing. NaN stays NaN, because it shows a fault.

The bound of log ratios is verl's (``verl/trainer/ppo/core_algos.py`` and ``rollout_corr_helper.py``). exp(20) is 4.9e8,
far beyond every clip, and its product with any advantage, and sums of such products, fit into float32.
"""

from torch import Tensor

LOG_RATIO_BOUND = 20.0
LOGPROB_BOUND = 10_000.0


def bounded_logprobs(logprobs: Tensor) -> Tensor:
    """Clamp logprobs, infinite ones too, to +-``LOGPROB_BOUND``."""
    return logprobs.clamp(-LOGPROB_BOUND, LOGPROB_BOUND)


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return ``log(pi / pi_other)`` of bounded logprobs: always finite, and 0 if both forbid the token."""
    return bounded_logprobs(logprobs) - bounded_logprobs(other_logprobs)


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """Return the exponential of log ratios clamped to +-``LOG_RATIO_BOUND``."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
