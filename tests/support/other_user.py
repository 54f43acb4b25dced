"""A process of another user that attacks a living run. Starting it needs root.

It reads its targets from standard input, attacks all of them round after round, and prints a line of JSON per round.
Attempts on files and processes must fail for lack of permission. No port may serve it, neither as Ray nor as a store in
which ranks meet. Ports also get garbage, which must not disturb the run.
"""

import encodings.idna  # noqa: F401 (another user may not be able to import it later)
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.hosts.stranger import ask

UID = 65534
_REST_S = 0.1
_GARBAGE = (b"\0" * 64, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\x80\x02c", b"\x3c" * 9, b"")


@dataclass
class Targets:
    """Parts of a living run: its directory, Ray's session, ports on 127.0.0.1, processes, shared memory."""

    run_dir: str
    session: str
    ports: list[int] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)


@dataclass
class Round:
    """Names of attempts that succeeded, were refused, or failed otherwise, and whether the run's directory was seen."""

    obtained: list[str]
    refused: list[str]
    other: list[str]
    sees_run: bool


class OtherUser:
    """Handle on the process. It starts immediately, since its imports take seconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, targets: Targets) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(targets)) + "\n")
        self._process.stdin.flush()

    def end(self) -> list[Round]:
        """Let it finish its round, and return all rounds."""
        out, _ = self._process.communicate(timeout=60)
        assert self._process.returncode == 0
        return [Round(**json.loads(line)) for line in out.splitlines()]


def _attempts(targets: Targets) -> dict[str, Callable[[], Any]]:
    """Return attempts by name. Each must be refused."""
    run, session = Path(targets.run_dir), Path(targets.session)
    private = session.parent.parent
    found: dict[str, Callable[[], Any]] = {
        "list private": lambda: list(private.iterdir()),
        "read token": (private / "token").read_text,
        "plant in private": (private / "planted").touch,
        "rename private": lambda: private.rename(private.with_name("mine")),
        "list session": lambda: list(session.iterdir()),
        "rename session": lambda: session.rename(session.with_name("mine")),
        "read log": (session / "logs" / "raylet.out").read_text,
        "plant log": (session / "logs" / "planted").touch,
        # A link while the run is alive. Afterwards, others may read the logs.
        "list logs by the run": lambda: list((run / "worker_logs").readlink().iterdir()),
        "unlink logs of the run": (run / "worker_logs").unlink,
        "plant in run": (run / "planted").touch,
        "rename run": lambda: run.rename(run.with_name("mine")),
        "read ledger": (run / "ledger.sqlite").read_bytes,
        "read the ledger's memory": (run / "ledger.sqlite-shm").read_bytes,
        "open lock": (run / ".lock").open,
        "write metrics": lambda: (run / "metrics.jsonl").open("a"),
        "write configuration": lambda: (run / "config.yaml").open("a"),
        "unlink checkpoints": (run / "checkpoints" / "latest").unlink,
        "plant a checkpoint": lambda: (run / "checkpoints" / "step-999999").mkdir(),
    }
    for name in ("raylet", "plasma_store"):
        found[f"connect {name}"] = partial(_connect, session / "sockets" / name)
        found[f"unlink {name}"] = (session / "sockets" / name).unlink
    for path in map(Path, targets.memory):
        found |= {
            f"read {path}": path.read_bytes,
            f"write {path}": partial(path.open, "r+b"),
            f"del {path}": path.unlink,
        }
    for process in targets.processes:
        place = Path(f"/proc/{process}")
        found[f"environment of {process}"] = (place / "environ").read_bytes
        found[f"files of {process}"] = lambda place=place: list((place / "fd").iterdir())
        found[f"memory of {process}"] = (place / "mem").open
        found[f"signal {process}"] = partial(os.kill, process, 0)
    return found


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))


def _served(port: int) -> list[str]:
    """Send garbage to a port, and return what it serves without the token."""
    for garbage in _GARBAGE:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(garbage)
    found = [f"{port}: {answer}" for answer in ask("127.0.0.1", port, timeout_s=0.5) if answer.startswith("OK")]
    with suppress(dist.DistError, RuntimeError):
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
        found.append(f"{port} is a store with {store.list_keys()}")
    return found


def _round(targets: Targets) -> Round:
    found = Round([], [], [], False)
    for name, attempt in _attempts(targets).items():
        try:
            attempt()
        except PermissionError:
            found.refused.append(name)
        except OSError as error:  # it no longer exists
            found.other.append(f"{name}: {type(error).__name__}")
        else:
            found.obtained.append(name)
    with suppress(OSError):
        found.sees_run = bool((Path(targets.run_dir) / "config.yaml").read_text())
    return found


def _main() -> None:
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)
    targets = Targets(**json.loads(sys.stdin.readline()))
    with ThreadPoolExecutor(32) as pool:
        served = pool.map(_served, targets.ports)
        first = _round(targets)
        first.obtained += [answer for answers in served for answer in answers]
        print(json.dumps(asdict(first)), flush=True)
    while not select.select([sys.stdin], [], [], _REST_S)[0]:  # the test closes it at the end
        print(json.dumps(asdict(_round(targets))), flush=True)


if __name__ == "__main__":
    _main()
