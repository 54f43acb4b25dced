"""What keeps nodes from coming together is one sentence on each of them, soon, with nothing left behind."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import Tiny
from tests.hosts.hosts import Host, Network, two_hosts
from tests.hosts.test_two_hosts import PORT, here, left_on, start


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Iterator[Network]:
    with two_hosts(tmp_path_factory.mktemp("shared")) as network:
        shutil.copytree(tiny.model, network.shared / "model")
        shutil.copytree(tiny.data, network.shared / "data")
        yield network


def test_a_node_that_never_comes(network: Network, tiny: Tiny) -> None:
    """Both that did come are told which one did not."""
    runs = [
        start(host, rank, network, tiny, "never", NODES="3", NODES_TIMEOUT_S="8")
        for rank, host in enumerate(network.nodes)
    ]
    codes = [run.finish(60) for run in runs]
    expected = f"slime-like: of 3 nodes, node 2 did not come to {here(network, 0)} within 8 s; start the same "
    assert codes == [1, 1]
    for run in runs:
        assert run.last_line.startswith(expected), run.output
    assert [left_on(host) for host in network.nodes] == [[], []]


def launchers(host: Host) -> list[psutil.Process]:
    return [process for process in host.processes() if "launch" in process.cmdline()[2:3]]


def test_a_node_that_ends_before_the_start(network: Network, tiny: Tiny) -> None:
    """Killed or interrupted while a third is awaited: the others learn of it at once."""
    first, second = network.nodes
    for victim, number, codes, said in (
        (first, signal.SIGKILL, [-9, 1], f"{here(network, 1)} has lost node 0 ({first.address}): its connection ended"),
        (second, signal.SIGTERM, [1, 130], f"{here(network, 1)}: interrupted there"),
    ):
        runs = [start(host, rank, network, tiny, "ends", NODES="3") for rank, host in enumerate(network.nodes)]
        runs[0].wait_for("is here", 60)
        (process,) = launchers(victim)
        process.send_signal(number)
        ended = [run.finish(30) for run in runs]
        assert [code if code != 137 else -9 for code in ended] == codes, runs[0].output + runs[1].output
        survivor = runs[1] if victim is first else runs[0]
        assert survivor.last_line.startswith(f"slime-like: {said}"), survivor.output
        assert [left_on(host) for host in network.nodes] == [[], []]


def test_node_0_is_killed_outright(network: Network, tiny: Tiny) -> None:
    """With Ray and training on: nobody is left to end them but they themselves."""
    runs = [start(host, rank, network, tiny, "killed") for rank, host in enumerate(network.nodes)]
    runs[0].wait_for("all 2 nodes have joined; training", 120)
    (process,) = launchers(network.nodes[0])
    process.kill()
    assert runs[1].finish(60) == 1
    runs[0].finish(30)
    assert runs[1].last_line.startswith(f"slime-like: {here(network, 1)} has lost node 0 "), runs[1].output
    assert [left_on(host, grace_s=60) for host in network.nodes] == [[], []]


def test_a_plan_that_is_refused(network: Network, tiny: Tiny) -> None:
    """Before Ray is started, and told to who is there."""
    runs = [
        start(host, rank, network, tiny, "plan", PLAN="1", GPUS_PER_NODE="-1")
        for rank, host in enumerate(network.nodes)
    ]
    assert [run.finish(120) for run in runs] == [2, 2]
    for run in runs:
        assert run.last_line.startswith(f"slime-like: {here(network, 0)}, slime-like plan: "), run.output
        assert "cluster.gpus_per_node=-1" in run.last_line and "Ray" not in run.output
    assert [left_on(host) for host in network.nodes] == [[], []]


def test_a_wrong_address_a_busy_port_and_a_wrong_key(network: Network, tiny: Tiny) -> None:
    first, second = network.nodes
    held = (
        f"import socket, time; s = socket.create_server(('{first.address}', {PORT + 1})); print('held'); time.sleep(60)"
    )
    holder = first.start([sys.executable, "-u", "-c", held], network.shared / "holder.log")
    other_key = network.shared / "other-key"
    other_key.write_text("k" * 40)
    other_key.chmod(0o600)
    holder.wait_for("held", 20)
    bounded = {"NODES_TIMEOUT_S": "3"}
    cases = {
        "no such address": (start(first, 0, network, tiny, "a", HEAD_ADDR="192.0.2.9", NODE_ADDR=""), 2),
        "nobody there": (start(second, 1, network, tiny, "b", HEAD_ADDR="192.0.2.9", **bounded), 1),
        "busy": (start(first, 0, network, tiny, "c", PORT=str(PORT + 1)), 1),
        "somebody else there": (
            start(second, 1, network, tiny, "d", PORT=str(PORT + 1), TOKEN_FILE=str(other_key), **bounded), 1,
        ),
        "no shared key": (start(second, 1, network, tiny, "e", ("--run_dir", "/tmp/own"), **bounded), 1),
    }  # fmt: skip
    codes = {name: run.finish(60) for name, (run, _) in cases.items()}
    said = {name: run.last_line for name, (run, _) in cases.items()}
    for process in first.processes():  # the holder, as it is called inside
        process.kill()
    holder.finish(10)
    assert codes == {name: code for name, (_, code) in cases.items()}, said
    assert f"HEAD_ADDR=192.0.2.9 is 192.0.2.9, which is no address of {first.name}" in said["no such address"]
    assert "192.0.2.9" in said["nobody there"] and "within 3 s" in said["nobody there"]
    assert f"port {PORT + 1} of {first.address} cannot be listened on (Address already in use)" in said["busy"]
    assert f"node 0 did not answer at {first.address}:{PORT + 1} within 3 s" in said["somebody else there"]
    assert "no cluster key /tmp/.own.cluster/key within 3 s" in said["no shared key"]
    assert [left_on(host) for host in network.nodes] == [[], []]


def test_a_node_that_shares_no_files(network: Network, tiny: Tiny) -> None:
    """It has the key, by hand, and its run directory is another one: checkpoints would be torn in two."""
    if network.why_loopback:
        pytest.skip(f"these nodes are loopback addresses and share everything: {network.why_loopback}")
    key = network.shared / "key"
    key.write_text("s" * 40)
    key.chmod(0o600)
    runs = [
        start(host, rank, network, tiny, "own", ("--run_dir", "/tmp/own"), TOKEN_FILE=str(key))
        for rank, host in enumerate(network.nodes)
    ]
    assert [run.finish(120) for run in runs] == [1, 1]
    for run in runs:
        assert "run_dir=/tmp/own is not the directory that node 0 sees" in run.last_line, run.output
        assert "Ray" not in run.output
    assert [left_on(host) for host in network.nodes] == [[], []]
