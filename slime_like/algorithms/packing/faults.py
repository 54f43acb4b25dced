"""Checks of sequences before packing, with messages that name the sequence.

Packing checks whole arrays; only where such a check fails is every sequence looked at.
"""

from collections import Counter
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from slime_like.trajectory import ScoredTrajectory, TensorField, Trajectory, UnscoredTrajectory, tensor_fields

_PLAIN = {
    "sequence_id": (str, "text"),
    "rollout_id": (str, "text"),
    "prompt_len": (Integral, "whole number"),
    "response_len": (Integral, "whole number"),
    "temperature": (Real, "number"),
    "token_weight": (Real, "number"),
}
_TOKEN_IDS = ("prompt_tokens", "response_tokens")


# ----------------------------------------------------------------------------------------------------- of the arguments
def checked_list(sequences: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories of any iterable as a list, all of one kind.

    Raises:
        ValueError: one alone, none, something else, or scored ones among unscored ones.
    """
    if isinstance(sequences, UnscoredTrajectory):
        raise ValueError(f"sequence {sequences.sequence_id!r} was given alone; give a list of sequences")
    sequences = list(sequences)
    if not sequences:
        raise ValueError("cannot pack an empty list of sequences; give at least one")
    kinds = set(map(type, sequences))
    if odd := [kind for kind in kinds if not issubclass(kind, UnscoredTrajectory)]:
        raise ValueError(f"a {odd[0].__name__} is not a sequence; give UnscoredTrajectory or ScoredTrajectory objects")
    if len(kinds) > 1:
        raise ValueError("scored and unscored sequences cannot share a pack; pack each kind by itself")
    return sequences


def checked_device(device: torch.device | str) -> torch.device:
    """Return the device of a pack.

    Raises:
        ValueError: no device's name, or a GPU where torch sees none.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {device!r} is not a torch device; give e.g. 'cpu' or 'cuda:0'") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {str(found)!r}: torch sees no GPU on this machine; give 'cpu', or install its CUDA build"
        )
    return found


def check_arguments(budget: int | None, pad_token_id: int, ignore_index: int) -> None:
    """Raises ``ValueError`` for numbers that are not whole, and for an ``ignore_index`` that is a token's id."""
    given = {"target_tokens_per_batch": budget, "pad_token_id": pad_token_id, "ignore_index": ignore_index}
    for name, value in given.items():
        if not isinstance(value, Integral) and not (value is None and name == "target_tokens_per_batch"):
            raise ValueError(f"{name}={value!r} must be an integer")
    if ignore_index >= 0:
        raise ValueError(f"ignore_index={ignore_index} is the id of a token; give a negative one")


# ----------------------------------------------------------------------------------------------------- of the sequences
def check_sizes(
    sequences: Sequence[Trajectory], prompts: list[int], responses: list[int], packed: int, pad_token_id: int
) -> None:
    """Reject empty parts, sizes over the pack's length, and padding that is no token.

    Raises:
        ValueError: the first that is not so.
    """
    for name, parts in (("prompt", prompts), ("response", responses)):
        if min(parts) < 1:
            where = sequences[parts.index(min(parts))].sequence_id
            raise ValueError(f"sequence {where!r} has an empty {name}: nothing could be scored; drop it before packing")
    actual = sum(prompts) + sum(responses)
    if actual > packed:
        _refuse_budget(sequences, actual, packed)
    if actual < packed and pad_token_id < 0:
        raise ValueError(f"pad_token_id={pad_token_id} is not a token id; give one of the vocabulary, e.g. 0")


def _refuse_budget(sequences: Sequence[Trajectory], actual: int, budget: int) -> None:
    for sequence in sequences:
        if sequence.total_len > budget:
            raise ValueError(
                f"sequence {sequence.sequence_id!r} has {sequence.total_len} tokens, over the budget of {budget}; "
                "raise target_tokens_per_batch or limit prompt and response"
            )
    raise ValueError(
        f"{len(sequences)} sequences from {sequences[0].sequence_id!r} on have {actual} tokens together, over the "
        f"budget of {budget}; pack fewer of them (partition_by_tokens chooses)"
    )


def repeated_id(sequence_ids: Sequence[str]) -> str:
    """Message that names the id of several sequences."""
    (twice, count), *_ = Counter(sequence_ids).most_common(1)
    return (
        f"{count} sequences of the pack have the id {twice!r}, so that their values could not be kept apart; "
        "give every sequence an id that is unique over the run"
    )


def negative_id(sequences: Sequence[Trajectory]) -> str | None:
    """The first sequence with a token below 0: an ``ignore_index`` would silently be scored as 0."""
    for sequence in sequences:
        for name in _TOKEN_IDS:
            if (lowest := int(getattr(sequence, name).amin())) < 0:
                return (
                    f"sequence {sequence.sequence_id!r}: {name} has the entry {lowest}, which is not a token id; give "
                    "the ids themselves, and set loss_mask to False where they carry no loss"
                )
    return None


def first_fault(sequences: Sequence[Trajectory]) -> str | None:
    """The first field of the first sequence that does not match its description, or ``None``.

    Then the first that only some sequences have, or have with another number of reward functions.
    """
    faults = (fault for sequence in sequences if (fault := _fault(sequence)))
    return next(faults, None) or _differing(sequences) or _other_functions(sequences)


def _fault(sequence: Trajectory) -> str | None:
    where = f"sequence {sequence.sequence_id!r}"
    for name, (kind, words) in _PLAIN.items():
        if hasattr(sequence, name) and not isinstance(value := getattr(sequence, name), kind):
            return f"{where}: {name} is {_named(value)}; give {'' if kind is str else 'a '}{words}"
    for name, described in tensor_fields(type(sequence)).items():
        value = getattr(sequence, name)
        if value is None and described.optional:
            continue
        form = f"{described.ndim}-dimensional" if described.ndim else "scalar"
        expected = f"a {form} tensor of {_entries(name, described)}, on the CPU"
        if not isinstance(value, Tensor):
            return f"{where}: {name} is {_named(value)}; give {expected}"
        if value.ndim != described.ndim or not _fits(value.dtype, described.dtype) or value.device.type != "cpu":
            found = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
            return f"{where}: {name} is {found}; give {expected}"
    return None


def _entries(name: str, described: TensorField) -> str:
    """Describe a field's values."""
    if described.over == "functions":
        return "numbers, one per reward function"
    if described.over == "sequence":
        return "one number"
    if described.dtype.is_floating_point:
        return "numbers"
    integers = "integer token ids" if name in _TOKEN_IDS else "integers"
    return "bools" if described.dtype == torch.bool else integers


def _fits(dtype: torch.dtype, described: torch.dtype) -> bool:
    """Return whether a type converts to the described one: numbers to floats, integers to integers, bools to bools."""
    if described == torch.bool or dtype == torch.bool:
        return described.is_floating_point or dtype == described
    return not dtype.is_complex if described.is_floating_point else not (dtype.is_floating_point or dtype.is_complex)


def _differing(sequences: Sequence[Trajectory]) -> str | None:
    """The first field that only some sequences have, or whose entries have another shape than in the first sequence."""
    for name, described in tensor_fields(type(sequences[0])).items():
        values = [getattr(s, name) for s in sequences]
        absent = [s.sequence_id for s, value in zip(sequences, values, strict=True) if value is None]
        if absent and len(absent) < len(sequences):
            return f"sequence {absent[0]!r} has no {name} while others of its pack do; all or none may have it"
        shapes = [] if absent else [value.shape[1:] for value in values]
        if described.entry_ndim and (odd := [i for i, shape in enumerate(shapes) if shape != shapes[0]]):
            return (
                f"sequence {sequences[odd[0]].sequence_id!r}: entries of {name} have shape {tuple(shapes[odd[0]])}, "
                f"those of the first of its pack {tuple(shapes[0])}; give one shape"
            )
    return None


def _other_functions(sequences: Sequence[Trajectory]) -> str | None:
    scored = [s for s in sequences if isinstance(s, ScoredTrajectory)]
    for s in scored:
        rewards, successes, first = s.rewards.numel(), s.successes.numel(), scored[0].rewards.numel()
        if rewards != successes or rewards != first:
            return (
                f"sequence {s.sequence_id!r} has {rewards} rewards and {successes} successes, the first of its pack "
                f"has {first} rewards; every sequence needs one of each per reward function"
            )
    return None


def _named(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
