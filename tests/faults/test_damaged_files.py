"""Full disks and damaged files end in one sentence, and the last good checkpoint is intact."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.faults.quick import quick
from tests.faults.test_failures import one_sentence
from tests.support.processes import run, succeed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system with room for one checkpoint of the tiny model, not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=11m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("behind", [pytest.param("false", marks=pytest.mark.acceptance), "true"])
def test_a_full_disk_at_save_leaves_the_last_good_checkpoint(
    tiny: Tiny, tmp_path: Path, small_disk: Path, behind: str
) -> None:
    run_dir = small_disk / "run"
    flags = ["--steps", "4", "--checkpoint.every", "1", "--logging.tensorboard", "false"]
    flags += ["--checkpoint.async_save", behind]
    finished = run(tiny.sft_flags(run_dir, *flags), tmp_path / "log")
    assert finished.code == 1
    room = r"(; \d+ of 11534336 bytes are free)?"  # absent for metrics.jsonl, which may be the first that does not fit
    refused = rf"could not be written \(No space left on device{room}\); free space there, and restart to resume"
    assert re.search(refused, one_sentence(finished)), finished.stderr
    checkpoints = run_dir / "checkpoints"
    assert json.loads((checkpoints / "latest" / "state.json").read_text())["step"] == 1
    assert not list(checkpoints.glob(".partial*"))


def test_a_run_that_fails_keeps_a_checkpoint_written_in_the_background(tiny: Tiny, tmp_path: Path) -> None:
    """The save of step 2 finishes during step 3, which never ends."""
    checkpoints = tmp_path / "run" / "checkpoints"
    written = checkpoints / ".partial-step-000002" / "trainer" / "__0_0.distcp"
    functions = f"[{{name: 'tests.faults.rewards:fails_once_saved', options: {{file: {written}}}}}]"
    flags = ["--steps", "6", "--checkpoint.every", "2", "--checkpoint.async_save", "true"]
    flags += ["--reward.functions", functions, "--reward.timeout_s", "60"]
    finished = run(quick(tiny, tmp_path / "run", *flags), tmp_path / "log")
    assert finished.code == 1
    assert "the run is to end here" in one_sentence(finished)
    assert "checkpoint of step 2:" not in finished.stderr
    assert json.loads((checkpoints / "latest" / "state.json").read_text())["step"] == 2
    assert (checkpoints / "latest" / "trainer" / "checksums.json").is_file()
    assert not list(checkpoints.glob(".partial*"))


def test_other_data_is_rejected_at_resume_before_anything_starts(tiny: Tiny, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    data = tmp_path / "sft.jsonl"
    data.write_text((tiny.data / "sft.jsonl").read_text() + json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    flags = tiny.sft_flags(tmp_path / "run", "--steps", "3", "--data.train", str(data))
    finished = run(flags, tmp_path / "log")
    assert finished.code == 2
    assert str(data) in one_sentence(finished) and "[data-changed]" in finished.stderr
    assert "starting" not in finished.stderr


def test_a_flipped_bit_is_rejected_at_resume_and_auto_resumes_from_the_previous_checkpoint(
    tiny: Tiny, trained: Path, tmp_path: Path
) -> None:
    """Only the ranks read whole checkpoints, after the run has started."""
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    checkpoint = tmp_path / "run" / "checkpoints" / "latest" / "trainer"
    largest = max(checkpoint.rglob("*"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    named = ["--resume", str(checkpoint.parent.resolve())]
    finished = run(tiny.sft_flags(tmp_path / "run", "--steps", "3", *named), tmp_path / "log")
    assert finished.code == 1
    sentence = one_sentence(finished)
    assert "is damaged (__0_0.distcp: bytes " in sentence and "are not as written" in sentence
    assert "; resume from a checkpoint before step-000002 [" in sentence
    finished = succeed(tiny.sft_flags(tmp_path / "run", "--steps", "3"), tmp_path / "log-auto")
    assert "passed over: " in finished.stderr and "step-000001 after step 1" in finished.stderr
    # Step 2 was run twice.
    assert [row["step"] for row in steps_of(tmp_path / "run")] == [1, 2, 2, 3]
