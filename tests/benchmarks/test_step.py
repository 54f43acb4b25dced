"""The comparison of steps, on figures that are known."""

import json
from pathlib import Path

import pytest

from benchmarks.step.measurement import PARTS, Measurement, from_records, from_run
from benchmarks.step.ours import flags
from benchmarks.step.table import Comparison, Round, render
from benchmarks.step.workload import Workload
from slime_like.config.reading.load import load_config
from slime_like.errors import DataError
from tests.benchmarks.runs import write_run
from tests.support.rejections import Rejects


def write_records(path: Path, records: list[dict[str, float]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def workload(tmp_path: Path) -> Workload:
    return Workload(
        tmp_path / "model", tmp_path / "prompts.jsonl", max_new_tokens=64, steps=20, warmup_steps=4, processes=2
    )


def comparison(limit: int, *seconds: tuple[float, float]) -> Comparison:
    """A round per (ours, TRL's)."""
    parts = {part: 0.125 * index for index, part in enumerate(PARTS)}
    rounds = [Round(Measurement(9, ours_s, 45.25, parts), Measurement(9, trl_s, 46.75)) for ours_s, trl_s in seconds]
    return Comparison(limit, rounds)


def test_ours_is_the_median_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    measured = from_run(write_run(tmp_path, [(seconds, 0.5) for seconds in (50.0, 1.0, 9.0, 2.0)]), warmup_steps=1)
    assert (measured.num_steps, measured.step_s) == (3, 2.5)  # a mean would be 4.5
    assert measured.response_length == pytest.approx((3 + 4 + 5) / 3)
    assert measured.parts == {part: {"train": 2.0, "orchestration": 0.5}.get(part, 0.0) for part in PARTS}


def test_theirs_is_the_median_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    records = [{"step_s": seconds, "response_length": 10.0 * seconds} for seconds in (50.0, 1.0, 9.0, 2.0)]
    measured = from_records(write_records(tmp_path / "trl.jsonl", records), warmup_steps=1)
    assert measured == Measurement(num_steps=3, step_s=2.0, response_length=40.0)


def test_too_short_a_run_and_a_step_without_its_length_are_refused(tmp_path: Path, rejects: Rejects) -> None:
    with rejects(DataError, "too-few-steps"):
        from_run(write_run(tmp_path, [(1.0, 0.5)] * 2), warmup_steps=2)
    records = write_records(tmp_path / "trl.jsonl", [{"step_s": 1.0, "response_length": 2.0}])
    with rejects(DataError, "too-few-steps"):
        from_records(records, warmup_steps=1)
    records = write_records(tmp_path / "trl.jsonl", [{"step_s": 1.0}])
    with rejects(DataError, "figure-missing"):
        from_records(records, warmup_steps=0)


@pytest.mark.parametrize(
    ("limit", "ours_s", "trl_s", "ratio", "verdict"),
    [(4, 0.4, 0.2, 2.0, "yes"), (4, 0.5, 0.2, 2.5, "NO"), (64, 0.8, 1.6, 0.5, "yes"), (256, 3.0, 10.0, 0.3, "NO"),
     (100, 1.0, 4.0, 0.25, "-")],
)  # fmt: skip
def test_the_ratio_is_ours_over_theirs(limit: int, ours_s: float, trl_s: float, ratio: float, verdict: str) -> None:
    compared = comparison(limit, (ours_s, trl_s))
    assert compared.ratio == pytest.approx(ratio)
    assert compared.verdict == verdict


def test_a_drifting_machine_does_not_show_in_the_ratio() -> None:
    compared = comparison(64, (1.0, 2.0), (10.0, 20.0), (3.0, 2.0))
    assert compared.ratio == 0.5  # of the median seconds, 3.0 and 2.0, it would be 1.5
    assert compared.ratio_range == (0.5, 1.5)
    assert compared.median_of(lambda one: one.ours.step_s) == 3.0


def test_the_table_shows_both_and_our_parts() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in render([comparison(64, (0.8, 1.6)), comparison(100, (2.0, 1.0), (3.0, 1.0))]).splitlines()
        if line.startswith("| 64 ") or line.startswith("| 100 ")
    ]
    assert rows == [
        ["64", "45.2", "46.8", "0.800", "1.600", "0.50", "0.50 to 0.50", "0.50", "yes"],
        ["100", "45.2", "46.8", "2.500", "1.000", "2.50", "2.00 to 3.00", "-", "-"],
        ["64", "0.000", "0.125", "0.250", "0.375", "0.500", "0.625"],
        ["100", "0.000", "0.125", "0.250", "0.375", "0.500", "0.625"],
    ]


def test_the_workload_survives_its_file(tmp_path: Path) -> None:
    workload(tmp_path).write(tmp_path / "workload.json")
    assert Workload.read(tmp_path / "workload.json") == workload(tmp_path)


def test_our_command_runs_the_workload(tmp_path: Path) -> None:
    config = load_config(None, flags(workload(tmp_path), tmp_path / "run"))
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (32, 8)
    assert (config.rollout.max_new_tokens, config.rollout.temperature, config.steps) == (64, 1.0, 20)
    assert (config.algorithm.epochs, config.algorithm.minibatches, config.algorithm.kl_coef) == (1, 1, 0.0)
    assert (config.rollout.engine, config.rollout.num_engines, config.trainer.parallel.data) == ("transformers", 2, 2)
    assert config.model.dtype == "float32" and not config.data.shuffle
    assert config.reward.functions[0].name == "length" and config.reward.functions[0].options["limit"] == 0
