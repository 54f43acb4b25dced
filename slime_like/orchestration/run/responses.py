"""Figures, tables and warnings about a step's responses; demonstrations have none."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from slime_like.observability.curve import plot_reward_curve
from slime_like.observability.flat_reward import FlatSteps
from slime_like.observability.phases import PhaseTimes
from slime_like.observability.records import RewardRecord, RolloutRecord
from slime_like.observability.tables import SAMPLE_TABLE, TOKEN_TABLE, Decode, Row, per_sample_rows, per_token_rows
from slime_like.orchestration.run.rollout_side import RolloutFigures
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.run.schedule import Schedule
from slime_like.orchestration.run.step import TrainedStep
from slime_like.orchestration.trainer.group_training import GroupTraining
from slime_like.trajectory import GRPOStats, ScoredTrajectory


class ResponseRecorder:
    """The part of a step's record that depends on the kind of its trajectories; demonstrations have none."""

    def rewards(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> RewardRecord | None:
        """Return the reward functions' results."""

    def rollout(
        self, step: int, trajectories: Sequence[ScoredTrajectory], times: PhaseTimes, figures: RolloutFigures
    ) -> RolloutRecord | None:
        """Return the figures of sampling."""

    def finish_step(self, step: int, trained: TrainedStep) -> None:
        """Write tables and warnings, after the step's metrics."""

    def finish(self) -> None:
        """Write warnings about the whole run, after the last step."""

    def draw(self, metrics: Path, run_dir: Path) -> dict[str, Path]:
        """Draw the curves of a finished run; their files, by name."""
        return {}


class SampledResponses(ResponseRecorder):
    """Steps on sampled and rewarded responses."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._schedule = Schedule(run.config)
        tables = run.config.run_dir / "tables" / f"{SAMPLE_TABLE}.jsonl"
        self._flat_steps = FlatSteps(str(tables) if run.config.debug.samples_per_step else None)

    def rewards(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> RewardRecord:
        functions = self._run.config.reward.functions
        failures = [t.reward_metadata["reason"] for t in trajectories if "reason" in t.reward_metadata]
        if failures:
            self._run.progress.note(_failure_note(step, trajectories, failures))
        return RewardRecord(
            func_names=[function.name for function in functions],
            weights=[function.weight for function in functions],
            rewards=torch.stack([trajectory.rewards for trajectory in trajectories]),
            successes=torch.stack([trajectory.successes for trajectory in trajectories]),
            group_ids=[trajectory.group_id for trajectory in trajectories],
            failures=failures,
        )

    def rollout(
        self, step: int, trajectories: Sequence[ScoredTrajectory], times: PhaseTimes, figures: RolloutFigures
    ) -> RolloutRecord:
        return RolloutRecord(
            finish_reasons=[trajectory.finish_reason for trajectory in trajectories],
            dropped_prompts=figures.dropped_prompts,
            queue_size=figures.queued_groups,
            seconds=times.step_s if self._run.config.rollout.max_staleness > 0 else None,  # sampled all the time
            staleness=[_staleness(trajectory, step) for trajectory in trajectories],
        )

    def finish_step(self, step: int, trained: TrainedStep) -> None:
        run, trajectories = self._run, trained.trajectories
        if self._schedule.shows_tables(step):
            limit = run.config.debug.samples_per_step
            training = run.trainers.training
            tables = debug_tables(step, trajectories, training, trained.updates[-1], run.decode, limit)
            for name, rows in tables.items():
                run.metrics.log_table(step, name, rows)
        self._note(self._flat_steps.add(step, flat=_without_advantage(trajectories)))

    def finish(self) -> None:
        self._note(self._flat_steps.at_end())

    def draw(self, metrics: Path, run_dir: Path) -> dict[str, Path]:
        curve = run_dir / "reward_curve.png"
        plot_reward_curve(metrics, curve)
        return {"reward curve": curve}

    def _note(self, sentence: str | None) -> None:
        if sentence is not None:
            self._run.progress.note(sentence)


def response_recorder(run: Run) -> ResponseRecorder:
    """The one for the run's trajectories."""
    return ResponseRecorder() if run.config.supervised else SampledResponses(run)


def debug_tables(
    step: int,
    trajectories: Sequence[ScoredTrajectory],
    trainers: GroupTraining,
    stats: GRPOStats,
    decode: Decode,
    limit: int,
) -> dict[str, list[Row]]:
    """Tables of the first ``limit`` samples; policy and reference logprobs are those frozen at the step's start."""
    logprobs = trainers.response_logprobs([trajectory.sequence_id for trajectory in trajectories[:limit]])
    samples = [
        replace(trajectory, ref_logprobs=logprobs[trajectory.sequence_id].reference)
        for trajectory in trajectories[:limit]
    ]
    pi = [logprobs[sample.sequence_id].policy.numpy() for sample in samples]
    tables = {
        SAMPLE_TABLE: per_sample_rows(step, samples, pi, stats, decode),
        TOKEN_TABLE: per_token_rows(step, samples, pi, decode),
    }
    return {name: rows for name, rows in tables.items() if rows}


def _failure_note(step: int, trajectories: Sequence[ScoredTrajectory], failures: Sequence[str]) -> str:
    reasons = ", ".join(f"{failures.count(reason)} by {reason}" for reason in sorted(set(failures)))
    details = [t.reward_metadata["detail"] for t in trajectories if "detail" in t.reward_metadata]
    reasons += f", first: {details[0]}" if details else ""
    return (
        f"step {step}, reward: scoring failed for {len(failures)} of {len(trajectories)} responses "
        f"({reasons}); they got reward 0"
    )


def _without_advantage(trajectories: Sequence[ScoredTrajectory]) -> bool:
    """True where there was nothing to learn from: rewards were alike in every group."""
    return not any(bool(trajectory.advantages.any()) for trajectory in trajectories)


def _staleness(trajectory: ScoredTrajectory, step: int) -> int:
    """Versions between the oldest token and the weights that step n trains, n - 1."""
    versions = trajectory.weight_versions
    return 0 if versions is None else step - 1 - int(versions.min())
