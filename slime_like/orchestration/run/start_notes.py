"""Notes for the user before the first step. None of them is an error."""

from collections.abc import Iterator, Mapping, Sequence

from slime_like.config import RunConfig
from slime_like.config.trainer import FSDP
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions
from slime_like.system.words import counted

_GSPO_LARGE = 0.01
"""GSPO's paper uses 3e-4 and 4e-4 (arXiv:2507.18071, section 5.1), PPO uses 0.2."""

_BFLOAT16 = ("avx512_bf16", "amx_bf16")

_PROCESS_BYTES = 400 * 2**20
"""Memory of a rank that does not depend on the model: libraries and their workspace."""

_GRADIENT_BYTES, _MOMENT_BYTES = 4, 8
"""Bytes per parameter: float32 gradients, and AdamW's two moments."""


def data_notes(config: RunConfig, prompts: PromptSource) -> Iterator[str]:
    """Yield notes on prompts that are left out, and on rows that a step uses more than once."""
    rows, dropped = prompts.num_rows, prompts.dropped_prompts
    if dropped:
        yield (
            f"{dropped} of {rows + dropped} prompts ({dropped / (rows + dropped):.0%}) are longer than "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and are left out"
        )
    wanted = config.rollout.prompts_per_step
    if rows < wanted:
        yield f"{counted(rows, 'row')} for rollout.prompts_per_step={wanted}: a step uses some rows more than once"


def held_out_notes(prompts: PromptSource, datasets: Mapping[str, Sequence[Prompt]]) -> Iterator[str]:
    """Yield notes on held-out prompts that are also in the training data."""
    for name, held_out in datasets.items():
        if shared := prompts.num_shared(held_out):
            different = len({prompt.tokens for prompt in held_out})
            yield (
                f"{shared} of {counted(different, 'held-out prompt')} of {name} stand in the training data too: "
                "accuracy is not that of unseen prompts"
            )


def algorithm_notes(config: RunConfig) -> Iterator[str]:
    """Warn about bounds that clip nothing, and about a warm-up that outlasts the run."""
    algorithm = config.algorithm
    if algorithm.loss == "gspo" and min(algorithm.clip_low, algorithm.clip_high) >= _GSPO_LARGE:
        yield (
            f"algorithm.loss=gspo with clip_low={algorithm.clip_low:g} and clip_high={algorithm.clip_high:g} clips "
            "almost nothing: the ratio of a sequence varies far less than that of a token; the GSPO paper uses 3e-4 "
            "and 4e-4, with reduction: samples"
        )
    updates, warmup = config.total_updates, config.trainer.optimizer.warmup_steps
    if warmup > updates:
        yield (
            f"trainer.optimizer.warmup_steps={warmup} lasts longer than the run's {counted(updates, 'update')}: the "
            "learning rate never reaches trainer.optimizer.lr"
        )


def checkpoint_notes(config: RunConfig) -> Iterator[str]:
    """Warn if no checkpoint interval is set."""
    if config.steps > 1 and "every" not in config.checkpoint.model_fields_set:
        yield (
            f"a checkpoint is written after step {config.steps} alone: a run that ends before loses all steps; set "
            "checkpoint.every (0 if that is meant)"
        )


def memory_notes(config: RunConfig, dimensions: ModelDimensions, available: int) -> Iterator[str]:
    """Warn if the processes may need more than the ``available`` bytes. For CPUs; counts the minimum of every rank.

    Raises:
        ConfigError: models and optimizer states already need more.
    """
    parallel, optimizer, parameters = config.trainer.parallel, config.trainer.optimizer, dimensions.num_parameters
    engines = 0 if config.supervised or config.debug.load_rollouts else config.rollout.num_engines
    ranks, engine_ranks = parallel.world_size, engines * config.rollout.tensor
    replicas = 1 if config.trainer.backend == FSDP else ranks // (parallel.tensor * parallel.pipeline)
    whole = config.model.dtype == "float32"  # otherwise the optimizer also has float32 main weights
    weights, state = parameters * (4 if whole else 2), parameters * (_MOMENT_BYTES + (0 if whole else 4))
    processes = (ranks + engine_ranks + config.reference_workers) * _PROCESS_BYTES
    needed = replicas * (weights * (1 + config.reference_in_trainer) + parameters * _GRADIENT_BYTES)
    needed += state * (1 if optimizer.distributed else replicas) + weights * (engines + config.reference_workers)
    problem = (
        f"{counted(ranks, 'trainer rank')} and {counted(engine_ranks, 'engine rank')} need about "
        f"{(needed + processes) / 2**30:.1f} GiB of memory without activations, and {available / 2**30:.1f} GiB are "
        "free: use fewer ranks (trainer.parallel.data, rollout.num_engines) or a smaller model"
    )
    if needed > available:
        raise ConfigError(problem, code="memory")
    if needed + processes > available:
        yield problem


def processor_notes(config: RunConfig, capabilities: Mapping[str, object]) -> Iterator[str]:
    """Warn about bfloat16 on a processor without instructions for it. For CPUs.

    Args:
        capabilities: capabilities of the processor, in the format of ``torch.cpu.get_capabilities``.
    """
    if config.model.dtype == "bfloat16" and not any(capabilities.get(name) for name in _BFLOAT16):
        yield (
            "model.dtype=bfloat16: this processor has no instructions for it (AVX-512 BF16, AMX), and takes many times "
            "as long as in float32; set model.dtype: float32"
        )
