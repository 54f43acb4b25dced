"""Several hosts on one machine, each with a network, host name, processes, /tmp and /dev/shm.

They are Linux namespaces, made with ``unshare`` and ``ip``, which needs root. The cluster's hosts share one network and
one directory. The first one has a second interface to the network of an outsider. Processes of a host end with it: its
process 1 is killed, and the kernel kills the others. Ray's workers are forked, and all other processes start anew.
Without permission for namespaces, the tests are skipped.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

import psutil
import pytest

from slime_like.orchestration.cluster import ray_node
from tests.support.forked_command import worker_server

REPO = Path(__file__).parents[2]
_UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def why_not() -> str:
    """Return why hosts cannot be made here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: util-linux, iproute2)"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"the kernel grants no namespaces: {tried.stderr.strip()}"
    name = f"slime{os.getpid() % 10_000}t"
    pair = ["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"]
    made = subprocess.run(pair, capture_output=True, text=True, check=False)
    if made.returncode:
        return f"the kernel grants no pair of virtual network cards: {made.stderr.strip()}"
    subprocess.run(["ip", "link", "del", name], check=True)
    return ""


@dataclass
class Running:
    """A command on a host, with its output in a file."""

    process: subprocess.Popen[bytes]
    log: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""

    def wait_for(self, text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, f"ended before it said {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"never said {text!r}:\n{self.output}"
            time.sleep(0.05)

    def finish(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            raise AssertionError(f"did not end within {timeout_s:.0f} s:\n{self.output}") from error


@dataclass
class Host:
    """One host.

    Attributes:
        init: id of its process 1 in this process's namespace.
        kept: handle that keeps its network's namespace after the power is off.
    """

    name: str
    address: str
    init: int
    kept: IO[str] | None = None

    def command(self, arguments: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.init), "-a", *arguments]

    def run(self, arguments: Sequence[str], timeout_s: float = 30.0) -> str:
        done = subprocess.run(self.command(arguments), capture_output=True, text=True, check=False, timeout=timeout_s)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Running:
        # Other tests may have started engines in this process, which set variables.
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ}
        kept["PYTHONPATH"] = os.pathsep.join([str(_forks_workers()), str(REPO), kept.get("PYTHONPATH", "")])
        variables = [f"{name}={value}" for name, value in {**kept, **(environment or {})}.items()]
        with log.open("w") as out:
            process = subprocess.Popen(
                self.command(["env", "-i", "-C", str(REPO), *variables, *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(process, log)

    def processes(self) -> list[psutil.Process]:
        """Return its living processes except process 1."""
        namespace = _pid_namespace(self.init)
        others = (process for process in psutil.process_iter() if process.pid != self.init)
        return [one for one in others if namespace and _pid_namespace(one.pid) == namespace and _is_alive(one)]

    def listening(self) -> list[tuple[str, int, str]]:
        """Return address, port and process name of every TCP listener. "*" is every address."""
        found = []
        for line in self.run(["ss", "-ltnpH"]).splitlines():
            columns = line.split()
            address, _, port = columns[3].rpartition(":")
            who = columns[5].split('"')[1] if len(columns) > 5 else ""
            address = address.strip("[]").removeprefix("::ffff:")
            found.append(("*" if address in ("0.0.0.0", "::", "*") else address, int(port), who))
        return found

    def power_off(self) -> None:
        """End the host without closing its connections."""
        # The other end of its cable keeps its address, like at a switch, as long as this namespace exists.
        self.kept = Path(f"/proc/{self.init}/ns/net").open()  # noqa: SIM115
        self.run(["ip", "link", "set", "eth0", "down"])
        os.kill(self.init, signal.SIGKILL)


def _pid_namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@dataclass
class Network:
    """Two hosts of a cluster, and an outsider.

    Attributes:
        nodes: the cluster's two.
        outsider: reaches the cluster's network through node 0's second interface.
        shared: directory that both nodes see under the same path.
    """

    nodes: list[Host]
    outsider: Host
    shared: Path


@contextmanager
def two_hosts(shared: Path) -> Iterator[Network]:
    """Yield the hosts, which are removed at the end."""
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:
        first, second, outsider = (
            _boot(stack, name, address)
            for name, address in (("node-a", "10.77.0.1"), ("node-b", "10.77.0.2"), ("outside", "192.168.77.9"))
        )
        _wire(first, "eth0", "10.77.0.1", second, "eth0", "10.77.0.2")
        _wire(first, "eth1", "192.168.77.1", outsider, "eth0", "192.168.77.9")
        # A second way into the cluster: its addresses, through node 0.
        outsider.run(["ip", "route", "add", "10.77.0.0/24", "via", "192.168.77.1"])
        for node in (first, second):
            _furnish(node, shared)
        yield Network([first, second], outsider, shared)


@cache
def _forks_workers() -> Path:
    """Return a directory for PYTHONPATH with which Ray forks its workers, since a start takes seconds."""
    shim = worker_server().shim
    condition = f"if {ray_node.__name__!r} in sys.orig_argv:"
    start = f"from tests.support.forked_command import start_workers_by; start_workers_by({str(shim)!r})"
    (shim.parent / "sitecustomize.py").write_text(f"import sys\n{condition}\n    {start}\n")
    return shim.parent


def _boot(stack: ExitStack, name: str, address: str) -> Host:
    # Process 1 waits for orphans, like a real one.
    init = "import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
    outer = subprocess.Popen([*_UNSHARE, sys.executable, "-c", init], stdin=subprocess.DEVNULL)
    stack.callback(_shut_down, outer)
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(outer.pid).children()) or "python" not in children[0].name():
        assert outer.poll() is None and time.monotonic() < deadline, "no namespace was made"
        time.sleep(0.01)
    host = Host(name, address, children[0].pid)
    host.run(["hostname", name])
    host.run(["ip", "link", "set", "lo", "up"])
    return host


def _shut_down(outer: subprocess.Popen[bytes]) -> None:
    outer.kill()  # --kill-child also ends process 1, and the kernel ends the others
    outer.wait()


def _wire(left: Host, left_card: str, left_address: str, right: Host, right_card: str, right_address: str) -> None:
    command = ["ip", "link", "add", left_card, "netns", str(left.init), "type", "veth"]
    subprocess.run([*command, "peer", "name", right_card, "netns", str(right.init)], check=True)
    for host, card, address in ((left, left_card, left_address), (right, right_card, right_address)):
        host.run(["ip", "addr", "add", f"{address}/24", "dev", card])
        host.run(["ip", "link", "set", card, "up"])


def _furnish(host: Host, shared: Path) -> None:
    """Mount a separate /tmp and /dev/shm that still contain directories shared by all hosts."""
    found_everywhere = {REPO, Path(sys.prefix), Path(sys.base_prefix), shared, _forks_workers()}
    found_everywhere |= {path.resolve() for path in found_everywhere}
    for replaced in (Path("/tmp"), Path("/dev/shm")):
        below = [path for path in found_everywhere if path.is_relative_to(replaced)]
        with tempfile.TemporaryDirectory(dir=replaced) as new:
            host.run(["mount", "-t", "tmpfs", "tmpfs", new])
            for path in sorted(below):
                target = str(new / path.relative_to(replaced))
                host.run(["mkdir", "-p", target])
                host.run(["mount", "--rbind", str(path), target])
            host.run(["mount", "--move", new, str(replaced)])
