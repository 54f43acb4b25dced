"""Are the files of rows there, and of a type that is read?"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from slime_like.config.run import RunConfig
from slime_like.data.rows import SUFFIXES


def training_file_problems(config: RunConfig) -> Iterator[str]:
    if not config.data.train and not config.debug.load_rollouts:
        yield "data.train=[] is empty; give at least one .jsonl or .parquet file"
    yield from _file_problems("data.train", config.data.train)


def held_out_file_problems(config: RunConfig) -> Iterator[str]:
    return _file_problems("evaluation.files", config.evaluation.files)


def _file_problems(field: str, files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        if file.is_dir():
            yield f"{field}={file} is a directory; give {' or '.join(SUFFIXES)} files"
        elif file.suffix not in SUFFIXES:
            yield f"{field}={file} is of an unknown type; give {' or '.join(SUFFIXES)} files"
        elif not file.is_file():
            yield f"{field}={file} does not exist; give an existing file"
