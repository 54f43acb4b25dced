"""Changed settings of a planned run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime_like.config import RunConfig
from slime_like.planning.hardware import Hardware
from slime_like.planning.planned_run import PlannedRun, Workload

Changes = Mapping[str, str]
"""Fields of the configuration, with dots, and their values as a flag has them."""


def flags(changes: Changes) -> list[str]:
    """``changes`` as arguments of a command."""
    return [word for name, value in changes.items() for word in (f"--{name}", value)]


def changed(run: PlannedRun, changes: Changes) -> PlannedRun:
    """``run`` with other settings; the model stays.

    Raises:
        pydantic.ValidationError: a value is not one of its field's.
    """
    values = run.config.model_dump(mode="json", exclude_unset=True)
    for name, value in changes.items():
        *path, leaf = name.split(".")
        section = values
        for part in path:
            section = section.setdefault(part, {})
        section[leaf] = _scalar(value)
    config = RunConfig.model_validate(values)
    workload = Workload.of(config, run.workload.mean_prompt, run.workload.mean_response)
    return replace(run, config=config, hardware=Hardware.of(config), workload=workload)


def _scalar(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
