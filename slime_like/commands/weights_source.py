"""The kind of a checkpoint that a command is given, and the dimensions of its model."""

from collections.abc import Sequence
from pathlib import Path

from slime_like.commands.command import has_flag
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.models.converted import MODEL, WEIGHTS, converted_problem, is_converted, training_checkpoint


def find_weights(checkpoint: Path, flags: Sequence[str]) -> tuple[Sequence[str], Path | None]:
    """Return flags that name the model and its precision, and the training checkpoint with the weights, if it is one.

    Raises ``ConfigError`` if it is not a checkpoint, it was converted and has damaged files, or its model is unknown.
    """
    named = has_flag(flags, "model.path")
    if (checkpoint / "config.json").is_file():
        if named:
            problem = f"--model.path: CHECKPOINT={checkpoint} is the model already; remove the flag"
            raise ConfigError(problem, code="flag-excluded")
        return ("--model.path", str(checkpoint)), None
    weights = checkpoint / WEIGHTS
    if is_converted(checkpoint) and weights.is_dir():
        if damage := converted_problem(checkpoint):
            raise ConfigError(f"CHECKPOINT={checkpoint} {damage}", code="checkpoint-damaged")
        return () if named else ("--model.path", str(checkpoint / MODEL)), weights.resolve()
    if not (checkpoint / "state.json").is_file() or not weights.is_dir():
        whole = training_checkpoint(checkpoint) or "a Hugging Face directory or a run's checkpoints/step-N"
        raise ConfigError(f"CHECKPOINT={checkpoint} is not a checkpoint; give {whole}", code="wrong-checkpoint")
    run_config = checkpoint.resolve().parent.parent / "config.yaml"
    if run_config.is_file():
        config = load_config(run_config)
        lora = config.model.lora
        model = ["--model.path", str(config.model.path), "--model.dtype", config.model.dtype]
        if lora.is_set:
            model += ["--model.lora.rank", str(lora.rank), "--model.lora.alpha", str(lora.alpha)]
            model += ["--model.lora.targets", *lora.targets]
        return (*model, "--trainer.backend", config.trainer.backend), weights.resolve()
    if not named:
        raise ConfigError(
            f"CHECKPOINT={checkpoint}: a training checkpoint does not contain its model's dimensions, and {run_config} "
            "does not exist; give --model.path, the Hugging Face directory that the run started from",
            code="model-unknown",
        )
    return (), weights.resolve()
