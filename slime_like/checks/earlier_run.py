"""What a run takes over from an earlier one: its checkpoint, or its rollouts."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from slime_like.config.run import RunConfig
from slime_like.data.dump_names import rollouts_name


def resume_problems(config: RunConfig) -> Iterator[str]:
    if config.resume in ("auto", "never") or Path(config.resume).is_dir():
        return  # what is in a directory is read, and compared, when the run starts
    yield (
        f"resume={config.resume} is neither auto nor never, nor a directory; give the path of a checkpoint, such as "
        f"{config.run_dir / 'checkpoints' / 'latest'}"
    )


def kept_rollout_problems(config: RunConfig) -> Iterator[str]:
    """Rollouts of an earlier run must cover this one's steps; without an engine nothing can be evaluated."""
    directory = config.debug.load_rollouts
    if directory is None:
        return
    if config.evaluation.files:
        yield (
            f"debug.load_rollouts={directory} starts no engine, so that evaluation.files cannot be sampled from; set "
            "evaluation.files: none and evaluation.every: 0 (and use slime-like eval on the exported model)"
        )
    if config.debug.shuffle_advantages:
        yield (
            "debug.shuffle_advantages=true permutes advantages as they are computed, and debug.load_rollouts="
            f"{directory} brings those that were kept; sample again, or set it to false"
        )
    if not directory.is_dir():
        yield f"debug.load_rollouts={directory} is not a directory; give one that debug.save_rollouts filled"
        return
    present = {file.name for file in directory.iterdir()}
    missing = [step for step in _trained_steps(config) if rollouts_name(step) not in present]
    if missing:
        yield (
            f"debug.load_rollouts={directory} lacks {rollouts_name(missing[0])}, and every one of steps={config.steps} "
            f"needs one; train for fewer steps, or keep more with debug.save_rollouts"
        )


def _trained_steps(config: RunConfig) -> Iterable[int]:
    """The steps that certainly will be trained: where a checkpoint is gone on from, only the last is certain."""
    fresh = not any((config.run_dir / "checkpoints").glob("step-*"))
    starts_over = config.resume == "never" or (config.resume == "auto" and fresh)
    return range(1 if starts_over else config.steps, config.steps + 1)
