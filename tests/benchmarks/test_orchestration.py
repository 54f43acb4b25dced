"""The report on a run whose phases are known."""

from pathlib import Path

import pytest

from benchmarks.orchestration import format_report, main, phase_report
from slime_like.errors import DataError
from tests.benchmarks.runs import write_run
from tests.support.rejections import Rejects


def test_the_first_steps_are_skipped(tmp_path: Path) -> None:
    report = phase_report(write_run(tmp_path, [(1.0, 100.0)] * 5 + [(1.0, 0.25), (1.0, 0.75)]) / "metrics.jsonl")
    assert (report.num_steps, report.step_s) == (2, 1.5)
    assert report.seconds["train"] == 1.0 and report.seconds["orchestration"] == 0.5
    assert report.share("orchestration") == pytest.approx(100 / 3)
    assert sum(report.seconds.values()) == pytest.approx(report.step_s)
    assert "orchestration takes 33.33% of step time, over 2 steady steps" in format_report(report)


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(write_run(tmp_path, [(1.0, 0.0), (1.0, 1.0)])), "--skip", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in (["train", "1.0000", "50.00%"], ["orchestration", "1.0000", "50.00%"], ["step", "2.0000", "100.00%"]):
        assert rows.count(row) == 1


def test_too_short_a_run_and_a_step_without_phases_are_refused(tmp_path: Path, rejects: Rejects) -> None:
    run_dir = write_run(tmp_path, [(1.0, 0.1)] * 5)
    with rejects(DataError, "too-few-steps"):
        phase_report(run_dir / "metrics.jsonl")
    with pytest.raises(SystemExit, match="run more steps"):
        main([str(run_dir)])
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "train_actor_performance/total_step_time (s)": 1.0}\n')
    with rejects(DataError, "figure-missing"):
        phase_report(run_dir / "metrics.jsonl", skip=0)
