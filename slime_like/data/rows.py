r"""Rows of prompt files, one at a time, each with its location, and the row formats of published datasets.

- ``gsm8k`` (openai/gsm8k): ``question``; the answer is the part of ``answer`` after ``####``.
- ``math`` (hendrycks/competition_math, MATH-500): ``problem``; ``answer``, or the last box of ``solution``.
- ``dapo`` (BytedTsinghua-SIA/DAPO-Math-17k and other files for verl): ``prompt``, chat messages;
  ``reward_model.ground_truth``.
- ``openr1`` (open-r1/OpenR1-Math-220k): ``problem``, ``answer``.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from slime_like.config import DataConfig
from slime_like.errors import ConfigError, DataError, Problem
from slime_like.system.words import extract_boxed, pluralize

SUFFIXES = (".jsonl", ".parquet", ".arrow")
_MOST_SHOWN, _MOST_LINES = 20, 8


@dataclass(frozen=True, slots=True)
class Row:
    """One row with its location: the line of a JSONL file, or the row number (from 1) of a Parquet file."""

    path: Path
    line: int
    values: dict[str, Any]

    def get(self, key: str) -> Any:
        """Return the value under ``key``, or under the dotted path that it spells; ``None`` if there is neither."""
        if key in self.values:
            return self.values[key]
        value: Any = self.values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def fault(self, code: str, problem: str, remedy: str = "") -> DataError:
        return DataError(problem, code=code, who=f"{self.path}:{self.line}", remedy=remedy)

    def token_ids(self, key: str, given: Any, vocab_size: int, owner: str) -> list[int]:
        """Return ``given``, the value under ``key``, if it is a list of ids that the ``owner`` has."""
        if not isinstance(given, list) or any(isinstance(t, bool) or not isinstance(t, int) for t in given):
            raise self.fault("bad-token-ids", f"{key!r} must be a list of integers", "give token ids")
        outside = [token for token in given if not 0 <= token < vocab_size]
        if outside:
            problem = f"{key!r} has the id {outside[0]}, but the {owner} has ids 0 to {vocab_size - 1}"
            raise self.fault("unknown-token-id", problem)
        return given

    def require_text(self, ids: Iterable[int], placeholders: frozenset[int]) -> None:
        """Reject ids that represent images or videos, which would be read as ordinary tokens."""
        if placeholders and (found := placeholders.intersection(ids)):
            problem = f"has the token {min(found)}, which represents images or videos, but only text is supported"
            raise self.fault("not-text", problem, "remove the row")


class BadRows:
    """Faults of single rows, collected to report them together. Rows with the same fault share a sentence."""

    def __init__(self) -> None:
        self._alike: dict[tuple[str, str], list[DataError]] = {}

    @contextmanager
    def collect(self) -> Iterator[None]:
        try:
            yield
        except DataError as fault:
            self._alike.setdefault((fault.code, fault.problem), []).append(fault)

    def raise_any(self) -> None:
        """Raise the only fault, or ``ConfigError`` with one problem per kind of fault, in order, up to twenty."""
        kinds = list(self._alike.values())
        places = [faults[0].who.rpartition(":") for faults in kinds]
        files = list(dict.fromkeys(path for path, _, _ in places))  # in the order of reading
        order = sorted(range(len(kinds)), key=lambda kind: (files.index(places[kind][0]), int(places[kind][2])))
        kinds = [kinds[kind] for kind in order]
        if kinds and len(kinds) == len(kinds[0]) == 1:
            raise kinds[0][0]
        problems = [Problem(faults[0].code, _sentence(faults)) for faults in kinds[:_MOST_SHOWN]]
        if (more := len(kinds) - len(problems)) > 0:
            problems.append(Problem("bad-rows", f"and {pluralize(more, 'more kind')} of bad rows"))
        if problems:
            raise ConfigError(problems)


def _sentence(faults: Sequence[DataError]) -> str:
    others = [fault.who.rpartition(":")[2] for fault in faults[1:]]
    named = ", ".join(others[:_MOST_LINES]) + (f" and {len(others) - _MOST_LINES} more" if others[_MOST_LINES:] else "")
    return f"{faults[0]} (also in rows {named})" if others else str(faults[0])


def read_rows(path: Path, bad: BadRows | None = None) -> Iterator[Row]:
    """Yield the rows of a file, or of all files of a pattern or directory, in order. Empty lines are skipped.

    ``bad`` collects lines that are not JSON objects. Without it, they raise, too. Raises ``DataError`` if the file
    cannot be read, or a line is not a JSON object.
    """
    if (files := data_files(path)) != [path]:
        for file in files:
            yield from read_rows(file, bad)
        return
    if path.suffix not in SUFFIXES:
        problem, remedy = f"the file type {path.suffix!r} is unknown", f"use {' or '.join(SUFFIXES)}"
        raise DataError(problem, code="file-type", who=str(path), remedy=remedy)
    try:
        yield from _read_jsonl(path, bad) if path.suffix == ".jsonl" else _read_table(path)
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise DataError(problem, code="file-not-readable", who=str(path), remedy="check the path") from error


def data_files(path: Path) -> list[Path]:
    """List the files that a path of the configuration names: itself, the matches of a pattern (``train-*.parquet``), or
    the files of a directory with one split, in order.

    Raises ``DataError`` if there is no file, or there are several splits.
    """
    is_pattern = any(sign in path.name for sign in "*?[") and not path.exists()
    if is_pattern:
        matches = sorted(path.parent.glob(path.name))
        found = [file for match in matches for file in (data_files(match) if match.is_dir() else [match])]
    elif not path.is_dir():
        return [path]
    elif (path / "dataset_dict.json").is_file():
        splits = ", ".join(json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"])
        raise DataError(f"has splits ({splits})", code="several-splits", who=str(path), remedy=f"give {path}/SPLIT")
    elif (path / "state.json").is_file():  # a directory written by ``Dataset.save_to_disk``
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        found = [path / file["filename"] for file in state["_data_files"]]
    else:
        found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        splits_of = sorted({re.split(r"[-_.]", file.name)[0] for file in found})
        if len(splits_of) > 1 or len({file.suffix for file in found}) > 1:
            problem = f"has files of several kinds ({', '.join(splits_of)})"
            remedy = f"give a pattern, e.g. {path}/{splits_of[-1]}-*{found[-1].suffix}"
            raise DataError(problem, code="several-splits", who=str(path), remedy=remedy)
    if not found:
        remedy = f"give {' or '.join(SUFFIXES)} files"
        problem = "matches no file" if is_pattern else "has no file with rows"
        raise DataError(problem, code="no-data-files", who=str(path), remedy=remedy)
    return found


def _read_jsonl(path: Path, bad: BadRows | None) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = None
            with nullcontext() if bad is None else bad.collect():
                row = _jsonl_row(Row(path, number, {}), line)
            if row is not None:
                yield row


def _jsonl_row(row: Row, line: bytes) -> Row:
    try:
        values = strict_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        remedy = "write the file as uncompressed text in UTF-8"
        raise row.fault("not-utf8", "this is not UTF-8 text", remedy) from error
    except (ValueError, RecursionError) as error:
        why = f"{error.msg}: column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise row.fault("not-json", f"this is not valid JSON ({why})", _ONE_OBJECT) from error
    if not isinstance(values, dict):
        raise row.fault("no-object", f"this is a {type(values).__name__}", _ONE_OBJECT)
    return replace(row, values=values)


_ONE_OBJECT = "give one object per line"


def _refuse_constant(name: str) -> None:
    """Reject ``NaN`` and ``Infinity``, which Python accepts although they are not JSON."""
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject repeated keys: Python keeps the last value, other readers keep the first."""
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in one object")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)
"""Shared decoder. With these arguments, ``json.loads`` would build a new one per call."""


def strict_json(text: str) -> Any:
    """Parse JSON that other readers read alike. Raises ``ValueError`` or ``RecursionError``."""
    values = _DECODER.decode(text)
    if "\\ud" in text.lower():
        try:
            json.dumps(values, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:  # half a character, which no tokenizer accepts
            half = error.object[error.start]
            raise ValueError(f"\\u{ord(half):04x} is half of a surrogate pair, not a character") from error
    return values


def _read_table(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file or an Arrow stream, without nulls in the mappings of their columns.

    A table gives such a mapping the keys of all rows.
    """
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with ExitStack() as stack:
            if path.suffix == ".parquet":
                batches = stack.enter_context(pyarrow.parquet.ParquetFile(path)).iter_batches(batch_size=1024)
            else:
                file = stack.enter_context(pyarrow.memory_map(str(path)))
                batches = stack.enter_context(pyarrow.ipc.open_stream(file))
            for batch in batches:
                for values in batch.to_pylist():
                    number += 1
                    yield Row(path, number, {key: _without_nulls(value) for key, value in values.items()})
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not one of pyarrow's
            raise
        problem = f"is damaged{' after this row' if number else ''} ({error})"
        who = f"{path}:{number}" if number else str(path)
        raise DataError(problem, code=f"damaged-{path.suffix[1:]}", who=who, remedy="write it again") from error


def _without_nulls(value: Any) -> Any:
    """Leave out the null values of mappings at every depth. Lists keep theirs, which are the row's own."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def in_format(row: Row, config: DataConfig) -> Row:
    """Return the row with its prompt and answer under the configured keys. Other keys stay.

    Raises ``DataError`` if the row does not have the format ``data.format``.
    """
    if config.format == "keys":
        return row
    prompt, answer = _extract(row, config.format)
    return replace(row, values={**row.values, config.prompt_key: prompt, config.answer_key: answer})


def fitting_format(row: Row) -> str | None:
    return next((name for name in _FORMATS if _is_of(row, name)), None)


def held_out_settings(config: DataConfig, file: Path) -> DataConfig:
    """Choose the settings to read a held-out file with, by its first row: the first training source that fits it, or
    else the format that it has.

    Raises ``DataError`` if the file cannot be read, or its first row has no known format.
    """
    for row in islice(read_rows(file, BadRows()), 1):
        if (part := next((part for part in config.parts if _is_like(row, part)), None)) is not None:
            return part
        by_keys = config.parts[0].model_copy(update={"format": "keys"})
        name = "keys" if _is_like(row, by_keys) else fitting_format(row)
        if name is not None:
            return by_keys.model_copy(update={"format": name})
        if config.mixture or config.format != "keys":
            forms = ", ".join(dict.fromkeys(part.format for part in config.parts))
            known = ", ".join(["keys", *_FORMATS])
            problem = f"fits neither the format of the training data ({forms}) nor another one ({known})"
            keys = f"data.prompt_key={config.prompt_key} and data.answer_key={config.answer_key}"
            raise row.fault("no-source", problem, f"give rows in one of these; keys: {keys}")
    return config.parts[0]


def _is_like(row: Row, config: DataConfig) -> bool:
    if config.format != "keys":
        return _is_of(row, config.format)
    has_prompt = any(row.get(key) is not None for key in (config.prompt_key, config.token_ids_key))
    return has_prompt and row.get(config.answer_key) is not None


def _is_of(row: Row, name: str) -> bool:
    try:
        _extract(row, name)
    except DataError:
        return False
    return True


def _after_marks(row: Row) -> str | None:
    _, marks, answer = str(row.get("answer")).rpartition("####")
    return answer.replace(",", "").strip() if marks else None


def _own_or_boxed(row: Row) -> Any:
    answer = row.get("answer")
    return answer if answer is not None and str(answer).strip() else extract_boxed(str(row.get("solution")))


_FORMATS: Mapping[str, tuple[str, Callable[[Row], Any]]] = {
    "gsm8k": ("question", _after_marks),
    "dapo": ("prompt", lambda row: row.get("reward_model.ground_truth")),
    "openr1": ("problem", lambda row: row.get("answer")),
    "math": ("problem", _own_or_boxed),
}
"""Key of the prompt, and function that returns the answer. More specific formats come first: a row with a `problem` and
an `answer` fits the last two."""


def _extract(row: Row, name: str) -> tuple[Any, Any]:
    key, answer_of = _FORMATS[name]
    prompt, answer = row.get(key), answer_of(row)
    if prompt is None or answer is None or not str(answer).strip():
        what = f"no {key!r}" if prompt is None else "no answer"
        remedy = "set data.format to the file's format, name the keys instead, or remove the row"
        raise row.fault("not-in-format", f"has {what} in the format {name}", remedy)
    return prompt, answer
