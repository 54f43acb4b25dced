"""Packing: many sequences laid end to end on one token axis, and back, without loss.

Everything is built on the CPU from index arithmetic, concatenated once and, for another device, moved in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeGuard

import numpy as np
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
    lengths = _Lengths(sequences, target_tokens_per_batch)
    _check(sequences, lengths)
    tensors = _layout(lengths)
    tensors |= _token_tensors(sequences, lengths, pad_token_id, ignore_index)
    tensors |= _response_tensors(sequences, lengths)
    if _are_scored(sequences):
        tensors |= _score_tensors(sequences, lengths)
    return PackedTrajectory(
        **move_together(tensors, torch.device(device)),
        max_seqlen=int(lengths.total.max()),
        packed_seq_len=lengths.packed,
        actual_total_tokens=lengths.actual,
        sequence_ids=[s.sequence_id for s in sequences],
        group_ids=[s.group_id for s in sequences],
        policy_versions=[s.policy_version for s in sequences],
        answers=[s.answer for s in sequences],
        finish_reasons=[s.finish_reason for s in sequences],
        reward_metadata=[s.reward_metadata for s in sequences] if _are_scored(sequences) else None,
        ignore_index=ignore_index,
        sequence_weights=_weights(sequences),
        sequence_temperatures=[s.temperature for s in sequences],
        is_filler=False,
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
        is_filler=True,
    )


def real_tokens(packs: Sequence[PackedTrajectory]) -> int:
    """Tokens of the packs' own sequences: without padding, and without fillers (``zero_weight_pack``)."""
    return sum(pack.actual_total_tokens for pack in packs if not pack.is_filler)


# ------------------------------------------------------------------------------------------------------------- checks
def _check(sequences: Sequence[Trajectory], lengths: _Lengths) -> None:
    kind = type(sequences[0])
    if any(type(s) is not kind for s in sequences):
        raise ValueError("scored and unscored sequences cannot share a pack; pack each kind by itself")
    for name, own in (("prompt", lengths.prompt_list), ("response", lengths.response_list)):
        if min(own) < 1:
            where = sequences[own.index(min(own))].sequence_id
            raise ValueError(f"sequence {where!r} has an empty {name}: nothing could be scored; drop it before packing")
    if lengths.padding < 0:
        _refuse_budget(sequences, lengths)


def _gathered(sequences: Sequence[Trajectory], name: str, lengths: list[int]) -> list[Tensor]:
    """One field of every sequence, of the stated length each."""
    tensors = list(map(attrgetter(name), sequences))
    _check_counts(sequences, name, tensors, lengths)
    return tensors


def _check_counts(sequences: Sequence[Trajectory], name: str, tensors: list[Tensor], lengths: list[int]) -> None:
    found = list(map(Tensor.numel, tensors))
    if found != lengths:
        where = next(i for i, (own, stated) in enumerate(zip(found, lengths, strict=True)) if own != stated)
        raise ValueError(
            f"sequence {sequences[where].sequence_id!r}: {name} has {found[where]} entries, its stated length is "
            f"{lengths[where]}"
        )


def _refuse_budget(sequences: Sequence[Trajectory], lengths: _Lengths) -> None:
    budget = lengths.packed
    for sequence in sequences:
        if sequence.total_len > budget:
            raise ValueError(
                f"sequence {sequence.sequence_id!r} has {sequence.total_len} tokens, over the budget of {budget}; "
                "raise target_tokens_per_batch or limit prompt and response"
            )
    raise ValueError(
        f"{len(sequences)} sequences from {sequences[0].sequence_id!r} on have {lengths.actual} tokens together, over "
        f"the budget of {budget}; pack fewer of them (partition_by_tokens chooses)"
    )


# ------------------------------------------------------------------------------------------------------------ building
class _Lengths:
    """Lengths of one pack, as lists and as arrays, padding apart from the sequences."""

    def __init__(self, sequences: Sequence[Trajectory], budget: int | None) -> None:
        self.prompt_list = [s.prompt_len for s in sequences]
        self.response_list = [s.response_len for s in sequences]
        self.prompt = np.array(self.prompt_list, dtype=np.int64)
        self.response = np.array(self.response_list, dtype=np.int64)
        self.total = self.prompt + self.response
        self.ends = self.total.cumsum()
        self.starts = self.ends - self.total
        self.actual = int(self.ends[-1])
        self.packed = self.actual if budget is None else budget
        self.padding = self.packed - self.actual

    def per_token(self, per_sequence: np.ndarray) -> np.ndarray:
        """Every sequence's value on each of its response tokens. NumPy repeats four times as fast as torch."""
        return np.repeat(per_sequence, self.response)


def _layout(lengths: _Lengths) -> dict[str, Tensor]:
    """Every tensor that follows from the lengths alone."""
    layout = {
        "position_ids": _positions(lengths),
        "sequence_mask": _sequence_mask(lengths),
        "response_mask": _response_mask(lengths),
        "cu_seqlens": np.concatenate([[0], lengths.ends]).astype(np.int32),
        "sequence_map": np.stack([lengths.starts, lengths.ends], axis=1),
        "prompt_lens": lengths.prompt,
        "response_lens": lengths.response,
    }
    return {name: torch.from_numpy(values) for name, values in layout.items()}


def _positions(lengths: _Lengths) -> np.ndarray:
    """Every token's own index less that of its segment's first token; padding is a segment too."""
    positions = np.arange(lengths.packed, dtype=np.int32)
    firsts = np.append(lengths.starts, lengths.actual).astype(np.int32)
    positions -= np.repeat(firsts, np.append(lengths.total, lengths.padding))
    return positions


def _sequence_mask(lengths: _Lengths) -> np.ndarray:
    owners = np.append(np.arange(lengths.total.size), -1).astype(np.int32)
    return np.repeat(owners, np.append(lengths.total, lengths.padding))


def _response_mask(lengths: _Lengths) -> np.ndarray:
    """False on a prompt, True on its response, False on the padding."""
    runs = np.append(np.stack([lengths.prompt, lengths.response], axis=1), lengths.padding)
    return np.repeat(np.arange(runs.size) % 2 == 1, runs)


def _token_tensors(
    sequences: Sequence[Trajectory], lengths: _Lengths, pad_token_id: int, ignore_index: int
) -> dict[str, Tensor]:
    prompts = _gathered(sequences, "prompt_tokens", lengths.prompt_list)
    responses = _gathered(sequences, "response_tokens", lengths.response_list)
    pieces = [piece for pair in zip(prompts, responses, strict=True) for piece in pair]
    if lengths.padding:  # an empty piece would cost torch.cat its fast path
        pieces.append(torch.full((lengths.padding,), pad_token_id, dtype=torch.int64))
    tokens = torch.cat(pieces).to(torch.int64)
    loss_mask = torch.cat(_gathered(sequences, "loss_mask", lengths.response_list)).to(torch.bool)
    carries = loss_mask.numpy().view(np.int8)
    weights = lengths.per_token(np.array(_weights(sequences), dtype=np.float64))
    weights *= carries  # half the time of torch's product of a float and a bool
    return {
        "tokens": tokens,
        "targets": torch.from_numpy(_targets(torch.cat(responses).to(torch.int64).numpy(), carries, ignore_index)),
        "loss_mask": loss_mask,
        "token_weights": torch.from_numpy(weights),
        "temperatures": torch.from_numpy(np.array([s.temperature for s in sequences], dtype=np.float64)),
    }


def _targets(responses: np.ndarray, carries: np.ndarray, ignore_index: int) -> np.ndarray:
    """``carries * (id - ignore) + ignore``, in place: half the time of any masked fill of integers."""
    responses -= ignore_index
    responses *= carries
    responses += ignore_index
    return responses


def _response_tensors(sequences: Sequence[Trajectory], lengths: _Lengths) -> dict[str, Tensor]:
    tensors = {}
    for name in (name for name in _PER_RESPONSE if hasattr(sequences[0], name)):
        values = list(map(attrgetter(name), sequences))
        absent = [value is None for value in values]
        if all(absent):
            continue
        if any(absent):
            missing = sequences[absent.index(True)].sequence_id
            raise ValueError(f"sequence {missing!r} has no {name} while others of its pack do; all or none may have it")
        _check_counts(sequences, name, values, lengths.response_list)
        tensors[name] = torch.cat(values).to(_DTYPES.get(name, torch.float32))
    return tensors


def _score_tensors(sequences: Sequence[ScoredTrajectory], lengths: _Lengths) -> dict[str, Tensor]:
    remedy = "every sequence needs one entry per reward function"
    return {
        "rewards": _stacked(sequences, "rewards", remedy),
        "successes": _stacked(sequences, "successes", remedy),
        "advantages": torch.from_numpy(lengths.per_token(_scalar_advantages(sequences))),
    }


def _scalar_advantages(sequences: Sequence[ScoredTrajectory]) -> np.ndarray:
    """(S,) float32. A 0-d tensor's ``tolist`` is a number, any other's a list: one pass reads and checks."""
    values = [s.advantages.tolist() for s in sequences]
    if list in set(map(type, values)):
        odd = next(s for s in sequences if s.advantages.ndim)
        raise ValueError(
            f"sequence {odd.sequence_id!r}: advantages have shape {tuple(odd.advantages.shape)}; every sequence needs "
            "one scalar advantage"
        )
    return np.array(values, dtype=np.float32)


def _stacked(sequences: Sequence[ScoredTrajectory], name: str, remedy: str) -> Tensor:
    """One field of every sequence as rows, float32; stacking itself checks that all have the same shape."""
    values = list(map(attrgetter(name), sequences))
    try:
        return torch.stack(values).to(torch.float32)
    except RuntimeError as error:
        odd = next((i for i, value in enumerate(values) if value.shape != values[0].shape), None)
        if odd is None:
            raise
        raise ValueError(
            f"sequence {sequences[odd].sequence_id!r} has {values[odd].numel()} {name}, the first of its pack has "
            f"{values[0].numel()}; {remedy}"
        ) from error


def _weights(sequences: Sequence[Trajectory]) -> list[float]:
    if _are_scored(sequences):
        return [s.token_weight for s in sequences]
    return [1.0] * len(sequences)


def _are_scored(sequences: Sequence[Trajectory]) -> TypeGuard[Sequence[ScoredTrajectory]]:
    """Of one kind they are: ``_check`` has seen to it."""
    return isinstance(sequences[0], ScoredTrajectory)


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
