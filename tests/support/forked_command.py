"""``slime-like``, Ray's workers and agents, and reward workers, forked from a server that has imported them.

Ray starts a worker with the command in ``setup_worker_path``. Here, that is ``worker_shim.py``, which passes arguments,
environment and standard streams to the server and waits. The fork continues like Ray's script.
"""

import argparse
import atexit
import ctypes
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import ray._private.node
from ray._private import services
from ray._private.runtime_env.context import RuntimeEnvContext
from ray._private.workers import setup_worker
from ray._raylet import Config

from slime_like.commands.main import main
from slime_like.sandbox import pool
from tests.support.forks import ANY_JOB, FIRST_JOB, clean_forks
from tests.support.worker_shim import PR_SET_PDEATHSIG

_SERVER_START_S = 120


class WorkerServer:
    """Server that forks Ray's workers for the commands of this test process, and ends with it."""

    def __init__(self) -> None:
        forks = clean_forks()
        self._directory = tempfile.TemporaryDirectory()
        self._socket = Path(self._directory.name, "workers")
        self.shim = Path(self._directory.name, "start_worker.py")
        root = Path(__file__).parents[2]
        self.shim.write_text(
            f"import sys\nsys.path[0] = {str(root)!r}\n"
            f"from tests.support.worker_shim import ask\nask({str(self._socket)!r}, {setup_worker.__file__!r})\n"
        )
        ready = forks.Event()
        server = forks.Process(target=_serve_workers, args=(str(self._socket), ready))  # a daemon may have no children
        server.start()
        atexit.register(server.kill)
        if not ready.wait(_SERVER_START_S):
            raise TimeoutError(f"the server of Ray workers did not start within {_SERVER_START_S} s")


def _serve_workers(path: str, ready: Any) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects them
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        ready.set()
        while True:
            connection, _ = server.accept()
            length, descriptors, _, _ = socket.recv_fds(connection, 16, 3)
            if os.fork() == 0:
                server.close()
                _join_namespaces(connection)
                _become_worker(connection, int(length), descriptors)
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)


def _join_namespaces(connection: socket.socket) -> None:
    """Enter the namespaces of the shim's host (``tests/hosts``)."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if Path(f"/proc/{pid}/ns/pid").readlink() == Path("/proc/self/ns/pid").readlink():
        return
    places = [Path(f"/proc/{pid}/ns/{kind}") for kind in ("pid", "uts", "net", "mnt")]
    with ExitStack() as stack:
        for file in [stack.enter_context(place.open()) for place in places]:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns({file.name})")
    if os.fork():  # only children are in the other namespace of processes
        os._exit(0)


def _become_worker(connection: socket.socket, length: int, descriptors: list[int]) -> NoReturn:
    """Run a worker. ``connection`` stays open as long as it lives. Workers that it starts are forked, too."""
    _start_reward_workers_by(str(Path(connection.getsockname()).with_name("start_worker.py")))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rb") as stream:
        request = json.loads(stream.read(length))
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.setpgid(0, 0)
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, arguments = parser.parse_known_args(request["arguments"])
    _inherit(
        request["environment"] | RuntimeEnvContext.deserialize(known.serialized_runtime_env_context).env_vars,
        request["directory"],
    )
    if (job := os.environ.get("RAY_JOB_ID", FIRST_JOB)) not in (FIRST_JOB, ANY_JOB):
        raise RuntimeError(f"only workers of a cluster's first job are forked, not of {job}")
    if "RAY_AUTH_MODE" in os.environ:  # read when Ray's core was imported
        Config.initialize(json.dumps({"AUTH_MODE": os.environ["RAY_AUTH_MODE"]}).encode())
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    sys.stdin = open(0)  # noqa: SIM115  # an agent detects the raylet's end there
    if arguments[0] == "-m":
        sys.argv = [arguments[1], str(os.getppid())]
        runpy.run_module(arguments[1], run_name="__main__")
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
    atexit._run_exitfuncs()
    os._exit(0)


def _end_with(connection: socket.socket) -> None:
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


@cache
def worker_server() -> WorkerServer:
    return WorkerServer()


class ForkedCommand:
    """``slime-like ARGUMENTS`` or another program in a new session, with the methods of ``subprocess.Popen``."""

    def __init__(
        self,
        workers: WorkerServer,
        arguments: Sequence[str],
        out: Path,
        err: Path,
        program: Callable[[Sequence[str]], int] = main,
    ) -> None:
        forks = clean_forks()
        begun = forks.Event()
        inherited = (list(arguments), str(out), str(err), dict(os.environ), str(Path.cwd()), str(workers.shim))
        self._process = forks.Process(target=_command, args=(begun, program, *inherited))
        self._process.start()
        if not begun.wait(_SERVER_START_S):
            raise TimeoutError(f"no command was forked within {_SERVER_START_S} s")
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("slime-like", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _command(
    begun: Any,
    program: Callable[[Sequence[str]], int],
    arguments: list[str],
    out: str,
    err: str,
    environment: dict[str, str],
    directory: str,
    shim: str,
) -> None:
    """Run the program, and end like an interpreter: exit handlers run, and output is written."""
    os.setsid()
    _inherit(environment, directory)
    for descriptor, file, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(file, flags, 0o644), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begun.set()
    sys.argv = ["slime-like", *arguments]
    start_workers_by(shim)
    _start_reward_workers_by(shim)
    code = program(arguments)
    atexit._run_exitfuncs()
    sys.exit(code)


def start_workers_by(shim: str) -> None:
    """Start workers and agents of this process's Ray nodes through the shim."""
    usual = ray._private.node.Node.__init__
    services._build_python_executable_command_memory_profileable = lambda *_: [sys.executable, shim]

    def start(node: Any, ray_params: Any, *arguments: Any, **options: Any) -> None:
        ray_params.update(setup_worker_path=shim)
        usual(node, ray_params, *arguments, **options)

    ray._private.node.Node.__init__ = start


def _start_reward_workers_by(shim: str) -> None:
    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([command[0], shim, *command[1:]], **options)

    pool.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": start})  # type: ignore[assignment]


def _inherit(environment: dict[str, str], directory: str) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
