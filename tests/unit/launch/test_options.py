"""A launch: options, addresses, the output of a dry run, notes of nodes that end, and Ray's token."""

import math
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from slime_like.commands.root import run
from slime_like.errors import ConfigError, LaunchError
from slime_like.launch.commands import ExitNotes, LaunchOptions, NodeEndedError, RunVerdict, launch_directory
from slime_like.orchestration.cluster.bundles import pieces_of, slots_per_node
from slime_like.orchestration.cluster.node import Place, find_place
from slime_like.orchestration.cluster.ray_session import await_token, create_token
from tests.support.rejections import Rejects
from tests.unit.orchestration.cluster.test_bundles import config


def place(**fields: object) -> Place:
    given = options(**fields)
    return find_place(given.node_rank, given.head, given.address)


def options(**fields: object) -> LaunchOptions:
    return LaunchOptions(**{"config": None, "flags": (), "nodes": 2, "node_rank": 0, "head": "127.0.0.2", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        *({"nodes": 0}, {"node_rank": 2}, {"head": ""}, {"port": 70_000}, {"port": 0}),
        *({"silence_s": 0.0}, {"nodes_timeout_s": math.nan}, {"stop_s": math.inf}),
    ],
)
def test_out_of_range_options_are_rejected(fields: dict[str, object], rejects: Rejects) -> None:
    with rejects(ConfigError, "option-range"):
        options(**fields)


def test_a_node_finds_its_own_address() -> None:
    """An explicit loopback address is accepted, for several nodes on one machine."""
    lead, follow = place(), place(node_rank=1)
    assert place(node_rank=1, address="127.0.0.3").interface == "lo"
    assert (lead.address, lead.interface) == ("127.0.0.2", "lo") and str(lead).startswith("node 0 (")
    assert (follow.head, follow.address, follow.interface) == ("127.0.0.2", "127.0.0.1", "lo")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"head": "192.0.2.1"}, r"HEAD_ADDR=192\.0\.2\.1 is 192\.0\.2\.1, which is not an address of "),
        ({"head": "127.0.0.1"}, r"HEAD_ADDR=127\.0\.0\.1: Ray takes 127\.0\.0\.1 for another address"),
        ({"head": "no..name"}, r"HEAD_ADDR=no\.\.name cannot be resolved"),
        ({"head": "localhost"}, r"HEAD_ADDR=localhost is .* here, which no other node can reach"),
        (
            {"head": "192.0.2.1", "address": "127.0.0.1"},
            r"HEAD_ADDR=192\.0\.2\.1 is .*, but on node 0 NODE_ADDR=127\.0",
        ),
        ({"node_rank": 1, "address": "gpu-1"}, r"NODE_ADDR=gpu-1 is not an address \("),
        ({"node_rank": 1, "address": "192.0.2.7"}, r"NODE_ADDR=192\.0\.2\.7 is not an address of "),
    ],
)
def test_a_wrong_address_is_rejected(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        place(**fields)


@pytest.mark.parametrize(
    ("parallel", "rollout", "nodes", "expected"),
    [
        ({"tensor": 2, "pipeline": 2, "context": 2}, {}, 2, 6),  # 6 ranks; 2 ranks and 1 engine
        ({"tensor": 2, "pipeline": 3}, {}, 2, 4),  # 4 ranks; 2 ranks and 1 engine
        ({"tensor": 4}, {"tensor": 2}, 3, 4),
        ({"pipeline": 4}, {}, 2, 3),
        ({"data": 2}, {"tensor": 8}, 4, 8),
    ],
)
def test_slots_without_gpus(
    tmp_path: Path, parallel: dict[str, int], rollout: dict[str, int], nodes: int, expected: int
) -> None:
    sections = {"trainer": {"parallel": parallel}, "rollout": rollout}
    assert slots_per_node(pieces_of(config(tmp_path, **sections)), parallel.get("tensor", 1), nodes) == expected


@pytest.mark.parametrize(
    ("gpus", "recipe", "size"),
    [
        (4, ["--cluster.gpus_per_node", "8"], "--cluster.gpus_per_node 4 --cluster"),  # this node's
        (0, ["--cluster.gpus_per_node", "8"], "--cluster.gpus_per_node 8 --cluster"),
        (0, [], "--cluster.gpus_per_node 3 --cluster.allow_idle_gpus true --cluster"),  # CPU slots, one of them idle
    ],
)
def test_a_launch_sets_the_size_of_its_cluster(
    gpus: int, recipe: list[str], size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("slime_like.commands.launch.local_gpus", lambda: gpus)
    flags = ["--run_dir", str(tmp_path / "run"), "--model.path", str(tmp_path), "--trainer.parallel.pipeline", "4"]
    options = ["--nodes", "2", "--head", "10.0.0.1", "--dry_run"]
    assert run(["launch", *options, "--", *flags, *recipe]) == 0
    (train,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("train:"))
    assert f"--cluster.nodes 2 {size}.address" in train
    assert list(tmp_path.iterdir()) == []


def notes(tmp_path: Path, rank: int, silence_s: float = 30, nodes_timeout_s: float = 600) -> ExitNotes:
    options = LaunchOptions(None, (), 2, rank, head="127.0.0.2", silence_s=silence_s, nodes_timeout_s=nodes_timeout_s)
    return ExitNotes(tmp_path / "run", options)


def sentence_of(waiting: ExitNotes, rank: int = 0) -> str:
    with pytest.raises(NodeEndedError) as ended:
        waiting.require_none_ended([rank])
    return ended.value.verdict.sentence


def test_a_note_of_an_earlier_start_waits_for_the_node_to_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes(tmp_path, 0).leave(RunVerdict(2, "no model"))
    notes(tmp_path, 1).require_none_ended()
    impatient, note = notes(tmp_path, 1, silence_s=1e-9), tmp_path / ".run.cluster" / "ended-0.json"
    left_at = note.stat().st_mtime
    monkeypatch.setattr(time, "time", lambda: left_at + 5)
    assert sentence_of(impatient) == "node 0 ended 5 s ago and was not restarted: no model"
    os.utime(note, (left_at - 3600, left_at - 3600))
    notes(tmp_path, 1, silence_s=1e-9).require_none_ended()  # too old to count
    again = notes(tmp_path, 0)
    impatient.require_none_ended()  # the node has returned
    again.leave(RunVerdict(1, "busy port"))
    assert sentence_of(impatient) == "busy port"


def test_a_note_that_cannot_be_read_still_counts(tmp_path: Path) -> None:
    waiting, path = notes(tmp_path, 0), tmp_path / ".run.cluster" / "ended-1.json"
    path.parent.mkdir()
    path.write_text("{")
    assert sentence_of(waiting, rank=1).startswith(f"node 1 has ended, and {path} does not say why")


def test_a_note_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".run.cluster").touch()
    notes(tmp_path, 0).leave(RunVerdict(1, "gone"))
    assert "ended-0.json cannot be written (File exists)" in capsys.readouterr().err


def test_a_key_is_created_once_and_found_by_waiting_nodes(tmp_path: Path) -> None:
    path = launch_directory(tmp_path / "runs" / "first") / "key"
    assert path == tmp_path / "runs" / ".first.cluster" / "key"  # not in the run directory, which may be moved aside
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(await_token(path, 20)))
    waiting.start()
    key = create_token(path)
    waiting.join()
    assert found == [key] == [create_token(path)] and len(key) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


@pytest.mark.parametrize(
    ("mode", "text", "code"),
    [(0o640, "x" * 32, "key-unsafe"), (0o604, "x" * 32, "key-unsafe"), (0o600, "x" * 15, "key-short")],
)
def test_an_unsafe_key_is_rejected(tmp_path: Path, mode: int, text: str, code: str, rejects: Rejects) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    for read in (create_token, lambda path: await_token(path, 1)):
        with rejects(LaunchError, code):
            read(path)


def test_a_key_that_nobody_creates_is_given_up(tmp_path: Path, rejects: Rejects) -> None:
    with rejects(LaunchError, "key-missing"):
        await_token(tmp_path / "key", 0.0)
