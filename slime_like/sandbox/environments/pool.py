"""Steps of many conversations in a few worker processes with bounds on time, memory and CPU. Belongs to one loop."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_like.config.rollout import EnvironmentConfig
from slime_like.errors import EnvironmentFailure
from slime_like.interfaces.environment import Step, Task
from slime_like.sandbox import single_items
from slime_like.sandbox.pool import WorkerKind
from slime_like.sandbox.single_items import CodePool, SingleItems

_MODULE = "slime_like.sandbox.environments.worker"
_SUSPICIOUS_STEPS = 8


class EnvironmentPool(CodePool):
    """``config.workers`` processes that take one step at a time each; a hung or dead one is replaced.

    The kernel ends the workers together with the thread that called ``start``, which is the loop's.
    """

    def __init__(self, config: EnvironmentConfig, logs: tuple[Path, str] | None = None) -> None:
        kind = WorkerKind(
            _MODULE,
            {"name": config.name, "options": config.options},
            who="an environment worker",
            section="rollout.environment",
            subject=f"rollout.environment.name={config.name}",
            error=EnvironmentFailure,
        )
        workers = SingleItems(
            kind,
            config,
            what=f"environment {config.name}",
            items="steps",
            suspicious=_SUSPICIOUS_STEPS,
            code="environment-fails",
            logs=logs,
        )
        super().__init__(workers)

    @property
    def judges_cut_turns(self) -> bool:
        """Whether the environment is asked about a turn that its limit cut off; known after ``start``."""
        return bool(self._workers.about["judges_cut_turns"])

    async def reset(self, task: Task) -> None:
        """Try the state in which a conversation begins. Raises as ``step`` does."""
        await self._workers.ask_one({"task": asdict(task), "first": True, "response": None})

    async def step(self, task: Task, state: Any, response: str, first: bool, truncated: bool = False) -> Step:
        """Run one step, the first of a conversation with its reset; waits for a free worker.

        Raises ``NoOutcome`` for this step alone, and ``EnvironmentFailure`` where none of the first steps of all had
        an outcome, or workers do not start any more.
        """
        item = {"task": asdict(task), "state": state, "response": response, "first": first, "truncated": truncated}
        return Step(**await self._workers.ask_one(item))


def start_problems(config: EnvironmentConfig, task: Task | None) -> list[str]:
    """Problems that a worker finds when it makes the environment, with its options, and resets it once for ``task``."""

    async def reset(pool: EnvironmentPool) -> None:
        if task is not None:
            await pool.reset(task)

    return single_items.start_problems(
        lambda: EnvironmentPool(config.model_copy(update={"workers": 1})),
        EnvironmentFailure,
        reset,
        f"rollout.environment.name={config.name} cannot be reset for the first row of the data",
    )
