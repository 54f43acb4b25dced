"""Recording of a step's figures to log and screen. Sampled responses also get tables, warnings and curves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
import torch

from slime_like.config import RunConfig
from slime_like.config.rollout import RewardFunction
from slime_like.interfaces.engine_limits import engine_limits
from slime_like.models.dimensions import ModelDimensions
from slime_like.observability import names
from slime_like.observability.health import Alarm, ends_in_a_loop
from slime_like.observability.tables import SAMPLE_TABLE, TOKEN_TABLE, Decode, Row, per_sample_rows, per_token_rows
from slime_like.orchestration.rollout.rows import Rollout, rollouts_of, trained_spans
from slime_like.orchestration.rollout.scoring import MASKED, OUTCOME, RESAMPLED, ZEROED, by_reason, failure_text
from slime_like.orchestration.run.alarms import RunAlarms
from slime_like.orchestration.run.sources import Run
from slime_like.orchestration.run.step import TrainedStep
from slime_like.orchestration.trainer.batcher import PackTokens
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.plugins.options import load_option
from slime_like.statistics import GRPOStats
from slime_like.system.gpus import GPUS
from slime_like.system.words import pluralize
from slime_like.trajectory import ScoredTrajectory

# Reading memory from every rank costs a round trip, and peaks rarely change.
_MEMORY_EVERY = 10
# Responses of a step that are searched for loops.
_SEARCHED = 64
# Groups whose rewards differ by less than this, by rounding only, have no gradient.
_ZERO_SPREAD = 1e-6

Rollouts = Sequence[Rollout[ScoredTrajectory]]


class StepRecorder(AbstractContextManager["StepRecorder"]):
    """Recorder of training steps. A context manager: an error that leaves it is an alarm."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._trained_tokens = 0
        self._trained_s = 0.0
        self._memory: dict[str, float] = {}
        self.alarms = RunAlarms(run)
        self._failures = ScoringFailures()
        self._watches_programs = bool(run.config.rollout.agent.command)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.alarms.close(error)

    @property
    def tokens_per_second(self) -> float:
        """Trained response tokens per second of the recorded steps."""
        return self._trained_tokens / self._trained_s if self._trained_s else 0.0

    def record(self, step: int, trained: TrainedStep, times: Mapping[str, float]) -> list[Alarm]:
        """Log one training step. ``times`` are its seconds by phase. Return what it raised or cleared."""
        run, step_s = self._run, sum(times.values())
        if directory := run.config.debug.save_rollouts:
            load_option("save-rollouts")(directory, step, trained.trajectories)
        self._trained_tokens += sum(trajectory.sampled_len for trajectory in trained.trajectories)
        self._trained_s += step_s
        if step % _MEMORY_EVERY == 1:
            peaks = run.policy.peak_memory_bytes()
            self._memory = {f"peak_{kind} (GiB)": nbytes / 2**30 for kind, nbytes in peaks.items()}
        figures, is_sampled = run.source.figures(step_s), run.source.has_rewards
        rollouts = rollouts_of(trained.trajectories)
        metrics = {
            **names.update_metrics(trained.updates),
            **names.update_metrics(trained.critic, "train_critic"),
            **trained.penalties,
            **names.phase_metrics(times, trained.busy_s),
            **_token_metrics(rollouts, trained.tokens, step_s),
            **self._trainer_speed(trained, times["train"] if trained.busy_s is None else trained.busy_s),
            **{f"{names.PERFORMANCE}/memory/{name}": value for name, value in self._memory.items()},
            **figures.metrics,
            **(self.sampled(step, rollouts, times, figures.failed) if is_sampled else {}),
            **source_metrics(rollouts, run.config.reward.functions if is_sampled else ()),
            **names.source_kls([update.source_kls for update in trained.updates]),
            **trained.scoring,
        }
        self.note(*figures.notes)
        alarms = self.alarms.check(step, metrics)
        metrics |= self.alarms.health.metrics
        run.metrics.log(step, metrics)
        run.progress.update(step, metrics)
        if run.source.has_rewards:
            self._show_samples(step, trained, figures.failed, bool(alarms))
        return alarms

    @cached_property
    def _dimensions(self) -> ModelDimensions:
        return ModelDimensions.from_checkpoint(self._run.config.model.path)

    def _trainer_speed(self, trained: TrainedStep, seconds: float) -> dict[str, float]:
        lengths = [row.total_len for row in trained.trajectories]
        return trainer_speed(self._run.config, self._dimensions, lengths, seconds, "peak_gpu (GiB)" in self._memory)

    def note(self, *sentences: str | None) -> None:
        """Print all sentences that are not empty."""
        for sentence in filter(None, sentences):
            self._run.progress.note(sentence)

    def finish(self) -> None:
        """Write warnings about the whole run. Runs after the last step."""
        self.note(self._failures.at_end())

    # ---------------------------------------------------------------------------------------------- sampled responses
    def sampled(
        self, step: int, rollouts: Rollouts, times: Mapping[str, float], failed: Sequence[ScoredTrajectory]
    ) -> dict[str, float]:
        """Return the metrics of rewards and of sampling, and report failures."""
        config = self._run.config
        metadata = [rollout.last.reward_metadata for rollout in rollouts]
        metadata += [row.reward_metadata for row in failed]
        self.note(self._failures.add(step, metadata))
        if self._watches_programs and (note := program_failures(step, metadata)):
            self._watches_programs = False
            self.note(note)
        asynchronous = config.rollout.max_staleness > 0  # sampling never pauses
        lifted = engine_limits(config.rollout.engine).lifted_arguments(config.rollout)
        return {
            **({"rollout/lifted_guarantees": float(len(lifted))} if lifted else {}),
            **reward_metrics(rollouts, config.reward.functions, metadata),
            **rollout_metrics(rollouts, step, sum(times.values()) if asynchronous else times["generate"]),
        }

    def _show_samples(self, step: int, trained: TrainedStep, failed: Sequence[ScoredTrajectory], is_due: bool) -> None:
        run, debug = self._run, self._run.config.debug
        is_due |= step % debug.tables_every == 0 or step in (1, run.config.steps)
        if debug.samples_per_step > 0 and is_due and trained.updates:
            policy, limit = run.policy, debug.samples_per_step
            tables = debug_tables(step, trained.trajectories, policy, trained.updates[-1], run.decode, limit, failed)
            for name, rows in tables.items():
                run.metrics.log_table(step, name, rows)


def reward_metrics(
    rollouts: Rollouts, functions: Sequence[RewardFunction], metadata: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return means of rewards and successes, over all functions and for each one, and counts of failures and groups.

    ``rewards_mean`` weighs all functions equally. ``total_reward_mean`` is the weighted sum, as in advantages.

    Args:
        metadata: of all responses, also of failed ones that are not among the rollouts.
    """
    rewards, successes, totals = _rewards(rollouts, functions)
    group_ids = np.asarray([rollout.group_id for rollout in rollouts])
    spreads = [float(np.ptp(totals[group_ids == group])) for group in np.unique(group_ids)]
    outcomes = [entry[OUTCOME] for entry in metadata if OUTCOME in entry]
    unscored = sum("reason" in entry and OUTCOME not in entry for entry in metadata)  # their reward is 0
    prefix, metrics = "ref_actor_rewards", dict[str, float]()
    for function, reward, success in zip(functions, rewards.mean(axis=0), successes.mean(axis=0), strict=True):
        metrics[f"{names.REWARD_OF}{function.label}_mean"] = float(reward)
        metrics[f"{prefix}/successes_func_{function.label}_mean"] = float(success)
    return {
        f"{prefix}/rewards_mean": float(rewards.mean()),
        f"{prefix}/successes_mean": float(successes.mean()),
        names.REWARD: float(totals.mean()),
        names.FAILURES: float(len(outcomes)),
        names.FAILED: names.ratio(len(outcomes), len(metadata)),
        f"{prefix}/unscored_answers": float(unscored),
        **{f"{prefix}/failures_{name}": float(outcomes.count(name)) for name in (MASKED, RESAMPLED, ZEROED)},
        **metrics,
        names.FLAT_GROUPS: float(sum(spread < _ZERO_SPREAD for spread in spreads)),
        names.GROUPS: float(len(spreads)),
    }


def rollout_metrics(rollouts: Rollouts, step: int, seconds: float) -> dict[str, float]:
    """Return lengths, ends and staleness of the step's responses, which were sampled in ``seconds``."""
    lengths, ends = [rollout.sampled_len for rollout in rollouts], [rollout.finish_reason for rollout in rollouts]
    # Versions between the oldest token and n - 1, the weights that step n trains.
    staleness = [0 if (oldest := rollout.oldest_version) is None else step - 1 - oldest for rollout in rollouts]
    turns = [count for rollout in rollouts if (count := _turns(rollout))]
    searched = rollouts[:: -(-len(rollouts) // _SEARCHED)]
    rows = [len(rollout.rows) for rollout in rollouts]
    metrics = {
        names.LENGTH: fmean(lengths),
        "rollout/response_length_max": float(max(lengths)),
        names.TRUNCATED: ends.count("length") / len(ends),
        names.ABORTED: ends.count("abort") / len(ends),
        names.REPEATED: fmean(ends_in_a_loop(rollout.last.response_tokens.numpy()) for rollout in searched),
        names.ZERO_ADVANTAGES: fmean(not any(row.advantages.any() for row in rollout.rows) for rollout in rollouts),
        "rollout/staleness_mean": fmean(staleness),
        "rollout/staleness_max": float(max(staleness)),
    }
    if seconds > 0:  # rollouts from disk took no time, so they have no speed (rather than a speed of 0)
        metrics[names.ROLLOUT_SPEED] = sum(lengths) / seconds
    if turns:
        metrics |= {"rollout/turns_mean": fmean(turns), names.TURN_LIMIT: ends.count("turns") / len(ends)}
    if max(rows) > 1:
        metrics["rollout/rows_mean"] = fmean(rows)
    return metrics


def source_metrics(rollouts: Rollouts, functions: Sequence[RewardFunction]) -> dict[str, float]:
    """Return the metrics of each source in a mixture. Success is the first function's; without one, only lengths."""
    columns = {"/response_length_mean": np.asarray([rollout.sampled_len for rollout in rollouts], np.float64)}
    if functions:
        _, successes, columns[names.SOURCE_REWARD] = _rewards(rollouts, functions)
        columns["/success"] = successes[:, 0]
        columns["/truncated_fraction"] = np.asarray([rollout.finish_reason == "length" for rollout in rollouts])
    sources, metrics = np.asarray([rollout.last.source or "" for rollout in rollouts]), dict[str, float]()
    for name in sorted({*sources.tolist()} - {""}):
        own = sources == name
        metrics[f"{names.SOURCES}{name}/share"] = float(own.mean())
        metrics |= {f"{names.SOURCES}{name}{what}": float(values[own].mean()) for what, values in columns.items()}
    return metrics


def _rewards(rollouts: Rollouts, functions: Sequence[RewardFunction]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return unweighted rewards and successes, (N, F), and weighted sums of the rewards, (N,), in float64."""
    rewards = torch.stack([rollout.last.rewards for rollout in rollouts]).double().numpy()
    successes = torch.stack([rollout.last.successes for rollout in rollouts]).double().numpy()
    return rewards, successes, rewards @ np.asarray([function.weight for function in functions], np.float64)


def trainer_speed(
    config: RunConfig, dimensions: ModelDimensions, lengths: Sequence[int], seconds: float, on_gpus: bool
) -> dict[str, float]:
    """Return tokens and FLOPs per second and trainer rank, and on GPUs the share of their data sheet's rate.

    Args:
        lengths: tokens of every row of the step.
        seconds: duration of all its optimizer steps. Recomputation takes time, but adds no FLOPs.
    """
    rank_s = seconds * config.trainer.parallel.world_size / config.algorithm.epochs
    if not rank_s:
        return {}
    tflops = dimensions.training_flops(lengths, config.model.lora.is_set) / rank_s / 1e12
    speed = {"trained_tokens_per_second_per_rank": sum(lengths) / rank_s, "tflops_per_rank": tflops}
    if on_gpus:
        speed["mfu (%)"] = 100 * tflops / GPUS[config.cluster.gpu].tflops
    return {f"{names.PERFORMANCE}/{name}": value for name, value in speed.items()}


def _token_metrics(rollouts: Rollouts, tokens: PackTokens, step_s: float) -> dict[str, float]:
    """Return lengths of responses, and shares of padding and of shared tokens in the trainer's packs."""
    lengths, whole = [rollout.sampled_len for rollout in rollouts], sum(r.total_len for o in rollouts for r in o.rows)
    padded = tokens.computed - (whole - tokens.shared)
    metrics = {
        "train_actor_training/response_lengths": fmean(lengths),
        f"{names.PERFORMANCE}/tokens_per_second": names.ratio(sum(lengths), step_s),
        f"{names.PERFORMANCE}/padded_tokens_percentage (%)": 100 * names.ratio(padded, tokens.computed),
    }
    if tokens.shared:
        metrics[f"{names.PERFORMANCE}/shared_tokens_percentage (%)"] = 100 * names.ratio(tokens.shared, whole)
    return metrics


class ScoringFailures:
    """Failures of a run. The first step with each kind is reported, and their number at the end: an unreliable function
    fails in every step, and the metrics count that."""

    def __init__(self) -> None:
        self._all: list[Mapping[str, Any]] = []
        self._kinds = set[tuple[str, ...]]()
        self._responses = 0

    def add(self, step: int, metadata: Sequence[Mapping[str, Any]]) -> str | None:
        """Record a step with the metadata of all its responses. Return a note if there is a new kind of failure."""
        failed = [entry for entry in metadata if "reason" in entry]
        self._responses += len(metadata)
        self._all += [{name: entry[name] for name in ("reason", OUTCOME) if name in entry} for entry in failed]
        failed.sort(key=lambda entry: _kind(entry) in self._kinds)  # the note quotes the first one
        known, self._kinds = self._kinds, self._kinds | {_kind(entry) for entry in failed}
        if self._kinds == known:
            return None
        share = f"{len(failed)} of {pluralize(len(metadata), 'response')} ({failure_text(failed)})"
        return f"step {step}, reward: scoring failed for {share}; {by_outcome(failed)}"

    def at_end(self) -> str | None:
        """Return a note about all recorded steps if any had a failure."""
        if not self._all:
            return None
        share = f"{len(self._all)} of {pluralize(self._responses, 'response')}"
        reasons = by_reason([entry["reason"] for entry in self._all])
        return f"all steps: scoring failed for {share} ({reasons}); {by_outcome(self._all)}"


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
    return f"step {step}, rollout.agent: all {pluralize(len(ends), 'program')} failed (first: {first})"


def _kind(failure: Mapping[str, Any]) -> tuple[str, ...]:
    """Return reason, function and, for errors, the exception's name, which the detail starts with."""
    reason = failure["reason"]
    error = str(failure.get("detail", "")).partition(":")[0] if reason == "error" else ""
    return reason, str(failure.get("function", "")), error


def debug_tables(
    step: int,
    trajectories: Sequence[ScoredTrajectory],
    policy: ModelRanks,
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
    frozen: dict[str, Any] = policy.stored_scores(chosen, "old_logprobs", "ref_logprobs")
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


def _turns(rollout: Rollout[ScoredTrajectory]) -> int:
    """Count the model's turns, 0 without a conversation. With several rows, each turn counts where it is trained."""
    if len(rollout.rows) > 1:
        return sum(len(trained_spans(row.loss_mask)) for row in rollout.rows)
    return len(rollout.last.reward_metadata.get("conversation", {"turns": ()})["turns"])
