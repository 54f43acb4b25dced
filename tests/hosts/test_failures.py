"""What keeps nodes from coming together is one sentence on each of them, soon, with nothing left behind.

All cases are started at once, each with a separate port and run directory: most of their time is spent waiting.
"""

import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.conftest import Tiny
from tests.hosts.hosts import Host, Network, Running, two_hosts
from tests.hosts.test_two_hosts import PORT, here, left_on, start

NOWHERE = "192.0.2.9"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Iterator[Network]:
    with two_hosts(tmp_path_factory.mktemp("shared")) as network:
        shutil.copytree(tiny.model, network.shared / "model")
        shutil.copytree(tiny.data, network.shared / "data")
        yield network


class Cases:
    """Starts of the script on both hosts, by name; each name has its port and its run directory."""

    def __init__(self, network: Network, tiny: Tiny) -> None:
        self._network = network
        self._tiny = tiny
        self.runs: dict[str, dict[int, Running]] = {}

    def port(self, name: str) -> int:
        return PORT + 1 + list(self.runs).index(name)

    def begin(
        self, name: str, rank: int, run_dir: Path | None = None, flags: tuple[str, ...] = (), **environment: str
    ) -> None:
        """Node ``rank`` of case ``name``."""
        self.runs.setdefault(name, {})
        flags = ("--run_dir", str(run_dir or self._network.shared / name), *flags)
        variables = {"PORT": str(self.port(name)), **environment}
        host = self._network.nodes[rank]
        self.runs[name][rank] = start(host, rank, self._network, self._tiny, name, flags, **variables)

    def both(self, name: str, run_dir: Path | None = None, flags: tuple[str, ...] = (), **environment: str) -> None:
        for rank in range(2):
            self.begin(name, rank, run_dir, flags, **environment)

    def launcher(self, name: str, rank: int) -> psutil.Process:
        """Python's process behind the script; not a child of it, which has its command line until it runs another."""
        port = str(self.port(name))
        found = {
            process.pid: process
            for process in self._network.nodes[rank].processes()
            if "launch" in (command := _command(process))[2:3] and port in command
        }
        (launcher,) = (process for process in found.values() if _parent(process) not in found)
        return launcher


@dataclass
class Ended:
    """How all of them ended: exit codes and closing lines by case and rank, and what was left on either host."""

    codes: dict[str, list[int]]
    said: dict[str, list[str]]
    output: dict[str, str]
    left: list[list[str]]


@pytest.fixture(scope="module")
def ended(network: Network, tiny: Tiny) -> Ended:
    cases = Cases(network, tiny)
    cases.both("killed")  # with Ray and training on
    holder = _begin_waiting(cases, network)
    for name, victim, number in (("lost", 0, signal.SIGKILL), ("stopped", 1, signal.SIGTERM)):
        cases.runs[name][0].wait_for("is here", 120)
        cases.launcher(name, victim).send_signal(number)
    cases.runs["killed"][0].wait_for("all 2 nodes have joined; training", 180)
    cases.launcher("killed", 0).kill()
    codes = {name: [run.finish(90) for run in runs.values()] for name, runs in cases.runs.items()}
    for process in network.nodes[0].processes():  # the holder, as it is called inside
        if "holder" in " ".join(_command(process)):
            process.kill()
    holder.finish(10)
    said = {name: [run.last_line for run in runs.values()] for name, runs in cases.runs.items()}
    output = {name: "\n".join(run.output for run in runs.values()) for name, runs in cases.runs.items()}
    return Ended(codes, said, output, [left_on(host, grace_s=60) for host in network.nodes])


def _begin_waiting(cases: Cases, network: Network) -> Running:
    """Those that end without Ray. Returns who holds the port of one of them."""
    first = network.nodes[0]
    cases.both("never", NODES="3", NODES_TIMEOUT_S="75")  # in which both start Ray, while all the others start
    cases.both("lost", NODES="3")
    cases.both("stopped", NODES="3")
    small = ("--cluster.gpu_memory_gib", "0.001")
    cases.both("plan", flags=small, PLAN="1", ENGINE="transformers", SILENCE_S="10")
    cases.begin("no such address", 0, HEAD_ADDR=NOWHERE, NODE_ADDR="")
    other_key = _key(network, "other")
    cases.begin("other key", 0)
    cases.begin("other key", 1, TOKEN_FILE=other_key)
    cases.begin("no head there", 1, HEAD_ADDR=NOWHERE, TOKEN_FILE=other_key, NODES_TIMEOUT_S="3")
    cases.begin("no shared key", 1, Path("/tmp/keyless"), NODES_TIMEOUT_S="3")
    cases.begin("busy", 1, SILENCE_S="10")
    taken = cases.port("busy")
    holder = _hold(first, taken, network.shared / "holder.log")
    cases.begin("busy", 0)
    cases.begin("somebody else there", 1, PORT=str(taken), TOKEN_FILE=other_key, NODES_TIMEOUT_S="3")
    if not network.why_loopback:
        cases.both("own", Path("/tmp/own"), TOKEN_FILE=_key(network, "by-hand"))
    return holder


def _command(process: psutil.Process) -> list[str]:
    """Empty where it has ended since it was found: cases that fail do so while others begin."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _parent(process: psutil.Process) -> int | None:
    """``None`` where it has ended since it was found."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def _hold(host: Host, port: int, log: Path) -> Running:
    """Somebody who accepts connections there and says nothing."""
    bound = f"s = socket.create_server(('{host.address}', {port}))"
    held = f"import socket, time; {bound}; print('holder'); time.sleep(300)"
    holder = host.start([sys.executable, "-u", "-c", held], log)
    holder.wait_for("holder", 30)
    return holder


def _key(network: Network, name: str) -> str:
    """A key that was made by hand."""
    path = network.shared / f"key-{name}"
    path.write_text("k" * 40)
    path.chmod(0o600)
    return str(path)


def test_a_node_that_never_comes(ended: Ended, network: Network) -> None:
    """Both nodes that joined name the one that did not."""
    expected = f"slime-like: of 3 nodes, node 2 did not come to {here(network, 0)} within 75 s; start the same "
    assert ended.codes["never"] == [1, 1]
    for line in ended.said["never"]:
        assert line.startswith(expected), ended.output["never"]


def test_a_node_that_ends_before_the_start(ended: Ended, network: Network) -> None:
    """Killed or interrupted while a third is awaited: the others learn of it at once."""
    lost = f"slime-like: {here(network, 1)} has lost node 0 ({network.nodes[0].address}): its connection ended"
    assert ended.codes["lost"] in ([-9, 1], [137, 1])
    assert ended.said["lost"][1].startswith(lost), ended.output["lost"]
    assert ended.codes["stopped"] == [1, 130]
    assert ended.said["stopped"][0].startswith(f"slime-like: {here(network, 1)}: interrupted there")
    assert ended.said["stopped"][1] == f"slime-like: interrupted on {here(network, 1)}", ended.output["stopped"]


def test_node_0_is_killed_outright(ended: Ended, network: Network) -> None:
    """With Ray and training on: only the nodes themselves are left to end them."""
    assert ended.codes["killed"][1] == 1
    lost = f"slime-like: {here(network, 1)} has lost node 0 "
    assert ended.said["killed"][1].startswith(lost), ended.output["killed"]


def test_a_plan_that_is_refused(ended: Ended, network: Network) -> None:
    """Rejected before Ray starts; both early and late nodes report it."""
    assert ended.codes["plan"] == [1, 1]
    for line in ended.said["plan"]:
        assert f"{here(network, 0)}, slime-like plan: " in line, ended.output["plan"]
        assert "more than the GPU's" in line
    assert "Ray" not in ended.output["plan"]


def test_a_wrong_address(ended: Ended, network: Network) -> None:
    assert ended.codes["no such address"] == [2] and ended.codes["no head there"] == [1]
    (line,) = ended.said["no such address"]
    assert f"HEAD_ADDR={NOWHERE} is {NOWHERE}, which is not an address of {network.nodes[0].name}" in line
    (line,) = ended.said["no head there"]
    assert NOWHERE in line and "within 3 s" in line


def test_a_busy_port_ends_who_waits_as_well(ended: Ended, network: Network) -> None:
    """Node 0 cannot answer there; node 1 finds its sentence beside the key."""
    assert ended.codes["busy"] == [1, 1]
    for line in ended.said["busy"]:
        assert f" of {network.nodes[0].address} cannot be listened on (Address already in use)" in line


def test_a_wrong_key_and_none(ended: Ended, network: Network) -> None:
    assert ended.codes["somebody else there"] == ended.codes["no shared key"] == [1]
    (line,) = ended.said["somebody else there"]
    assert f"node 0 did not answer at {network.nodes[0].address}:" in line and "within 3 s" in line
    assert "no cluster key /tmp/.keyless.cluster/key within 3 s" in ended.said["no shared key"][0]


def test_a_node_with_another_key(ended: Ended, network: Network) -> None:
    """Ray's head does not answer it; node 0 finds its sentence beside the key."""
    assert ended.codes["other key"] == [1, 1]
    refused = f"slime-like: {here(network, 1)}: {network.nodes[0].address}:"
    for line in ended.said["other key"]:
        assert line.startswith(refused), ended.output["other key"]
        assert "answers, but does not accept this node's key; give every node the same TOKEN_FILE" in line
    assert "joined Ray" not in ended.output["other key"]


def test_a_node_that_shares_no_files(ended: Ended, network: Network) -> None:
    """It has the key, by hand, and its run directory is another one: checkpoints would be torn in two."""
    if network.why_loopback:
        pytest.skip(f"these nodes are loopback addresses and share everything: {network.why_loopback}")
    assert ended.codes["own"] == [1, 1]
    for line in ended.said["own"]:
        assert "run_dir=/tmp/own is not the directory that node 0 sees" in line, ended.output["own"]
    assert "joined Ray" not in ended.output["own"]


def test_nothing_is_left(ended: Ended) -> None:
    assert ended.left == [[], []]
