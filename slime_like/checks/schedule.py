"""How many optimizer steps a run has, and whether its schedule fits them. Needs neither torch nor Megatron."""

from collections.abc import Iterator

from slime_like.config.run import RunConfig


def total_updates(config: RunConfig) -> int:
    """Optimizer steps of the whole run."""
    return config.steps * config.algorithm.epochs * config.algorithm.minibatches


def minibatch_problems(config: RunConfig) -> Iterator[str]:
    """Do a step's samples suffice for its minibatches and replicas?"""
    prompts, minibatches = config.rollout.prompts_per_step, config.algorithm.minibatches
    samples = 1 if config.supervised else config.rollout.samples_per_prompt
    replicas = config.trainer.parallel.data
    if minibatches > prompts:
        yield (
            f"algorithm.minibatches={minibatches} is more than rollout.prompts_per_step={prompts}, and a group stays "
            f"in one minibatch; use at most {prompts}"
        )
    elif prompts // minibatches * samples < replicas:
        yield (
            f"trainer.parallel.data={replicas} is more than the {prompts // minibatches * samples} samples of a "
            "minibatch, and every replica needs one; lower it, or raise rollout.prompts_per_step"
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
            f"steps to decay={optimizer.decay}; use fewer, or decay: constant"
        )
