"""The fields of many sequences as the tensors of a pack, checked as whole arrays.

Torch joins the tensors. It rejects pieces with different numbers of dimensions, on different devices, or with lossy
conversions (numbers to bools, fractions to integers), but its message names none of the sequences. NumPy does the index
arithmetic: it repeats four times and masks integers twice as fast as torch.
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.trajectory import PackedTrajectory, ScoredTrajectory, TensorField, Trajectory, tensor_fields

Array = np.ndarray[Any, Any]

RESPONSE_FIELDS = tensor_fields(PackedTrajectory)
"""Tensors of a pack that join those of its trajectories, most with one entry per response token."""

_dtype_of = attrgetter("dtype")


class PackLengths:
    """Lengths of one pack, as lists and as arrays, with padding separate from the sequences."""

    def __init__(self, prompts: list[int], responses: list[int], budget: int | None) -> None:
        self.prompt_list, self.response_list = prompts, responses
        self.prompt, self.response = (np.array(lengths, dtype=np.int64) for lengths in (prompts, responses))
        self.total = self.prompt + self.response
        self.ends = self.total.cumsum()
        self.starts = self.ends - self.total
        self.actual, self.num_responses = int(self.ends[-1]), int(self.response.sum())
        self.packed = self.actual if budget is None else budget
        self.padding = self.packed - self.actual

    def owner(self, response_token: int) -> tuple[int, int]:
        """Return the sequence that a response token of the pack belongs to, and its place in the response."""
        ends = self.response.cumsum()
        sequence = int(np.searchsorted(ends, response_token, side="right"))
        return sequence, response_token - int(ends[sequence] - self.response[sequence])


def _lay_out(lengths: PackLengths) -> dict[str, Tensor]:
    """Compute the tensors that depend only on lengths. Padding is a segment too, but belongs to no sequence."""
    segments = np.append(lengths.total, lengths.padding)
    firsts = np.append(lengths.starts, lengths.actual).astype(np.int32)
    positions = np.arange(lengths.packed, dtype=np.int32)
    positions -= np.repeat(firsts, segments)
    owners = np.append(np.arange(lengths.total.size), -1).astype(np.int32)
    # Prompts and responses by turns, and the padding at the end.
    runs = np.append(np.stack([lengths.prompt, lengths.response], axis=1), lengths.padding)
    layout = {
        "position_ids": positions,
        "sequence_mask": np.repeat(owners, segments),
        "response_mask": np.repeat(np.arange(runs.size) % 2 == 1, runs),
        "cu_seqlens": np.concatenate([[0], lengths.ends]).astype(np.int32),
        "sequence_map": np.stack([lengths.starts, lengths.ends], axis=1),
        "prompt_lens": lengths.prompt,
        "response_lens": lengths.response,
    }
    return {name: torch.from_numpy(values) for name, values in layout.items()}


def pack_tensors(
    sequences: Sequence[Trajectory], lengths: PackLengths, pad_token_id: int, ignore_index: int
) -> dict[str, Tensor]:
    """Return every tensor of the pack, on the CPU and without a graph.

    Raises:
        ValueError: a value that no pack may hold; the message names the sequence.
        TypeError, AttributeError, RuntimeError: a field doesn't match its description.
    """
    with torch.no_grad():
        tensors = _lay_out(lengths)
        tensors["tokens"] = _tokens(sequences, lengths, pad_token_id)
        tensors |= _loss_tensors(sequences, lengths, tensors, ignore_index)
        first = sequences[0]
        found = {name: each for name, each in RESPONSE_FIELDS.items() if name != "loss_mask" and hasattr(first, name)}
        absent = [name for name in found if getattr(first, name) is None]
        if absent and len(set(map(attrgetter(*absent), sequences))) > 1:
            raise ValueError(f"only some sequences of the pack have {' or '.join(absent)}; give it to all or to none")
        for name, described in found.items():
            if name in absent and described.optional:
                continue
            tensors[name] = _per_response(sequences, lengths, name, described)
            if described.over not in ("inputs", "prompt"):
                _require_finite(sequences, lengths, name, tensors[name], tensors["loss_mask"])
        if isinstance(sequences[0], ScoredTrajectory):
            tensors |= {name: _stack_rows(sequences, name) for name in ("rewards", "successes")}
            if (rewards := tensors["rewards"].shape) != (successes := tensors["successes"].shape):
                raise TypeError(f"rewards {tuple(rewards)} and successes {tuple(successes)}")
    return tensors


def _tokens(sequences: Sequence[Trajectory], lengths: PackLengths, pad_token_id: int) -> Tensor:
    prompts = _collect(sequences, "prompt_tokens", lengths.prompt_list)
    responses = _collect(sequences, "response_tokens", lengths.response_list)
    pieces = [*prompts, *responses]
    pieces[0::2], pieces[1::2] = prompts, responses
    tokens = torch.empty(lengths.packed, dtype=torch.int64)
    _join(pieces, tokens[: lengths.actual])
    tokens[lengths.actual :] = pad_token_id
    if tokens.numpy().min() < 0:  # takes a tenth of the time of torch's min
        sequence = int(np.searchsorted(lengths.ends, int(tokens.argmin()), side="right"))
        raise ValueError(
            f"sequence {sequences[sequence].sequence_id!r} has the token {int(tokens.min())}; give ids of the "
            "vocabulary, and set loss_mask to False for tokens without loss"
        )
    return tokens


def _loss_tensors(
    sequences: Sequence[Trajectory], lengths: PackLengths, tensors: dict[str, Tensor], ignore_index: int
) -> dict[str, Tensor]:
    loss_mask = _per_response(sequences, lengths, "loss_mask", RESPONSE_FIELDS["loss_mask"])
    mask = loss_mask.numpy()
    ones = mask.view(np.int8)  # a product with 0 and 1 takes half the time of one with bools
    # Reading targets from the joined tokens takes half the time of joining the responses again, and masking them in
    # place as ``mask * (id - ignore) + ignore`` half the time of a masked fill of integers.
    targets = tensors["tokens"].numpy()[tensors["response_mask"].numpy()]
    targets -= ignore_index
    targets *= ones
    targets += ignore_index
    remedy = "give a finite one, 0 or more"
    weights = _check_column(sequences, token_weights_of(sequences), "the token_weight", remedy, least=0.0)
    if bool((weights == weights[0]).all()):  # reduction "tokens": nothing to repeat
        token_weights = np.multiply(ones, weights[0], dtype=np.float64)
    else:
        token_weights = np.repeat(weights, lengths.response)
        token_weights *= ones
    remedy = "give the positive one it was sampled at, or 1 if greedily"
    temperatures = [s.temperature for s in sequences]
    return {
        "targets": torch.from_numpy(targets),
        "loss_mask": loss_mask,
        "token_weights": torch.from_numpy(token_weights),
        "temperatures": torch.from_numpy(
            _check_column(sequences, temperatures, "temperature", remedy, least=math.ulp(0.0))
        ),
    }


def _per_response(sequences: Sequence[Trajectory], lengths: PackLengths, name: str, described: TensorField) -> Tensor:
    counts = lengths.response_list
    try:
        if described.over == "supports":
            counts = [int(sequence.support_sizes.sum()) for sequence in sequences]  # type: ignore[union-attr]
        elif described.over == "inputs":
            counts = [sequence.total_len - 1 for sequence in sequences]
        elif described.over == "prompt":
            counts = lengths.prompt_list
        values = _collect(sequences, name, counts, len if described.entry_ndim else Tensor.numel)
        entry = values[0].shape[1:] if described.entry_ndim else ()
        return _join(values, torch.empty(sum(counts), *entry, dtype=described.dtype))
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name}: cannot be packed ({error}); give all sequences tensors of one kind") from error


def _require_finite(
    sequences: Sequence[Trajectory], lengths: PackLengths, name: str, joined: Tensor, loss_mask: Tensor
) -> None:
    # A finite sum shows that all entries are finite. Otherwise (it may overflow) look at each entry.
    if not joined.is_floating_point() or math.isfinite(joined.sum()):
        return
    odd = ~joined.isfinite()
    carrying = (odd.flatten(1).any(1) if odd.ndim > 1 else odd) & loss_mask
    if carrying.any():
        row = int(carrying.nonzero()[0])
        sequence, token = lengths.owner(row)
        raise ValueError(
            f"sequence {sequences[sequence].sequence_id!r}: {name} has the entry {joined[row].tolist()} at response "
            f"token {token}, which carries loss; drop the sequence, or set its loss_mask to False"
        )


def _stack_rows(sequences: Sequence[Trajectory], name: str) -> Tensor:
    """Return one field of every sequence as (S, num_funcs) float32. Stacking checks that all have one shape."""
    rows = torch.stack(list(map(attrgetter(name), sequences)))
    if rows.ndim != 2 or rows.is_complex() or rows.device.type != "cpu":
        raise TypeError(f"{name} stacked into {rows.ndim} dimensions of {rows.dtype} on {rows.device}")
    finite = rows.isfinite()
    if not finite.all():
        sequence, function = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"sequence {sequences[sequence].sequence_id!r}: entry {function} of {name} is "
            f"{float(rows[sequence, function])}; give finite numbers"
        )
    return rows.to(torch.float32)


def _collect(
    sequences: Sequence[Trajectory], name: str, lengths: list[int], count: Callable[[Tensor], int] = Tensor.numel
) -> list[Tensor]:
    """Return one field of every sequence, after checking its length."""
    tensors = list(map(attrgetter(name), sequences))
    found = list(map(count, tensors))
    if found != lengths:
        where = next(i for i, (length, stated) in enumerate(zip(found, lengths, strict=True)) if length != stated)
        raise ValueError(
            f"sequence {sequences[where].sequence_id!r}: {name} has {found[where]} entries, not {lengths[where]}; "
            "give tensors of the stated length"
        )
    return tensors


def _join(pieces: list[Tensor], out: Tensor) -> Tensor:
    """Join the pieces in ``out``. Reject what torch would allow: other numbers of dimensions, bools as integers."""
    if pieces[0].ndim != out.ndim or pieces[0].device.type != "cpu":
        raise TypeError(f"{pieces[0].ndim}-dimensional tensors on {pieces[0].device}")
    is_integer = not out.is_floating_point() and out.dtype != torch.bool
    if is_integer and torch.bool in set(map(_dtype_of, pieces)):
        raise TypeError("bools are not integers")
    return torch.cat(pieces, out=out)


def token_weights_of(sequences: Sequence[Trajectory]) -> list[float]:
    """Return the weight of each sequence, 1 if it is unscored."""
    if isinstance(sequences[0], ScoredTrajectory):
        return [s.token_weight for s in sequences]  # type: ignore[union-attr]
    return [1.0] * len(sequences)


def _check_column(
    sequences: Sequence[Trajectory], values: list[float], name: str, remedy: str, least: float = -math.inf
) -> Array:
    """Return the values as (S,) float64, after checking that they are finite and at least ``least``."""
    found = np.array(values, dtype=np.float64)
    fits = (found >= least) & (np.abs(found) < np.inf)
    if not fits.all():
        odd = int(fits.argmin())
        raise ValueError(f"sequence {sequences[odd].sequence_id!r} has {name} {values[odd]}; {remedy}")
    return found
