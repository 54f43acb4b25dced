"""Records of one training step, with its wall time by phase: the typed inputs of ``slime_like.observability.names``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from slime_like.statistics import GRPOStats, ValueStats

PHASES = ("wait", "generate", "reward", "score", "train", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecord:
    """Rewards of a step's N responses.

    Attributes:
        func_names, weights: (F,) of the reward functions; the weights make the total reward.
        rewards, successes: (N, F), unweighted.
        group_ids: (N,) the prompt group of each response.
        failures: "masked", "resampled" or "zeroed" for each rollout that failed. Only zeroed ones are among the N.
        unscored_answers: number of responses with reward 0 because an included function could not cope with them.
    """

    func_names: Sequence[str]
    weights: Sequence[float]
    rewards: ArrayLike
    successes: ArrayLike
    group_ids: Sequence[int]
    failures: Sequence[str] = ()
    unscored_answers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """Figures of generating a step's responses.

    Attributes:
        finish_reasons: (N,) "stop", "length", "abort" or "turns".
        dropped_prompts: prompts of this step without a trained sample.
        queue_size: groups waiting in the rollout queue.
        staleness: (N,) weight versions between a response's first token and its update.
        seconds: generation time for ``tokens_per_second``; ``None`` means the phase "generate".
        turns: (N,) the model's turns in each conversation; empty without an environment.
        rows: (N,) training rows of each response.
    """

    finish_reasons: Sequence[str]
    dropped_prompts: int = 0
    queue_size: int = 0
    staleness: Sequence[int] = ()
    seconds: float | None = None
    turns: Sequence[int] = ()
    rows: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ScoringRecord:
    """One step of a role besides the policy: total seconds, seconds of scoring (the rest is waiting), scored tokens,
    and further metrics by name."""

    total_s: float
    model_running_s: float
    response_tokens: int
    total_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRecord:
    """One weight sync.

    Attributes:
        verification_s: seconds for hashing and the probe, an upper bound of verification's share of ``total_s``.
        nbytes: bytes of the weights.
        wire_nbytes: bytes sent to each engine.
        changed_fraction: fraction of elements that changed since the last sync; ``None`` if they were not compared.
    """

    total_s: float
    verification_s: float
    nbytes: int
    wire_nbytes: int
    changed_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step.

    Attributes:
        updates, critic: metrics of every optimizer step, in order; none of the policy while its critic warms up.
        times: time by phase.
        response_lengths: (N,) sampled tokens of every response, without observations.
        packed_tokens: tokens the trainer computed, including padding.
        actual_tokens: tokens of sequences among them; shared ones count once.
        shared_tokens: tokens not computed because sequences share them.
        rewards, rollout: ``None`` in supervised mode.
        scoring: work of frozen roles, by role.
        sources: (N,) source of each response's prompt in the mixture; empty, or "", without one.
        replay_buffer_size: trajectories waiting for training.
        weight_gather_s: part of the phase "sync" in which the trainer gathers its weights; ``None`` if not measured.
        probe_gap: largest engine-to-trainer logprob gap of the probe after the sync; ``None`` without a probe.
        sync: the weight sync after the step.
        memory: the trainer's memory by name, e.g. ``{"peak_rss (GiB)": 1.5}``.
        penalties: KLs that changed advantages, and a coefficient, by name.
        trainers_busy_s: seconds that trainer ranks worked on streamed samples, in any phase; ``None`` if they worked
            only in the phase "train".
    """

    updates: Sequence[GRPOStats]
    times: PhaseTimes
    response_lengths: Sequence[int]
    packed_tokens: int
    actual_tokens: int
    shared_tokens: int = 0
    rewards: RewardRecord | None = None
    rollout: RolloutRecord | None = None
    sources: Sequence[str] = ()
    scoring: Mapping[str, ScoringRecord] = field(default_factory=dict)
    replay_buffer_size: int = 0
    weight_gather_s: float | None = None
    probe_gap: float | None = None
    sync: SyncRecord | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    penalties: Mapping[str, float] = field(default_factory=dict)
    critic: Sequence[ValueStats] = ()
    trainers_busy_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Metrics of one held-out file, or of all files together.

    Attributes:
        accuracy: mean over scored responses of the first reward function's success; with several samples, mean@n.
            NaN if none was scored.
        response_length_mean: mean tokens per response.
        truncated_fraction: fraction of responses that reached a token limit.
        scoring_failures: responses that count neither as solved nor as unsolved, because a function, the environment
            or the agent failed.
        pass_at: pass@k by k, over prompts with k scored samples; empty with one sample per prompt.
    """

    accuracy: float
    num_responses: int
    response_length_mean: float
    truncated_fraction: float
    scoring_failures: int = 0
    pass_at: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Wall time of one step, in seconds; ``sum(seconds.values()) + orchestration_s`` is ``step_s``.

    Attributes:
        seconds: time in each of ``PHASES``, every phase present.
        orchestration_s: time outside all phases: batching, bookkeeping, everything between the phases.
    """

    step_s: float
    seconds: dict[str, float]
    orchestration_s: float


class PhaseClock:
    """Stopwatch of one training loop. Runs from construction, or from the last ``finish``. Not thread-safe.

    Counts whole nanoseconds, so the parts add up to the step and none is negative.
    """

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._open: str | None = None
        self._restart(now_ns())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to ``name``, one of ``PHASES``, even if it raises. Phases do not nest."""
        if self._open is not None:  # its time would be counted twice
            raise RuntimeError(f"phase {name!r} begins inside phase {self._open!r}; end that one first")
        self._open = name
        started = self._now_ns()
        try:
            yield
        finally:
            self._spent_ns[name] += self._now_ns() - started
            self._open = None

    def finish(self) -> PhaseTimes:
        """Return the times since the start, or since the last ``finish``, and restart the clock."""
        now = self._now_ns()
        step_ns = now - self._started_ns
        spent = self._spent_ns
        self._restart(now)
        return PhaseTimes(
            step_s=step_ns / 1e9,
            seconds={name: ns / 1e9 for name, ns in spent.items()},
            orchestration_s=(step_ns - sum(spent.values())) / 1e9,
        )

    def _restart(self, now_ns: int) -> None:
        self._started_ns = now_ns
        self._spent_ns = dict.fromkeys(PHASES, 0)
