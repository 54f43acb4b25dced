"""Every field and every name as text: ``slime-like train --help``, ``docs/configuration.md`` and ``docs/rewards.md``.

``python -m slime_like.commands.reference`` writes the pages.
"""

import sys
import textwrap
from pathlib import Path

from slime_like.commands.parts import Part, named_parts
from slime_like.commands.rewards_page import rewards_text
from slime_like.config.reading.fields import Field, SectionDoc, sections

_INTRODUCTION = """\
# Configuration reference

Generated from the models in `slime_like/config` by `python -m slime_like.commands.reference`; change it there.

One YAML file describes a run. Every key is also a flag: `--trainer.parallel.tensor 2` or `trainer.parallel.tensor=2`.
Flags override the file.

- Lists take several values: `--data.train a.jsonl b.jsonl`.
- Switches take `true` or `false`.
- Mappings take one entry per flag, `--rollout.engine_args.block_size 32`, and merge with the file's.
- `${steps}` refers to another field; `???` marks a field that every run has to set.
- Lists of sections are YAML text: `--reward.functions '[{name: math_verify}, {name: length, options: {limit: 400}}]'`.

Relative paths start at the current directory. Each key is followed by its type and default.
"""

_NAMES = """\
## Names

These names are built in; [rewards](rewards.md) have a page, and [you can add more](extending.md).
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
    """The whole page, Markdown."""
    parts = [_INTRODUCTION]
    parts += [_section(section) for section in sections() if section.fields]
    names = [
        f"`{setting}`\n\n" + "\n".join(_item(part.name, part.summary + _options(part)) for part in named) + "\n"
        for setting, named in named_parts().items()
        if setting != "reward.functions"  # docs/rewards.md has them in full
    ]
    return "\n".join([*parts, _NAMES, *names])


def _section(section: SectionDoc) -> str:
    heading = f"## `{section.name}`" if section.name else "## The run"
    introduction = f"\n{section.description}\n" if section.description else ""
    return f"{heading}\n{introduction}\n" + "\n".join(_field(field) for field in section.fields) + "\n"


def _field(field: Field) -> str:
    default = "required" if field.required else f"`{field.default_text}`"
    kind = field.type_text.removesuffix(" or none").replace("true | false", "switch").replace(" | ", ", ")
    return _item(field.name, field.description, f" ({kind}; {default})")


def _item(name: str, meaning: str, note: str = "") -> str:
    text = f"- `{name}`{note}: {meaning}"
    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def main() -> int:
    for name, text in (("configuration", reference_text()), ("rewards", rewards_text())):
        path = Path("docs") / f"{name}.md"
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
