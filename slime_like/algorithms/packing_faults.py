"""What is wrong with a sequence that cannot be packed, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from slime_like.trajectory import ScoredTrajectory, UnscoredTrajectory


def _integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _bools(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool


def _numbers(tensor: Tensor) -> bool:
    return not tensor.is_complex()


# Field: dimensions, what its entries must be, and in words.
_FIELDS: dict[str, tuple[int, Callable[[Tensor], bool], str]] = {
    "prompt_tokens": (1, _integers, "integer token ids"),
    "response_tokens": (1, _integers, "integer token ids"),
    "loss_mask": (1, _bools, "bools"),
    "logprobs": (1, _numbers, "numbers"),
    "old_logprobs": (1, _numbers, "numbers"),
    "ref_logprobs": (1, _numbers, "numbers"),
    "weight_versions": (1, _integers, "integers"),
    "rewards": (1, _numbers, "numbers, one per reward function"),
    "successes": (1, _numbers, "numbers, one per reward function"),
    "advantages": (0, _numbers, "one number"),
}
_MAY_BE_ABSENT = ("logprobs", "old_logprobs", "ref_logprobs", "weight_versions")
_PLAIN = {"prompt_len": Integral, "response_len": Integral, "temperature": Real, "token_weight": Real}


def first_fault(sequences: Sequence[UnscoredTrajectory | ScoredTrajectory]) -> str | None:
    """The first field of the first sequence that is not what its trajectory's documentation says, or ``None``."""
    faults = (fault for sequence in sequences if (fault := _fault(sequence)))
    return next(faults, None)


def negative_id(sequences: Sequence[UnscoredTrajectory | ScoredTrajectory]) -> str | None:
    """The first sequence with a token below 0: an ``ignore_index`` would be scored as 0 without a word."""
    for sequence in sequences:
        for name in ("prompt_tokens", "response_tokens"):
            if (lowest := int(getattr(sequence, name).amin())) < 0:
                return (
                    f"sequence {sequence.sequence_id!r}: {name} has the entry {lowest}, which is no token's id; give "
                    "the ids themselves, and say in loss_mask which of them carry no loss"
                )
    return None


def _fault(sequence: UnscoredTrajectory | ScoredTrajectory) -> str | None:
    where = f"sequence {sequence.sequence_id!r}"
    for name, kind in _PLAIN.items():
        value = getattr(sequence, name, 1)
        if not isinstance(value, kind):
            words = "whole number" if kind is Integral else "number"
            return f"{where}: {name} is {_named(value)}; give a {words}"
    for name, (ndim, fits, words) in _FIELDS.items():
        value = getattr(sequence, name, None)
        if value is None and (name in _MAY_BE_ABSENT or not hasattr(sequence, name)):
            continue
        shape = (
            f"a {ndim}-dimensional tensor of {words}, on the CPU" if ndim else f"a scalar tensor of {words}, on the CPU"
        )
        if not isinstance(value, Tensor):
            return f"{where}: {name} is {_named(value)}; give {shape}"
        if value.ndim != ndim or not fits(value) or value.device.type != "cpu":
            found = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
            return f"{where}: {name} is {found}; give {shape}"
    return None


def _named(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
