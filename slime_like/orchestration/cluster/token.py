"""Ray's token: a secret that the nodes of a run share, in a file that only its owner may read."""

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from slime_like.errors import LaunchError
from slime_like.system.disk import write_private
from slime_like.system.interrupts import polls

_POLL_S = 0.2
_SHORTEST = 16


def create_token(path: Path) -> str:
    """Return the token in the file. Node 0 creates a missing file.

    Raises:
        LaunchError: the file cannot be created, or others may read it.
    """
    try:
        if not path.exists():
            write_private(path, secrets.token_urlsafe(32))
    except OSError as error:
        raise LaunchError(
            f"cannot create the cluster's key {path} ({error.strerror})", code="key-not-made", remedy="give TOKEN_FILE"
        ) from error
    return _read(path)


def await_token(path: Path, timeout_s: float, watch: Callable[[], None] = lambda: None) -> str:
    """Wait for node 0 to create the file, and return its token. ``watch`` is called while waiting, and may raise.

    Raises:
        LaunchError: the file does not appear in time, or others may read it.
    """
    for _ in polls(_POLL_S, timeout_s):
        if path.exists():
            return _read(path)
        watch()
    raise LaunchError(
        f"no cluster key {path} within {timeout_s:.0f} s: node 0, which creates it, was not started, or the nodes do "
        "not share this directory",
        code="key-missing",
        remedy="share it, or copy a key to every node and give TOKEN_FILE",
    )


def _read(path: Path) -> str:
    about = path.stat()
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise LaunchError(
            f"the cluster's key {path} can be read by other users",
            code="key-unsafe",
            remedy="chown it to you, and chmod 600 it",
        )
    if len(token := path.read_text(encoding="utf-8").strip()) < _SHORTEST:
        raise LaunchError(
            f"the cluster's key {path} is shorter than {_SHORTEST} characters",
            code="key-short",
            remedy="remove it, or write one",
        )
    return token
