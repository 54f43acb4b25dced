"""Read a validated configuration from a YAML file and flags, and write one.

OmegaConf merges the file with the flags and resolves ``${other.field}``; pydantic validates the result.
Ids of the Hugging Face hub are replaced with local directories.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from slime_like.config.base import CONFLICT, until_invalid
from slime_like.config.filling import AUTO, FILLING, fill
from slime_like.config.reading.fields import all_fields, describe, sections
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError, Problem, field_of

_MODELS = r"(model(\.lora)?|reference|distillation|critic)\.path|distillation\.teachers\..+"
_FIELD = re.compile(_MODELS + r"|data\.train|data\.mixture\.files|evaluation\.files")
_ID = re.compile(r"((\w[\w.-]*)/\w[\w.-]*?(?<!\.jsonl)(?<!\.parquet)(?<!\.arrow))(?:@([\w.-]+))?(?:/(.+))?")
_SNAPSHOT = re.compile(r"(model|dataset)s--([\w.-]+?)--([\w.-]+)/snapshots/(\w+)")

_ASSIGNMENT = re.compile(r"([a-z_]+)(\.[\w.\[\]-]+)?=")
_DEEPEST = 100
_ESCAPED = re.compile(r"(\\*)\$\{")


def load_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    more: Callable[[RunConfig], Iterable[Problem]] = lambda _: (),
) -> RunConfig:
    """Read ``path`` if there is one, apply the flags in order, and validate.

    Relative paths are relative to the current directory, in the file and in flags. All paths of the result are
    absolute. Ids of the Hugging Face hub become paths of downloaded snapshots.

    Args:
        path: YAML file; ``None`` starts from the defaults.
        overrides: flags as on a command line: ``--rollout.engine sglang``, ``rollout.engine=sglang``,
            ``--data.train a.jsonl b.jsonl``, ``--rollout.engine_args.key value``. The last one wins; mappings merge.
        run_dir: the run directory if neither names one.
        more: finds further problems of a rejected configuration. To read a field that is at fault ends it.

    Raises:
        ConfigError: with every problem found, each naming field, value and remedy.
    """
    problems: list[Problem] = []
    merged: dict[str, Any] = {"model": {}} | ({} if run_dir is None else {"run_dir": str(run_dir)})
    problems += _merge(merged, {} if path is None else _read(path))
    for name, values in _settings(overrides, problems):
        try:
            problems += _merge(merged, _setting(name, values))
        except ValueError as error:
            problems.append(Problem("flag-value", f"--{name}: {error}", name))
    data, undecided = _resolved(merged, path)
    problems += [Problem("field-undecided", f"{name}=??? is undecided; give a value", name) for name in undecided]
    filling = [name for name in FILLING if _take_auto(data, name.split("."))]
    try:
        data = _with_snapshots(data)
    except ConfigError as error:
        problems += error.problems
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        problems += [problem for problem in describe(error.errors()) if problem.field not in undecided]
    if problems:
        raise ConfigError([*problems, *_others(problems, data, filling, more)])
    return fill(config, filling) if filling else config


def _others(
    problems: list[Problem], data: Any, unknown: list[str], more: Callable[[RunConfig], Iterable[Problem]]
) -> Iterator[Problem]:
    """Yield the problems that do not depend on fields at fault: conflicts of all sections, and ``more``."""
    try:
        config = RunConfig.model_validate(data, context={"collects": CONFLICT})
    except ValidationError:  # an unknown key of the root may be meant for any field
        return
    rest = config.without(*unknown, *(one.field for one in problems if one.field and one.code != CONFLICT))
    conflicts = [Problem(CONFLICT, text, field_of(text)) for text in rest.all_conflicts()]
    shown = set(map(str, problems))
    yield from (one for one in [*conflicts, *until_invalid(more, rest)] if str(one) not in shown)


def _take_auto(data: Any, keys: Sequence[str]) -> bool:
    """Remove the value below these keys if it is ``auto``, and return whether it was."""
    for key in keys[:-1]:
        data = data.get(key) if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get(keys[-1]) != AUTO:
        return False
    del data[keys[-1]]
    return True


def save_config(config: RunConfig, path: Path) -> None:
    """Write every field, defaults included. ``load_config(path)`` gives an equal configuration."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(_escaped(config.model_dump(mode="json")))), encoding="utf-8")


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file's mapping as plain values, interpolations resolved.

    Raises:
        ConfigError: ``file-unreadable``, ``yaml-syntax``, or ``file-content`` if it holds something else.
    """
    return _resolved(_read(path), path)[0]


def is_assignment(argument: str) -> bool:
    """Return whether a command-line argument is ``name=value`` of a field."""
    found = _ASSIGNMENT.match(argument)
    return found is not None and found[1] in RunConfig.model_fields


def _read(path: Path) -> dict[str, Any]:
    try:
        text = _usable(path.read_text(encoding="utf-8"))
        # OmegaConf asserts that a text is no number.
        is_one_value = isinstance(yaml.compose(text, yaml.CSafeLoader), yaml.ScalarNode)
        read: Any = OmegaConf.to_container(OmegaConf.create("" if is_one_value else text))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "give the path of a YAML configuration file"
        raise ConfigError(f"{path}: cannot be read ({reason}); {remedy}", code="file-unreadable") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not usable YAML ({_reason(error)}); correct it", code="yaml-syntax") from error
    if not isinstance(read, dict) or not read:
        raise ConfigError(f"{path}: has no settings; give `key: value` lines", code="file-content")
    return read


def _usable(text: str) -> str:
    """Return the text. Raises ``ValueError`` if it is nested so deep that libyaml could overflow the stack.

    Also raises ``YAMLError`` for ``{name:gspo}``, which YAML reads as one key without a value.
    """
    inside: list[yaml.CollectionStartEvent] = []
    before = ""
    for event in yaml.parse(text, yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            inside.pop()
        if len(inside) > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} levels")
        plain = event.value if isinstance(event, yaml.ScalarEvent) and event.implicit[0] else None
        if plain == "" and ":" in before and inside and inside[-1].flow_style:
            problem = f"{before} has no space after its colon; write {before.replace(':', ': ', 1)}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
        before = plain or ""
    return text


def _merge(low: dict[str, Any], high: dict[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Merge a layer into the lower ones. Mappings merge, and other values replace; `???` replaces nothing.

    A part's name removes options of lower layers. Options alone belong to the name before them, or the default.
    Yields a problem for a list instead of a mapping, or a mapping instead of a list, and leaves it out.
    """
    for key, value in high.items():
        name, field = f"{prefix}{key}", all_fields().get(f"{prefix}{key}")
        below = low.get(key, {} if name in sections() else None)
        if field is not None and field.kind == "part" and not isinstance(below, dict):
            below = {"name": field.default.name if below is None else below}
            if isinstance(value, str):
                below = value
        if {dict, list} == {type(below), type(value)}:
            kind = "a list" if isinstance(value, dict) else "a section; write its fields below it"
            yield Problem("field-type", f"{name}={value} must be {kind}", name)
        elif isinstance(value, dict):
            low[key] = below if isinstance(below, dict) else {}
            yield from _merge(low[key], value, f"{name}.")
        elif value != "???" or key not in low:
            low[key] = value


def _resolved(merged: dict[str, Any], path: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Return the values with interpolations resolved, and the names of the fields that are still ``???``."""
    try:
        read = OmegaConf.create(merged)
        plain: Any = OmegaConf.to_container(read, resolve=True)
        return plain, sorted(OmegaConf.missing_keys(read))
    except (OmegaConfBaseException, TypeError) as error:
        where = "" if path is None else f"{path}: "
        raise ConfigError(f"{where}{_reason(error)}; correct the interpolation", code="yaml-syntax") from error


def _settings(arguments: Sequence[str], problems: list[Problem]) -> Iterator[tuple[str, list[str]]]:
    """Yield name and values of ``--name value ...``, ``--name=value`` and ``name=value``, in order."""
    given: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--") or is_assignment(argument):
            name, equals, value = argument.removeprefix("--").partition("=")
            given.append((_with_underscores(name), [value] if equals else []))
        elif given:
            given[-1][1].append(argument)
        else:
            problems.append(Problem("flag-missing", f"{argument!r} is not a flag; write --section.field value"))
    yield from given


def _with_underscores(name: str) -> str:
    """Return the name with underscores for dashes in the part that names a field, but not in the keys below it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if (field := ".".join(parts[:end]).replace("-", "_")) in all_fields():
            return ".".join([field, *parts[end:]])
    return name


def _setting(name: str, values: list[str]) -> dict[str, Any]:
    """Return one flag as a nested mapping. Text stays text, so only pydantic converts it; the rest is YAML."""
    field = all_fields().get(name)
    value: Any = values
    if not values:
        raise ValueError(f"the value is missing; give one of type {field.type_text}" if field else "has no value")
    if field is not None and field.kind == "many" and not (len(values) == 1 and values[0][:1] == "["):
        value = [] if [value.lower() for value in values] == ["none"] else values
    elif len(values) > 1:
        given = " ".join(values)
        raise ValueError(f"takes one value, got {len(values)} ({given}); quote it, and put the file before all flags")
    elif field is not None and field.kind == "text":
        (value,) = values
    else:
        try:
            value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={_usable(values[0])}"]))["value"]  # type: ignore[index,call-overload]
        except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
            raise ValueError(f"{values[0]!r} is not usable YAML ({_reason(error)}); correct it") from error
    keys = name.replace("[", ".").replace("]", "").split(".")
    if len(keys) > _DEEPEST:
        raise ValueError(f"more than {_DEEPEST} levels")
    for key in reversed(keys):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _escaped(value: Any) -> Any:
    """Return ``value`` with ``${`` escaped in all text: it was resolved already."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return _ESCAPED.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f"line {mark.line + 1}: "
    return where + (getattr(error, "problem", None) or str(error).splitlines()[0])


def _with_snapshots(data: dict[str, Any]) -> Any:
    """Download what ``owner/name[@revision]`` names, and replace it with its snapshot's path, which has the commit.

    Data may name files: ``owner/name/main/train-*.parquet``. A run that resumes keeps the commits of its start. Without
    a connection or an earlier download, the id stays, and checks reject it. Raises ``ConfigError`` if the hub does not
    provide it.
    """
    saved = Path(os.path.expanduser(str(data.get("run_dir"))), "config.yaml")  # noqa: PTH111 (it never raises)
    is_resumed = data.get("resume") != "never" and os.path.lexists(saved)
    text = saved.read_text(encoding="utf-8", errors="replace") if is_resumed else ""
    pins = {(kind, f"{owner}/{name}"): commit for kind, owner, name, commit in _SNAPSHOT.findall(text)}

    def replaced(value: Any, field: str = "") -> Any:
        if isinstance(value, dict):
            return {key: replaced(one, f"{field}.{key}".lstrip(".")) for key, one in value.items()}
        if isinstance(value, list):
            return [replaced(one, field) for one in value]
        return _local(value, field, pins) if isinstance(value, str) and _FIELD.fullmatch(field) else value

    return replaced(data)


def _local(given: str, field: str, pins: dict[tuple[str, str], str]) -> str:
    found, kind = _ID.fullmatch(given), "dataset" if field.startswith(("data.", "evaluation.")) else "model"
    if found is None or os.path.lexists(found[2]) or (kind == "model" and found[4]):
        return given
    from huggingface_hub import errors, snapshot_download

    commit = found[3] or pins.get((kind, found[1]))
    try:
        place = snapshot_download(found[1], repo_type=kind, revision=commit, allow_patterns=found[4])
    except errors.LocalEntryNotFoundError:
        return given
    except (OSError, ValueError) as error:
        problem = f"is not a path, and the hub does not provide it ({str(error).strip().splitlines()[0]})"
        text = f"{field}={given}: {problem}; give a path or another id"
        raise ConfigError([Problem("hub-refuses", text, field)]) from error
    return str(Path(place, found[4] or ""))
