"""Replacement of a Ray worker's interpreter, which asks a server that has imported everything for a fork.

Shim and worker end together, and with the raylet that started the shim. A worker of another interpreter is not forked.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


_CONTEXT = "--serialized-runtime-env-context="


def ask(server: str, setup_worker: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    contexts = [json.loads(argument.removeprefix(_CONTEXT)) for argument in sys.argv if argument.startswith(_CONTEXT)]
    asked = [Path(context.get("py_executable", sys.executable)).parent for context in contexts]
    if any(directory != Path(sys.executable).parent for directory in asked):
        os.execv(sys.executable, [sys.executable, setup_worker, *sys.argv[1:]])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # like reward workers
    request = json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ), "directory": str(Path.cwd())})
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        socket.send_fds(connection, [b"%16d" % len(request.encode())], [0, 1, 2])
        connection.sendall(request.encode())
        while connection.recv(1):
            pass
