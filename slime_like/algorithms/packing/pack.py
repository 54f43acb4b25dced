"""Packing of many sequences end to end on one token axis, and back, without loss.

Everything is built on the CPU from index arithmetic, concatenated once and, for another device, moved in one copy.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from slime_like.algorithms.packing.fields import RESPONSE_FIELDS, PackLengths, pack_tensors, token_weights_of
from slime_like.algorithms.packing.prefixes import Sharing, segment_fields
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory, Trajectory, UnscoredTrajectory, tensor_fields

_ALIGNMENT = 8
# Fields of a sequence that aren't tensors, and the pack's lists of their values.
_PLAIN = {
    "sequence_id": "sequence_ids",
    "rollout_id": "rollout_ids",
    "group_id": "group_ids",
    "policy_version": "policy_versions",
    "answer": "answers",
    "finish_reason": "finish_reasons",
    "temperature": "sequence_temperatures",
    "source": "sources",
}


def pack_sequences(
    sequences: Sequence[Trajectory],
    device: torch.device | str = "cpu",
    pad_token_id: int = 0,
    target_tokens_per_batch: int | None = None,
    ignore_index: int = -100,
    sharing: Sharing | None = None,
) -> PackedTrajectory:
    """Lay sequences end to end as ``[P1, R1, P2, R2, ..., PAD...]``.

    Args:
        sequences: all scored or all unscored, on the CPU, in the order of the pack. Token ids and weight versions are
            integers, loss masks bool. Other tensors may have any number type and become the type of their field
            (float32).
        device: device of the pack's tensors, which move in one transfer.
        pad_token_id: token id of trailing padding.
        target_tokens_per_batch: length to pad the pack to; by default there is no padding.
        ignore_index: value of ``targets`` for tokens without loss; negative, so it is no token's id.
        sharing: which common prefixes of a group's sequences to compute once; none by default.

    Returns:
        The pack. Padding is a separate segment that belongs to no sequence, mask, mean or count.

    Raises:
        ValueError: there is nothing to pack, a prompt or response is empty, a tensor doesn't have its stated length,
            only some sequences have a field, two have the same id, a token id or weight is negative, a reward or a
            loss-carrying entry isn't finite, a temperature isn't positive, or the budget is too small.
        TypeError, RuntimeError: a field has another type or shape than described.
    """
    sequences = list(sequences)
    if len(set(map(type, sequences))) != 1:
        raise ValueError("a pack has sequences of one kind, at least one; pack scored and unscored ones separately")
    if ignore_index >= 0:
        raise ValueError(f"ignore_index={ignore_index}: could be the id of a token; give a negative one")
    lengths = _checked_lengths(sequences, target_tokens_per_batch, pad_token_id)
    tensors = pack_tensors(sequences, lengths, pad_token_id, ignore_index) | segment_fields(sequences, lengths, sharing)
    values: dict[str, Any] = dict.fromkeys(RESPONSE_FIELDS) | move_together(tensors, torch.device(device))
    scored = isinstance(sequences[0], ScoredTrajectory)
    plain = _PLAIN | ({"reward_metadata": "reward_metadata"} if scored else {"conversation": "conversations"})
    values |= {plural: list(map(attrgetter(name), sequences)) for name, plural in plain.items()}
    return PackedTrajectory(
        **values,
        sequence_weights=token_weights_of(sequences),
        max_seqlen=int(lengths.total.max()),
        packed_seq_len=lengths.packed,
        actual_total_tokens=lengths.actual,
        ignore_index=ignore_index,
    )


def _checked_lengths(sequences: list[Trajectory], budget: int | None, pad_token_id: int) -> PackLengths:
    (twice, count), *_ = Counter(s.sequence_id for s in sequences).most_common(1)
    if count > 1:
        raise ValueError(
            f"{count} sequences have the id {twice!r}; give every sequence an id that is unique over the run"
        )
    for sequence in sequences:
        if min(sequence.prompt_len, sequence.response_len) < 1:
            raise ValueError(
                f"sequence {sequence.sequence_id!r} has an empty prompt or response; drop it before packing"
            )
    lengths = PackLengths([s.prompt_len for s in sequences], [s.response_len for s in sequences], budget)
    if lengths.padding < 0:
        longest = max(sequences, key=lambda sequence: sequence.total_len)
        raise ValueError(
            f"{len(sequences)} sequences have {lengths.actual} tokens, {longest.sequence_id!r} alone "
            f"{longest.total_len}, over the budget of {budget}; pack fewer (partition_by_tokens chooses) or raise it"
        )
    if lengths.padding and pad_token_id < 0:
        raise ValueError(f"pad_token_id={pad_token_id}: not a token id; give one of the vocabulary, such as 0")
    return lengths


def unpack_sequences(packed: PackedTrajectory) -> list[Trajectory]:
    """Return the sequences of a pack, with every field as it was, on the CPU.

    Tensors have the types that their fields describe. Each owns its memory, since a view would keep the whole pack
    alive in a buffer, and would be pickled with it.

    Args:
        packed: any pack; scored if it has advantages.

    Returns:
        One ``ScoredTrajectory`` or ``UnscoredTrajectory`` per real sequence, in order.
    """
    cls: type[Trajectory] = UnscoredTrajectory if packed.advantages is None else ScoredTrajectory
    response_lens = packed.response_lens.tolist()
    prompt_lens = packed.prompt_lens.tolist()
    pieces = [length for pair in zip(prompt_lens, response_lens, strict=True) for length in pair]
    parts = _split_owned(packed.tokens[: packed.actual_total_tokens], pieces)
    columns: dict[str, Sequence[Any]] = {"prompt_tokens": parts[0::2], "response_tokens": parts[1::2]}
    columns |= {"prompt_len": prompt_lens, "response_len": response_lens}
    inputs = (packed.prompt_lens + packed.response_lens - 1).tolist()
    lengths = {"inputs": inputs, "prompt": prompt_lens}
    if packed.support_sizes is not None:
        lengths["supports"] = [int(sizes.sum()) for sizes in packed.support_sizes.split(response_lens)]
    for name, described in tensor_fields(cls).items():
        if name in RESPONSE_FIELDS:
            columns[name] = _split_owned(getattr(packed, name), lengths.get(described.over, response_lens))
    columns |= {name: getattr(packed, plural) for name, plural in _PLAIN.items()}
    if packed.advantages is None:
        columns["conversation"] = packed.conversations or [None] * packed.num_sequences
    else:
        assert packed.rewards is not None and packed.successes is not None
        columns |= {
            "rewards": torch.ops.aten.unbind_copy(packed.rewards.cpu()),
            "successes": torch.ops.aten.unbind_copy(packed.successes.cpu()),
            "reward_metadata": list(packed.reward_metadata or []),
            "token_weight": packed.sequence_weights,
        }
    names = list(columns)
    return [cls(**dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def unpack_response_logprobs(packed: PackedTrajectory, response_logprobs: Tensor) -> list[Tensor]:
    """Split a flat per-response tensor into one tensor per sequence. Each owns its memory; gradients pass through.

    Args:
        packed: the pack, whose ``response_lens`` define the parts.
        response_logprobs: (R,) or (R, ...).

    Returns:
        (response_len, ...) for every sequence.

    Raises:
        ValueError: there aren't exactly R values.
    """
    lengths = packed.response_lens.tolist()
    if response_logprobs.ndim == 0 or len(response_logprobs) != sum(lengths):
        raise ValueError(
            f"response_logprobs has shape {tuple(response_logprobs.shape)}, the pack has {sum(lengths)} response "
            "tokens; give exactly one value per response token"
        )
    return list(torch.ops.aten.split_with_sizes_copy(response_logprobs, lengths))


def response_tokens(packed: PackedTrajectory) -> Tensor:
    """Return the response tokens, (R,) int64, including masked ones (which ``targets`` hides)."""
    return packed.tokens[packed.response_mask]


def response_logit_index(packed: PackedTrajectory) -> Tensor:
    """Return the positions whose logits score the response tokens, (R,) int64: one before each token.

    This is the only place where logits and tokens are shifted against each other.
    """
    return packed.response_mask.nonzero().squeeze(1) - 1


def zero_weight_pack(like: PackedTrajectory) -> PackedTrajectory:
    """Return a pack that trains nothing: the first sequence of ``like`` without loss, on the same device.

    It evens out micro-batch counts between ranks: it takes part in every collective and adds exactly 0.
    """
    pack = pack_sequences(unpack_sequences(like)[:1], device=like.tokens.device, ignore_index=like.ignore_index)
    return replace(
        pack,
        loss_mask=torch.zeros_like(pack.loss_mask),
        token_weights=torch.zeros_like(pack.token_weights),
        targets=torch.full_like(pack.targets, like.ignore_index),
        sequence_weights=[0.0],
        is_filler=True,
    )


def real_tokens(packs: Sequence[PackedTrajectory]) -> int:
    """Count the packs' tokens, shared ones once, without padding and fillers (``zero_weight_pack``)."""
    return sum(pack.actual_total_tokens - pack.shared_tokens for pack in packs if not pack.is_filler)


def move_together(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy CPU tensors of any dtype to ``device`` in one byte buffer. The results are views of it.

    On the CPU they are returned unchanged. The host doesn't wait for the copy: torch keeps the pinned memory until the
    copy is done.
    """
    if device.type == "cpu":
        return tensors
    # Aligned start of every tensor, and the total size.
    *starts, total = accumulate(
        (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()), initial=0
    )
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    places = {name: slice(start, start + tensors[name].nbytes) for name, start in zip(tensors, starts, strict=True)}
    for name, tensor in tensors.items():
        buffer[places[name]].copy_(tensor.contiguous().flatten().view(torch.uint8))
    moved = buffer.to(device, non_blocking=True)
    return {name: moved[places[name]].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}


def _split_owned(flat: Tensor | None, lengths: list[int]) -> list[Tensor] | list[None]:
    if flat is None:
        return [None] * len(lengths)
    return list(torch.ops.aten.split_with_sizes_copy(flat.cpu(), lengths))
