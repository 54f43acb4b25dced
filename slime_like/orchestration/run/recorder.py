"""Recording of a step's figures to log and screen. Sampled responses also get tables, warnings and curves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from slime_like.data.dump import dump_path, save_trajectories
from slime_like.observability.names import step_metrics
from slime_like.observability.records import PhaseTimes, RewardRecord, RolloutRecord, StepRecord
from slime_like.observability.tables import SAMPLE_TABLE, TOKEN_TABLE, Decode, Row, per_sample_rows, per_token_rows
from slime_like.orchestration.rollout.rows import Rollout, rollouts_of, trained_spans
from slime_like.orchestration.rollout.scoring import OUTCOME, ZEROED, by_reason, failure_text
from slime_like.orchestration.run.rollout_side import RolloutFigures
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.run.step import TrainedStep
from slime_like.orchestration.trainer.calls import RankCalls
from slime_like.orchestration.trainer.scoring import frozen_scores
from slime_like.statistics import GRPOStats
from slime_like.system.words import counted
from slime_like.trajectory import ScoredTrajectory

# Reading memory from every rank costs a round trip, and peaks rarely change.
_MEMORY_EVERY = 10
# Consecutive steps without a policy gradient until a warning.
_WARN_AFTER = 5


class StepRecorder:
    """Recorder of training steps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._trained_tokens = 0
        self._trained_s = 0.0
        self._memory: dict[str, float] = {}
        self._flat_steps = 0
        self._failures = ScoringFailures()
        self._watches_programs = bool(run.config.rollout.agent.command)

    @property
    def tokens_per_second(self) -> float:
        """Trained response tokens per second of the recorded steps."""
        return self._trained_tokens / self._trained_s if self._trained_s else 0.0

    def record(self, step: int, trained: TrainedStep, times: PhaseTimes) -> None:
        """Log one training step."""
        run = self._run
        if directory := run.config.debug.save_rollouts:
            save_trajectories(dump_path(directory, step), trained.trajectories)
        self._trained_tokens += sum(trajectory.sampled_len for trajectory in trained.trajectories)
        self._trained_s += times.step_s
        if step % _MEMORY_EVERY == 1:
            peaks = run.trainers.peak_memory_bytes()
            self._memory = {f"peak_{kind} (GiB)": nbytes / 2**30 for kind, nbytes in peaks.items()}
        figures, is_sampled = run.rollout.figures(times.step_s), not run.config.supervised
        sampled = self.sampled(step, trained.trajectories, times, figures) if is_sampled else (None, None)
        self.note(*figures.notes)
        sync = figures.sync
        rollouts = rollouts_of(trained.trajectories)
        metrics = step_metrics(
            StepRecord(
                updates=trained.updates,
                critic=trained.critic,
                times=times,
                response_lengths=[rollout.sampled_len for rollout in rollouts],
                sources=[rollout.last.source or "" for rollout in rollouts],
                packed_tokens=trained.tokens.computed,
                actual_tokens=sum(t.total_len for t in trained.trajectories) - trained.tokens.shared,
                shared_tokens=trained.tokens.shared,
                trainers_busy_s=trained.busy_s,
                penalties=trained.penalties,
                rewards=sampled[0],
                rollout=sampled[1],
                scoring={**figures.scoring, **trained.scoring},
                weight_gather_s=None if sync is None else sync.gather_s,
                probe_gap=None if sync is None else sync.probe_gap,
                sync=sync,
                replay_buffer_size=figures.ready_groups,
                memory=self._memory,
            )
        )
        if sync is not None and step == run.finished_steps + 1:
            self.note(str(sync))
        run.metrics.log(step, metrics)
        run.progress.update(step, metrics)
        if is_sampled:
            self._show_samples(step, trained, figures.failed)
            self._warn_of_flat_rewards(step, trained.trajectories)

    def note(self, *sentences: str | None) -> None:
        """Print all sentences that are not empty."""
        for sentence in filter(None, sentences):
            self._run.progress.note(sentence)

    def finish(self) -> None:
        """Write warnings about the whole run. Runs after the last step."""
        self.note(self._failures.at_end())

    # ---------------------------------------------------------------------------------------------- sampled responses
    def sampled(
        self, step: int, trajectories: Sequence[ScoredTrajectory], times: PhaseTimes, figures: RolloutFigures
    ) -> tuple[RewardRecord, RolloutRecord]:
        """Return the reward functions' results and the figures of sampling."""
        functions, rollouts = self._run.config.reward.functions, rollouts_of(trajectories)
        metadata = [rollout.last.reward_metadata for rollout in rollouts]
        metadata += [row.reward_metadata for row in figures.failed]
        self.note(self._failures.add(step, metadata))
        if self._watches_programs and (failed := program_failures(step, metadata)):
            self._watches_programs = False
            self.note(failed)
        rewards = RewardRecord(
            func_names=[function.label for function in functions],
            weights=[function.weight for function in functions],
            rewards=torch.stack([rollout.last.rewards for rollout in rollouts]),
            successes=torch.stack([rollout.last.successes for rollout in rollouts]),
            group_ids=[rollout.group_id for rollout in rollouts],
            failures=[entry[OUTCOME] for entry in metadata if OUTCOME in entry],
            unscored_answers=sum("reason" in entry and OUTCOME not in entry for entry in metadata),
        )
        record = RolloutRecord(
            finish_reasons=[rollout.finish_reason for rollout in rollouts],
            dropped_prompts=figures.dropped_prompts,
            queue_size=figures.queued_groups,
            seconds=times.step_s if self._run.config.rollout.max_staleness > 0 else None,  # sampling never pauses
            staleness=[_staleness(rollout, step) for rollout in rollouts],
            turns=[turns for rollout in rollouts if (turns := _turns(rollout))],
            rows=[len(rollout.rows) for rollout in rollouts],
        )
        return rewards, record

    def _show_samples(self, step: int, trained: TrainedStep, failed: Sequence[ScoredTrajectory]) -> None:
        run, debug = self._run, self._run.config.debug
        is_due = step % debug.tables_every == 0 or step in (1, run.config.steps)
        if debug.samples_per_step > 0 and is_due and trained.updates:
            ranks, limit = run.trainers.ranks, debug.samples_per_step
            tables = debug_tables(step, trained.trajectories, ranks, trained.updates[-1], run.decode, limit, failed)
            for name, rows in tables.items():
                run.metrics.log_table(step, name, rows)

    def _warn_of_flat_rewards(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> None:
        has_gradient = any(bool(trajectory.advantages.any()) for trajectory in trajectories)
        self._flat_steps = 0 if has_gradient else self._flat_steps + 1
        if self._flat_steps == _WARN_AFTER:
            self.note(
                f"steps {step - _WARN_AFTER + 1} to {step}: for every prompt, all responses got the same reward, so "
                "there was no policy gradient; use prompts that are sometimes solved, or more samples per prompt"
            )


class ScoringFailures:
    """Counter of failures that reports only some steps, since an unreliable function fails in every step.

    It reports the first, second, fourth, eighth and so on of the steps with failures, and steps with a new kind.
    """

    def __init__(self) -> None:
        self._all: list[Mapping[str, Any]] = []
        self._kinds = set[tuple[str, ...]]()
        self._failed_steps = 0
        self._responses = 0

    def add(self, step: int, metadata: Sequence[Mapping[str, Any]]) -> str | None:
        """Record a step with the metadata of all its responses. Return a note if one is due."""
        failed = [entry for entry in metadata if "reason" in entry]
        self._responses += len(metadata)
        if not failed:
            return None
        self._all += [{name: entry[name] for name in ("reason", OUTCOME) if name in entry} for entry in failed]
        self._failed_steps += 1
        failed.sort(key=lambda entry: _kind(entry) in self._kinds)  # the note quotes the first one
        new = {_kind(entry) for entry in failed} - self._kinds
        self._kinds |= new
        is_power_of_two = self._failed_steps & (self._failed_steps - 1) == 0
        if not (is_power_of_two or new):
            return None
        return (
            f"step {step}, reward: scoring failed for {len(failed)} of {counted(len(metadata), 'response')} "
            f"({failure_text(failed)}); {by_outcome(failed)}"
        )

    def at_end(self) -> str | None:
        """Return a note about all recorded steps if any had a failure."""
        if not self._all:
            return None
        share, reasons = f"{len(self._all)} of {counted(self._responses, 'response')}", [e["reason"] for e in self._all]
        return f"all steps: scoring failed for {share} ({by_reason(reasons)}); {by_outcome(self._all)}"


def by_outcome(failed: Sequence[Mapping[str, Any]]) -> str:
    """Count responses without a reward by what became of them: "2 masked, 1 zeroed"."""
    found = Counter(entry.get(OUTCOME, ZEROED) for entry in failed)  # an answer's reward is 0, too
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items()))


def program_failures(step: int, metadata: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a note if all agents' programs of a step ended with an exit code other than 0."""
    ends = [end for entry in metadata for end in entry.get("conversation", {}).get("steps", ()) if "exit_code" in end]
    if not ends or len(ends) < len(metadata):
        return None
    first = f"exit code {ends[0]['exit_code']}: {ends[0]['output']}"
    return f"step {step}, rollout.agent: all {counted(len(ends), 'program')} failed (first: {first})"


def _kind(failure: Mapping[str, Any]) -> tuple[str, ...]:
    """Return reason, function and, for errors, the exception's name, which the detail starts with."""
    reason = failure["reason"]
    error = str(failure.get("detail", "")).partition(":")[0] if reason == "error" else ""
    return reason, str(failure.get("function", "")), error


def debug_tables(
    step: int,
    trajectories: Sequence[ScoredTrajectory],
    ranks: RankCalls,
    stats: GRPOStats,
    decode: Decode,
    limit: int,
    failed: Sequence[ScoredTrajectory] = (),
) -> dict[str, list[Row]]:
    """Build tables of ``limit`` samples with all their rows, from as many prompts as possible. As many failed
    rollouts come first.

    Policy and reference logprobs are frozen at the step's start.
    """
    chosen = [row for rollout in _spread_over_prompts(trajectories)[:limit] for row in rollout.rows]
    frozen: dict[str, Any] = frozen_scores(ranks, chosen, "old_logprobs", "ref_logprobs")
    samples = [*failed[:limit], *(replace(row, **frozen[row.sequence_id]) for row in chosen)]
    tables = {
        SAMPLE_TABLE: per_sample_rows(step, samples, stats, decode),
        TOKEN_TABLE: per_token_rows(step, samples, decode),
    }
    return {name: rows for name, rows in tables.items() if rows}


def _spread_over_prompts(trajectories: Sequence[ScoredTrajectory]) -> list[Rollout[ScoredTrajectory]]:
    """Sort rollouts: the first sample of every prompt, then the second of every prompt, and so on."""
    taken = Counter[int]()

    def turn(rollout: Rollout[ScoredTrajectory]) -> int:
        taken[rollout.group_id] += 1
        return taken[rollout.group_id]

    return sorted(rollouts_of(trajectories), key=turn)


def _staleness(rollout: Rollout[ScoredTrajectory], step: int) -> int:
    """Return the number of versions between the oldest token and n - 1, the weights that step n trains."""
    version = rollout.oldest_version
    return 0 if version is None else step - 1 - version


def _turns(rollout: Rollout[ScoredTrajectory]) -> int:
    """Count the model's turns, 0 without a conversation. With several rows, each turn counts where it is trained."""
    if len(rollout.rows) > 1:
        return sum(len(trained_spans(row.loss_mask)) for row in rollout.rows)
    return len(rollout.last.reward_metadata.get("conversation", {"turns": ()})["turns"])
