"""Debug tables: text, rewards and logprobs of a few samples of a training step, per sample and per token."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from slime_like.statistics import GRPOStats
    from slime_like.trajectory import ScoredTrajectory

SAMPLE_TABLE = "per_sample_debug_table"
TOKEN_TABLE = "per_token_debug_table"
HELD_OUT_TABLE = "held_out_debug_table"

# Columns about the whole optimizer step, equal in all of its rows.
STEP_COLUMNS = ("loss", "policy_loss", "kl_loss", "ratios", "clipfrac", "approx_policy_kls")

Decode = Callable[[Sequence[int]], str]
Row = dict[str, Any]
"""Cells by column, for ``MetricLogger.log_table``."""


class HeldOutSample(NamedTuple):
    """A response to a held-out prompt. ``prompt_id`` numbers the prompts of all data sets, always in the same order.
    ``success`` is ``None`` if the response could not be scored."""

    dataset: str
    prompt_id: int
    prompt_tokens: list[int]
    response_tokens: list[int]
    answer: str
    success: bool | None
    finish_reason: str


def held_out_rows(step: int, samples: Sequence[HeldOutSample], decode: Decode) -> list[Row]:
    """Return one row per sample of the evaluation after ``step``."""
    return [
        {
            "Sequence ID": sample.prompt_id,
            "Step": step,
            "Dataset": sample.dataset,
            "Prompt": decode(sample.prompt_tokens),
            "Response": decode(sample.response_tokens),
            "Answer": sample.answer,
            "Success": sample.success,
            "Finish Reason": sample.finish_reason,
        }
        for sample in samples
    ]


def per_sample_rows(step: int, trajectories: Sequence[ScoredTrajectory], stats: GRPOStats, decode: Decode) -> list[Row]:
    """Return one row per training row of each sample.

    The advantage is the mean over tokens. Reward and success are per reward function, unweighted. "Response Length"
    counts sampled tokens only. The two mean gaps are |difference of logprobs| over tokens that carry loss, in nats;
    ``None`` without such logprobs or tokens.
    "Reward Metadata" is JSON text: metadata of reward functions and of an environment's steps, or the reason why
    scoring failed, and what became of the rollout. With an environment, two more columns have the number of the model's
    turns and the conversation.
    If a sample has several training rows, "Rollout ID" is the same in all of them, and so are rewards and advantage.

    Args:
        trajectories: samples with the trainer's ``old_logprobs``.
        stats: metrics of the optimizer step.
        decode: converts token ids to text, including special tokens.
    """
    figures = {name: float(getattr(stats, name)) for name in STEP_COLUMNS}
    has_turns, has_rows = _have_turns(trajectories), any(each.rollout_id != each.sequence_id for each in trajectories)
    return [
        {
            "Sequence ID": sample.sequence_id,
            **({"Rollout ID": sample.rollout_id} if has_rows else {}),
            "Prompt": decode(sample.prompt_tokens.tolist()),
            "Response": decode(sample.response_tokens.tolist()),
            "Advantages": float(sample.advantages.double().mean()),
            "Response Length": sample.sampled_len,
            "Step": step,
            **_rewards(sample),
            **figures,
            "Mean Abs Diff Pi-Ref": _masked_mean(_gap(sample, sample.ref_logprobs), sample.loss_mask),
            "Mean Abs Diff Pi-Generated": _masked_mean(_gap(sample, sample.logprobs), sample.loss_mask),
            "Answer": sample.answer,
            "Group ID": sample.group_id,
            "Weight Version": None if sample.weight_versions is None else sample.policy_version,
            "Finish Reason": sample.finish_reason,
            "Reward Metadata": _reward_metadata(sample),
            **(_conversation(sample, decode) if has_turns else {}),
        }
        for sample in trajectories
    ]


def response_column(columns: Sequence[str]) -> str:
    """Return the column with the responses; for conversations, the one that separates turns."""
    return "Conversation" if "Conversation" in columns else "Response"


def reading_order(columns: Sequence[str]) -> list[str]:
    """Return the samples' columns, the most readable ones first, without ``STEP_COLUMNS``."""
    rewards = [column for column in columns if column.startswith("Reward_")]
    outcome = ("Advantages", "Finish Reason", *rewards, "Reward Metadata", "Response Length")
    read = ("Step", "Prompt", response_column(columns), "Answer", *outcome)
    first = [column for column in read if column in columns]
    return first + [column for column in columns if column not in {*first, *STEP_COLUMNS}]


def per_token_rows(step: int, trajectories: Sequence[ScoredTrajectory], decode: Decode) -> list[Row]:
    """Return one row per response token; for the arguments, see ``per_sample_rows``.

    Token positions count from 0 at the first response token. Logprobs and gaps are in nats; ``None`` if there is no
    reference, or if no engine sampled the token. With an environment, one more column has the number of the turn, from
    1; an observation has the number of the turn it answers.
    """
    rows: list[Row] = []
    has_turns = _have_turns(trajectories)
    for sample in trajectories:
        length, token_ids = sample.response_len, sample.response_tokens.tolist()
        starts = [start for start, _ in _turns(sample)]
        columns: dict[str, Sequence[Any]] = {
            "Sequence ID": [sample.sequence_id] * length,
            "Token Position": range(length),
            "Token ID": token_ids,
            "Decoded Token": [decode([token]) for token in token_ids],
            "Generated Logprob": _sampled_cells(sample, sample.logprobs),
            "Ref Logprob": _cells(sample.ref_logprobs, length),
            "Pi Logprob": _cells(sample.old_logprobs, length),
            "Abs Diff Pi-Ref": _cells(_gap(sample, sample.ref_logprobs), length),
            "Abs Diff Pi-Generated": _sampled_cells(sample, _gap(sample, sample.logprobs)),
            "Step": [step] * length,
            "Loss Mask": sample.loss_mask.tolist(),
            "Weight Version": _cells(sample.weight_versions, length),
            **({"Turn": [bisect_right(starts, token) for token in range(length)]} if has_turns else {}),
        }
        rows += (dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True))
    return rows


def _turns(sample: ScoredTrajectory) -> list[tuple[int, int]]:
    """Return ``[start, end)`` of the model's turns in the response; without an environment, one turn."""
    conversation = sample.reward_metadata.get("conversation")
    return [(start, end) for start, end in conversation["turns"]] if conversation else [(0, sample.response_len)]


def _have_turns(samples: Sequence[ScoredTrajectory]) -> bool:
    return any("conversation" in sample.reward_metadata for sample in samples)


def _conversation(sample: ScoredTrajectory, decode: Decode) -> dict[str, int | str]:
    tokens, turns = sample.response_tokens.tolist(), _turns(sample)
    lines = []
    for number, (start, end) in enumerate(turns, start=1):
        lines.append(f"{number} model: {decode(tokens[start:end])}")
        if number < len(turns):
            lines.append(f"{number} environment: {decode(tokens[end : turns[number][0]])}")
    return {"Turns": len(turns), "Conversation": "\n".join(lines)}


def _gap(sample: ScoredTrajectory, others: Tensor | None) -> np.ndarray | None:
    """Return |difference| (response_len,) between the policy's logprobs and ``others``, in float64."""
    if others is None or sample.old_logprobs is None:
        return None
    return (sample.old_logprobs.double() - others.double()).abs().numpy()


def _rewards(sample: ScoredTrajectory) -> dict[str, float]:
    names, cells = sample.reward_metadata["func_names"], dict[str, float]()
    for name, reward, success in zip(names, sample.rewards.tolist(), sample.successes.tolist(), strict=True):
        cells |= {f"Reward_{name}": float(f"{reward:.7g}"), f"Success_{name}": success}  # the digits of a float32
    return cells


def _reward_metadata(sample: ScoredTrajectory) -> str | None:
    """Return metadata by reward function, and under ``environment`` a list by step; ``None`` if there is none."""
    shown = {name: each for name, each in sample.reward_metadata.items() if name not in ("func_names", "conversation")}
    steps = sample.reward_metadata.get("conversation", {}).get("steps", [])
    if any(steps):
        shown["environment"] = steps
    return json.dumps(shown, ensure_ascii=False) if shown else None


def _cells(values: np.ndarray | Tensor | None, length: int) -> list[Any]:
    return [None] * length if values is None else values.tolist()


def _sampled_cells(sample: ScoredTrajectory, values: np.ndarray | Tensor | None) -> list[Any]:
    """Return ``values`` as cells, empty for observations, because no engine sampled them."""
    cells = _cells(values, sample.response_len)
    for (_, end), (start, _) in pairwise(_turns(sample)):
        cells[end:start] = [None] * (start - end)
    return cells


def _masked_mean(values: np.ndarray | None, mask: Tensor) -> float | None:
    return None if values is None or not mask.any() else float(values[mask.numpy()].mean())
