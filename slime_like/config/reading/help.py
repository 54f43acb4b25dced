"""The text of every field, for ``slime-like train --help``."""

import textwrap

from slime_like.config.reading.fields import SectionDoc, sections

_INDENT = " " * 6


def fields_help(width: int = 100) -> str:
    """Describe every flag, its type and default, section by section."""
    return "\n\n".join(_section(section, width) for section in sections() if section.fields)


def _section(section: SectionDoc, width: int) -> str:
    title = f"{section.name or 'run'}:" + (f" {section.description}" if section.description else "")
    lines = [title]
    for field in section.fields:
        lines.append(f"  --{field.name} ({field.type_text}; default: {field.default_text})")
        if field.required:
            lines[-1] = f"  --{field.name} ({field.type_text}; required)"
        lines += textwrap.wrap(
            field.description, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
        )
    return "\n".join(lines)
