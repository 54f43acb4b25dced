"""The debug tables of a step: a few samples with the trainers' own logprobs beside the engine's."""

from collections.abc import Sequence
from dataclasses import replace

from slime_like.observability.tables import Decode, Table, per_sample_table, per_token_table
from slime_like.orchestration.trainer.group_training import GroupTraining
from slime_like.trajectory import GRPOStats, ScoredTrajectory


def debug_tables(
    step: int,
    trajectories: Sequence[ScoredTrajectory],
    trainers: GroupTraining,
    stats: GRPOStats,
    decode: Decode,
    limit: int,
) -> list[Table]:
    """Tables of the first ``limit`` samples; policy and reference logprobs are those frozen at the step's start."""
    logprobs = trainers.response_logprobs([trajectory.sequence_id for trajectory in trajectories[:limit]])
    samples = [
        replace(trajectory, ref_logprobs=logprobs[trajectory.sequence_id].reference)
        for trajectory in trajectories[:limit]
    ]
    pi = [logprobs[sample.sequence_id].policy.numpy() for sample in samples]
    tables = [
        per_sample_table(step, samples, pi, stats, decode),
        per_token_table(step, samples, pi, decode),
    ]
    return [table for table in tables if table.rows]
