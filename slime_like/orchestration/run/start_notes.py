"""What a user should know before the first step, although nothing of it is an error."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from slime_like.config import RunConfig
from slime_like.config.trainer import FSDP
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import WeightFilesError, stored_dtype
from slime_like.system.words import counted

_GSPO_LARGE = 0.01
"""The paper's bounds are 3e-4 and 4e-4 (arXiv:2507.18071, section 5.1), PPO's 0.2."""

_BFLOAT16 = ("avx512_bf16", "amx_bf16")

_GEOMETRIC_WIDE = 0.1
"""Errors of single tokens, of either sign, average out over a response."""

_PROCESS_BYTES = 400 * 2**20
"""Of a rank, without what depends on the model: libraries and their work space."""

_GRADIENT_BYTES, _MOMENT_BYTES = 4, 8
"""Per parameter: float32 gradients, and AdamW's two moments."""


def data_notes(config: RunConfig, prompts: PromptSource) -> Iterator[str]:
    """Prompts that are left out, and rows that a step takes more than once."""
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
    """Held-out prompts that are trained on, too."""
    for name, held_out in datasets.items():
        if shared := prompts.num_shared(held_out):
            different = len({prompt.tokens for prompt in held_out})
            yield (
                f"{shared} of {counted(different, 'held-out prompt')} of {name} stand in the training data too: "
                "accuracy is not that of unseen prompts"
            )


def algorithm_notes(config: RunConfig) -> Iterator[str]:
    """Optimizer steps of different sizes; bounds that clip nothing."""
    algorithm = config.algorithm
    if algorithm.loss == "gspo" and min(algorithm.clip_low, algorithm.clip_high) >= _GSPO_LARGE:
        yield (
            f"algorithm.loss=gspo with clip_low={algorithm.clip_low:g} and clip_high={algorithm.clip_high:g} clips "
            "almost nothing: the ratio of a sequence varies far less than that of a token; the GSPO paper uses 3e-4 "
            "and 4e-4, with reduction: samples"
        )
    low, high = algorithm.importance_low, algorithm.importance_high
    masks_geometric = algorithm.importance_correction != "none" and algorithm.importance_level == "geometric"
    if masks_geometric and min(1 - low, high - 1) >= _GEOMETRIC_WIDE:
        yield (
            f"algorithm.importance_level=geometric with importance_low={low:g} and importance_high={high:g} bounds "
            "almost nothing: the geometric mean of a response's ratios stays within hundredths of 1; set bounds as "
            "near, e.g. 0.99 and 1.01"
        )
    updates, warmup = config.total_updates, config.trainer.optimizer.warmup_steps
    if warmup > updates:
        yield (
            f"trainer.optimizer.warmup_steps={warmup} lasts longer than the run's {counted(updates, 'update')}: the "
            "learning rate never reaches trainer.optimizer.lr"
        )
    prompts, minibatches = config.rollout.prompts_per_step, config.algorithm.minibatches
    if prompts % minibatches:
        sizes = f"{prompts // minibatches} or {prompts // minibatches + 1}"
        yield (
            f"algorithm.minibatches={minibatches} does not divide rollout.prompts_per_step={prompts}: optimizer "
            f"steps have {sizes} prompts"
        )


def checkpoint_notes(config: RunConfig) -> Iterator[str]:
    """Warn where no checkpoint interval is set."""
    if config.steps > 1 and "every" not in config.checkpoint.model_fields_set:
        yield (
            f"a checkpoint is written after step {config.steps} alone: a run that ends before loses all steps; set "
            "checkpoint.every (0 if that is meant)"
        )


def support_notes(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    """What bounds ``top_p`` or ``min_p`` beside them, in a vocabulary that has more tokens."""
    rollout = config.rollout
    if rollout.top_k <= 0 and 0 < rollout.bounded_top_k < dimensions.vocab_size:
        cut = f"rollout.top_p={rollout.top_p:g}" if rollout.top_p < 1.0 else f"rollout.min_p={rollout.min_p:g}"
        yield (
            f"{cut} is drawn from the {rollout.bounded_top_k} likeliest tokens, the most that training reads; set "
            "rollout.top_k for fewer"
        )


def precision_notes(config: RunConfig) -> Iterator[str]:
    """Weights of ``model.path`` that are computed in fewer bits than they are stored in."""
    with suppress(WeightFilesError):  # reported where the weights are loaded
        stored, computed = stored_dtype(config.model.path), config.model.dtype
        if computed == "bfloat16" and stored in ("float16", "float32", "float64"):
            yield (
                f"model.dtype={computed} rounds the weights of {config.model.path}, which are stored in {stored}; "
                "set model.dtype: float32 to avoid it"
            )


def memory_notes(config: RunConfig, dimensions: ModelDimensions, available: int) -> Iterator[str]:
    """More bytes than are available to the processes that compute; for CPUs. What every rank needs at least counts.

    Raises:
        ConfigError: the models and optimizer states alone are more.
    """
    parallel, optimizer, parameters = config.trainer.parallel, config.trainer.optimizer, dimensions.num_parameters
    engines = 0 if config.supervised or config.debug.load_rollouts else config.rollout.num_engines
    ranks, engine_ranks = parallel.world_size, engines * config.rollout.tensor
    replicas = 1 if config.trainer.backend == FSDP else ranks // (parallel.tensor * parallel.pipeline)
    whole = config.model.dtype == "float32"  # else the optimizer has main weights in float32, too
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
    """bfloat16 without instructions for it; for CPUs.

    Args:
        capabilities: of the processor, as ``torch.cpu.get_capabilities`` names them.
    """
    if config.model.dtype == "bfloat16" and not any(capabilities.get(name) for name in _BFLOAT16):
        yield (
            "model.dtype=bfloat16: this processor has no instructions for it (AVX-512 BF16, AMX), and takes many times "
            "as long as in float32; set model.dtype: float32"
        )


def core_notes(config: RunConfig) -> Iterator[str]:
    """More processes that compute at the same time than cores; for CPUs."""
    cores = len(os.sched_getaffinity(0))
    engine_ranks = 0 if config.supervised else config.rollout.num_engines * config.rollout.tensor
    for number, what in ((config.trainer.parallel.world_size, "trainer ranks"), (engine_ranks, "engine ranks")):
        if number > cores:
            yield f"{number} {what} share {counted(cores, 'core')}: they slow each other down"
