r"""Row formats of published datasets: where they keep the prompt and the answer.

- ``gsm8k`` (openai/gsm8k): ``question``; the answer is the part of ``answer`` after ``####``.
- ``math`` (hendrycks/competition_math, MATH-500): ``problem``; ``answer``, or the last box of ``solution``.
- ``dapo`` (BytedTsinghua-SIA/DAPO-Math-17k and other files for verl): ``prompt``, chat messages;
  ``reward_model.ground_truth``.
- ``openr1`` (open-r1/OpenR1-Math-220k): ``problem``, ``answer``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from slime_like.config import DataConfig
from slime_like.data.rows import BadRows, Row, read_rows
from slime_like.errors import DataError
from slime_like.system.latex import boxed


def in_format(row: Row, config: DataConfig) -> Row:
    """Return the row with its prompt and answer under the configured keys. Other keys stay.

    Raises:
        DataError: the row does not have the format ``data.format``.
    """
    if config.format == "keys":
        return row
    prompt, answer = _FORMATS[config.format](row)
    return replace(row, values={**row.values, config.prompt_key: prompt, config.answer_key: answer})


def fitting_format(row: Row) -> str | None:
    """Return the first format that fits the row, or ``None``."""
    return next((name for name in _FORMATS if _is_of(row, name)), None)


def held_out_settings(config: DataConfig, file: Path) -> DataConfig:
    """Choose the settings to read a held-out file with, by its first row: the first training source that fits it, or
    else the format that it has.

    Raises:
        DataError: the file cannot be read, or its first row has no known format.
    """
    for row in islice(read_rows(file, BadRows()), 1):
        if (part := next((part for part in config.parts if _is_like(row, part)), None)) is not None:
            return part
        by_keys = config.parts[0].model_copy(update={"format": "keys"})
        name = "keys" if _is_like(row, by_keys) else fitting_format(row)
        if name is not None:
            return by_keys.model_copy(update={"format": name})
        if config.mixture or config.format != "keys":
            raise _of_no_format(row, config)
    return config.parts[0]


def _of_no_format(row: Row, config: DataConfig) -> DataError:
    forms = ", ".join(dict.fromkeys(part.format for part in config.parts))
    problem = f"fits neither the format of the training data ({forms}) nor another ({', '.join(['keys', *_FORMATS])})"
    keys = f"data.prompt_key={config.prompt_key} and data.answer_key={config.answer_key}"
    return row.fault("no-source", problem, f"give rows in one of these; keys: {keys}")


def _is_like(row: Row, config: DataConfig) -> bool:
    if config.format != "keys":
        return _is_of(row, config.format)
    has_prompt = any(row.get(key) is not None for key in (config.prompt_key, config.token_ids_key))
    return has_prompt and row.get(config.answer_key) is not None


def _is_of(row: Row, name: str) -> bool:
    try:
        _FORMATS[name](row)
    except DataError:
        return False
    return True


def _gsm8k(row: Row) -> tuple[Any, Any]:
    _, mark, answer = str(_value(row, "answer")).rpartition("####")
    if not mark or not answer.strip():
        raise _unfit(row, "`answer` has nothing behind '####'")
    return _value(row, "question"), answer.strip().replace(",", "")


def _math(row: Row) -> tuple[Any, Any]:
    answer = row.get("answer")
    if _is_blank(answer):
        answer = boxed(str(_value(row, "solution")))
    if _is_blank(answer):
        raise row.fault("not-in-format", r"`solution` has no \boxed{}", "add an `answer`, or remove the row")
    return _value(row, "problem"), answer


def _dapo(row: Row) -> tuple[Any, Any]:
    answer = _value(row, "reward_model.ground_truth")
    if _is_blank(answer):
        raise row.fault("not-in-format", "`reward_model.ground_truth` is empty", "give the answer, or remove the row")
    return _value(row, "prompt"), answer


def _openr1(row: Row) -> tuple[Any, Any]:
    answer = _value(row, "answer")
    if _is_blank(answer):
        raise row.fault("not-in-format", "`answer` is empty", "give the answer, or remove the row")
    return _value(row, "problem"), answer


_FORMATS: Mapping[str, Callable[[Row], tuple[Any, Any]]] = {
    "gsm8k": _gsm8k,
    "dapo": _dapo,
    "openr1": _openr1,
    "math": _math,
}
"""Formats, more specific ones first: a row with a `problem` and an `answer` fits the last two."""


def _is_blank(answer: Any) -> bool:
    return answer is None or (isinstance(answer, str) and not answer.strip())


def _value(row: Row, key: str) -> Any:
    if (value := row.get(key)) is None:
        raise _unfit(row, f"has no {key!r}")
    return value


def _unfit(row: Row, problem: str) -> Exception:
    return row.fault("not-in-format", problem, "set data.format to that of the file, or leave it out and name the keys")
