"""Conversion between YAML files or flags and a validated ``RunConfig``."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from slime_like.config.base import absolute_path
from slime_like.config.filling import AUTO, FILLING, fill
from slime_like.config.reading.fields import UNDECIDED, Field, all_fields, section_names
from slime_like.config.reading.flags import read_flags
from slime_like.config.reading.problems import describe_all
from slime_like.config.reading.rest import Place, forget, places_of, without, wrong_places
from slime_like.config.reading.yaml_text import Document, read_document, write_text
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError, Problem


def load_config(path: Path | None, overrides: Sequence[str] = (), run_dir: Path | None = None) -> RunConfig:
    """Read ``path`` (if any), apply the flags in order, validate.

    Relative paths, in the file and in flags alike, are relative to the current directory; in the result every path is
    absolute.

    Args:
        path: YAML file; ``None`` starts from the defaults alone.
        overrides: flags as on a command line: ``--rollout.engine sglang``, ``--trainer.parallel.tensor=2``,
            ``--data.train a.jsonl b.jsonl``, ``--rollout.engine_args.key value``; the last one wins.
        run_dir: the run directory where neither names one; none makes it an error.

    Raises:
        ConfigError: with every problem found, each naming field, value and remedy.
    """
    document = _read(path)
    origins = {key: f"{path}:{line}: " for key, line in document.lines.items()}
    data = _without_empty_sections(document.data or {}, "", section_names())
    problems = document.problems + read_flags(overrides, data, origins)
    data.setdefault("model", {})  # so that what is reported missing is model.path
    if run_dir is not None:
        data.setdefault("run_dir", str(run_dir))
    undecided = list(_undecided(data, origins))
    data = without(data, places_of(undecided))
    problems += undecided
    _make_paths_absolute(data, all_fields())
    places = {name: tuple(name.split(".")) for name in FILLING}
    filling = {name: place for name, place in places.items() if _value_at(data, place) == AUTO}
    config = _validated(without(data, filling.values()), origins, problems)
    if problems or config is None:
        raise ConfigError(problems, rest=config and forget(config, filling.values()))
    try:
        return fill(config, filling) if filling else config
    except ConfigError as error:
        raise ConfigError(error.problems, rest=forget(config, filling.values())) from error


def _value_at(data: Any, place: Place) -> Any:
    for key in place:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _undecided(data: dict[str, Any], origins: dict[str, str], prefix: str = "") -> Iterator[Problem]:
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _undecided(value, origins, f"{name}.")
        elif value == UNDECIDED:
            text = f"{origins.get(name, '')}{name}={UNDECIDED} is to be decided"
            yield Problem("field-undecided", f"{text}; give a value, or remove it for the default", name)


def _validated(data: dict[str, Any], origins: dict[str, str], problems: list[Problem]) -> RunConfig | None:
    """The configuration, or what is right of it; appends to ``problems``.

    Pydantic compares the fields of a section only where each of them is right. What is wrong is therefore taken out,
    and the rest validated again.
    """
    wrong, rest, reported = places_of(problems), data, list[ErrorDetails]()
    config: RunConfig | None = None
    while config is None:
        try:
            config = RunConfig.model_validate(rest)
        except ValidationError as error:
            details = error.errors()
            found = wrong_places(details)
            if reported and found <= wrong:
                break
            # Later, a conflict with a default that stands in for a wrong value does not count.
            new = [one for one in details if one not in reported and wrong.isdisjoint(wrong_places([one]))]
            reported += new if reported else details
            wrong |= found
            rest = without(data, wrong)
    problems += describe_all(reported, origins)
    return forget(config, wrong) if config is not None and wrong else config


def save_config(config: RunConfig, path: Path) -> None:
    """Write every field, defaults included; ``load_config(path)`` gives an equal configuration."""
    path.write_text(write_text(config.model_dump(mode="json")), encoding="utf-8")


def _read(path: Path | None) -> Document:
    if path is None:
        return Document()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        other = path.with_suffix({".yml": ".yaml", ".yaml": ".yml"}.get(path.suffix, ".yaml"))
        remedy = f"did you mean {other}?" if other.is_file() else "give a YAML configuration file"
        raise ConfigError(f"{path}: cannot be read ({reason}); {remedy}", code="file-unreadable") from error
    document = read_document(text, str(path))
    if path.suffix == ".sh" and not isinstance(document.data, dict):
        remedy = f"if it launches another project's run, convert it: slime-like import-config {quote(str(path))}"
        raise ConfigError(f"{path}: is a shell script, not a YAML configuration; {remedy}", code="file-content")
    if document.data is None and not document.problems:
        document.problems.append(Problem("file-content", f"{path}: holds no settings; give `key: value` lines"))
    if not isinstance(document.data, dict | None):
        found = type(document.data).__name__
        document.problems.append(Problem("file-content", f"{path}:1: holds a {found}; give `key: value` lines"))
        document.data = None
    if document.data is None and document.problems:
        raise ConfigError(document.problems)
    return document


def _without_empty_sections(data: dict[Any, Any], prefix: str, known: set[str]) -> dict[Any, Any]:
    """``rollout:`` with nothing below it means the section's defaults."""
    cleaned = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if name in known and value is None:
            value = {}
        cleaned[key] = _without_empty_sections(value, f"{name}.", known) if isinstance(value, dict) else value
    return cleaned


def _make_paths_absolute(data: dict[str, Any], fields: dict[str, Field]) -> None:
    for field in fields.values():
        if field.item is not Path:
            continue
        *parents, leaf = field.name.split(".")
        section: Any = data
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict) and leaf in section:
            section[leaf] = _absolute(section[leaf], field.optional)


def _absolute(value: Any, optional: bool) -> Any:
    if isinstance(value, list | tuple):
        return [_absolute(item, optional) for item in value]
    if not isinstance(value, str) or not value or (optional and value.lower() == "none"):
        return value  # validation says what is wrong with it, if anything is
    return str(absolute_path(Path(value)))
