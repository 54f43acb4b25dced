"""Whether all nodes see one run directory: node 0 writes a file, the others look for it."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from slime_like.errors import LaunchError
from slime_like.launch.cluster_key import key_path

_SEE_FILE_S = 3.0


class Witness:
    """A file beside the run directory by which others prove that they see the same file system. Context manager."""

    def __init__(self, run_dir: Path) -> None:
        self.path = key_path(run_dir).with_name(f"witness-{secrets.token_hex(8)}")

    def __enter__(self) -> Witness:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise LaunchError(f"{self.path} cannot be written ({error.strerror})") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)


def require_seen(witness: Path, run_dir: Path) -> None:
    """A file system of its own would never show it; one of the network may take a moment.

    Raises:
        LaunchError: it is not there.
    """
    deadline = time.monotonic() + _SEE_FILE_S
    while not witness.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"run_dir={run_dir} is not the directory that node 0 sees (its {witness.name} is not there); put it on "
                "a file system that all nodes share"
            )
        time.sleep(0.2)
