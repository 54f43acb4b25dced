"""``slime-like make-tiny-model`` and ``slime-like make-tasks``: models and data to try things with."""

import argparse
import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_like.commands.command import Command, at_least_one, option, parse_path
from slime_like.config.run import MAX_SEED
from slime_like.errors import ConfigError
from slime_like.models.dimensions import FAMILIES
from slime_like.system.disk import whole_file
from slime_like.system.words import pluralize

_CHECKED_ROWS = 8
_DRAWS_PER_ROW = 50
_SEED_STRIDE = 10_000_019
"""Distance between seeds. The library adds a row's number to the seed, so neighboring seeds would share rows."""
_NUMBER = r"[{name: reasoning_gym, options: {pattern: '-?\d+'}}]"


def _make_tiny_model(arguments: argparse.Namespace, _: list[str]) -> int:
    out, seed = arguments.out, arguments.seed
    from slime_like.checks.run_files import directory_problem

    if problem := directory_problem(out):
        raise ConfigError(f"OUT={out} {problem}", code="output-unusable")
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed={seed} must be 0 to {MAX_SEED}", code="field-range")
    if out.is_dir() and any(out.iterdir()) and not arguments.force:
        problem = f"OUT={out} is not empty; give another directory, or --force to write into it"
        raise ConfigError(problem, code="output-not-empty")
    from slime_like.examples.tiny_model import make_arithmetic_data, make_calculator_data, make_tiny_model

    make_tiny_model(out, family=arguments.family, seed=seed)
    make_arithmetic_data(out / "data", seed=seed)
    make_calculator_data(out / "data" / "calculator", seed=seed)
    print(f"model: {out}\ndata:  {out / 'data'}\ntrain: {shlex.join(_first_training(out, arguments.family))}")
    return 0


def _first_training(out: Path, family: str) -> list[str]:
    """Return a command that trains on demonstrations, because an untrained model would get no rewards.

    It names no recipe, so it works in every directory.
    """
    flags = {
        "algorithm.loss": "sft",
        "model.path": str(out),
        "data.train": str(out / "data" / "sft.jsonl"),
        "data.max_prompt_tokens": "48",
        "trainer.optimizer.lr": "0.002",
        "run_dir": str(out / "run"),
    } | ({} if FAMILIES[family].megatron else {"trainer.backend": "fsdp"})
    return ["slime-like", "train", *(word for name, value in flags.items() for word in (f"--{name}", value))]


TINY_MODEL = Command(
    "make-tiny-model",
    "write a tiny Hugging Face checkpoint and arithmetic data",
    _make_tiny_model,
    "Write a tiny, randomly initialized Hugging Face checkpoint into OUT, sums of two numbers into\n"
    "OUT/data (train.jsonl, sft.jsonl, eval.jsonl), and products for the calculator environment into\n"
    "OUT/data/calculator. Nothing is downloaded. The model's sequences have at most 1024 tokens, so set\n"
    "data.max_prompt_tokens below its default, e.g. to 48. The last line printed is a command that trains\n"
    "on the sums.",
    (
        option("out", type=parse_path, metavar="OUT", help="directory to write"),
        option("--family", choices=FAMILIES, default="qwen3", help="model family (default: %(default)s)"),
        option("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)"),
        option("--force", action="store_true", help="write into OUT even if it contains files"),
    ),
    takes_flags=False,
)


def _make_tasks(given: argparse.Namespace, _: list[str]) -> int:
    pairs = [text.partition("=") for text in given.set]
    if wrong := [text for text, (name, sign, _) in zip(given.set, pairs, strict=True) if not (name and sign)]:
        raise ConfigError(f"--set={wrong[0]}: must be NAME=VALUE", code="argument-value")
    out: Path = given.out
    if out.suffix != ".jsonl" or out.is_dir():
        raise ConfigError(f"OUT={out} must be a file whose name ends with .jsonl", code="output-unusable")
    if out.exists():
        raise ConfigError(f"OUT={out} exists; give a new file, or remove this one", code="output-exists")
    settings = {name: value for name, _, value in pairs}
    other = _questions(given.exclude) if given.exclude is not None else ()
    rows = task_rows(given.task, given.count, given.seed, settings, not given.plain, other)
    lines = [json.dumps(row) for row in rows]
    try:
        with whole_file(out) as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise ConfigError(f"OUT={out} cannot be written ({error.strerror})", code="output-unusable") from error
    print(f"{out}: {pluralize(given.count, 'row')} of {given.task}; reward.functions: [{{name: reasoning_gym}}]")
    if (different := len({json.dumps(json.loads(line)["prompt"]) for line in lines})) < given.count:
        print(f"different prompts: {different} of {given.count}")
    if given.plain:
        print(f"Without tags, the reward needs a pattern of the answer, e.g. for the last number: {_NUMBER}")
    return 0


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
    from omegaconf import OmegaConf

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


def _questions(path: Path) -> set[str]:
    """Return the questions in a file that this command wrote."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return {json.loads(json.loads(line)["answer"])["question"] for line in lines}
    except (OSError, ValueError, LookupError, TypeError) as error:
        problem = f"--exclude={path}: {type(error).__name__} ({error}); give a file that make-tasks has written"
        raise ConfigError(problem, code="argument-value") from error


TASKS = Command(
    "make-tasks",
    "write rows of a task of reasoning-gym, for the reward of the same name",
    _make_tasks,
    "Write generated rows of one task of reasoning-gym (the extra `tasks`) for data.train or evaluation.files.",
    (
        option("task", metavar="TASK", help="name of a task of reasoning-gym, e.g. chain_sum"),
        option("out", type=parse_path, metavar="OUT.jsonl", help="file to write"),
        option("--count", type=at_least_one, default=1000, help="rows (default: %(default)s)"),
        option("--seed", type=int, default=0, help="seed of the generator (default: %(default)s)"),
        option("--exclude", type=parse_path, metavar="FILE.jsonl", help="leave out the questions in this file"),
        option("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the task, e.g. max_terms=3"),
        option("--plain", action="store_true", help="without the system prompt that asks for <answer> tags"),
    ),
    takes_flags=False,
)
