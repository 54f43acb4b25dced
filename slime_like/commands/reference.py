"""Every field and every built-in name: ``train --help``, ``docs/configuration.md`` and ``docs/rewards.md``.

``python -m slime_like.commands.reference`` writes everything after the introductions of the two pages.
"""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_like.config.reading.fields import Field, sections
from slime_like.config.reading.parts import PartDocs, read_part
from slime_like.config.rollout import AGENT, ENVIRONMENT
from slime_like.plugins.objective import ADVANTAGES, LOSSES, REDUCTIONS
from slime_like.sandbox.environment_worker import REGISTERED as ENVIRONMENTS
from slime_like.sandbox.rewards.registry import REGISTERED as REWARDS
from slime_like.weights.transports.names import TRANSPORTS

_REWARDS = "reward.functions"
_NAMES = """\
## Names

These names are built in. [Rewards](rewards.md) have a page, and [you can add more](extending.md).
"""
_PLACES: Mapping[str, Mapping[str, str]] = {
    _REWARDS: REWARDS,
    "algorithm.loss": LOSSES,
    "algorithm.advantage": ADVANTAGES,
    "algorithm.reduction": REDUCTIONS,
    "rollout.environment.name": ENVIRONMENTS,
    "sync.transport": {name: f"slime_like.weights.transports.{module}" for name, (module, _) in TRANSPORTS.items()},
}
"""Import paths of the built-in parts, by the setting that accepts their names."""
_GIVEN = {
    ENVIRONMENT: "The rewards that `rollout.environment` returned, summed over a conversation.",
    AGENT: "The reward that `rollout.agent` returned.",
}


def fields_help() -> str:
    """Return the fields as flags, and the names that they accept. Imports none of the named parts."""
    fields = [_section(name, leaves, "--") for name, leaves in sections().items() if leaves]
    names = [
        _item(setting, f"{', '.join([*places, *(_GIVEN if places is REWARDS else ())])}.")
        for setting, places in _PLACES.items()
    ]
    return "\n".join([*fields, _NAMES, *names])


def reference_text() -> str:
    """Return the fields, section by section, and the names that they accept."""
    fields = [_section(name, leaves) for name, leaves in sections().items() if leaves]
    names = [_explained(one) if "algorithm" in one else _names(one) for one in _PLACES if one != _REWARDS]
    return "\n".join([*fields, _NAMES, *names])


def _section(name: str, leaves: Sequence[Field], prefix: str = "") -> str:
    """Return a section. The page lists fields of other models' ranks only if the trainer's fields differ."""
    home = f"trainer.{name.rpartition('.')[2]}"
    known = {_meaning(one) for one in sections().get(home, ()) if home != name and not prefix}
    lines = []
    for one in leaves:
        kind = one.type_text.removesuffix(" or none").replace("true | false", "switch").replace(" | ", ", ")
        if _meaning(one) not in known:
            lines.append(_item(prefix + one.name, one.description, _note(kind, one.default_text)))
    if known:
        link = f"[`{home}`](#{home.replace('.', '')})"
        lines = [f"The fields of {link}, with other defaults:\n", *lines] if lines else [f"The fields of {link}."]
    return f"## {f'`{name}`' if name else 'The run'}\n\n" + "\n".join(lines) + "\n"


def _meaning(field: Field) -> tuple[str, str | None, str]:
    return field.name.rpartition(".")[2], field.default_text, field.description


def _names(setting: str) -> str:
    """List the names that a setting accepts, with the first line of their documentation."""
    items = [
        _item(part.name, part.summary + (f" Options: {each}." if (each := _shown(part)) else ""))
        for part in named_parts()[setting]
    ]
    return f"`{setting}`\n\n" + "\n".join(items) + "\n"


def _explained(setting: str) -> str:
    """List the names that a setting accepts, with their options. Another page has their formulas."""
    parts = [f"`{part.name}`" + (f" ({each})" if (each := _shown(part)) else "") for part in named_parts()[setting]]
    text = f"`{setting}`, [with formulas](objective.md): {', '.join(parts)}."
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False) + "\n"


def _shown(part: PartDocs) -> str:
    return ", ".join(f"`{one.name}`" if one.default is None else f"`{one.name}={one.default}`" for one in part.options)


def _note(kind: str, default: str | None) -> str:
    """Return type and default. A type that the default shows is left out, and so are `none`, `[]` and `{}`."""
    if default in (None, "none", "[]", "{}"):
        return f" ({kind})" if default else f" ({kind}; required)"
    shown = kind in ("switch", "integer", "number", "text", "name or mapping") and default != "none"
    return f" (`{default}`)" if shown else f" ({kind}; `{default}`)"


def _item(name: str, meaning: str, note: str = "") -> str:
    text = f"- `{name}`{note}: {meaning}"
    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _reward(part: PartDocs) -> str:
    paragraphs = [f"### `{part.name}`", part.summary, *([part.details] if part.details else [])]
    options = (
        _item(option.name, option.meaning[:1].upper() + option.meaning[1:], _note(option.type_text, option.default))
        for option in part.options
    )
    return "\n\n".join([*paragraphs, "\n".join(options)] if part.options else paragraphs) + "\n"


def page_text(path: Path) -> str:
    """Return the page with its introduction unchanged and the rest generated."""
    rewards = "## Included functions\n\n" + "\n".join(_reward(part) for part in named_parts()[_REWARDS])
    text = rewards if path.stem == "rewards" else reference_text()
    introduction, _, _ = path.read_text(encoding="utf-8").partition(text[: text.index("\n") + 1])
    return introduction + text


def named_parts() -> dict[str, tuple[PartDocs, ...]]:
    """Return the built-in parts by the setting that accepts their names. Imports all of them."""
    found = {setting: tuple(map(read_part, places, places.values())) for setting, places in _PLACES.items()}
    return found | {_REWARDS: found[_REWARDS] + tuple(map(PartDocs, _GIVEN, _GIVEN.values()))}


def main() -> int:
    for path in (Path("docs/configuration.md"), Path("docs/rewards.md")):
        path.write_text(page_text(path), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
