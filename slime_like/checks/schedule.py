"""How many optimizer steps a run has, and whether its schedule fits them. Needs neither torch nor Megatron."""

from collections.abc import Iterator
from typing import Any

from slime_like.config.run import RunConfig


def total_updates(config: RunConfig) -> int:
    """Optimizer steps of the whole run."""
    return config.steps * config.algorithm.epochs * config.algorithm.minibatches


def depends_on_length(config: RunConfig) -> bool:
    """Whether the schedule depends on where the run ends: such a run cannot be made longer."""
    return config.trainer.optimizer.decay != "constant" or config.trainer.optimizer.final_weight_decay is not None


def schedule(config: RunConfig) -> dict[str, Any]:
    """Settings that the learning rate and the weight decay of every update follow from: a resumed run keeps them."""
    settings = config.trainer.optimizer
    found = {name: getattr(settings, name) for name in ("lr", "min_lr", "warmup_steps", "decay", "weight_decay")}
    if settings.final_weight_decay is not None:
        found["final_weight_decay"] = settings.final_weight_decay
    if depends_on_length(config):
        found["updates"] = total_updates(config)
    return found


def minibatch_problems(config: RunConfig) -> Iterator[str]:
    """Do a step's samples suffice for its minibatches and replicas?"""
    prompts, minibatches = config.rollout.prompts_per_step, config.algorithm.minibatches
    samples = 1 if config.supervised else config.rollout.samples_per_prompt
    replicas = config.trainer.parallel.data
    if minibatches > prompts:
        yield (
            f"algorithm.minibatches={minibatches} is more than rollout.prompts_per_step={prompts}: each minibatch "
            f"needs a prompt; use at most {prompts}"
        )
    elif prompts // minibatches * samples < replicas:
        yield (
            f"trainer.parallel.data={replicas} is more than the {prompts // minibatches * samples} samples of a "
            "minibatch: each data-parallel replica needs one; lower it, or raise rollout.prompts_per_step"
        )


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """Why the schedule of learning rate and weight decay cannot be followed, with the remedy."""
    optimizer = config.trainer.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield (
            f"trainer.optimizer.min_lr={optimizer.min_lr:g} is above trainer.optimizer.lr={optimizer.lr:g}; "
            "use at most the peak rate"
        )
    final = optimizer.final_weight_decay
    if final is not None and final < optimizer.weight_decay:
        yield (
            f"trainer.optimizer.final_weight_decay={final:g} is below trainer.optimizer.weight_decay="
            f"{optimizer.weight_decay:g}, and weight decay only grows; use at least that"
        )
    updates = total_updates(config)
    if optimizer.decay != "constant" and optimizer.warmup_steps >= updates:
        yield (
            f"trainer.optimizer.warmup_steps={optimizer.warmup_steps} leaves nothing of the run's {updates} optimizer "
            f"steps to decay={optimizer.decay}; use at most {updates - 1}, or trainer.optimizer.decay: constant"
        )
