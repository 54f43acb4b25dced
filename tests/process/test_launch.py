"""Both sides of a launch with a GCS in this process. Each failure is a sentence that names node and cause.

``tests/hosts`` has nodes that are killed or interrupted.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import SlimeLikeError
from slime_like.launch import commands, nodes
from slime_like.launch.commands import LaunchOptions, RefusedError, RunVerdict, launch_directory
from slime_like.launch.nodes import facts, launch
from slime_like.launch.restarts import ENDED
from slime_like.orchestration.cluster import gcs
from slime_like.orchestration.cluster.bundles import RANK_LABEL
from tests.conftest import Tiny
from tests.process.conftest import wait_until
from tests.unit.launch.gcs_server import HOST, TOKEN, GcsServer, gcs_server

NODE_0 = "node 0 (gpu-0, 10.0.0.0)"
REMEDY = "restart to resume from the last checkpoint"


class Node(threading.Thread):
    """``launch`` in a thread."""

    def __init__(self, config: RunConfig, rank: int, port: int, **fields: object) -> None:
        super().__init__(daemon=True)
        self._fallbacks = fields.pop("fallbacks", ())
        given = {"nodes": 3, "head": HOST, "address": f"127.0.0.{rank + 2}", "plan": False, **fields}
        self._options = LaunchOptions(config=None, flags=(), node_rank=rank, port=port, **given)  # type: ignore[arg-type]
        self._config = config
        self.place = f"node {rank} ({socket.gethostname()}, 127.0.0.{rank + 2})"
        self.verdict: RunVerdict | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.verdict = launch(self._options, self._config, self._fallbacks)  # type: ignore[arg-type]
        except Exception as error:
            self.error = error

    def ended(self) -> Node:
        self.join(30)
        assert not self.is_alive()
        return self


class FakeRay:
    """Replacement of ``RayNode`` that joins the test's GCS without a process."""

    gcs: GcsServer
    directory = "/tmp/slime-test"
    death = ""

    def __init__(self, parameters: dict[str, Any], environment: Any, timeout_s: float) -> None:
        self._rank = int(parameters["labels"][RANK_LABEL])

    def __enter__(self) -> FakeRay:
        return self

    def __exit__(self, *_: object) -> None:
        self.gcs.leave(self._rank)

    def wait_ready(self, watch: Callable[[], None] = lambda: None) -> None:
        watch()
        self.gcs.join(self._rank)

    def problem(self) -> str | None:
        return self.death or None


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = ((nodes, "_POLL_S", 0.05), (nodes, "_LINGER_S", 0.2), (nodes, "_FOLLOW_EVERY_S", 0.05))
    for module, name, seconds in (*waits, (gcs, "_REFUSED_S", 0.3)):
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def config(tiny: Tiny, tmp_path: Path) -> RunConfig:
    token = launch_directory(tmp_path / "run") / "key"
    token.parent.mkdir()
    token.write_text(TOKEN)
    token.chmod(0o600)
    return load_config(Path("configs/quickstart.yaml"), tiny.rl_flags(tmp_path / "run")[2:])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    with gcs_server() as (found, port):
        ray = type("Ray", (FakeRay,), {"gcs": found})
        monkeypatch.setattr(nodes, "RayNode", ray)
        monkeypatch.setattr(nodes, "_require_free", lambda address, port: None)
        found.port, found.ray = port, ray  # type: ignore[attr-defined]
        yield found


def begin(server: GcsServer, config: RunConfig, rank: int = 1, **fields: object) -> Node:
    return Node(config, rank, server.port, **fields)  # type: ignore[attr-defined]


def publish(server: GcsServer, config: RunConfig, nodes: int = 3, **different: str) -> None:
    """Publish what node 0 publishes."""
    stored = {"head": NODE_0, "nodes": nodes, "facts": facts(config) | different}
    server.values[b"agreement"] = json.dumps(stored).encode()


def head(server: GcsServer, config: RunConfig, **fields: object) -> Node:
    """Start node 0, which waits for the others."""
    node = begin(server, config, 0, **fields)
    wait_until(lambda: b"agreement" in server.values)
    return node


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is bound, so no other process gets it. Nothing listens there."""
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        yield unused.getsockname()[1]


def problem(server: GcsServer) -> RunVerdict:
    """Return what a node that cannot continue reports to node 0, and answer with node 0's verdict."""
    wait_until(lambda: b"problem" in server.values)
    server.values[b"verdict"] = b'{"code": 1, "sentence": "over"}'
    return RunVerdict(**json.loads(server.values[b"problem"]))


@pytest.mark.parametrize(
    ("different", "data", "expected"),
    [
        (
            {"torch": "0"},
            {},
            RunVerdict(1, "torch=.*: NODE 0 has 0; use one environment or image on all nodes", "nodes-differ"),
        ),
        (
            {"steps": "0"},
            {},
            RunVerdict(1, "steps=.*: NODE 0 has 0; give the same settings on all nodes", "nodes-differ"),
        ),
        ({}, {"train": [Path("none.jsonl")]}, RunVerdict(2, ".*none.jsonl", "data.train")),
    ],
    ids=["version", "setting", "data"],
)
def test_a_node_that_differs_from_node_0_ends_the_run(
    server: GcsServer, config: RunConfig, different: dict[str, str], data: dict[str, Any], expected: RunVerdict
) -> None:
    publish(server, config, **different)
    node = begin(server, config.model_copy(update={"data": config.data.model_copy(update=data)}))
    found = problem(server)
    assert node.ended().verdict == found and (found.code, found.fault) == (expected.code, expected.fault)
    sentence = expected.sentence.replace("NODE 0", re.escape(NODE_0))
    assert re.match(f"{re.escape(node.place)}: {sentence}", found.sentence), found.sentence
    assert 1 not in server.nodes


def test_ray_that_ends_on_a_node_ends_the_run(server: GcsServer, config: RunConfig) -> None:
    publish(server, config)
    node = begin(server, config)
    wait_until(lambda: 1 in server.nodes)
    server.ray.death = "Ray ended by itself"  # type: ignore[attr-defined]
    assert problem(server) == RunVerdict(1, f"{node.place}: Ray ended by itself", "ray-ended")


def test_a_rank_is_given_once(server: GcsServer, config: RunConfig) -> None:
    """The run continues without the second node, which leaves no note. The first one gets node 0's verdict."""
    publish(server, config, nodes=2)
    first = begin(server, config)
    wait_until(lambda: 1 in server.nodes)
    for rank, why in ((1, f"{first.place} has it already"), (2, "with NODES=2 it must be 1 to 1")):
        refused = begin(server, config, rank).ended().error
        assert isinstance(refused, RefusedError)
        assert str(refused) == f"NODE_RANK={rank} on {socket.gethostname()} is rejected: {why}"
    assert b"problem" not in server.values and list(launch_directory(config.run_dir).glob("ended-*")) == []
    assert first.is_alive()
    server.values[b"verdict"] = b'{"code": 0, "sentence": ""}'
    assert first.ended().verdict == RunVerdict(0)


def test_ray_that_ends_on_node_0_ends_the_run(server: GcsServer, config: RunConfig) -> None:
    leader = head(server, config)
    server.ray.death = "Ray's gcs_server ended by itself with -9"  # type: ignore[attr-defined]
    sentence = f"{leader.place}, during `start`: Ray's gcs_server ended by itself with -9; {REMEDY}"
    assert leader.ended().verdict == RunVerdict(1, sentence, "ray-ended")


def test_a_node_that_never_comes_is_named_on_the_others(server: GcsServer, config: RunConfig) -> None:
    publish(server, config)
    node = begin(server, config)
    wait_until(lambda: 1 in server.nodes)
    leader = begin(server, config, 0, nodes_timeout_s=1.0)
    verdict = leader.ended().verdict
    assert verdict is not None and verdict == node.ended().verdict and verdict.code == 1
    assert verdict.sentence.startswith(f"of 3 nodes, node 2 did not come to {leader.place} within 1 s; start the same ")


@pytest.mark.parametrize(("sizes", "chosen"), [((2, 1), 2), ((1,), 1), ((), None)])
def test_the_first_layout_that_fits_the_nodes_that_came_is_used(
    server: GcsServer, config: RunConfig, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], chosen: int | None
) -> None:
    """Of three nodes, one stays away. It still finds the note of node 0 if it comes after the end."""
    ran: list[list[str]] = []
    monkeypatch.setattr(nodes, "run_command", lambda arguments, *_: ran.append(arguments) or RunVerdict(0))
    publish(server, config)
    node = begin(server, config)
    wait_until(lambda: 1 in server.nodes)
    fallbacks = [
        (LaunchOptions(None, ("--cluster.nodes", str(size)), size, 0, HOST, plan=False), config) for size in sizes
    ]
    leader = begin(server, config, 0, nodes_timeout_s=1.0, fallbacks=fallbacks)
    verdict = leader.ended().verdict
    assert verdict == node.ended().verdict and verdict is not None
    if chosen is None:
        assert (verdict.fault, ran) == ("node-missing", [])
    else:
        assert verdict == RunVerdict(0)
        assert [arguments[:3] for arguments in ran] == [["train", "--cluster.nodes", str(chosen)]]
    assert (launch_directory(config.run_dir) / "ended-0.json").exists()


def test_a_node_with_another_key_ends_the_run(server: GcsServer, config: RunConfig, tmp_path: Path) -> None:
    """Node 0 reads the note that the node leaves."""
    other = tmp_path / "key"
    other.touch(mode=0o600)
    other.write_text("w" * 40)
    leader = head(server, config)
    node = begin(server, config, token_file=other).ended()
    assert isinstance(node.error, SlimeLikeError) and node.error.code == "wrong-token"
    assert str(node.error).startswith(f"{node.place}: {HOST}:")
    assert leader.ended().verdict == RunVerdict(1, str(node.error), "wrong-token") and 1 not in server.nodes


def test_a_plan_that_is_rejected_ends_every_node(
    config: RunConfig, port: int, server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(arguments: list[str], *_: object) -> RunVerdict:
        Path(arguments[arguments.index("--output") + 1]).write_text('{"problems": ["a=1", "b=2"]}')
        return RunVerdict(1)

    monkeypatch.setattr(commands, "run_command", plan)
    early = Node(config, 1, port)
    time.sleep(0.5)  # it waits for node 0's GCS
    leader = Node(config, 0, port, plan=True).ended()
    assert leader.verdict == RunVerdict(1, f"{leader.place}, slime-like plan: a=1; b=2", ENDED)
    assert early.ended().verdict == leader.verdict and server.nodes == {}


def test_node_0_fails_while_one_waits_and_another_comes_later(config: RunConfig, port: int) -> None:
    """Node 0's port is taken. The early node reads its note, the late one after twice the silence bound."""
    early = Node(config, 1, port)
    time.sleep(0.5)  # it waits for node 0's GCS
    leader = Node(config, 0, port).ended()
    assert isinstance(leader.error, SlimeLikeError) and leader.error.code == "port-taken"
    sentence = str(leader.error)
    assert early.ended().verdict == RunVerdict(1, sentence, "port-taken")
    late = Node(config, 2, port, silence_s=0.1).ended().verdict
    assert late is not None and late.code == 1
    assert late.sentence.endswith(f"s ago and was not restarted: {sentence}")


def test_a_node_0_that_does_not_answer_is_given_up(config: RunConfig, port: int) -> None:
    alone = Node(config, 1, port, nodes_timeout_s=1.0).ended().error
    assert isinstance(alone, SlimeLikeError) and alone.code == "head-silent" and f"{HOST}:{port}" in str(alone)


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), RuntimeError("a bug")])
def test_a_node_that_ends_before_ray_connects_it_leaves_a_note(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    monkeypatch.setattr(nodes, "find_place", Mock(side_effect=raised))
    node, here = Node(config, 1, 6380).ended(), f"node 1 ({socket.gethostname()})"
    interrupted = isinstance(raised, KeyboardInterrupt)
    sentence = f"interrupted on {here}" if interrupted else f"{here}: RuntimeError: a bug"
    assert (node.verdict, node.error) == ((RunVerdict(130, sentence), None) if interrupted else (None, raised))
    note = launch_directory(config.run_dir) / "ended-1.json"
    fault = "node-lost" if interrupted else ""
    assert json.loads(note.read_text()) == {"code": 1, "sentence": sentence, "fault": fault}
