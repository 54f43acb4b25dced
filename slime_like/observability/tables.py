"""Debug tables: what a few samples of a training step said, earned and scored, whole and token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from slime_like.trajectory import GRPOStats, ScoredTrajectory

SAMPLE_TABLE = "per_sample_debug_table"
TOKEN_TABLE = "per_token_debug_table"

_STATS = ("loss", "policy_loss", "kl_loss", "ratios", "clipfrac", "approx_policy_kls")
_TOKEN_COLUMNS = [
    "Sequence ID", "Token Position", "Token ID", "Decoded Token", "Generated Logprob", "Ref Logprob", "Pi Logprob",
    "Abs Diff Pi-Ref", "Abs Diff Pi-Generated", "Step", "Loss Mask", "Weight Version",
]  # fmt: skip

_CONVERSATION_COLUMNS = ["Turns", "Conversation"]
_TURN_COLUMNS = ["Turn"]

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns; ``MetricLogger.log_table(step, table.name, table.columns, table.rows)`` stores it."""

    name: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """One response as float64 arrays (response_len,); ``None`` where the sample has no such logprobs."""

    pi: np.ndarray
    generated: np.ndarray | None
    reference: np.ndarray | None

    @property
    def reference_gap(self) -> np.ndarray | None:
        return None if self.reference is None else np.abs(self.pi - self.reference)

    @property
    def generated_gap(self) -> np.ndarray | None:
        return None if self.generated is None else np.abs(self.pi - self.generated)


def per_sample_table(
    step: int,
    trajectories: Sequence[ScoredTrajectory],
    pi_logprobs: Sequence[np.ndarray],
    stats: GRPOStats,
    decode: Decode,
    limit: int,
) -> Table:
    """One row for each of the first ``limit`` samples.

    Reward and success stand per reward function, unweighted. Columns from "loss" on to "approx_policy_kls" are figures
    of the whole optimizer step. The two mean gaps are |difference of logprobs| over loss-carrying tokens, in nats;
    ``None`` where the sample has no such logprobs, or no token carries loss. Where an environment took part, two more
    columns count the model's turns and show who said what, a line each.

    Args:
        step: training step.
        trajectories: the step's samples.
        pi_logprobs: (response_len,) of each of them, under the trainer's policy.
        stats: the optimizer step's figures.
        decode: token ids to text, special tokens included.
        limit: rows at most.

    Raises:
        ValueError: a per-token field has another length than the response, or reward functions differ over samples.
    """
    names = list(trajectories[0].reward_metadata["func_names"]) if trajectories else []
    talks = _have_turns(trajectories)
    figures = [float(getattr(stats, name)) for name in _STATS]
    rows = [
        [
            sample.sequence_id,
            decode(sample.prompt_tokens.tolist()),
            decode(sample.response_tokens.tolist()),
            float(sample.advantages),
            sample.response_len,
            step,
            *_rewards(sample, names),
            *figures,
            _masked_mean(tokens.reference_gap, sample.loss_mask),
            _masked_mean(tokens.generated_gap, sample.loss_mask),
            sample.answer,
            sample.group_id,
            None if sample.weight_versions is None else sample.policy_version,
            sample.finish_reason,
            *(_conversation(sample, decode) if talks else ()),
        ]
        for sample, tokens in _samples(trajectories, pi_logprobs, limit)
    ]
    return Table(SAMPLE_TABLE, _sample_columns(names) + (_CONVERSATION_COLUMNS if talks else []), rows)


def per_token_table(
    step: int,
    trajectories: Sequence[ScoredTrajectory],
    pi_logprobs: Sequence[np.ndarray],
    decode: Decode,
    limit: int,
) -> Table:
    """One row for each response token of the first ``limit`` samples; arguments and errors as ``per_sample_table``.

    Token positions count from 0 at the first response token. Logprobs and gaps are in nats; they are ``None`` where the
    sample has none (no reference in use, a demonstration or an observation that no engine sampled). Where an
    environment took part, one more column has the number of the turn, from 1; what answers a turn has its number.
    """
    talks = _have_turns(trajectories)
    rows = [
        [*row, *([turn] if talks else [])]
        for sample, tokens in _samples(trajectories, pi_logprobs, limit)
        for row, turn in zip(_rows(step, sample, tokens, decode), _turn_numbers(sample), strict=True)
    ]
    return Table(TOKEN_TABLE, _TOKEN_COLUMNS + (_TURN_COLUMNS if talks else []), rows)


def _turns(sample: ScoredTrajectory) -> list[tuple[int, int]]:
    """``[start, end)`` of the model's turns in the response; the whole of it where no environment took part."""
    conversation = sample.reward_metadata.get("conversation")
    return [(start, end) for start, end in conversation["turns"]] if conversation else [(0, sample.response_len)]


def _have_turns(samples: Sequence[ScoredTrajectory]) -> bool:
    return any("conversation" in sample.reward_metadata for sample in samples)


def _conversation(sample: ScoredTrajectory, decode: Decode) -> tuple[int, str]:
    """Number of turns, and one line for everything that either side said."""
    tokens, turns = sample.response_tokens.tolist(), _turns(sample)
    lines = []
    for number, (start, end) in enumerate(turns, start=1):
        lines.append(f"{number} model: {decode(tokens[start:end])}")
        if number < len(turns):
            lines.append(f"{number} environment: {decode(tokens[end : turns[number][0]])}")
    return len(turns), "\n".join(lines)


def _turn_numbers(sample: ScoredTrajectory) -> Iterator[int]:
    turns = _turns(sample)
    ends = [start for start, _ in turns[1:]] + [sample.response_len]
    for number, ((start, _), end) in enumerate(zip(turns, ends, strict=True), start=1):
        yield from [number] * (end - start)


def _sample_columns(func_names: Sequence[str]) -> list[str]:
    rewards = [column for name in func_names for column in (f"Reward_{name}", f"Success_{name}")]
    return [
        "Sequence ID", "Prompt", "Response", "Advantages", "Response Length", "Step", *rewards, *_STATS,
        "Mean Abs Diff Pi-Ref", "Mean Abs Diff Pi-Generated", "Answer", "Group ID", "Weight Version", "Finish Reason",
    ]  # fmt: skip


def _rows(step: int, sample: ScoredTrajectory, tokens: _Tokens, decode: Decode) -> Iterator[list[Any]]:
    length = sample.response_len
    token_ids = sample.response_tokens.tolist()
    columns = (
        [sample.sequence_id] * length,
        range(length),
        token_ids,
        [decode([token]) for token in token_ids],
        _sampled_cells(sample, tokens.generated),
        _cells(tokens.reference, length),
        _cells(tokens.pi, length),
        _cells(tokens.reference_gap, length),
        _sampled_cells(sample, tokens.generated_gap),
        [step] * length,
        sample.loss_mask.tolist(),
        _cells(sample.weight_versions, length),
    )
    return (list(row) for row in zip(*columns, strict=True))


def _samples(
    trajectories: Sequence[ScoredTrajectory], pi_logprobs: Sequence[np.ndarray], limit: int
) -> Iterator[tuple[ScoredTrajectory, _Tokens]]:
    if len(trajectories) != len(pi_logprobs):
        raise ValueError(
            f"{len(pi_logprobs)} arrays of policy logprobs for {len(trajectories)} trajectories; give one for each"
        )
    if limit < 0:
        raise ValueError(f"limit={limit} is negative; give the number of samples, 0 for none")
    for sample, pi in list(zip(trajectories, pi_logprobs, strict=True))[:limit]:
        yield sample, _tokens(sample, pi)


def _tokens(sample: ScoredTrajectory, pi: np.ndarray) -> _Tokens:
    per_token: dict[str, np.ndarray | Tensor | None] = {"pi_logprobs": pi, **sample.response_tensors()}
    for name, values in per_token.items():
        if values is not None and tuple(values.shape) != (sample.response_len,):
            raise ValueError(
                f"sample {sample.sequence_id}: {name} has shape {tuple(values.shape)}; "
                f"({sample.response_len},) is needed, one entry per response token"
            )
    return _Tokens(
        np.asarray(pi, np.float64),
        None if sample.logprobs is None else sample.logprobs.double().numpy(),
        None if sample.ref_logprobs is None else sample.ref_logprobs.double().numpy(),
    )


def _rewards(sample: ScoredTrajectory, names: Sequence[str]) -> list[float]:
    logged = list(sample.reward_metadata["func_names"])
    shapes = (tuple(sample.rewards.shape), tuple(sample.successes.shape))
    if logged != list(names) or shapes != ((len(names),), (len(names),)):
        raise ValueError(
            f"sample {sample.sequence_id}: reward functions {logged}, rewards of shape {shapes[0]}, successes of shape "
            f"{shapes[1]}; all samples of a step need one of each for {list(names)}"
        )
    pairs = zip(sample.rewards.tolist(), sample.successes.tolist(), strict=True)
    return [value for pair in pairs for value in pair]


def _cells(values: np.ndarray | Tensor | None, length: int) -> list[Any]:
    return [None] * length if values is None else values.tolist()


def _sampled_cells(sample: ScoredTrajectory, values: np.ndarray | None) -> list[Any]:
    """Empty on observations, which no engine sampled."""
    cells = _cells(values, sample.response_len)
    for (_, end), (start, _) in pairwise(_turns(sample)):
        cells[end:start] = [None] * (start - end)
    return cells


def _masked_mean(values: np.ndarray | None, mask: Tensor) -> float | None:
    return None if values is None or not mask.any() else float(values[mask.numpy()].mean())
