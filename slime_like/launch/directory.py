"""Directory in which the nodes of a launch meet; beside the run directory, which may be moved aside."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.errors import LaunchError
from slime_like.launch.options import LaunchOptions
from slime_like.system.disk import write_private


def launch_directory(run_dir: Path) -> Path:
    return run_dir.with_name(f".{run_dir.name}.cluster")


def token_path(options: LaunchOptions, config: RunConfig) -> Path:
    """File of Ray's token: the one that the options name, else in the launch directory."""
    return options.token_file or launch_directory(config.run_dir) / "key"


@contextmanager
def marker(run_dir: Path) -> Iterator[Path]:
    """A file that exists inside: a node that does not see it has another file system there."""
    path = launch_directory(run_dir) / f"witness-{secrets.token_hex(8)}"
    try:
        write_private(path, "")
    except OSError as error:
        raise LaunchError(f"{path} cannot be written ({error.strerror})") from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
