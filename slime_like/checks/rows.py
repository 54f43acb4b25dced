"""Checks of data files, and the row for trying custom code. The run reads and checks all rows before Ray starts."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from slime_like.config.run import RunConfig
from slime_like.data.encoding import answer_text
from slime_like.data.formats import in_format
from slime_like.data.messages import read_messages, spells_messages
from slime_like.data.rows import SUFFIXES, data_files, read_rows
from slime_like.errors import DataError
from slime_like.interfaces.environment import Task
from slime_like.system.words import from_here


def training_file_problems(config: RunConfig) -> Iterator[str]:
    data = config.data
    if not data.training_files and not config.debug.load_rollouts:
        yield "data.train=[] is empty; give at least one .jsonl or .parquet file, or sources in data.mixture"
    yield from file_problems("data.train", data.train)
    for number, source in enumerate(data.mixture):
        yield from file_problems(f"data.mixture.{number}.files", source.files)


def held_out_file_problems(config: RunConfig) -> Iterator[str]:
    return file_problems("evaluation.files", config.evaluation.files)


def file_problems(field: str, paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        try:
            files = data_files(path)
        except DataError as error:
            yield f"{field}={error}"
            continue
        for file in files:
            if not file.is_file():
                yield f"{field}={file} does not exist{from_here(file)}; give an existing file, directory or pattern"
            elif file.suffix not in SUFFIXES:
                how = "`datasets.load_dataset(...)[split].to_json('train.jsonl')` writes one"
                yield f"{field}={file} has an unknown type; give {' or '.join(SUFFIXES)} files ({how})"


def first_row(config: RunConfig) -> tuple[Task, str] | None:
    """Return the first row with an answer, with messages joined to a text, and as JSON; ``None`` without any."""
    for data in config.data.parts:
        for file in data.train or config.evaluation.files:
            with suppress(DataError, TypeError, ValueError):
                for whole in read_rows(file):
                    row = in_format(whole, data)
                    prompt, answer = row.get(data.prompt_key) or "", row.get(data.answer_key)
                    settings = None if data.environment_key is None else row.get(data.environment_key)
                    if not isinstance(prompt, str) or spells_messages(prompt):
                        messages = read_messages(row, data.prompt_key, "bad-prompt")
                        prompt = "\n".join(message["content"] for message in messages)
                    if answer is not None:
                        task = Task(prompt, answer_text(answer), settings if isinstance(settings, dict) else {})
                        return task, json.dumps(whole.values, default=str)
    return None
