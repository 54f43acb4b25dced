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
from slime_like.system.words import extract_boxed


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


def _final_number(row: Row) -> Any:
    _, mark, answer = str(_value(row, "answer")).rpartition("####")
    if not mark:
        raise _unfit(row, "`answer` has no '####'")
    return answer.strip().replace(",", "")


def _own_or_boxed(row: Row) -> Any:
    answer = row.get("answer")
    return extract_boxed(str(_value(row, "solution"))) if _is_blank(answer) else answer


_FORMATS: Mapping[str, tuple[str, Callable[[Row], Any]]] = {
    "gsm8k": ("question", _final_number),
    "dapo": ("prompt", lambda row: _value(row, "reward_model.ground_truth")),
    "openr1": ("problem", lambda row: _value(row, "answer")),
    "math": ("problem", _own_or_boxed),
}
"""Key of the prompt, and function that returns the answer. More specific formats come first: a row with a `problem` and
an `answer` fits the last two."""


def _extract(row: Row, name: str) -> tuple[Any, Any]:
    key, answer_of = _FORMATS[name]
    prompt, answer = _value(row, key), answer_of(row)
    if _is_blank(answer):
        raise row.fault("not-in-format", f"has no answer in the format {name}", "add the answer, or remove the row")
    return prompt, answer


def _is_blank(answer: Any) -> bool:
    return answer is None or (isinstance(answer, str) and not answer.strip())


def _value(row: Row, key: str) -> Any:
    if (value := row.get(key)) is None:
        raise _unfit(row, f"has no {key!r}")
    return value


def _unfit(row: Row, problem: str) -> DataError:
    return row.fault("not-in-format", problem, "set data.format to the file's format, or name the keys instead")
