"""Lock of a run directory: two runs would move, overwrite and remove each other's files."""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Self

from slime_like.errors import ConfigError

LOCK_FILE = ".lock"
# Error codes of file systems without locks; some network file systems are mounted so.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Context manager: no other run trains in ``run_dir``, which is made if missing.

    The kernel ends the lock with the process, however that ends, so that a killed run never bars the next. A directory
    that was made for the lock and holds nothing else in the end is removed: the run was rejected.

    Attributes:
        warning: set where the file system has no locks, so that no run is kept out; else ``None``.

    Raises:
        ConfigError: another process trains there; it is named.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK_FILE
        self._held: TextIOWrapper | None = None
        self._made = False
        self.warning: str | None = None

    def __enter__(self) -> Self:
        self.take()
        return self

    def take(self) -> None:
        """Take it, in the directory that has the name now: called again where the former one was moved aside."""
        self._made = not self._path.parent.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        held = self._take()
        if self._held is not None:
            self._held.close()
        self._held = held

    def _take(self) -> TextIOWrapper:
        while True:
            # Who may read it may also lock it.
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "a+", encoding="utf-8")
            os.fchmod(file.fileno(), 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    raise ConfigError([self._occupied(file)]) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    file.close()
                    raise
                self.warning = (
                    f"{self._path.parent} has no file locks ({error.strerror}): see that no other run is there"
                )
            if self._is_current(file):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                return file
            file.close()  # its holder ended, or the directory was moved, between the two calls

    def _is_current(self, file: TextIOWrapper) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def _occupied(self, file: TextIOWrapper) -> str:
        file.seek(0)
        holder = file.read().strip() or "another process"
        return (
            f"run_dir={self._path.parent}: another run uses this directory ({holder}); wait for it, end it, or choose "
            "another run_dir"
        )

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._path.unlink(missing_ok=True)  # while it is held: a process that has opened it checks again
            self._held.close()
            self._held = None
            if self._made and not any(self._path.parent.iterdir()):
                with suppress(OSError):  # another run is there since
                    self._path.parent.rmdir()
