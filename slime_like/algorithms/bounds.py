"""Bounds of logprobs and log ratios, so that no difference, product or exponential of them overflows float32.

Inside the bounds nothing changes; where one holds, the value is the bound's and the gradient 0. A token that a masked
vocabulary forbids, of logprob -inf, therefore has finite ratios and teaches nothing. NaN stays NaN: it is a fault.

The bound of log ratios is that of verl (``verl/trainer/ppo/core_algos.py`` and ``rollout_corr_helper.py``): exp(20) is
4.9e8, far beyond every clip, and float32 still holds its product with any advantage and any sum of such products.
"""

from torch import Tensor

LOG_RATIO_BOUND = 20.0
LOGPROB_BOUND = 10_000.0


def bounded_logprobs(logprobs: Tensor) -> Tensor:
    """Logprobs within +-``LOGPROB_BOUND``, so also those that are infinite."""
    return logprobs.clamp(-LOGPROB_BOUND, LOGPROB_BOUND)


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """``log(pi / pi_other)`` of bounded logprobs: always finite, and 0 where both forbid the token."""
    return bounded_logprobs(logprobs) - bounded_logprobs(other_logprobs)


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """The ratio to a log ratio within +-``LOG_RATIO_BOUND``."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
