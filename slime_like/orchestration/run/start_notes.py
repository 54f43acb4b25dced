"""Notes for the user before the first step. None of them is an error."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.config.roles import CRITIC
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import WeightFilesError, header_shapes, keeps_type
from slime_like.orchestration.trainer.checkpoint import Checkpoint
from slime_like.system.words import pluralize


def data_notes(
    max_prompt_tokens: int, wanted: int, prompts: PromptSource, datasets: Mapping[str, Sequence[Prompt]] | None = None
) -> Iterator[str]:
    """Yield notes on prompts that are left out, repeated within a step, or also in the held-out ``datasets``."""
    rows, dropped = prompts.num_rows, prompts.dropped_prompts
    if dropped:
        share = f"{dropped} of {rows + dropped} prompts ({dropped / (rows + dropped):.0%})"
        yield f"{share} are longer than data.max_prompt_tokens={max_prompt_tokens} and are left out"
    if rows < wanted:
        yield f"{pluralize(rows, 'row')} for rollout.prompts_per_step={wanted}: a step uses some rows more than once"
    for name, held_out in (datasets or {}).items():
        if shared := prompts.num_shared(held_out):
            different = len({tuple(prompt.input.token_ids) for prompt in held_out})
            yield f"{shared} of {pluralize(different, 'held-out prompt')} of {name} are also in the training data"


def settings_notes(config: RunConfig) -> Iterator[str]:
    """Warn about an adapter of another base, experts without factors, a warm-up that outlasts the run, an unset
    checkpoint interval, and files that are not evaluated."""
    base, model = config.model.lora.base, config.model.path
    if base is not None and Path(base).resolve() != model.resolve():
        yield f"the adapter in model.lora.path names {base} as its base; its factors are added to model.path={model}"
    with suppress(WeightFilesError):  # a check reports it
        stored = header_shapes(model).items() if config.model.lora.is_set else ()
        if any(".experts." in name and len(shape) == 3 for name, shape in stored):
            yield "this model's experts have no factors (model.lora), so they stay as they are"
    updates, warmup = config.total_updates, config.trainer.optimizer.warmup_steps
    if warmup > updates:
        problem = f"is longer than the run ({pluralize(updates, 'update')}), which never reaches the learning rate"
        yield f"trainer.optimizer.warmup_steps={warmup} {problem}"
    if config.steps > 1 and "every" not in config.checkpoint.model_fields_set:
        remedy = "set checkpoint.every (0 if this is intended)"
        yield f"the only checkpoint is written after step {config.steps}, so a failure before loses all steps; {remedy}"
    if config.evaluation.files and not config.starts_engines:
        yield "evaluation.files is not evaluated, because this run starts no engines; run `slime-like eval`"


def critic_note(checkpoint: Checkpoint | None, needs_critic: bool) -> str:
    """State that the run leaves out the checkpoint's critic; empty if it does not."""
    left = checkpoint is not None and not needs_critic and (checkpoint.path / CRITIC).is_dir()
    return "the checkpoint's critic is left out, because algorithm.advantage needs none" if left else ""


def router_note(model: Path, rate: float) -> str:
    """State whether biases of the model's routers change; empty without such biases."""
    dimensions = ModelDimensions.from_checkpoint(model)
    has_biases = dimensions.moe_sigmoid
    if dimensions.attention.unsupported:
        with suppress(WeightFilesError):  # there are none if the run starts with converted weights
            has_biases = any(map(keeps_type, header_shapes(model)))
    if not has_biases:
        return ""
    fate = "move against the experts' load after each optimizer step" if rate else "are frozen"
    return f"the routers' biases {fate} (trainer.router_bias_rate={rate:g})"
