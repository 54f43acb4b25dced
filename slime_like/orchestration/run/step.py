"""A training step, on a whole batch or a stream: scores, the critic, penalties, and the optimizer steps."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from slime_like.algorithms.losses.kl import kept_sequences
from slime_like.algorithms.losses.loss import build_policy
from slime_like.config.roles import CRITIC
from slime_like.observability.names import scoring_metrics, source_kls
from slime_like.observability.timing import PhaseClock
from slime_like.orchestration.cluster.ray_calls import Answers
from slime_like.orchestration.rollout.advantages import Advantages, distill, normalize_importance
from slime_like.orchestration.run.sources import Run
from slime_like.orchestration.trainer.batcher import PackTokens, TrainingBatch, WindowStream, split_by_group
from slime_like.orchestration.trainer.model_ranks import present
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.orchestration.trainer.rank_training import StreamedStep
from slime_like.statistics import GRPOStats, ValueStats
from slime_like.trajectory import ScoredTrajectory

_WINDOW = "training on a window"


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One completed training step.

    Attributes:
        trajectories: its trajectories, in the order of group ids.
        updates: figures of every optimizer step, in order.
        scoring: metrics of the frozen roles that trainer ranks hold.
        tokens: number of computed and shared tokens.
        busy_s: seconds that trainer ranks worked on it; ``None`` if the phase "train" measures that.
        penalties: metrics of the KL in the reward, and to the teacher.
        critic: figures of every optimizer step of the critic, in order.
        given_advantages: advantages of the trajectories before a KL or a critic replaced them; empty if none could.
    """

    trajectories: Sequence[ScoredTrajectory]
    updates: Sequence[GRPOStats]
    scoring: Mapping[str, float]
    tokens: PackTokens
    busy_s: float | None = None
    penalties: Mapping[str, float] = field(default_factory=dict)
    critic: Sequence[ValueStats] = ()
    given_advantages: Sequence[Tensor] = ()

    @classmethod
    def of_stream(cls, windows: WindowStream, steps: Sequence[StreamedStep]) -> Self:
        """Build the step from its ``windows`` and what every rank reports. Seconds are means over ranks."""
        trajectories = sorted(windows.trajectories, key=lambda trajectory: trajectory.group_id)
        scoring = dict[str, float]()
        for role in steps[0].scoring_s:
            scoring |= _work_of_trainers(role, trajectories, fmean(step.scoring_s[role] for step in steps))
        busy_s = fmean(step.busy_s for step in steps)
        return cls(trajectories, present(s.stats for s in steps)[:1], scoring, windows.tokens, busy_s)


def train_on_batch(run: Run, step: int, clock: PhaseClock) -> TrainedStep:
    """Sample the whole batch, then run its optimizer steps."""
    with run.source.sampling(run.progress):
        trajectories = run.source.next_batch(step, clock)
    given = [row.advantages for row in trajectories]
    batch, updates = run.policy.load_batch(trajectories), []
    with clock.phase("sync"):
        run.devices.training()
    with run.progress.waiting("training"):
        scoring = score(run, trajectories, clock)
        critic, penalties = train_critic(run, trajectories, step, clock)
        penalties |= apply_penalties(run, trajectories, step, clock)
        with clock.phase("train"):
            for index, denominator in optimizer_steps(run, batch, trajectories, step):
                answers = run.policy.start("training", TrainerRank.train_minibatch, index, denominator)
                updates += present(answers.result())[:1]
            learned = [present(answers.result())[0] for answers in critic]
    others: dict[str, Any] = {"penalties": penalties, "critic": learned, "given_advantages": given}
    return TrainedStep(trajectories, updates, scoring, batch.tokens, **others)


def train_on_stream(run: Run, step: int, clock: PhaseClock) -> TrainedStep:
    """Run one optimizer step. Trainers process full windows while other groups are still being sampled.

    Each window has a cost. Trainers therefore get one only when they would idle, with everything that is full by then.
    The rest is the last window. If all groups are ready together, the last window is the whole batch.
    """
    policy, source = run.policy, run.source
    windows = WindowStream(policy.batcher)
    policy.defer(policy.start(_WINDOW, TrainerRank.begin_stream))
    with run.source.sampling(run.progress):
        for groups in source.stream(step, clock):
            holds = source.is_complete(step) or not policy.is_idle()
            if window := windows.add(groups, holds):
                policy.defer(policy.scatter(_WINDOW, TrainerRank.train_window, window, False))
    with clock.phase("train"), run.progress.waiting("training"):
        window, denominator = windows.finish()
        policy.defer(policy.scatter(_WINDOW, TrainerRank.train_window, window, True))
        steps = policy.call("updating", TrainerRank.finish_stream, denominator)
    return TrainedStep.of_stream(windows, steps)


def score(run: Run, trajectories: Sequence[ScoredTrajectory], clock: PhaseClock) -> dict[str, float]:
    """Freeze the scores of every role that the first update or the KL in the reward needs and trajectories lack. Return
    the metrics of frozen roles."""
    metrics = dict[str, float]()
    if not run.source.has_rewards:
        return metrics
    with clock.phase("score"):
        for role in run.config.roles.scoring:
            started = time.perf_counter()
            run.policy.call(f"scoring with the {role.name} weights", TrainerRank.score_batch, role.name)
            if not role.trained:
                own = [row for row in trajectories if role.source in (None, row.source)]
                metrics |= _work_of_trainers(role.name, own, time.perf_counter() - started)
    return metrics


def train_critic(
    run: Run, trajectories: Sequence[ScoredTrajectory], step: int, clock: PhaseClock
) -> tuple[list[Answers[Any]], dict[str, float]]:
    """Compute advantages from the critic's values. Start its optimizer steps, as many as the policy's.

    On devices of its own, they run while the policy trains. Return their answers, and the metrics of a KL in the
    reward; nothing without a critic.
    """
    if (critic := run.models.get(CRITIC)) is None:
        return [], {}
    coefficient = run.kl_reward.value
    with clock.phase("critic"), critic.on_devices():
        denominators = critic.load_batch(trajectories).denominators
        critic.call("scoring with the critic", TrainerRank.score_batch, CRITIC)
        scores = critic.stored_scores(trajectories, "values")
        values = {name: each["values"] for name, each in scores.items()}
        returns, kl = Advantages(run.config).of_values(run.policy, trajectories, values, step, coefficient)
        targets = {name: target.numpy() for name, target in returns.items()}
        critic.defer(critic.start("receiving returns", TrainerRank.set_tokens, "returns", targets))
        updates = [
            critic.start("training the critic", TrainerRank.train_minibatch, index, denominator)
            for index, denominator in [*enumerate(denominators)] * run.config.algorithm.epochs
        ]
        for answers in updates:
            critic.defer(answers)  # leaving shared devices waits for them
    return updates, _adapt_kl(run, kl) if coefficient > 0 else {}


def apply_penalties(
    run: Run, trajectories: Sequence[ScoredTrajectory], step: int, clock: PhaseClock
) -> dict[str, float]:
    """Subtract the KL to the reference from rewards, and add a sampled teacher's gain to advantages. Give trainers the
    batch's mean importance weight, and the tokens that the loss chooses. Return the metrics of the KLs."""
    config, policy, coefficient = run.config, run.policy, run.kl_reward.value
    metrics = dict[str, float]()
    if not run.source.has_rewards:
        return metrics
    with clock.phase("score"):
        if coefficient > 0 and not config.algorithm.needs_critic:  # which applies the KL at each token
            metrics |= _adapt_kl(run, Advantages(config).penalize_kl(policy, trajectories, step, coefficient))
        if config.distillation.sampled_coef > 0:
            kls = distill(policy, trajectories, config.distillation.coef)
            metrics |= {"train_actor_training/distillation_kl": kls.pop(None)} | source_kls([kls])
        if config.algorithm.importance.normalize:
            normalize_importance(config.algorithm, policy, trajectories)
        if config.algorithm.chooses_tokens:
            _choose_tokens(run, trajectories, step)
    return metrics


def _adapt_kl(run: Run, kl: float) -> dict[str, float]:
    """Adapt the coefficient of the KL in the reward. Return the metrics of the KL that it was applied to."""
    metrics = {"train_actor_training/kl_reward": kl, "train_actor_training/kl_reward_coef": run.kl_reward.value}
    run.kl_reward.adapt(kl)
    return metrics


def _choose_tokens(run: Run, trajectories: Sequence[ScoredTrajectory], step: int) -> None:
    """Have the loss choose tokens of every optimizer step, by old logprobs and advantages."""
    algorithm, found = run.config.algorithm, dict[str, np.ndarray]()
    frozen = run.policy.stored_scores(trajectories, "old_logprobs")
    loss: Any = build_policy(algorithm.loss)
    generator = torch.Generator().manual_seed(run.config.seed * 1_000_003 + step)
    for rows in split_by_group(trajectories, algorithm.minibatches):
        mask = torch.cat([row.loss_mask for row in rows])
        old = torch.cat([frozen[row.sequence_id]["old_logprobs"] for row in rows])
        advantages = torch.cat([row.advantages for row in rows])
        chosen = torch.zeros_like(mask).masked_scatter(mask, loss.choose_tokens(old[mask], advantages[mask], generator))
        parts = chosen.split([row.response_len for row in rows])
        found |= {row.sequence_id: part.numpy() for row, part in zip(rows, parts, strict=True)}
    run.policy.call("receiving chosen tokens", TrainerRank.set_tokens, "chosen_tokens", found)


def _work_of_trainers(role: str, rows: Sequence[ScoredTrajectory], seconds: float) -> dict[str, float]:
    """Return the metrics of trainers' scoring. They never wait, because the packs are already there."""
    responses, total = sum(row.response_len for row in rows), sum(row.total_len for row in rows)
    return scoring_metrics(role, seconds, seconds, responses, total)


def optimizer_steps(
    run: Run, batch: TrainingBatch, trajectories: Sequence[ScoredTrajectory], step: int
) -> list[tuple[int, float]]:
    """Return (minibatch, denominator) of the step's updates: ``algorithm.epochs`` passes, none while the critic warms
    up."""
    if step <= run.config.critic.warmup_steps:
        return []
    shrinks = run.config.algorithm.rejection.shrinks
    denominators = _of_kept(run, batch, trajectories) if shrinks else batch.denominators
    return [*enumerate(denominators)] * run.config.algorithm.epochs


def _of_kept(run: Run, batch: TrainingBatch, rows: Sequence[ScoredTrajectory]) -> list[float]:
    """Return each minibatch's denominator without rejected sequences, or with them if all are: its gradient is 0."""
    algorithm = run.config.algorithm
    frozen = run.policy.stored_scores(rows, "old_logprobs")
    kept = kept_sequences(
        algorithm.rejection,
        torch.cat([frozen[row.sequence_id]["old_logprobs"] for row in rows]),
        torch.cat([row.logprobs for row in rows if row.logprobs is not None]),  # not None: engines sampled
        torch.cat([row.loss_mask for row in rows]),
        torch.tensor([row.response_len for row in rows]),
    )
    counted = {row.sequence_id for row, is_kept in zip(rows, kept.tolist(), strict=True) if is_kept}
    found = []
    for minibatch, whole in zip(split_by_group(rows, algorithm.minibatches), batch.denominators, strict=True):
        rest = [row for row in minibatch if row.sequence_id in counted and bool(row.loss_mask.any())]
        found.append(run.policy.batcher.denominator(rest) if rest else whole)
    return found
