"""A run's directory at its start: what is resumed, what is moved aside, and which settings have changed since."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_like.config import RunConfig
from slime_like.config.fields import all_fields, value_text
from slime_like.config.load import load_config, save_config
from slime_like.errors import ConfigError
from slime_like.observability.metrics import METRICS_FILE
from slime_like.orchestration.checkpoints import Checkpoint

CONFIG_FILE, SUMMARY_FILE = "config.yaml", "summary.json"
_TOLD = 8  # changed settings named; more make no sentence


def find_checkpoint(config: RunConfig) -> Checkpoint | None:
    """What ``resume`` asks for; ``None`` means a new start.

    Raises:
        CheckpointError: a path was given, or ``latest`` exists, and cannot be read.
    """
    if config.resume == "never":
        return None
    if config.resume != "auto":
        return Checkpoint.read(Path(config.resume))
    latest = config.run_dir / "checkpoints" / "latest"
    return Checkpoint.read(latest) if latest.is_symlink() else None


def prepare_run_dir(config: RunConfig) -> tuple[Checkpoint | None, list[str]]:
    """Make the directory, save the configuration in it, and find what to resume.

    An earlier run of the directory that is not the one resumed is moved aside. A configuration that differs from the
    earlier start's is saved beside that one, not over it.

    Returns:
        The checkpoint to go on from, if any, and the settings that have changed since, as "field: before -> now".

    Raises:
        ConfigError: the run has finished.
        CheckpointError: what is to be resumed cannot be.
    """
    checkpoint = find_checkpoint(config)
    ours = checkpoint is not None and checkpoint.path.is_relative_to(config.run_dir.resolve())
    if checkpoint is not None:
        _require_resumable(checkpoint, config, ours)
    if not ours and (config.run_dir / METRICS_FILE).exists():
        _move_aside(config.run_dir)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    changed = _save_config(config, checkpoint.step) if checkpoint is not None and ours else []
    save_config(config, config.run_dir / CONFIG_FILE)
    return checkpoint, changed


def write_summary(config: RunConfig, summary: dict[str, Any]) -> None:
    """The closing figures; their presence says that the run has ended in good order."""
    path = config.run_dir / SUMMARY_FILE
    path.write_text(json.dumps({"steps": config.steps, **summary}, indent=1) + "\n", encoding="utf-8")


def _require_resumable(checkpoint: Checkpoint, config: RunConfig, ours: bool) -> None:
    if not config.debug.load_rollouts:
        checkpoint.data_position()  # raises before anything starts
    if ours and checkpoint.step >= config.steps and (config.run_dir / SUMMARY_FILE).exists():
        raise ConfigError(
            [
                f"steps={config.steps}: the run in {config.run_dir} has finished {checkpoint.step} steps; raise steps, "
                "choose another run_dir, or set resume: never to start anew"
            ]
        )


def _move_aside(run_dir: Path) -> None:
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(aside)


def _save_config(config: RunConfig, step: int) -> list[str]:
    """Keep the earlier configuration where this one differs; what differs."""
    path = config.run_dir / CONFIG_FILE
    if not path.is_file():
        return []
    try:
        changed = _differences(load_config(path, []), config)
    except ConfigError as error:
        changed = [f"what {path} says is no longer understood ({error.problems[0]})"]
    if changed:
        path.replace(path.with_name(f"config.until-step-{step:06d}.yaml"))
    return changed if len(changed) <= _TOLD else [*changed[:_TOLD], f"and {len(changed) - _TOLD} more"]


def _differences(before: RunConfig, now: RunConfig) -> list[str]:
    return [
        f"{name}: {value_text(_value(before, name))} -> {value_text(_value(now, name))}"
        for name in all_fields()
        if name not in ("resume", "run_dir", "cluster.address") and _value(before, name) != _value(now, name)
    ]


def _value(config: RunConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
