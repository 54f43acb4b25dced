"""A node that ends before it has met the others leaves word, and they end with it instead of waiting in vain."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError, LaunchError
from slime_like.launch import participant
from slime_like.launch.cluster_key import create_key, key_path
from slime_like.launch.exit_notes import Awaited, LastWords, NodeEndedError, words_path
from slime_like.launch.launcher import launch
from slime_like.launch.membership import RollCall
from slime_like.launch.messages import Hello, Problem, Verdict
from slime_like.launch.options import LaunchOptions
from tests.conftest import Tiny

HEAD = "127.0.0.2"


def sentence_of(awaited: Awaited) -> str:
    with pytest.raises(NodeEndedError) as ended:
        awaited.require_not_ended()
    return ended.value.verdict.sentence


def test_words_that_come_while_somebody_waits_count_at_once(tmp_path: Path) -> None:
    words, awaited = LastWords(tmp_path / "run", 0), Awaited(tmp_path / "run", 0, return_s=60, patience_s=60)
    awaited.require_not_ended()
    assert words.leave(Verdict(2, "no model")) == ""
    assert sentence_of(awaited) == "no model"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["ended-0.json"]


def test_words_of_an_earlier_start_wait_for_the_node_to_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = LastWords(tmp_path / "run", 0)
    words.leave(Verdict(2, "no model"))
    Awaited(tmp_path / "run", 0, return_s=60, patience_s=60).require_not_ended()
    impatient = Awaited(tmp_path / "run", 0, return_s=0, patience_s=60)
    time.sleep(0.01)
    left_at = words_path(tmp_path / "run", 0).stat().st_mtime
    monkeypatch.setattr(time, "time", lambda: left_at + 5)
    assert sentence_of(impatient) == "node 0 ended 5 s ago and was not started again: no model"
    words.take_back()
    impatient.require_not_ended()  # it has been started again,
    words.leave(Verdict(1, "busy port"))
    assert sentence_of(impatient) == "busy port"  # and has ended again


def test_words_of_another_day_do_not_count(tmp_path: Path) -> None:
    LastWords(tmp_path / "run", 0).leave(Verdict(2, "no model"))
    long_ago = time.time() - 3600
    os.utime(words_path(tmp_path / "run", 0), (long_ago, long_ago))
    awaited = Awaited(tmp_path / "run", 0, return_s=0, patience_s=600)
    time.sleep(0.01)
    awaited.require_not_ended()


def test_words_that_cannot_be_read_are_words(tmp_path: Path) -> None:
    awaited = Awaited(tmp_path / "run", 1, return_s=60, patience_s=60)
    path = words_path(tmp_path / "run", 1)
    path.parent.mkdir()
    path.write_text("{")
    assert sentence_of(awaited).startswith(f"node 1 has ended, and {path} does not say why")


def test_what_cannot_be_left_is_said(tmp_path: Path) -> None:
    (tmp_path / ".run.cluster").touch()
    words = LastWords(tmp_path / "run", 0)
    words.take_back()
    assert words.leave(Verdict(1, "gone")).endswith("ended-0.json cannot be written (File exists)")


class Node(threading.Thread):
    """``launch`` in a thread."""

    def __init__(self, config: RunConfig, rank: int, **fields: object) -> None:
        super().__init__(daemon=True)
        given = {"nodes": 3, "head": HEAD, "address": f"127.0.0.{rank + 2}", "plan": False, **fields}
        self._options = LaunchOptions(config=None, flags=(), node_rank=rank, **given)  # type: ignore[arg-type]
        self._config = config
        self.verdict: Verdict | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.verdict = launch(self._options, self._config)
        except (ConfigError, LaunchError) as error:
            self.error = error

    def ended(self) -> Node:
        self.join(30)
        assert not self.is_alive()
        return self


@pytest.fixture
def config(tiny: Tiny, tmp_path: Path) -> RunConfig:
    return load_config(Path("configs/quickstart.yaml"), tiny.rl_flags(tmp_path / "run")[2:])


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a node has begun to wait for node 0: words that node 0 leaves from then on are of this start."""
    event, real = threading.Event(), participant.await_key

    def noted(*arguments: Any) -> bytes:
        event.set()
        return real(*arguments)

    monkeypatch.setattr(participant, "await_key", noted)
    return event


def settled(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_node_0_is_refused_while_one_waits_and_another_comes_later(
    config: RunConfig, tmp_path: Path, waiting: threading.Event
) -> None:
    """The first learns at once, the second when node 0 has stayed away for twice the bound on silence."""
    early = Node(config, 1)
    early.start()
    assert waiting.wait(30)  # for a key that nobody makes
    broken = config.model_copy(update={"data": config.data.model_copy(update={"train": [tmp_path / "none.jsonl"]})})
    head = Node(broken, 0)
    head.run()
    assert isinstance(head.error, ConfigError)
    (problem,) = head.error.problems
    assert "none.jsonl" in problem
    assert early.ended().verdict == Verdict(2, problem)
    late = Node(config, 2, silence_s=0.1)
    late.start()
    verdict = late.ended().verdict
    assert verdict is not None and verdict.code == 2
    assert verdict.sentence.endswith(f"s ago and was not started again: {problem}")


def test_a_port_that_is_taken_on_node_0(config: RunConfig, waiting: threading.Event) -> None:
    with socket.socket() as holder:
        holder.bind((HEAD, 0))  # taken, and nobody answers the one that waits
        port = holder.getsockname()[1]
        early = Node(config, 1, port=port)
        early.start()
        assert waiting.wait(30)
        head = Node(config, 0, port=port)
        head.run()
    assert isinstance(head.error, LaunchError) and f"port {port} of {HEAD} cannot be listened on" in str(head.error)
    assert early.ended().verdict == Verdict(1, str(head.error))


def test_a_node_that_cannot_come_leaves_word_for_node_0(config: RunConfig) -> None:
    """And node 0 for the third, which comes last of all."""
    with socket.socket() as held:  # for node 0, which may share it: this one does not listen
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HEAD, 0))
        port = held.getsockname()[1]
        head = Node(config, 0, port=port)
        head.start()
        settled((config.run_dir.parent / f".{config.run_dir.name}.cluster" / "key").exists)
        stray = Node(config, 1, port=port, address="192.0.2.7")
        stray.run()
        assert isinstance(stray.error, ConfigError)
        (problem,) = stray.error.problems
        assert problem.startswith("NODE_ADDR=192.0.2.7 is no address of")
        assert head.ended().verdict == Verdict(2, problem)
        last = Node(config, 2, port=port, silence_s=0.1)
        last.start()
        verdict = last.ended().verdict
    assert verdict is not None and verdict.code == 2 and verdict.sentence.endswith(problem)


def test_an_interrupt_right_after_the_first_word_is_told(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 knows the node from then on, and would else tell the others that its connection ended."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(participant, "say", interrupted)
    with RollCall(HEAD, 0, create_key(key_path(config.run_dir)), nodes=2, silence_s=20) as roll:
        node = Node(config, 1, nodes=2, port=roll.port)
        node.start()
        events = [roll.next_event(timeout_s=30) for _ in range(2)]
        roll.tell_all(Verdict(1, "over"))
        verdict = node.ended().verdict
    assert [type(event) for _, event in filter(None, events)] == [Hello, Problem]
    assert verdict is not None and verdict.code == 130
