"""Every field as text, for ``slime-like train --help`` and for ``docs/configuration.md``.

``python -m slime_like.config.reading.reference`` writes the latter.
"""

import sys
import textwrap
from pathlib import Path

from slime_like.config.reading.fields import Field, SectionDoc, sections

_INTRODUCTION = """\
# Configuration reference

Generated from the models in `slime_like/config` by `python -m slime_like.config.reading.reference`; change it there.

One YAML file describes a run. Every key is also a flag of `slime-like train`: `--trainer.parallel.tensor 2` or
`--trainer.parallel.tensor=2`. Flags override the file, later flags override earlier ones.

- Lists take several values: `--data.train a.jsonl b.jsonl`.
- Switches take `true` or `false`; `none` clears an optional field.
- Mappings take one entry per flag: `--rollout.engine_args.block_size 32`.
- Lists of sections are YAML text: `--reward.functions '[{name: math_verify}, {name: length, options: {limit: 400}}]'`.

Relative paths are relative to the current directory. The run directory holds the resolved configuration, with absolute
paths and every default, as `config.yaml`; it can be used again.
"""


def fields_help(width: int = 100) -> str:
    """Describe every flag, its type and default, section by section."""
    return "\n\n".join(_help(section, width) for section in sections() if section.fields)


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


def reference_text() -> str:
    """The whole page, Markdown."""
    parts = [_INTRODUCTION]
    parts += [_section(section) for section in sections() if section.fields]
    return "\n".join(parts)


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
    path = Path("docs/configuration.md")
    path.write_text(reference_text(), encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
