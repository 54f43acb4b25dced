"""Lock of a run directory. Without it, two runs would move, overwrite and remove each other's files."""

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from slime_like.errors import ConfigError

LOCK_FILE = ".lock"
# Error codes of file systems without locks. Some network file systems are mounted like this.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Context manager that keeps other runs out of ``run_dir``, which is created if missing.

    The kernel releases the lock with the process, so a killed run never blocks the next one. If the directory was
    created for the lock and is empty at the end, the run was rejected, and the directory is removed.

    Attributes:
        warning: set if the file system has no locks, so other runs are not kept out; otherwise ``None``.

    Raises:
        ConfigError: another process trains there; the message names it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK_FILE
        self._held: FileLock | None = None
        self._made = False
        self.warning: str | None = None

    def __enter__(self) -> Self:
        self.take()
        return self

    def take(self) -> None:
        """Lock the directory that has the name now. Call again after the former directory was moved aside."""
        self._made = not self._path.parent.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever can read the file can also lock it. A lock without the kernel would outlive a killed run.
        held = FileLock(self._path, mode=0o600, fallback_to_soft=False)
        try:
            held.acquire(blocking=False)
            self._path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        except Timeout:
            holder = ""
            with suppress(FileNotFoundError):
                holder = self._path.read_text(encoding="utf-8").strip()
            problem = f"another run uses this directory ({holder or 'another process'})"
            remedy = "wait for it, end it, or set another run_dir"
            raise ConfigError(f"run_dir={self._path.parent}: {problem}; {remedy}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            problem = f"{self._path.parent} has no file locks ({error.strerror})"
            self.warning = f"{problem}: make sure that no other run uses it"
        if self._held is not None:
            self._held.release()
        self._held = held

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._path.unlink(missing_ok=True)  # while locked: whoever has opened the file opens it again
            self._held.release()
            self._held = None
            if self._made and not any(self._path.parent.iterdir()):
                with suppress(OSError):  # another run has started there
                    self._path.parent.rmdir()
