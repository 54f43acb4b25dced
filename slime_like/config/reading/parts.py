"""Documentation and options of parts, read from their docstrings and signatures."""

import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime_like.config.reading.fields import value_text

_KINDS: Mapping[str, type | tuple[type, ...]] = {"integer": int, "number": (int, float), "switch": bool, "text": str}
_TYPES = {"int": "integer", "float": "number", "bool": "switch", "str": "text"}


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword argument, its type and default as in YAML. ``default`` is ``None`` if it is required."""

    name: str
    type_text: str
    default: str | None
    meaning: str

    def accepts(self, value: Any) -> bool:
        """Return whether the value has the option's type. An option with default none may be none."""
        kind = _KINDS.get(self.type_text)
        if value is None or kind is None:
            return kind is None or self.default == "none"
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


@dataclass(frozen=True, slots=True)
class PartDocs:
    """One part.

    Attributes:
        summary: first line of its documentation.
        details: the other lines, without the sections about arguments and errors.
    """

    name: str
    summary: str
    details: str = ""
    options: tuple[Option, ...] = ()

    def option_problems(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence, beginning with the option, for each value in ``given`` that the part does not take."""
        known = {option.name: option for option in self.options}
        takes = ", ".join(known) or "no options"
        for name, value in given.items():
            if name not in known:
                yield f"{name} is not an option of {self.name}; it takes {takes}"
            elif not known[name].accepts(value):
                yield f"{name}={value_text(value)} must be of type {known[name].type_text}; correct it"
        for option in self.options:
            if option.default is None and option.name not in given:
                yield f"{option.name} is missing, which {self.name} needs; set it"


def read_part(name: str, place: str) -> PartDocs:
    """Import the part at ``module:attribute``, or the module without an attribute, and read its documentation.

    Its options are the arguments of a class, and the keyword-only arguments of a function.
    """
    part = pkgutil.resolve_name(place)
    part = getattr(part, "compute", part)  # an estimator's function
    text = (inspect.getdoc(part) or "").replace("``", "`")
    summary, _, rest = text.partition("\n")
    details = re.split(r"^(?:Args|Attributes|Returns|Raises):$", rest, maxsplit=1, flags=re.MULTILINE)[0]
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n?|\n)*)", text, flags=re.MULTILINE)
    entries = re.findall(r"^(\w+): (.*(?:\n[ ]+.*)*)", textwrap.dedent(section[1] if section else ""), re.MULTILINE)
    meanings = {option: " ".join(meaning.split()) for option, meaning in entries}
    given = inspect.signature(part).parameters.values() if callable(part) else ()
    options = (
        Option(
            one.name,
            _TYPES.get(inspect.formatannotation(one.annotation).removesuffix(" | None"), "mapping"),
            None if one.default is one.empty else value_text(one.default),
            meanings.get(one.name, ""),
        )
        for one in given
        if inspect.isclass(part) or one.kind is one.KEYWORD_ONLY
    )
    return PartDocs(name, summary, details.strip(), tuple(options))
