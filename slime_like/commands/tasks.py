"""``slime-like make-tasks``."""

import argparse
import json
from pathlib import Path

from slime_like.commands.command import Command, at_least_one, given_path, option
from slime_like.errors import ConfigError
from slime_like.system.disk import whole_file
from slime_like.system.words import counted

_NUMBER = r"[{name: reasoning_gym, options: {pattern: '-?\d+'}}]"


def _run(given: argparse.Namespace, _: list[str]) -> int:
    pairs = [text.partition("=") for text in given.set]
    if wrong := [text for text, (name, sign, _) in zip(given.set, pairs, strict=True) if not (name and sign)]:
        raise ConfigError(f"--set={wrong[0]}: must be NAME=VALUE", code="argument-value")
    out: Path = given.out
    if out.suffix != ".jsonl" or out.is_dir():
        raise ConfigError(f"OUT={out} must be a file whose name ends with .jsonl", code="output-unusable")
    if out.exists():
        raise ConfigError(f"OUT={out} exists; give a new file, or remove this one", code="output-exists")
    from slime_like.data.task_library import task_rows

    settings = {name: value for name, _, value in pairs}
    other = _questions(given.exclude) if given.exclude is not None else ()
    rows = task_rows(given.task, given.count, given.seed, settings, not given.plain, other)
    lines = [json.dumps(row) for row in rows]
    try:
        with whole_file(out) as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise ConfigError(f"OUT={out} cannot be written ({error.strerror})", code="output-unusable") from error
    print(f"{out}: {counted(given.count, 'row')} of {given.task}; reward.functions: [{{name: reasoning_gym}}]")
    if (different := len({json.dumps(json.loads(line)["prompt"]) for line in lines})) < given.count:
        print(f"different prompts: {different} of {given.count}")
    if given.plain:
        print(f"Without tags, the reward needs a pattern of the answer, e.g. for the last number: {_NUMBER}")
    return 0


def _questions(path: Path) -> set[str]:
    """Return the questions in a file that this command wrote."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return {json.loads(json.loads(line)["answer"])["question"] for line in lines}
    except (OSError, ValueError, LookupError, TypeError) as error:
        problem = f"--exclude={path}: {type(error).__name__} ({error}); give a file that make-tasks has written"
        raise ConfigError(problem, code="argument-value") from error


COMMAND = Command(
    "make-tasks",
    "write rows of a task of reasoning-gym, for the reward of the same name",
    _run,
    "Write generated rows of one task of reasoning-gym (the extra `tasks`) for data.train or evaluation.files.",
    (
        option("task", metavar="TASK", help="name of a task of reasoning-gym, e.g. chain_sum"),
        option("out", type=given_path, metavar="OUT.jsonl", help="file to write"),
        option("--count", type=at_least_one, default=1000, help="rows (default: %(default)s)"),
        option("--seed", type=int, default=0, help="seed of the generator (default: %(default)s)"),
        option("--exclude", type=given_path, metavar="FILE.jsonl", help="leave out the questions in this file"),
        option("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the task, e.g. max_terms=3"),
        option("--plain", action="store_true", help="without the system prompt that asks for <answer> tags"),
    ),
    takes_flags=False,
)
