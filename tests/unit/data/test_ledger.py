"""The ledger: events, audits and snapshots; and saved rollouts."""

import random
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from slime_like.commands.main import main
from slime_like.data.dump import dump_path, load_trajectories, save_trajectories
from slime_like.data.ledger import (
    DROPPED,
    FAILED,
    FILE_NAME,
    GENERATED,
    ISSUED,
    REISSUED,
    SCORED,
    TRAINED,
    Ledger,
    audit_run,
)
from slime_like.errors import DataError, SlimeLikeError, exit_code
from slime_like.models.dimensions import ModelDimensions
from slime_like.observability.timing import PhaseClock
from slime_like.orchestration.run.stored_sources import SavedRollouts
from slime_like.verification.comparison import synthetic_batch
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint

STATES = (TRAINED, DROPPED, ISSUED, SCORED, REISSUED)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.begin(tmp_path)


def finish(ledger: Ledger, *groups: int, step: int) -> None:
    ledger.add(groups, GENERATED, version=step - 1)
    ledger.add(groups, SCORED)
    ledger.add(groups, TRAINED, step=step)


def whole_way(ledger: Ledger, *groups: int) -> None:
    ledger.add(groups, ISSUED, version=0)
    finish(ledger, *groups, step=1)


def test_everything_is_accounted_for(ledger: Ledger, tmp_path: Path) -> None:
    whole_way(ledger, 0, 1, 2)
    ledger.add([3, 4, 5, 6], ISSUED, version=1)
    ledger.add([3, 4], GENERATED, version=1)
    ledger.add([3], SCORED)
    ledger.add([3], DROPPED, reason="zero spread")
    ledger.add([5], DROPPED, reason="oversampled")
    audit = audit_run(tmp_path)
    assert (audit.issued, audit.trained, audit.in_flight) == (7, 3, (4, 6))
    assert audit.dropped == {"zero spread": 1, "oversampled": 1}
    assert not audit.problems and audit.issued == audit.trained + sum(audit.dropped.values()) + len(audit.in_flight)


@pytest.mark.parametrize(
    ("group", "states", "problem"),
    [
        *((0, [state], f"group 0 was issued, generated, scored, trained, {state}") for state in STATES),
        (1, [ISSUED, TRAINED], "group 1 was issued, trained"),
        (2, [ISSUED], "group 1 was never issued, though later ones were"),
    ],
)
def test_impossible_events_are_named(
    ledger: Ledger, tmp_path: Path, group: int, states: list[str], problem: str
) -> None:
    whole_way(ledger, 0)
    for state in states:
        ledger.add([group], state)
    assert audit_run(tmp_path).problems == (problem,)


def test_a_snapshot_can_be_restored(ledger: Ledger, tmp_path: Path) -> None:
    whole_way(ledger, 0)
    ledger.add([1], ISSUED, version=1)
    ledger.snapshot(tmp_path / "copy")
    finish(ledger, 1, step=2)
    ledger.restore(tmp_path / "copy")
    audit = audit_run(tmp_path)
    assert (audit.trained, audit.in_flight, audit.problems) == (1, (1,), ())
    ledger.add([1], REISSUED, version=1, reason="resumed")  # and it can be written to
    finish(ledger, 1, step=2)
    assert audit_run(tmp_path).trained == 2 and not audit_run(tmp_path).problems
    ledger.close()
    Ledger.begin(tmp_path).close()  # a new start
    assert audit_run(tmp_path).issued == 0


def test_a_path_may_contain_characters_of_a_uri(tmp_path: Path) -> None:
    run_dir = tmp_path / "lr=1e-3 #2, 50%20 who?"
    run_dir.mkdir()
    with closing(Ledger(run_dir / FILE_NAME)) as ledger:
        whole_way(ledger, 0)
        ledger.snapshot(run_dir / "copy")
        ledger.restore(run_dir / "copy")
    assert audit_run(run_dir).trained == 1


def test_threads_may_write_concurrently(ledger: Ledger, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: ledger.add(range(n * 50, n * 50 + 50), ISSUED, version=0), range(4)))
    assert audit_run(tmp_path).in_flight == tuple(range(200))


@pytest.mark.parametrize("content", [None, b"no database at all, but long enough to be looked at" * 50])
def test_an_unusable_snapshot_is_rejected(
    ledger: Ledger, tmp_path: Path, rejects: Rejects, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "copy").write_bytes(content)
    with rejects(DataError, "no-ledger" if content is None else "damaged-ledger"):
        ledger.restore(tmp_path / "copy")


def test_the_command(ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole_way(ledger, 0, 1)
    ledger.add([2, 3], ISSUED, version=1)
    ledger.add([2], DROPPED, reason="oversampled")
    for outcome in ("masked: timeout", "resampled: error", "zeroed: error", "masked: timeout"):
        ledger.add([1], FAILED, reason=outcome)
    assert main(["report", "--audit", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "audit: 4 groups issued = 2 trained + 1 dropped (1 oversampled) + 1 in flight",
        "audit: 4 rollouts failed (2 masked: timeout, 1 resampled: error, 1 zeroed: error)",
        "audit: holds",
    ]
    ledger.add([0], TRAINED, step=2)
    assert main(["report", "--audit", str(tmp_path)]) == 1
    assert "audit: group 0 was issued, generated, scored, trained, trained" in capsys.readouterr().out
    (tmp_path / FILE_NAME).unlink()
    assert main(["report", "--audit", str(tmp_path)]) == 2
    assert "ledger.sqlite is missing: no run of rollouts has written to" in capsys.readouterr().err


def test_a_full_disk_is_reported(ledger: Ledger, rejects: Rejects) -> None:
    """SQLite reports its page limit like a full disk."""
    ledger._database.execute("PRAGMA max_page_count = 1")
    with rejects(SlimeLikeError, "disk-refused") as caught:
        ledger.add(range(10_000), ISSUED, version=0)
    assert isinstance(caught.value, SlimeLikeError)
    assert exit_code(caught.value) == 1  # a restarter may try again


def test_a_reader_does_not_block_writers(ledger: Ledger, tmp_path: Path) -> None:
    """Meanwhile, events stay in the log next to the file. A snapshot contains them."""
    ledger._database.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (0,)
        whole_way(ledger, 0)
        assert audit_run(tmp_path).trained == 1
        ledger.snapshot(tmp_path / "copy")
        shutil.copyfile(tmp_path / FILE_NAME, tmp_path / "file alone")
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (0,)
    counts = {}
    for name in ("copy", "file alone"):
        with closing(sqlite3.connect(tmp_path / name)) as copy:
            found = copy.execute("SELECT count(*) FROM sqlite_master WHERE name = 'events'").fetchone()[0]
            counts[name] = copy.execute("SELECT count(*) FROM events").fetchone()[0] if found else 0
            assert name != "copy" or copy.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert counts == {"copy": 4, "file alone": 0}


def test_another_writer_is_reported(ledger: Ledger, tmp_path: Path, rejects: Rejects) -> None:
    ledger._database.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with rejects(SlimeLikeError, "ledger-locked"):
            ledger.add([0], ISSUED, version=0)
    ledger.add([0], ISSUED, version=0)


RANDOM = random.Random(0).randbytes(4096)
BROKEN: dict[str, tuple[object, str]] = {
    "random bytes": (RANDOM, "damaged-dump"),
    "the beginning of a pickle": (b"\x80\x02" + RANDOM, "damaged-dump"),
    "empty": (b"", "damaged-dump"),
    "text": (b"hello", "damaged-dump"),
    "a list": ([1, 2], "damaged-dump"),
    "no version": ({}, "damaged-dump"),
    "another version": ({"version": 9}, "dump-version"),
    "other fields": ({"version": 1, "trajectories": [{"x": 1}]}, "damaged-dump"),
    "nothing in it": ({"version": 1, "trajectories": []}, "empty-dump"),
}


@pytest.mark.parametrize(("content", "code"), BROKEN.values(), ids=BROKEN)
def test_a_broken_dump_is_named(tmp_path: Path, content: object, code: str) -> None:
    path = dump_path(tmp_path, 1)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(DataError) as caught:
        load_trajectories(path)
    assert (caught.value.code, caught.value.who) == (code, str(path))


def test_saved_rollouts_are_loaded_and_a_cut_file_is_not(tmp_path: Path, rejects: Rejects) -> None:
    batch = synthetic_batch(ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "model")))
    for row in batch[:2]:
        row.rollout_id = "0-0"
    path = dump_path(tmp_path, 12)
    save_trajectories(path, batch)
    for found, saved in zip(load_trajectories(path), batch, strict=True):
        for field in fields(saved):
            value, expected = getattr(found, field.name), getattr(saved, field.name)
            same = torch.equal(value, expected) if isinstance(expected, torch.Tensor) else value == expected
            assert same, field.name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with rejects(DataError, "damaged-dump"):
        load_trajectories(path)


def test_rollouts_of_a_model_with_other_tokens_are_refused(tmp_path: Path) -> None:
    batch = synthetic_batch(ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "model")))
    save_trajectories(dump_path(tmp_path, 1), batch)
    largest = max(int(ids.max()) for each in batch for ids in (each.prompt_tokens, each.response_tokens))
    assert len(SavedRollouts(tmp_path, largest + 1).next_batch(1, PhaseClock())) == len(batch)
    with pytest.raises(DataError, match=rf"step-000001\.pt: contains token id {largest}, but model.path has ids 0 to"):
        SavedRollouts(tmp_path, largest).next_batch(1, PhaseClock())
