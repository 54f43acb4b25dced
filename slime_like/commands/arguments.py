"""Arguments shared by subcommands: configuration flags and an optional run directory."""

import tempfile
import uuid
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from slime_like.config.base import require_path


def given_path(text: str) -> Path:
    """``type`` of a positional path: text that can name no file is rejected."""
    try:
        require_path(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return Path(text)


def has_flag(flags: Sequence[str], name: str) -> bool:
    """Return whether the flags hold ``--name value`` or ``--name=value``."""
    return any(flag == f"--{name}" or flag.startswith(f"--{name}=") for flag in flags)


def temporary_run_dir(command: str) -> Path:
    """A directory that does not exist yet, for a command that leaves nothing behind."""
    return Path(tempfile.gettempdir()) / f"slime-like-{command}-{uuid.uuid4().hex[:12]}"


def at_least_one(text: str) -> int:
    """``type`` of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
