"""Packing: many sequences laid end to end on one token axis, and back, without loss.

Everything is built on the CPU from index arithmetic, concatenated once and, for another device, moved in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from slime_like.algorithms.packing.faults import (
    MAY_BE_ABSENT,
    check_arguments,
    check_sizes,
    checked_device,
    checked_list,
    first_fault,
    repeated_id,
)
from slime_like.algorithms.packing.transfer import move_together
from slime_like.algorithms.tensor_checks import require_tensors
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory, Trajectory, UnscoredTrajectory


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
            that only some sequences have, a field of another type or shape than its trajectory says, an id that two
            sequences have, a negative token id, an advantage, a reward or a loss-carrying token's logprob that is not
            finite, a negative weight, a temperature that is not positive, or more tokens than the budget: the message
            names the sequence. A device that is not there, or a number that should be whole.

    Example:
        >>> packed = pack_sequences(trajectories, pad_token_id=0, target_tokens_per_batch=4096)
    """
    # Need NumPy, as nothing else here does: importing the package takes torch alone.
    from slime_like.algorithms.packing.fields import pack_tensors, token_weights_of
    from slime_like.algorithms.packing.layout import PackLengths

    sequences = checked_list(sequences)
    check_arguments(target_tokens_per_batch, pad_token_id, ignore_index)
    target = checked_device(device)
    sequence_ids = [s.sequence_id for s in sequences]
    try:
        if len(set(sequence_ids)) < len(sequence_ids):
            raise ValueError(repeated_id(sequence_ids))
        prompts, responses = [s.prompt_len for s in sequences], [s.response_len for s in sequences]
        lengths = PackLengths(prompts, responses, target_tokens_per_batch)
        check_sizes(sequences, prompts, responses, lengths.packed, pad_token_id)
        tensors = pack_tensors(sequences, lengths, pad_token_id, ignore_index)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        # What torch says about a thousand tensors at once names none of them; looking at each costs as much as packing.
        if fault := first_fault(sequences):
            raise ValueError(fault) from error
        raise
    return PackedTrajectory(
        **move_together(tensors, target),
        max_seqlen=int(lengths.total.max()),
        packed_seq_len=lengths.packed,
        actual_total_tokens=lengths.actual,
        sequence_ids=sequence_ids,
        group_ids=[s.group_id for s in sequences],
        policy_versions=[s.policy_version for s in sequences],
        answers=[s.answer for s in sequences],
        finish_reasons=[s.finish_reason for s in sequences],
        reward_metadata=[s.reward_metadata for s in sequences] if _are_scored(sequences) else None,
        conversations=[s.conversation for s in sequences if isinstance(s, UnscoredTrajectory)] or None,
        ignore_index=ignore_index,
        sequence_weights=token_weights_of(sequences),
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
    for name in MAY_BE_ABSENT:
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
    require_tensors(response_logprobs=response_logprobs)
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


def _are_scored(sequences: Sequence[Trajectory]) -> TypeGuard[Sequence[ScoredTrajectory]]:
    """Of one kind they are: ``checked_list`` has seen to it."""
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
        for name in (*MAY_BE_ABSENT, "loss_mask", "advantages")
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
