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

One YAML file describes a run. Every key is also a flag of `slime-like train`: `--trainer.parallel.tensor 2` or
`--trainer.parallel.tensor=2`. Flags override the file, later flags override earlier ones.

- Lists take several values: `--data.train a.jsonl b.jsonl`.
- Switches take `true` or `false`; `none` clears an optional field.
- Mappings take one entry per flag: `--rollout.engine_args.block_size 32`.
- Lists of sections are YAML text: `--reward.functions '[{name: math_verify}, {name: length, options: {limit: 400}}]'`.

Relative paths are relative to the current directory. The run directory holds the resolved configuration, with absolute
paths and every default, as `config.yaml`; it can be used again.
"""

_NAMES = """\
## Names

Built-in names, with options and their defaults. Rewards, losses, advantage estimators and environments may also be
custom code, `package.module:name` or `path/to/file.py:name`; engines and backends are entry points:
[extending](extending.md). Rewards in full: [rewards](rewards.md).
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
    rows = [
        f"| `{setting}` | `{part.name}` | {_escaped(part.summary + _options(part))} |"
        for setting, named in named_parts().items()
        for part in named
    ]
    return "\n".join([*parts, _NAMES, "| setting | name | meaning |", "|---|---|---|", *rows, ""])


def _section(section: SectionDoc) -> str:
    heading = f"## `{section.name}`" if section.name else "## The run"
    introduction = f"\n{section.description}\n" if section.description else ""
    rows = "\n".join(_row(field) for field in section.fields)
    return f"{heading}\n{introduction}\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}\n"


def _row(field: Field) -> str:
    default = "required" if field.required else f"`{_escaped(field.default_text)}`"
    return f"| `{field.name}` | {_escaped(field.type_text)} | {default} | {_escaped(field.description)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    for name, text in (("configuration", reference_text()), ("rewards", rewards_text())):
        path = Path("docs") / f"{name}.md"
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
