"""Steps of many conversations in a few worker processes with limits on time, memory and CPU."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_like.config.rollout import EnvironmentConfig
from slime_like.errors import EnvironmentFailure
from slime_like.interfaces.environment import Step, Task
from slime_like.sandbox.pool import WorkerKind
from slime_like.sandbox.single_items import NoOutcome, SingleItems


class EnvironmentPool(SingleItems):
    """``config.workers`` processes that each run one step at a time. A hung or dead process is replaced.

    A pool belongs to one event loop. The kernel ends the workers when that loop's thread ends.
    """

    def __init__(self, config: EnvironmentConfig, logs: tuple[Path, str] | None = None) -> None:
        kind = WorkerKind(
            "slime_like.sandbox.environments.worker",
            {"name": config.name, "options": config.options},
            section="rollout.environment",
            subject=f"rollout.environment.name={config.name}",
            error=EnvironmentFailure,
        )
        super().__init__(kind, config, logs, items="steps", code="environment-fails")

    @property
    def judges_cut_turns(self) -> bool:
        """True if the environment receives turns that a token limit cut off. Known after ``start``."""
        return bool(self.about["judges_cut_turns"])

    async def step(self, task: Task, state: Any, response: str, first: bool, truncated: bool = False) -> Step:
        """Wait for a free worker and run one step. The first step of a conversation includes its reset.

        Raises:
            NoOutcome: this step failed.
            EnvironmentFailure: all first steps failed, or workers no longer start.
        """
        item = {"task": asdict(task), "state": state, "response": response, "first": first, "truncated": truncated}
        return Step(**await self.ask_one(item))


def start_problems(config: EnvironmentConfig, task: Task | None) -> list[str]:
    """Let a worker create the environment and reset it for ``task``, if given. Return the problems."""
    pool = EnvironmentPool(config.model_copy(update={"workers": 1}))
    if task is None:
        return pool.start_problems()
    item = {"task": asdict(task), "first": True, "response": None}

    async def reset() -> list[str]:
        try:
            await pool.ask_one(item)
        except NoOutcome as failed:
            what = f"rollout.environment.name={config.name} cannot be reset for the first row of the data"
            return [f"{what}: {failed}; correct it, or the row"]
        return []

    return pool.start_problems(reset)
