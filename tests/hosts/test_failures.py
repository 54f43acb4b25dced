"""A node that fails ends the run on every node soon, with one sentence, and leaves nothing.

``tests/process/test_launch.py`` has nodes that never come, have another key, or whose plan is rejected, without Ray.
All cases run at the same time, each with a separate port and run directory, since they mostly wait.
"""

import signal
from dataclasses import dataclass

import psutil
import pytest

from tests.conftest import Tiny
from tests.hosts.hosts import Network, Running
from tests.hosts.test_two_hosts import PORT, here, left_on, start

CASES = ("killed", "stopped")


@dataclass
class Ended:
    """Launches and exit codes of all cases by rank, and processes left on either host."""

    runs: dict[str, list[Running]]
    codes: dict[str, list[int]]
    left: list[list[str]]


@pytest.fixture(scope="module")
def ended(network: Network, tiny: Tiny) -> Ended:
    runs: dict[str, list[Running]] = {}

    def begin(name: str, **environment: str) -> None:
        environment |= {"PORT": str(PORT + 1 + CASES.index(name))}
        flags = ("--run_dir", str(network.shared / name))
        nodes = enumerate(network.nodes)
        runs[name] = [start(host, rank, network, tiny, name, flags, **environment) for rank, host in nodes]

    begin("killed")
    begin("stopped", NODES="3")
    runs["stopped"][0].wait_for("is here", 120)
    _launcher(runs["stopped"][1]).send_signal(signal.SIGTERM)
    runs["killed"][0].wait_for("all 2 nodes have joined; training", 180)
    _launcher(runs["killed"][0]).kill()
    codes = {name: [run.finish(90) for run in pair] for name, pair in runs.items()}
    return Ended(runs, codes, [left_on(host, grace_s=60) for host in network.nodes])


def _launcher(run: Running) -> psutil.Process:
    """Return the process that runs the script, the child of ``nsenter``."""
    return psutil.Process(run.process.pid).children()[0]


def test_a_node_that_is_interrupted_ends_the_others(ended: Ended, network: Network) -> None:
    leader, node = ended.runs["stopped"]
    assert ended.codes["stopped"] == [1, 130]
    assert leader.last_line.startswith(f"slime-like: {here(network, 1)}: interrupted there"), leader.output
    assert node.last_line == f"slime-like: interrupted on {here(network, 1)}", node.output


def test_node_0_is_killed_outright(ended: Ended, network: Network) -> None:
    """Training has started, so the other node must end it."""
    assert ended.codes["killed"] in ([-9, 1], [137, 1])
    lost = f"slime-like: {here(network, 1)} has lost node 0 ({network.nodes[0].address}): its connection ended"
    node = ended.runs["killed"][1]
    assert node.last_line.startswith(lost), node.output


def test_nothing_is_left(ended: Ended) -> None:
    assert ended.left == [[], []]
