"""Replacement of Hugging Face hub ids with local directories."""

import os
import re
from pathlib import Path
from typing import Any

from slime_like.errors import ConfigError, Problem

_MODELS = r"(model(\.lora)?|reference|distillation|critic)\.path|distillation\.teachers\..+"
_FIELD = re.compile(_MODELS + r"|data\.train|data\.mixture\.files|evaluation\.files")
_ID = re.compile(r"((\w[\w.-]*)/\w[\w.-]*?(?<!\.jsonl)(?<!\.parquet)(?<!\.arrow))(?:@([\w.-]+))?(?:/(.+))?")
_SNAPSHOT = re.compile(r"(model|dataset)s--([\w.-]+?)--([\w.-]+)/snapshots/(\w+)")


def with_snapshots(data: dict[str, Any]) -> Any:
    """Download what ``owner/name[@revision]`` names, and replace it with its snapshot's path, which has the commit.

    Data may name files: ``owner/name/main/train-*.parquet``. A run that resumes keeps the commits of its start. Without
    a connection or an earlier download, the id stays, and checks reject it.

    Raises:
        ConfigError: the hub does not provide it.
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
