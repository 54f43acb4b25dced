"""Records of one training step: the typed inputs of ``slime_like.observability.names``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from slime_like.observability.phases import PhaseTimes

if TYPE_CHECKING:
    from slime_like.trajectory import GRPOStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecord:
    """Rewards of a step's N responses.

    Attributes:
        func_names, weights: (F,) of the reward functions; the weights make the total reward.
        rewards, successes: (N, F), unweighted.
        group_ids: (N,) the prompt group of each response.
        failures: why scoring failed ("timeout", "crash", "memory", "cpu", "error"), one per response that got 0 for it.
    """

    func_names: Sequence[str]
    weights: Sequence[float]
    rewards: ArrayLike
    successes: ArrayLike
    group_ids: Sequence[int]
    failures: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """Figures of generating a step's responses.

    Attributes:
        finish_reasons: (N,) "stop", "length", "abort" or "turns".
        dropped_prompts: prompts of this step that gave no trained sample.
        queue_size: groups that wait in the rollout queue.
        staleness: (N,) weight versions between a response's first token and the weights it trains.
        seconds: generation time that ``tokens_per_second`` is counted over; ``None`` takes the phase "generate".
        turns: (N,) of the model in each conversation; empty without an environment.
        rows: (N,) training rows of each response.
    """

    finish_reasons: Sequence[str]
    dropped_prompts: int = 0
    queue_size: int = 0
    staleness: Sequence[int] = ()
    seconds: float | None = None
    turns: Sequence[int] = ()
    rows: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRecord:
    """One step of the reference workers: of ``total_s``, scoring and waiting for rollouts; tokens scored."""

    total_s: float
    model_running_s: float
    waiting_s: float
    response_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRecord:
    """One weight sync.

    Attributes:
        verification_s: by how much verification lengthened it, at most: all hashing, and the probe.
        nbytes: bytes of the weights.
        wire_nbytes: bytes sent to each engine.
        changed_fraction: share of elements that differ from the last sync's; ``None`` where they were not compared.
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
        updates: figures of every optimizer step inside the training step, in order.
        times: where the time went.
        response_lengths: (N,) tokens of every response trained on that the model sampled, observations not counted.
        packed_tokens: tokens the trainer computed, padding included.
        actual_tokens: of these, tokens of real sequences, shared ones once.
        shared_tokens: tokens that were left out because others share them.
        rewards, rollout: ``None`` in supervised mode.
        sources: (N,) of the mixture that the responses' prompts come from; empty without one.
        replay_buffer_size: trajectories that wait for training.
        weight_gather_s: the part of the phase "sync" in which the trainer gathers its weights; ``None`` if unmeasured.
        probe_gap: largest engine-to-trainer logprob gap of the probe after the sync; ``None`` without a probe.
        sync: the weight sync after the step.
        memory: memory figures of the trainer by name, e.g. ``{"peak_rss (GiB)": 1.5}``.
        trainers_busy_s: seconds that trainer ranks worked on samples that were streamed to them, also while others were
            waited for; ``None`` where they trained in the phase "train" alone.
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
    reference: ReferenceRecord | None = None
    replay_buffer_size: int = 0
    weight_gather_s: float | None = None
    probe_gap: float | None = None
    sync: SyncRecord | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    trainers_busy_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Figures of one held-out file, or of all together.

    Attributes:
        accuracy: mean over responses of the first reward function's success; with several samples, mean@n.
        response_length_mean: tokens.
        truncated_fraction: responses that met the length limit, 0 to 1.
        scoring_failures: responses that count as unsolved because a function or the environment failed.
        pass_at: pass@k by k; none with one sample per prompt.
    """

    accuracy: float
    num_responses: int
    response_length_mean: float
    truncated_fraction: float
    scoring_failures: int = 0
    pass_at: Mapping[int, float] = field(default_factory=dict)
