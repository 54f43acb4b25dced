"""Every field and every name as text: ``slime-like train --help``, ``docs/configuration.md`` and ``docs/rewards.md``.

``python -m slime_like.commands.reference`` writes what follows the introductions of the pages.
"""

import sys
import textwrap
from pathlib import Path

from slime_like.commands.parts import Part, named_parts
from slime_like.config.reading.fields import Field, SectionDoc, sections

_NAMES = """\
## Names

These names are built in. [Rewards](rewards.md) have a page, and [you can add more](extending.md).
"""


def fields_help(width: int = 100) -> str:
    """Describe every flag, its type and default, section by section; then every name that a flag takes."""
    described = [_help(section, width) for section in sections() if section.fields]
    return "\n\n".join([*described, *(_names_help(*named, width) for named in named_parts().items())])


def _help(section: SectionDoc, width: int) -> str:
    indent = " " * 6
    lines = [f"{section.name or 'run'}:" + (f" {section.description}" if section.description else "")]
    for field in section.fields:
        default = "required" if field.required else f"default: {field.default_text}"
        lines.append(f"  --{field.name} ({field.type_text}; {default})")
        lines += textwrap.wrap(
            field.description, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    return "\n".join(lines)


def _names_help(setting: str, parts: tuple[Part, ...], width: int) -> str:
    lines = [f"names for {setting}:"]
    for part in parts:
        text = f"{part.name}: {part.summary}{_options(part)}"
        lines += textwrap.wrap(
            text, width, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False, break_long_words=False
        )
    return "\n".join(lines)


def _options(part: Part) -> str:
    shown = [f"`{name}`" if default is None else f"`{name}={default}`" for name, default in part.defaults.items()]
    return f" Options: {', '.join(shown)}." if shown else ""


def reference_text() -> str:
    """Return the fields and names, Markdown."""
    parts = [_section(section) for section in sections() if section.fields]
    names = [
        f"`{setting}`\n\n" + "\n".join(_item(part.name, part.summary + _options(part)) for part in named) + "\n"
        for setting, named in named_parts().items()
        if setting != "reward.functions"  # docs/rewards.md has them in full
    ]
    return "\n".join([*parts, _NAMES, *names])


def _section(section: SectionDoc) -> str:
    heading = f"## `{section.name}`" if section.name else "## The run"
    return f"{heading}\n\n" + "\n".join(_field(field) for field in section.fields) + "\n"


def _field(field: Field) -> str:
    kind = field.type_text.removesuffix(" or none").replace("true | false", "switch").replace(" | ", ", ")
    return _item(field.name, field.description, _note(kind, None if field.required else field.default_text))


def _note(kind: str, default: str | None) -> str:
    """Return type and default. The type is left out if the default shows it."""
    if default is None:
        return f" ({kind}; required)"
    shown = kind in ("switch", "integer", "number", "text") and default != "none"
    return f" (`{default}`)" if shown else f" ({kind}; `{default}`)"


def _item(name: str, meaning: str, note: str = "") -> str:
    text = f"- `{name}`{note}: {meaning}"
    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def rewards_text() -> str:
    """Return the included reward functions, Markdown."""
    return "## Included functions\n\n" + "\n".join(_reward(part) for part in named_parts()["reward.functions"])


def _reward(part: Part) -> str:
    paragraphs = [f"### `{part.name}`", part.summary, *([part.details] if part.details else [])]
    options = (
        _item(option.name, option.meaning[:1].upper() + option.meaning[1:], _note(option.type_text, option.default))
        for option in part.options
    )
    return "\n\n".join([*paragraphs, "\n".join(options)] if part.options else paragraphs) + "\n"


def page_text(path: Path) -> str:
    """Return the page with its introduction as it is, and the rest generated."""
    text = rewards_text() if path.stem == "rewards" else reference_text()
    introduction, _, _ = path.read_text(encoding="utf-8").partition(text[: text.index("\n") + 1])
    return introduction + text


def main() -> int:
    for path in (Path("docs/configuration.md"), Path("docs/rewards.md")):
        path.write_text(page_text(path), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
