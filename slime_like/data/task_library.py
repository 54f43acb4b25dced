"""Rows from reasoning-gym, a library of generated tasks that can each judge an answer."""

import json
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf

from slime_like.errors import ConfigError

_CHECKED_ROWS = 8
_DRAWS_PER_ROW = 50
_SEED_STRIDE = 10_000_019
"""Distance between seeds. The library adds a row's number to the seed, so neighboring seeds would share rows."""


def task_rows(
    task: str, count: int, seed: int, settings: Mapping[str, str] = {}, system: bool = True, other: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield rows of one task: chat messages as ``prompt``; as ``answer``, the input of the reward ``reasoning_gym``.

    Args:
        seed: seed of the generator; the same seed gives the same rows.
        settings: settings of the task, as YAML text.
        system: whether each prompt begins with the library's request for ``<answer>`` tags.
        other: questions that no row may have.

    Raises ``ConfigError`` if the library is not installed, or lacks the task or setting; the task's answer does not
    survive JSON; or almost every question is in ``other``.
    """
    try:
        import reasoning_gym as library
        import reasoning_gym.factory
        import reasoning_gym.utils
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reasoning-gym is not usable ({error}); install the extra tasks: pip install -e '.[tasks]' in the clone",
            code="package-missing",
        ) from error
    if task not in library.factory.DATASETS:
        known = ", ".join(sorted(library.factory.DATASETS))
        raise ConfigError(f"TASK={task} is unknown; use one of {known}", code="task-unknown")
    draws = count * (_DRAWS_PER_ROW if other else 1)
    written = OmegaConf.from_dotlist([f"{name}={text}" for name, text in settings.items()])
    given: dict[str, Any] = dict(OmegaConf.to_container(written))  # type: ignore[arg-type]
    try:
        dataset = library.create_dataset(task, **given | {"size": draws, "seed": seed * _SEED_STRIDE})
    except (TypeError, ValueError, AssertionError) as error:
        problem = f"TASK={task}: {error or type(error).__name__}; correct --set"
        raise ConfigError(problem, code="task-settings") from error
    new = (entry for number in range(draws) if (entry := dataset[number])["question"] not in other)
    request = [{"role": "system", "content": library.utils.SYSTEM_PROMPTS["default"].strip()}] if system else []
    for number in range(count):
        if (entry := next(new, None)) is None:
            raise ConfigError(
                f"TASK={task}: only {number} of {count} questions in {draws} draws are not in --exclude; give other "
                "settings, or exclude fewer",
                code="task-exhausted",
            )
        row = {"task": task, **{name: entry[name] for name in ("question", "answer", "metadata")}}
        if number < _CHECKED_ROWS:
            _require_judged(library, row)
        prompt = [*request, {"role": "user", "content": entry["question"]}]
        yield {"prompt": prompt, "answer": json.dumps(row)}


def _require_judged(library: ModuleType, row: Mapping[str, Any]) -> None:
    """Require that the library accepts its own answer after JSON. Some tasks have no answer."""
    if row["answer"] is None:
        return
    try:
        score = library.factory.get_score_answer_fn(row["task"])(row["answer"], json.loads(json.dumps(row)))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"TASK={row['task']}: its rows cannot be written as JSON ({error})", code="task-rows"
        ) from error
    if score != 1.0:
        problem = f"its own answer gets {score} once it is read from a file; use another task"
        raise ConfigError(f"TASK={row['task']}: {problem}", code="task-rows")
