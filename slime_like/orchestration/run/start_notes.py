"""What a user should know before the first step, although nothing of it is an error."""

import os
from collections.abc import Iterator
from contextlib import suppress

from slime_like.config import RunConfig
from slime_like.data.prompts import PromptSource
from slime_like.models.weight_files import WeightFilesError, stored_dtype
from slime_like.system.words import counted

_GSPO_LARGE = 0.01
"""The paper's bounds are 3e-4 and 4e-4 (arXiv:2507.18071, section 5.1), PPO's 0.2."""


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


def algorithm_notes(config: RunConfig) -> Iterator[str]:
    """Optimizer steps of different sizes; bounds that clip nothing."""
    algorithm = config.algorithm
    if algorithm.loss == "gspo" and min(algorithm.clip_low, algorithm.clip_high) >= _GSPO_LARGE:
        yield (
            f"algorithm.loss=gspo with clip_low={algorithm.clip_low:g} and clip_high={algorithm.clip_high:g} clips "
            "almost nothing: the ratio of a sequence varies far less than that of a token; the GSPO paper uses 3e-4 "
            "and 4e-4, with reduction: samples"
        )
    prompts, minibatches = config.rollout.prompts_per_step, config.algorithm.minibatches
    if prompts % minibatches:
        sizes = f"{prompts // minibatches} or {prompts // minibatches + 1}"
        yield (
            f"algorithm.minibatches={minibatches} does not divide rollout.prompts_per_step={prompts}: optimizer "
            f"steps have {sizes} prompts"
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


def core_notes(config: RunConfig) -> Iterator[str]:
    """More processes that compute at the same time than cores; for CPUs."""
    cores = len(os.sched_getaffinity(0))
    engine_ranks = 0 if config.supervised else config.rollout.num_engines * config.rollout.tensor
    for number, what in ((config.trainer.parallel.world_size, "trainer ranks"), (engine_ranks, "engine ranks")):
        if number > cores:
            yield f"{number} {what} share {counted(cores, 'core')}: they slow each other down"
