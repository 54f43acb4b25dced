"""Values of other projects' settings: text of a command line, or what YAML has."""

import math
from typing import Any

import yaml

from slime_like.config.reading.yaml_text import read_value


def scalar(value: Any) -> Any:
    """Text of a command line as YAML reads it; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return read_value(value)
    except yaml.YAMLError:
        return value


def whole(value: Any) -> int:
    """A whole number. Raises ``ValueError``."""
    found = scalar(value)
    if isinstance(found, float) and found.is_integer():
        return int(found)
    if type(found) is not int:
        raise ValueError(f"{value} is no whole number")
    return found


def natural(value: Any) -> int:
    """A whole number above 0. Raises ``ValueError``."""
    found = whole(value)
    if found <= 0:
        raise ValueError(f"{value} is not above 0")
    return found


def number(value: Any) -> float:
    """A number. Raises ``ValueError``."""
    found = scalar(value)
    if type(found) not in (int, float) or not math.isfinite(found):
        raise ValueError(f"{value} is no number")
    return float(found)


def flag(value: Any) -> bool:
    """True or false. Raises ``ValueError``."""
    found = str(value).lower()
    if found not in ("true", "false"):
        raise ValueError(f"{value} is neither true nor false")
    return found == "true"


def texts(value: Any) -> list[str]:
    """A text, or a list of them, as lists of paths are written. Raises ``ValueError``."""
    found = scalar(value)
    items = found if isinstance(found, list) else [found]
    if not items or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{value} is no list of paths")
    return items


def text(value: Any) -> str:
    """A text. Raises ``ValueError``."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value} is no text")
    return value


def unless_null(value: Any) -> Any:
    """The value; ``None`` where it is a word for nothing."""
    return None if value in ("null", "None", "none", "") else value
