"""What a run does with its alarms: the disk, a resumed history, and the end of a run."""

import json
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime_like.config.reading.load import load_config
from slime_like.errors import SlimeLikeError, exit_code
from slime_like.observability.health import EVENTS_FILE, Alarm
from slime_like.orchestration.run import alarms as module
from slime_like.orchestration.run.alarms import RunAlarms
from slime_like.orchestration.run.milestones import Milestones
from tests.support.rejections import Rejects

MODEL = Path(__file__).parents[4] / "configs" / "models" / "Qwen2.5-0.5B"
REPEATED = {"rollout/repeated_fraction": 0.2}


def a_run(run_dir: Path, *flags: str, **more: Any) -> Any:
    notes: list[str] = []
    config = load_config(None, ["--run_dir", str(run_dir), "--model.path", str(MODEL), *flags])
    return SimpleNamespace(config=config, progress=SimpleNamespace(note=notes.append, notes=notes),
                           **{"finished_steps": 0} | more)  # fmt: skip


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / EVENTS_FILE).read_text().splitlines()]


def test_an_alarm_is_noted_written_and_posted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Any] = []
    webhook = SimpleNamespace(post=posted.append, close=lambda: posted.append("closed"))
    monkeypatch.setattr(module, "load_option", lambda name: lambda url, note: webhook)
    run = a_run(tmp_path, "--health.webhook", "http://127.0.0.1:9/", "--health.stop_on", "[disk]")
    found = RunAlarms(run)
    assert [alarm.rule for alarm in found.check(3, REPEATED)] == ["repeated_text"]
    (row,) = events(tmp_path)
    assert posted == [row]
    assert (row["step"], row["severity"], row["value"], row["threshold"]) == (3, "warning", 0.2, 0.1)
    assert run.progress.notes == [f"step 3, warning of health.repeated_text: {row['text']}"]
    assert found.check(4, REPEATED) == [] and found.stop is None and len(events(tmp_path)) == 1
    found.close(None)
    assert posted == [row, "closed"]


def test_demonstrations_have_no_gap_to_an_engine(tmp_path: Path) -> None:
    metrics = {"train_actor_training/perplexity": 500.0, "train_actor_training/engine_perplexity": 1.0}
    found = {loss: RunAlarms(a_run(tmp_path, "--algorithm.loss", loss)).check(1, metrics) for loss in ("gspo", "sft")}
    assert [alarm.rule for alarm in found["gspo"]] == ["engine_gap"] and found["sft"] == []


def test_an_error_that_ends_the_run_is_an_alarm(tmp_path: Path) -> None:
    """Not an interrupt, nor the end by a rule, which was told. A disk that is full does not hide the error."""
    (tmp_path / "metrics.jsonl").touch()
    found = RunAlarms(a_run(tmp_path, finished_steps=4))
    found.close(KeyboardInterrupt())
    assert not (tmp_path / EVENTS_FILE).exists()
    found.close(SlimeLikeError("the loss is not finite", code="x", who="rank 1"))
    (row,) = events(tmp_path)
    assert (row["step"], row["rule"], row["severity"]) == (5, "failed", "alarm")
    assert row["text"] == "rank 1: the loss is not finite"
    (tmp_path / EVENTS_FILE).unlink()
    (tmp_path / EVENTS_FILE).symlink_to("/dev/full")
    found.close(ValueError("the cause"))
    found.stop = Alarm(5, 0.0, "disk", "warning", 1.0, 2.0, "little room")
    (tmp_path / EVENTS_FILE).unlink()
    found.close(SlimeLikeError("the end", code="health-stop"))
    assert not (tmp_path / EVENTS_FILE).exists()


def test_a_disk_with_little_room_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint's size counts, not an older one's."""
    usage, free = namedtuple("usage", "free"), 1000
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage(free))
    found = RunAlarms(a_run(tmp_path, "--health.stop_on", "[disk]"))
    assert found.check(1, {}) == []
    for step, size in ((1, 400), (2, 600)):
        part = tmp_path / "checkpoints" / f"step-{step:06d}" / "model" / "part"
        part.parent.mkdir(parents=True)
        part.write_bytes(bytes(size))
        (tmp_path / "checkpoints" / "latest").unlink(missing_ok=True)
        (tmp_path / "checkpoints" / "latest").symlink_to(part.parents[1].name)
        alarms = found.check(step, {})
        assert [(alarm.rule, alarm.value) for alarm in alarms] == ([("disk", 600 / 1000)] if step == 2 else [])
    assert found.stop is not None and found.stop.rule == "disk"
    free = 500
    (alarm,) = found.check(3, {})
    assert (alarm.severity, alarm.value, alarm.threshold) == ("alarm", 600 / 500, 1)


def test_a_resumed_run_remembers_the_steps_before(tmp_path: Path) -> None:
    """Not the steps after the checkpoint, which an earlier start made, nor evaluations."""
    time = "train_actor_performance/total_step_time (s)"
    lengths = [*((step, 100.0) for step in range(1, 21)), *((step, 1000.0) for step in range(21, 40))]
    rows = [{"step": step, time: 1.0, "rollout/response_length_mean": length} for step, length in lengths]
    rows.insert(10, {"step": 10, "evaluation/accuracy": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = RunAlarms(a_run(tmp_path, finished_steps=20))
    raised = [alarm for step in (21, 22) for alarm in found.check(step, {"rollout/response_length_mean": 1000.0})]
    assert [(alarm.step, alarm.rule, alarm.value) for alarm in raised] == [(22, "length_cliff", 10.0)]


@pytest.mark.parametrize("every", [0, 5])
def test_a_rule_ends_the_run_after_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejects: Rejects, every: int
) -> None:
    saved: list[str] = []
    flags = ["--checkpoint.every", str(every), "--steps", "10"]
    run = a_run(tmp_path, *flags, checkpoints=SimpleNamespace(commit_written=lambda: None))
    recorder: Any = SimpleNamespace(alarms=SimpleNamespace(stop=None))
    milestones = Milestones(run, recorder)
    monkeypatch.setattr(milestones, "_evaluate", lambda step: None)
    monkeypatch.setattr(milestones, "_save", lambda step: saved.append(f"step {step}"))
    monkeypatch.setattr(milestones, "_finish_save", lambda: saved.append("finished"))
    milestones.after(4)
    assert saved == []
    recorder.alarms.stop = Alarm(5, 0.0, "disk", "warning", 1.0, 2.0, "little room")
    with rejects(SlimeLikeError, "health-stop") as caught:
        milestones.after(5)
    assert (
        saved == ["step 5", "finished"]
        and exit_code(cast(SlimeLikeError, caught.value)) == 1
        and getattr(caught.value, "who", None) == "health.disk"
    )
    milestones.after(10)  # the last step has ended the run anyway
    assert saved[2:] == ["step 10"]
