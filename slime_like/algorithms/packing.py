"""Packing: many sequences laid end to end on one token axis, and back, without loss.

Everything is built on the CPU from index arithmetic, concatenated once and, for another device, moved in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slime_like.algorithms.transfer import move_together
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory, UnscoredTrajectory

Trajectory = UnscoredTrajectory | ScoredTrajectory

_PER_RESPONSE = ("logprobs", "old_logprobs", "ref_logprobs", "weight_versions")
_DTYPES = {"weight_versions": torch.int64}


def pack_sequences(
    sequences: Sequence[Trajectory],
    device: torch.device | str = "cpu",
    pad_token_id: int = 0,
    target_tokens_per_batch: int | None = None,
    ignore_index: int = -100,
) -> PackedTrajectory:
    """Lay sequences end to end as ``[P1, R1, P2, R2, ..., PAD...]``.

    Args:
        sequences: all scored or all unscored, on the CPU, in the order they will have in the pack.
        device: where the pack's tensors go, in one transfer.
        pad_token_id: token id of trailing padding.
        target_tokens_per_batch: length the pack is padded to; none adds no padding.
        ignore_index: value of ``targets`` where a token carries no loss.

    Returns:
        The pack. Padding is a segment of its own: it belongs to no sequence, mask, mean or count.

    Raises:
        ValueError: nothing to pack, an empty prompt or response, tensors that do not fit their stated length, fields
            that only some sequences have, or more tokens than the budget. The message names the sequence.

    Example:
        >>> packed = pack_sequences(trajectories, pad_token_id=0, target_tokens_per_batch=4096)
    """
    if not sequences:
        raise ValueError("cannot pack an empty list of sequences; give at least one")
    _check(sequences, target_tokens_per_batch)
    lengths = _Lengths(sequences, target_tokens_per_batch)
    tensors = _layout(lengths) | _token_tensors(sequences, lengths, pad_token_id, ignore_index)
    tensors |= _response_tensors(sequences, lengths)
    scored = isinstance(sequences[0], ScoredTrajectory)
    if scored:
        tensors |= _score_tensors(sequences, lengths)
    return PackedTrajectory(
        **move_together(tensors, torch.device(device)),
        max_seqlen=max(lengths.total_list),
        packed_seq_len=lengths.packed,
        actual_total_tokens=lengths.actual,
        sequence_ids=[s.sequence_id for s in sequences],
        group_ids=[s.group_id for s in sequences],
        policy_versions=[s.policy_version for s in sequences],
        answers=[s.answer for s in sequences],
        finish_reasons=[s.finish_reason for s in sequences],
        reward_metadata=[s.reward_metadata for s in sequences if isinstance(s, ScoredTrajectory)] if scored else None,
        ignore_index=ignore_index,
        sequence_weights=_weights(sequences),
        sequence_temperatures=[s.temperature for s in sequences],
    )


def unpack_sequences(packed: PackedTrajectory) -> list[Trajectory]:
    """Give back the sequences of a pack, every field equal to what went in, on the CPU.

    Each tensor owns its memory: a view would keep the whole pack alive in a buffer, and would be pickled with it.

    Args:
        packed: any pack; scored if it has advantages.

    Returns:
        One ``ScoredTrajectory`` or ``UnscoredTrajectory`` per real sequence, in order.

    Example:
        >>> unpack_sequences(pack_sequences(trajectories))
    """
    response_lens = packed.response_lens.tolist()
    columns = _token_columns(packed, response_lens)
    for name in _PER_RESPONSE:
        columns[name] = _split_owned(getattr(packed, name), response_lens)
    columns["loss_mask"] = _split_owned(packed.loss_mask, response_lens)
    if packed.advantages is None:
        for name in ("old_logprobs", "ref_logprobs"):
            del columns[name]
        cls: type[Trajectory] = UnscoredTrajectory
    else:
        columns |= _score_columns(packed)
        cls = ScoredTrajectory
    columns |= _plain_columns(packed, response_lens)
    names = list(columns)
    return [cls(**dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def unpack_response_logprobs(packed: PackedTrajectory, response_logprobs: Tensor) -> list[Tensor]:
    """Cut a flat per-response tensor into one tensor per sequence; each owns its memory, gradients pass through.

    Args:
        packed: the pack whose ``response_lens`` say where to cut.
        response_logprobs: (R,).

    Returns:
        (response_len,) for every sequence.

    Raises:
        ValueError: not exactly R values.
    """
    lengths = packed.response_lens.tolist()
    if response_logprobs.ndim != 1 or response_logprobs.numel() != sum(lengths):
        raise ValueError(
            f"response_logprobs has shape {tuple(response_logprobs.shape)}, the pack has {sum(lengths)} response "
            "tokens; give exactly one value per response token"
        )
    return list(torch.ops.aten.split_with_sizes_copy(response_logprobs, lengths))


def response_tokens(packed: PackedTrajectory) -> Tensor:
    """(R,) int64: the response tokens themselves, masked ones included (``targets`` hides those)."""
    return packed.tokens[packed.response_mask]


def response_logit_index(packed: PackedTrajectory) -> Tensor:
    """(R,) int64: positions whose logits score the response tokens, one before each token, never in another sequence.

    This is the only place where logits and tokens are shifted against each other.
    """
    return packed.response_mask.nonzero().squeeze(1) - 1


def zero_weight_pack(like: PackedTrajectory) -> PackedTrajectory:
    """A pack that trains nothing: the first sequence of ``like``, carrying no loss, on the same device.

    Evens out micro-batch counts between ranks: it runs through the model and every collective, and adds exactly 0.
    """
    first = _first_sequence(like)
    pack = pack_sequences([first], device=like.tokens.device, ignore_index=like.ignore_index)
    return replace(
        pack,
        loss_mask=torch.zeros_like(pack.loss_mask),
        token_weights=torch.zeros_like(pack.token_weights),
        targets=torch.full_like(pack.targets, like.ignore_index),
        sequence_weights=[0.0],
    )


# ------------------------------------------------------------------------------------------------------------- checks
def _check(sequences: Sequence[Trajectory], budget: int | None) -> None:
    kind = type(sequences[0])
    if any(type(s) is not kind for s in sequences):
        raise ValueError("scored and unscored sequences cannot share a pack; pack each kind by itself")
    prompt_lens = [s.prompt_len for s in sequences]
    response_lens = [s.response_len for s in sequences]
    for name, lengths in (("prompt", prompt_lens), ("response", response_lens)):
        if min(lengths) < 1:
            where = next(s.sequence_id for s, n in zip(sequences, lengths, strict=True) if n < 1)
            raise ValueError(f"sequence {where!r} has an empty {name}: nothing could be scored; drop it before packing")
    _check_lengths(sequences, "prompt_tokens", prompt_lens)
    _check_lengths(sequences, "response_tokens", response_lens)
    _check_lengths(sequences, "loss_mask", response_lens)
    if budget is not None:
        _check_budget(sequences, prompt_lens, response_lens, budget)


def _check_lengths(sequences: Sequence[Trajectory], name: str, lengths: list[int]) -> None:
    if [getattr(s, name).numel() for s in sequences] == lengths:
        return
    for sequence, length in zip(sequences, lengths, strict=True):
        found = getattr(sequence, name).numel()
        if found != length:
            raise ValueError(
                f"sequence {sequence.sequence_id!r}: {name} has {found} entries, its stated length is {length}"
            )


def _check_budget(sequences: Sequence[Trajectory], prompts: list[int], responses: list[int], budget: int) -> None:
    total = sum(prompts) + sum(responses)
    if total <= budget:
        return
    for sequence in sequences:
        if sequence.total_len > budget:
            raise ValueError(
                f"sequence {sequence.sequence_id!r} has {sequence.total_len} tokens, over the budget of {budget}; "
                "raise target_tokens_per_batch or limit prompt and response"
            )
    raise ValueError(
        f"{len(sequences)} sequences from {sequences[0].sequence_id!r} on have {total} tokens together, over the "
        f"budget of {budget}; pack fewer of them (partition_by_tokens chooses)"
    )


# ------------------------------------------------------------------------------------------------------------ building
class _Lengths:
    """Lengths of one pack, as lists and as tensors, padding apart from the sequences."""

    def __init__(self, sequences: Sequence[Trajectory], budget: int | None) -> None:
        self.prompt = torch.tensor([s.prompt_len for s in sequences], dtype=torch.int64)
        self.response_list = [s.response_len for s in sequences]
        self.response = torch.tensor(self.response_list, dtype=torch.int64)
        self.total = self.prompt + self.response
        self.total_list: list[int] = self.total.tolist()
        self.num_responses = sum(self.response_list)
        self.actual = sum(self.total_list)
        self.packed = self.actual if budget is None else budget
        self.padding = self.packed - self.actual


def _layout(lengths: _Lengths) -> dict[str, Tensor]:
    """Every tensor that follows from the lengths alone."""
    ends = lengths.total.cumsum(0)
    starts = ends - lengths.total
    return {
        "position_ids": _positions(lengths, ends),
        "sequence_mask": _sequence_mask(lengths, ends),
        "response_mask": _response_mask(lengths, starts, ends),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        "sequence_map": torch.stack([starts, ends], dim=1),
        "prompt_lens": lengths.prompt,
        "response_lens": lengths.response,
    }


# Each of these is a running sum of its steps, summed in place: one buffer of T entries and no other.
def _positions(lengths: _Lengths, ends: Tensor) -> Tensor:
    """Steps of 1 that fall back to 0 where a segment, padding included, begins."""
    steps = torch.ones(lengths.packed, dtype=torch.int64)
    steps[0] = 0
    begins = ends if lengths.padding else ends[:-1]
    steps[begins] = 1 - lengths.total[: begins.numel()]
    return steps.cumsum_(0)


def _sequence_mask(lengths: _Lengths, ends: Tensor) -> Tensor:
    steps = torch.zeros(lengths.packed, dtype=torch.int64)
    steps[ends[:-1]] = 1
    mask = steps.cumsum_(0)
    mask[lengths.actual :] = -1
    return mask


def _response_mask(lengths: _Lengths, starts: Tensor, ends: Tensor) -> Tensor:
    """Up by 1 where a response begins, down where it ends."""
    steps = torch.zeros(lengths.packed + 1, dtype=torch.int8)
    steps[starts + lengths.prompt] = 1
    steps[ends] = -1
    return steps.cumsum_(0)[:-1].to(torch.bool)


def _token_tensors(
    sequences: Sequence[Trajectory], lengths: _Lengths, pad_token_id: int, ignore_index: int
) -> dict[str, Tensor]:
    pieces = [piece for s in sequences for piece in (s.prompt_tokens, s.response_tokens)]
    if lengths.padding:
        pieces.append(torch.full((lengths.padding,), pad_token_id, dtype=torch.int64))
    loss_mask = torch.cat([s.loss_mask for s in sequences]).to(torch.bool)
    responses = torch.cat([s.response_tokens for s in sequences]).to(torch.int64)
    weights = torch.tensor(_weights(sequences), dtype=torch.float32)
    token_weights = weights.repeat_interleave(lengths.response, output_size=lengths.num_responses)
    return {
        "tokens": torch.cat(pieces).to(torch.int64),
        # mask * (id - ignore) + ignore, in place: half the time of any masked fill of integers.
        "targets": responses.sub_(ignore_index).mul_(loss_mask).add_(ignore_index),
        "loss_mask": loss_mask,
        "token_weights": token_weights.mul_(loss_mask.view(torch.uint8)),
        "temperatures": torch.tensor([s.temperature for s in sequences], dtype=torch.float32),
    }


def _response_tensors(sequences: Sequence[Trajectory], lengths: _Lengths) -> dict[str, Tensor]:
    names = [name for name in _PER_RESPONSE if hasattr(sequences[0], name)]
    tensors = {}
    for name in names:
        values = [getattr(s, name) for s in sequences]
        present = [value is not None for value in values]
        if not any(present):
            continue
        if not all(present):
            missing = sequences[present.index(False)].sequence_id
            raise ValueError(f"sequence {missing!r} has no {name} while others of its pack do; all or none may have it")
        _check_lengths(sequences, name, lengths.response_list)
        tensors[name] = torch.cat(values).to(_DTYPES.get(name, torch.float32))
    return tensors


def _score_tensors(sequences: Sequence[Trajectory], lengths: _Lengths) -> dict[str, Tensor]:
    tensors = {}
    for name in ("rewards", "successes"):
        values = [getattr(s, name) for s in sequences]
        widths = [value.numel() for value in values]
        if len(set(widths)) > 1:
            odd = next(i for i, width in enumerate(widths) if width != widths[0])
            raise ValueError(
                f"sequence {sequences[odd].sequence_id!r} has {widths[odd]} {name}, the first of its pack has "
                f"{widths[0]}; every sequence needs one entry per reward function"
            )
        tensors[name] = torch.stack(values).to(torch.float32)
    advantages = torch.stack([s.advantages for s in sequences if isinstance(s, ScoredTrajectory)]).to(torch.float32)
    if advantages.ndim != 1:
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape[1:])}; every sequence needs one scalar advantage"
        )
    tensors["advantages"] = advantages.repeat_interleave(lengths.response, output_size=lengths.num_responses)
    return tensors


def _weights(sequences: Sequence[Trajectory]) -> list[float]:
    return [s.token_weight if isinstance(s, ScoredTrajectory) else 1.0 for s in sequences]


# ----------------------------------------------------------------------------------------------------------- unpacking
def _split_owned(flat: Tensor | None, lengths: list[int]) -> list[Tensor] | list[None]:
    if flat is None:
        return [None] * len(lengths)
    return list(torch.ops.aten.split_with_sizes_copy(flat.cpu(), lengths))


def _token_columns(packed: PackedTrajectory, response_lens: list[int]) -> dict[str, Sequence]:
    prompt_lens = packed.prompt_lens.tolist()
    pieces = [n for pair in zip(prompt_lens, response_lens, strict=True) for n in pair]
    parts = _split_owned(packed.tokens[: packed.actual_total_tokens], pieces)
    return {"prompt_tokens": parts[0::2], "response_tokens": parts[1::2], "prompt_len": prompt_lens}


def _plain_columns(packed: PackedTrajectory, response_lens: list[int]) -> dict[str, Sequence]:
    return {
        "response_len": response_lens,
        "answer": packed.answers,
        "sequence_id": packed.sequence_ids,
        "group_id": packed.group_ids,
        "policy_version": packed.policy_versions,
        "temperature": packed.sequence_temperatures,
        "finish_reason": packed.finish_reasons,
    }


def _score_columns(packed: PackedTrajectory) -> dict[str, Sequence]:
    assert packed.advantages is not None and packed.rewards is not None and packed.successes is not None
    firsts = packed.response_lens.cumsum(0) - packed.response_lens
    return {
        "advantages": torch.ops.aten.unbind_copy(packed.advantages[firsts].cpu()),
        "rewards": torch.ops.aten.unbind_copy(packed.rewards.cpu()),
        "successes": torch.ops.aten.unbind_copy(packed.successes.cpu()),
        "reward_metadata": list(packed.reward_metadata or []),
        "token_weight": packed.sequence_weights,
    }


def _first_sequence(packed: PackedTrajectory) -> Trajectory:
    """Sequence 0 of a pack, without cutting up the others."""
    tokens, responses = int(packed.cu_seqlens[1]), int(packed.response_lens[0])
    changes: dict[str, object] = {
        name: None if getattr(packed, name) is None else getattr(packed, name)[:responses]
        for name in (*_PER_RESPONSE, "loss_mask", "advantages")
    }
    for name in ("rewards", "successes"):
        changes[name] = None if getattr(packed, name) is None else getattr(packed, name)[:1]
    for name in ("prompt_lens", "response_lens"):
        changes[name] = getattr(packed, name)[:1]
    for name in ("sequence_ids", "group_ids", "policy_versions", "answers", "finish_reasons"):
        changes[name] = getattr(packed, name)[:1]
    for name in ("sequence_weights", "sequence_temperatures"):
        changes[name] = getattr(packed, name)[:1]
    metadata = packed.reward_metadata
    changes |= {"tokens": packed.tokens[:tokens], "actual_total_tokens": tokens, "packed_seq_len": tokens}
    changes["reward_metadata"] = None if metadata is None else metadata[:1]
    return unpack_sequences(replace(packed, **changes))[0]  # type: ignore[arg-type]
