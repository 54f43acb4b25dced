"""Learning rate and weight decay of every optimizer step."""

import math

from slime_like.checks.schedule import total_updates
from slime_like.config import RunConfig


def learning_rate(config: RunConfig, update: int) -> float:
    """Rate of optimizer step ``update`` (from 1): linear warm-up from 0, then the decay to ``min_lr`` at the run's end.

    Step n of the warm-up runs at n / warmup_steps of the peak rate; the cosine is half a period.
    """
    settings = config.trainer.optimizer
    warmup = settings.warmup_steps
    if warmup and update <= warmup:
        return settings.lr * update / warmup
    if settings.decay == "constant":
        return settings.lr
    end = max(total_updates(config), warmup + 1)
    if update > end:
        return settings.min_lr
    passed = (update - warmup) / (end - warmup)
    remaining = 1.0 - passed if settings.decay == "linear" else 0.5 * (math.cos(math.pi * passed) + 1.0)
    return settings.min_lr + remaining * (settings.lr - settings.min_lr)


def weight_decay(config: RunConfig, update: int) -> float:
    """Weight decay of optimizer step ``update`` (from 1): constant, or linear towards ``final_weight_decay``."""
    settings = config.trainer.optimizer
    if settings.final_weight_decay is None:
        return settings.weight_decay
    passed = min(1.0, update / total_updates(config))
    return settings.weight_decay + passed * (settings.final_weight_decay - settings.weight_decay)
