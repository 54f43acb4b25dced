"""Packing: many sequences laid end to end on one token axis, and back, without loss.

Everything is built on the CPU from index arithmetic, concatenated once and, for another device, moved in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from slime_like.algorithms.packing_faults import first_fault, negative_id
from slime_like.algorithms.transfer import move_together
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory, UnscoredTrajectory

if TYPE_CHECKING:
    from slime_like.algorithms.pack_layout import PackLengths

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
        sequences: all scored or all unscored, on the CPU, in the order they will have in the pack. Token ids and
            weight versions are integers, loss masks bool; whatever else is a tensor may have any number type, and
            becomes what its trajectory says it is (float32).
        device: where the pack's tensors go, in one transfer.
        pad_token_id: token id of trailing padding.
        target_tokens_per_batch: length the pack is padded to; none adds no padding.
        ignore_index: value of ``targets`` where a token carries no loss; negative, as every other id is a token's.

    Returns:
        The pack. Padding is a segment of its own: it belongs to no sequence, mask, mean or count.

    Raises:
        ValueError: nothing to pack, an empty prompt or response, tensors that do not fit their stated length, fields
            that only some sequences have, a field of another type or shape than its trajectory says, a negative token
            id, an advantage that is not finite, a temperature that is not positive, or more tokens than the budget. The
            message names the sequence.

    Example:
        >>> packed = pack_sequences(trajectories, pad_token_id=0, target_tokens_per_batch=4096)
    """
    # Needs NumPy, as nothing else here does: importing the package takes torch alone.
    from slime_like.algorithms.pack_layout import PackLengths, layout

    sequences = _checked_list(sequences)
    if ignore_index >= 0:
        raise ValueError(f"ignore_index={ignore_index} is the id of a token; give a negative one")
    try:
        prompts, responses = [s.prompt_len for s in sequences], [s.response_len for s in sequences]
        lengths = PackLengths(prompts, responses, target_tokens_per_batch)
        _check(sequences, lengths)
        tensors = layout(lengths)
        tensors |= _token_tensors(sequences, lengths, pad_token_id, ignore_index)
        tensors |= _response_tensors(sequences, lengths)
        if _are_scored(sequences):
            tensors |= _score_tensors(sequences, lengths)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        # What torch says about a thousand tensors at once names none of them; looking at each costs as much as packing.
        if fault := first_fault(sequences):
            raise ValueError(fault) from error
        raise
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
        conversations=[s.conversation for s in sequences if isinstance(s, UnscoredTrajectory)] or None,
        ignore_index=ignore_index,
        sequence_weights=_weights(sequences),
        sequence_temperatures=[s.temperature for s in sequences],
        is_filler=False,
    )


def unpack_sequences(packed: PackedTrajectory) -> list[Trajectory]:
    """Give back the sequences of a pack, every field equal to what went in, on the CPU.

    Tensors that went in with another type than their trajectory's come back with the trajectory's.

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
        columns["conversation"] = packed.conversations or [None] * packed.num_sequences
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
def _checked_list(sequences: Sequence[Trajectory]) -> list[Trajectory]:
    """All trajectories, of one kind; whatever can be walked over is welcome."""
    if isinstance(sequences, Trajectory):
        raise ValueError(f"sequence {sequences.sequence_id!r} was given alone; give a list of sequences")
    sequences = list(sequences)
    if not sequences:
        raise ValueError("cannot pack an empty list of sequences; give at least one")
    kinds = set(map(type, sequences))
    if odd := [kind for kind in kinds if not issubclass(kind, Trajectory)]:
        raise ValueError(f"a {odd[0].__name__} is no sequence; give UnscoredTrajectory or ScoredTrajectory objects")
    if len(kinds) > 1:
        raise ValueError("scored and unscored sequences cannot share a pack; pack each kind by itself")
    return sequences


def _check(sequences: Sequence[Trajectory], lengths: PackLengths) -> None:
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


def _joined(pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The pieces end to end. A conversion that would lose something, and rows instead of vectors, are refused.

    Torch itself refuses pieces that differ in their number of dimensions or lie on different devices.
    """
    joined = torch.cat(pieces)
    if not _keeps(joined.dtype, dtype) or joined.ndim != 1 or joined.device.type != "cpu":
        raise TypeError(f"joined into {joined.ndim} dimensions of {joined.dtype} on {joined.device}")
    return joined.to(dtype)


def _keeps(given: torch.dtype, dtype: torch.dtype) -> bool:
    """Bools are not made of numbers, nor integers of fractions; anything real will do for a float."""
    if dtype == torch.bool or given.is_complex:
        return given == dtype
    return dtype.is_floating_point or not (given.is_floating_point or given == torch.bool)


def _check_counts(sequences: Sequence[Trajectory], name: str, tensors: list[Tensor], lengths: list[int]) -> None:
    found = list(map(Tensor.numel, tensors))
    if found != lengths:
        where = next(i for i, (own, stated) in enumerate(zip(found, lengths, strict=True)) if own != stated)
        raise ValueError(
            f"sequence {sequences[where].sequence_id!r}: {name} has {found[where]} entries, its stated length is "
            f"{lengths[where]}"
        )


def _refuse_budget(sequences: Sequence[Trajectory], lengths: PackLengths) -> None:
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
def _token_tensors(
    sequences: Sequence[Trajectory], lengths: PackLengths, pad_token_id: int, ignore_index: int
) -> dict[str, Tensor]:
    from slime_like.algorithms.pack_layout import masked_targets, masked_weights

    prompts = _gathered(sequences, "prompt_tokens", lengths.prompt_list)
    responses = _gathered(sequences, "response_tokens", lengths.response_list)
    pieces = [piece for pair in zip(prompts, responses, strict=True) for piece in pair]
    if lengths.padding:  # an empty piece would cost torch.cat its fast path
        if pad_token_id < 0:
            raise ValueError(f"pad_token_id={pad_token_id} is no token's id; give one of the vocabulary, e.g. 0")
        pieces.append(torch.full((lengths.padding,), pad_token_id, dtype=torch.int64))
    tokens = _joined(pieces, torch.int64)
    if tokens.numpy().min() < 0:  # a tenth of the time of torch's
        raise ValueError(negative_id(sequences))
    loss_mask = _joined(_gathered(sequences, "loss_mask", lengths.response_list), torch.bool)
    weights = lengths.per_token(_column(sequences, _weights(sequences), "the token_weight", "it must be finite"))
    return {
        "tokens": tokens,
        "targets": masked_targets(_joined(responses, torch.int64), loss_mask, ignore_index),
        "loss_mask": loss_mask,
        "token_weights": masked_weights(weights, loss_mask),
        "temperatures": _temperatures(sequences),
    }


def _temperatures(sequences: Sequence[Trajectory]) -> Tensor:
    remedy = "give the positive one it was sampled at, or 1 if greedily"
    return _column(sequences, [s.temperature for s in sequences], "temperature", remedy, above=0.0)


def _column(
    sequences: Sequence[Trajectory], values: list[float], name: str, remedy: str, above: float = -math.inf
) -> Tensor:
    """(S,) float64, finite and above a bound."""
    from slime_like.algorithms.pack_layout import column

    found, odd = column(values, above)
    if odd is not None:
        raise ValueError(f"sequence {sequences[odd].sequence_id!r} has {name} {values[odd]}; {remedy}")
    return found


def _response_tensors(sequences: Sequence[Trajectory], lengths: PackLengths) -> dict[str, Tensor]:
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
        tensors[name] = _joined(values, _DTYPES.get(name, torch.float32))
    return tensors


def _score_tensors(sequences: Sequence[ScoredTrajectory], lengths: PackLengths) -> dict[str, Tensor]:
    return {
        "rewards": _rows(sequences, "rewards"),
        "successes": _rows(sequences, "successes"),
        "advantages": lengths.per_token(_scalar_advantages(sequences)),
    }


def _scalar_advantages(sequences: Sequence[ScoredTrajectory]) -> Tensor:
    """(S,) float32. A 0-d tensor's ``tolist`` is a number, any other's a list: one pass reads and checks."""
    values: list[Any] = [s.advantages.tolist() for s in sequences]
    if list in set(map(type, values)):
        raise TypeError("advantages of more than one number")
    return _column(sequences, values, "the advantage", "it must be finite").to(torch.float32)


def _rows(sequences: Sequence[ScoredTrajectory], name: str) -> Tensor:
    """One field of every sequence as rows, (S, num_funcs) float32; stacking itself checks that all have one shape."""
    values = list(map(attrgetter(name), sequences))
    try:
        rows = torch.stack(values)
    except RuntimeError as error:
        odd = next((i for i, value in enumerate(values) if value.shape != values[0].shape), None)
        if odd is None:
            raise
        raise ValueError(
            f"sequence {sequences[odd].sequence_id!r} has {values[odd].numel()} {name}, the first of its pack has "
            f"{values[0].numel()}; every sequence needs one entry per reward function"
        ) from error
    if rows.ndim != 2:
        raise TypeError(f"stacked into {rows.ndim} dimensions")
    return rows.to(torch.float32)


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
    metadata, conversations = packed.reward_metadata, packed.conversations
    changes |= {"tokens": packed.tokens[:tokens], "actual_total_tokens": tokens, "packed_seq_len": tokens}
    changes["reward_metadata"] = None if metadata is None else metadata[:1]
    changes["conversations"] = None if conversations is None else conversations[:1]
    return unpack_sequences(replace(packed, **changes))[0]  # type: ignore[arg-type]
