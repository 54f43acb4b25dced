"""The secret that the nodes of a run share: Ray's token, and the key of our own connections between nodes."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from slime_like.errors import LaunchError
from slime_like.system.interrupts import raise_if_interrupted

_LOOK_EVERY_S = 0.2
_SHORTEST = 16


def key_path(run_dir: Path) -> Path:
    """Where the key lies unless another file is named: beside the run directory, which may be moved aside."""
    return run_dir.with_name(f".{run_dir.name}.cluster") / "key"


def create_key(path: Path) -> bytes:
    """Node 0's part: the file's key, made where there is none yet, readable by its owner alone.

    Raises:
        LaunchError: it cannot be made, or others may read it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="ascii") as stream:
                stream.write(secrets.token_urlsafe(32))
            draft.replace(path)  # whole, or not there
    except OSError as error:
        raise LaunchError(f"the cluster's key {path} cannot be made ({error.strerror}); give TOKEN_FILE") from error
    return _read(path)


def await_key(path: Path, timeout_s: float, look: Callable[[], None] = lambda: None) -> bytes:
    """Every other node's part: wait until node 0 has made the file. ``look`` is called meanwhile, and may raise.

    Raises:
        LaunchError: it did not come in time, or others may read it.
    """
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        raise_if_interrupted()
        look()
        if time.monotonic() > deadline:
            raise LaunchError(
                f"no cluster key {path} within {timeout_s:.0f} s: node 0 makes it there, so that either node 0 was not "
                "started, or this directory is not on a file system that all nodes share; share it, or copy a key to "
                "every node and give TOKEN_FILE"
            )
        time.sleep(_LOOK_EVERY_S)
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        about = path.stat()
        key = path.read_bytes().strip()
    except OSError as error:
        raise LaunchError(f"the cluster's key {path} cannot be read ({error.strerror})") from error
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise LaunchError(f"the cluster's key {path} may be read by others than you; chown it to you, and chmod 600 it")
    if len(key) < _SHORTEST:
        raise LaunchError(f"the cluster's key {path} is shorter than {_SHORTEST} characters; remove it, or write one")
    return key
