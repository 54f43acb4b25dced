"""Files that a run is writing, or that are large or damaged."""

import io
import os
import shutil
import threading
from pathlib import Path

import pytest

from slime_like.errors import DataError
from slime_like.observability import json_lines
from slime_like.observability.json_lines import newest_lines, read_lines
from slime_like.observability.metrics import METRICS_FILE
from slime_like.observability.report.data import read_run
from slime_like.observability.tables import HELD_OUT_TABLE, SAMPLE_TABLE, TOKEN_TABLE
from tests.support.rejections import Rejects
from tests.unit.observability.report_run import SAMPLES, STEPS, TOKENS, write_run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "sound")


def test_only_files_are_tables(sound: Path, tmp_path: Path) -> None:
    """A pipe would never end."""
    run_dir = shutil.copytree(sound, tmp_path / "run")
    os.mkfifo(run_dir / "tables" / "pipe.jsonl")
    (run_dir / "tables" / "directory.jsonl").mkdir()
    assert set(read_run(run_dir).tables) == {HELD_OUT_TABLE, SAMPLE_TABLE, TOKEN_TABLE}


# --------------------------------------------------------------------------------------------------- growing and large
class GrowingFile(io.RawIOBase):
    """Has more content after its end was reached."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._pieces.pop(0)
        buffer[: len(piece)] = piece
        return len(piece)


def test_a_line_that_is_finished_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second half is no damaged line."""
    growing = GrowingFile([b'{"step": 1}\n{"st', b"", b'ep": 2}\n', b""])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: io.BufferedReader(growing))
        steps = [record["step"] for _, record in read_lines(tmp_path)]
    assert steps == [1]


def test_a_run_that_writes_meanwhile(sound: Path, tmp_path: Path) -> None:
    """Metrics and tables grow by a few bytes at a time; every report has whole lines, and never fewer of them."""
    names = (METRICS_FILE, f"tables/{SAMPLE_TABLE}.jsonl", f"tables/{TOKEN_TABLE}.jsonl")
    run_dir = shutil.copytree(sound, tmp_path / "run")
    for name in names[1:]:
        (run_dir / name).write_bytes(b"")
    ended = threading.Event()

    def write() -> None:
        for name in names[1:]:
            content = (sound / name).read_bytes()
            with (run_dir / name).open("ab", buffering=0) as file:
                for start in range(0, len(content), 200):
                    file.write(content[start : start + 200])
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    counts = []
    while not ended.is_set() or not counts:
        tables = read_run(run_dir).tables
        counts.append([len(tables[Path(name).stem].rows) for name in names[1:]])
    writer.join()
    tables = read_run(run_dir).tables
    assert all(sorted(column) == list(column) for column in zip(*counts, strict=True))
    logged = STEPS // 10 * SAMPLES
    assert [len(tables[Path(name).stem].rows) for name in names[1:]] == [logged, logged * TOKENS]


@pytest.mark.parametrize(("count", "steps"), [(2, [8, 9]), (5, [5, 6, 7, 8, 9]), (100, [5, 6, 7, 8, 9])])
def test_the_end_of_a_table(count: int, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 12 bytes; 65 bytes from the end there is a row's beginning, or the middle of one."""
    path = tmp_path / "table.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(10)))
    monkeypatch.setattr(json_lines, "NEWEST_BYTES", 65)
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 7)
    newest, before = newest_lines(path, count)
    assert [row["step"] for row in newest] == steps and before == 10 - len(steps)


def test_damage_is_found_in_the_rows_that_are_read(tmp_path: Path, rejects: Rejects) -> None:
    path = tmp_path / "table.jsonl"
    path.write_text('{"step": 1}\n{}\n{"step": 3}\n{"step"')
    assert newest_lines(path, 2) == ([{"step": 3}], 2)
    with rejects(DataError, "damaged-line") as fault:
        newest_lines(path, 3)
    assert f"{path}:2:" in str(fault.value)
