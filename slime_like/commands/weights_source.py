"""A checkpoint that a command is given: of which kind it is, and where its model's dimensions are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_like.commands.command import has_flag
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.models.converted import MODEL, WEIGHTS, converted_problem, is_converted, training_checkpoint


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Flags that name the model (dimensions and precision), and the training checkpoint with its weights, if any."""

    flags: tuple[str, ...]
    weights: Path | None


def find_weights(checkpoint: Path, flags: Sequence[str]) -> WeightsSource:
    """Find the kind of a checkpoint and its model's dimensions.

    Raises:
        ConfigError: it is of no kind, a converted one with damaged files, or a training checkpoint whose model
            cannot be found.
    """
    if (checkpoint / "config.json").is_file():
        if has_flag(flags, "model.path"):
            problem = f"--model.path: CHECKPOINT={checkpoint} is the model already; leave it out"
            raise ConfigError(problem, code="flag-excluded")
        return WeightsSource(("--model.path", str(checkpoint)), None)
    weights = checkpoint / WEIGHTS
    if is_converted(checkpoint) and weights.is_dir():
        if damage := converted_problem(checkpoint):
            raise ConfigError(f"CHECKPOINT={checkpoint} {damage}", code="checkpoint-damaged")
        model_flags = () if has_flag(flags, "model.path") else ("--model.path", str(checkpoint / MODEL))
        return WeightsSource(model_flags, weights.resolve())
    if not (checkpoint / "state.json").is_file() or not weights.is_dir():
        raise ConfigError(f"CHECKPOINT={checkpoint} {_what_instead(checkpoint)}", code="wrong-checkpoint")
    run_config = checkpoint.resolve().parent.parent / "config.yaml"
    if run_config.is_file():
        config = load_config(run_config)
        model = ("--model.path", str(config.model.path), "--model.dtype", config.model.dtype)
        return WeightsSource((*model, "--trainer.backend", config.trainer.backend), weights.resolve())
    if not has_flag(flags, "model.path"):
        raise ConfigError(
            f"CHECKPOINT={checkpoint}: a training checkpoint does not hold its model's dimensions, and {run_config} "
            "does not exist; give --model.path, the Hugging Face directory that the run started from",
            code="model-unknown",
        )
    return WeightsSource((), weights.resolve())


def _what_instead(checkpoint: Path) -> str:
    if not checkpoint.is_dir():
        return "is not a directory; give a Hugging Face directory or a run's checkpoints/step-N"
    if (checkpoint / "checkpoints").is_dir():
        return "is a run directory; give its hf/, or checkpoints/latest in it"
    whole = training_checkpoint(checkpoint)
    if whole is not None:
        return f"is the {checkpoint.name}/ of a checkpoint; give {whole}"
    return (
        "is neither a Hugging Face directory (no config.json) nor a training checkpoint (no state.json beside "
        "trainer/); give one of these"
    )
