"""What is wrong with the files of a configuration that is refused anyway: told in the same list, not in the next one.

A run reads its rows with the model's tokenizer, which takes a second to import, once its configuration is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from slime_like.checks.families import family_problems
from slime_like.checks.model_directories import find_dimensions, weight_problems
from slime_like.config.run import RunConfig
from slime_like.data.encoding import RowEncoder
from slime_like.data.rows import SUFFIXES, read_rows
from slime_like.data.tokenizer import missing_tokenizer
from slime_like.errors import ConfigError, DataError

_MAX_ROWS = 20_000
"""Of each file: a second."""


def with_problems_of_files(error: ConfigError, trains: bool) -> ConfigError:
    """The error of a configuration with wrong fields, and what is wrong with the files that the others name."""
    if error.rest is None:
        return error
    return ConfigError([*error.problems, *_model_problems(error.rest, trains), *data_problems(error.rest, trains)])


def data_problems(config: RunConfig, trains: bool) -> list[str]:
    """No tokenizer, and the first bad row of each file, as far as it can be told without one. What is not there, is no
    checkpoint or is a file of another type is left to others."""
    is_checkpoint = (config.model.path / "config.json").is_file()
    missing = missing_tokenizer(config.model.path) if is_checkpoint else None
    return [*([] if missing is None else [missing]), *_row_problems(config, trains)]


def _row_problems(config: RunConfig, trains: bool) -> list[str]:
    supervised = trains and config.supervised
    groups: list[tuple[Sequence[Path], bool]] = []
    if trains and config.debug.load_rollouts is None:
        groups.append((config.data.train, supervised))
    if not supervised:
        groups += [([file], False) for file in config.evaluation.files]
    readable = [(files, need) for files, need in groups if files and all(map(_is_readable, files))]
    return list(dict.fromkeys(problem for files, need in readable for problem in _bad_rows(config, files, need)))


def _is_readable(file: Path) -> bool:
    return file.suffix in SUFFIXES and file.is_file()


def _bad_rows(config: RunConfig, files: Sequence[Path], need_response: bool) -> Iterator[str]:
    encoder, found = RowEncoder(_AnyTokenizer(), config.data, need_response), False
    for file in files:
        try:
            for row in islice(read_rows(file), _MAX_ROWS):
                found = True
                encoder.encode(row)
        except DataError as error:
            found = True
            yield str(error)
    if not found:
        yield f"{', '.join(map(str, files))}: no rows; give a file with rows"


def _model_problems(config: RunConfig, trains: bool) -> list[str]:
    path = config.model.path
    if not path.is_dir():
        return []
    dimensions, problems = find_dimensions(path, "model.path")
    if dimensions is None:
        return problems
    return [*(family_problems(config, dimensions) if trains else ()), *weight_problems(path, "model.path", dimensions)]


class _AnyTokenizer:
    """Takes whatever only a model's own tokenizer could refuse."""

    chat_template = ""
    eos_token_id = 0

    def __len__(self) -> int:
        return 2**31

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0]

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        return ""
