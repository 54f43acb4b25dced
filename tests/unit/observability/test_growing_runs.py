"""Files that are damaged, or that a run is still writing."""

import io
import os
import shutil
from pathlib import Path

import pytest

from slime_like.errors import DataError
from slime_like.observability.json_lines import read_lines
from slime_like.observability.report.data import read_run
from slime_like.observability.tables import HELD_OUT_TABLE, SAMPLE_TABLE, TOKEN_TABLE
from tests.support.rejections import Rejects
from tests.unit.observability.report_run import write_run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "sound")


def test_only_regular_files_are_tables(sound: Path, tmp_path: Path) -> None:
    """Reading a pipe would never end."""
    run_dir = shutil.copytree(sound, tmp_path / "run")
    os.mkfifo(run_dir / "tables" / "pipe.jsonl")
    (run_dir / "tables" / "directory.jsonl").mkdir()
    assert set(read_run(run_dir).tables) == {HELD_OUT_TABLE, SAMPLE_TABLE, TOKEN_TABLE}


class GrowingFile(io.RawIOBase):
    """A file that grows after its end was reached."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._pieces.pop(0)
        buffer[: len(piece)] = piece
        return len(piece)


def test_a_line_finished_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second half is not read as a damaged line."""
    growing = GrowingFile([b'{"step": 1}\n{"st', b"", b'ep": 2}\n', b""])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: io.BufferedReader(growing))
        steps = [record["step"] for _, record in read_lines(tmp_path)]
    assert steps == [1]


def test_newest_lines(tmp_path: Path, rejects: Rejects) -> None:
    """Damage is found only in lines that are read."""
    path = tmp_path / "table.jsonl"
    path.write_text('{"step": 1}\n{}\n{"step": 3}\n{"step"')
    assert list(read_lines(path, 2)) == [(3, {"step": 3})]
    with rejects(DataError, "damaged-line") as fault:
        list(read_lines(path, 3))
    assert f"{path}:2:" in str(fault.value)
