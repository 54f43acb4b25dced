"""A node that fails ends the run on every node soon, with one sentence, and leaves nothing.

All cases run at the same time, each with a separate port and run directory, since they mostly wait.
"""

import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.conftest import Tiny
from tests.hosts.hosts import Network, Running, two_hosts
from tests.hosts.test_two_hosts import PORT, here, left_on, start

CASES = ("killed", "never", "stopped", "plan", "other key")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Iterator[Network]:
    with two_hosts(tmp_path_factory.mktemp("shared")) as network:
        shutil.copytree(tiny.model, network.shared / "model")
        shutil.copytree(tiny.data, network.shared / "data")
        yield network


@dataclass
class Ended:
    """Exit codes and last lines of all cases by rank, their output, and processes left on either host."""

    codes: dict[str, list[int]]
    said: dict[str, list[str]]
    output: dict[str, str]
    left: list[list[str]]


@pytest.fixture(scope="module")
def ended(network: Network, tiny: Tiny) -> Ended:
    runs: dict[str, list[Running]] = {}

    def begin(name: str, *flags: str, key: str = "", **environment: str) -> None:
        """Start both nodes of a case, node 1 with the key in this file."""
        flags = ("--run_dir", str(network.shared / name), *flags)
        environment["PORT"] = str(PORT + 1 + CASES.index(name))
        keys: list[dict[str, str]] = [{}, {"TOKEN_FILE": key} if key else {}]
        runs[name] = [
            start(host, rank, network, tiny, name, flags, **environment, **keys[rank])
            for rank, host in enumerate(network.nodes)
        ]

    begin("never", NODES="3", NODES_TIMEOUT_S="45")
    runs["never"][0].wait_for("is here", 60)  # both have joined before the machine is busy with the others
    begin("killed")
    begin("stopped", NODES="3")
    begin("plan", "--cluster.gpu_memory_gib", "0.001", PLAN="1", ENGINE="transformers", SILENCE_S="10")
    other = network.shared / "other-key"
    other.touch(mode=0o600)
    other.write_text("k" * 40)
    begin("other key", key=str(other))
    runs["stopped"][0].wait_for("is here", 120)
    _launcher(runs["stopped"][1]).send_signal(signal.SIGTERM)
    runs["killed"][0].wait_for("all 2 nodes have joined; training", 180)
    _launcher(runs["killed"][0]).kill()
    codes = {name: [run.finish(90) for run in pair] for name, pair in runs.items()}
    said = {name: [run.last_line for run in pair] for name, pair in runs.items()}
    output = {name: "\n".join(run.output for run in pair) for name, pair in runs.items()}
    return Ended(codes, said, output, [left_on(host, grace_s=60) for host in network.nodes])


def _launcher(run: Running) -> psutil.Process:
    """Return the process that runs the script: ``nsenter``'s child on a host."""
    process = psutil.Process(run.process.pid)
    return process.children()[0] if "nsenter" in process.name() else process


def test_a_node_that_never_comes(ended: Ended, network: Network) -> None:
    """Both nodes that joined name the missing one."""
    expected = f"slime-like: of 3 nodes, node 2 did not come to {here(network, 0)} within 45 s; start the same "
    assert ended.codes["never"] == [1, 1]
    for line in ended.said["never"]:
        assert line.startswith(expected), ended.output["never"]


def test_a_node_that_is_interrupted_ends_the_others(ended: Ended, network: Network) -> None:
    assert ended.codes["stopped"] == [1, 130]
    assert ended.said["stopped"][0].startswith(f"slime-like: {here(network, 1)}: interrupted there")
    assert ended.said["stopped"][1] == f"slime-like: interrupted on {here(network, 1)}", ended.output["stopped"]


def test_node_0_is_killed_outright(ended: Ended, network: Network) -> None:
    """Training has started, so the other node must end it."""
    assert ended.codes["killed"] in ([-9, 1], [137, 1])
    lost = f"slime-like: {here(network, 1)} has lost node 0 ({network.nodes[0].address}): its connection ended"
    assert ended.said["killed"][1].startswith(lost), ended.output["killed"]


def test_a_plan_that_is_rejected(ended: Ended, network: Network) -> None:
    """Both nodes report it, and Ray does not start."""
    assert ended.codes["plan"] == [1, 1]
    for line in ended.said["plan"]:
        assert f"{here(network, 0)}, slime-like plan: " in line, ended.output["plan"]
        assert "more than the GPU's" in line
    assert "Ray's head" not in ended.output["plan"]


def test_a_node_with_another_key(ended: Ended, network: Network) -> None:
    """Ray's head rejects the node. Node 0 reads the node's note."""
    assert ended.codes["other key"] == [1, 1]
    refused = f"slime-like: {here(network, 1)}: {network.nodes[0].address}:"
    for line in ended.said["other key"]:
        assert line.startswith(refused), ended.output["other key"]
        assert "answers, but does not accept this node's key; give every node the same TOKEN_FILE" in line
    assert "joined Ray" not in ended.output["other key"]


def test_nothing_is_left(ended: Ended) -> None:
    assert ended.left == [[], []]
