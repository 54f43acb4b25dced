"""What follows from the lengths and masks of a pack's sequences: index arithmetic on the CPU.

Computed by NumPy, which is faster at repeating (four times) and at masking integers (twice) than torch. Nothing else in
this package needs it, so that only packing does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class PackLengths:
    """Lengths of one pack, as lists and as arrays, padding apart from the sequences."""

    def __init__(self, prompts: list[int], responses: list[int], budget: int | None) -> None:
        self.prompt_list, self.response_list = prompts, responses
        self.prompt, self.response = (np.array(lengths, dtype=np.int64) for lengths in (prompts, responses))
        self.total = self.prompt + self.response
        self.ends = self.total.cumsum()
        self.starts = self.ends - self.total
        self.actual = int(self.ends[-1])
        self.packed = self.actual if budget is None else budget
        self.padding = self.packed - self.actual

    def per_token(self, per_sequence: Tensor) -> Tensor:
        """Every sequence's value on each of its response tokens."""
        return torch.from_numpy(np.repeat(per_sequence.numpy(), self.response))


def layout(lengths: PackLengths) -> dict[str, Tensor]:
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


def _positions(lengths: PackLengths) -> np.ndarray:
    """Every token's own index less that of its segment's first token; padding is a segment too."""
    positions = np.arange(lengths.packed, dtype=np.int32)
    firsts = np.append(lengths.starts, lengths.actual).astype(np.int32)
    positions -= np.repeat(firsts, np.append(lengths.total, lengths.padding))
    return positions


def _sequence_mask(lengths: PackLengths) -> np.ndarray:
    owners = np.append(np.arange(lengths.total.size), -1).astype(np.int32)
    return np.repeat(owners, np.append(lengths.total, lengths.padding))


def _response_mask(lengths: PackLengths) -> np.ndarray:
    """False on a prompt, True on its response, False on the padding."""
    runs = np.append(np.stack([lengths.prompt, lengths.response], axis=1), lengths.padding)
    return np.repeat(np.arange(runs.size) % 2 == 1, runs)


def column(values: list[float], above: float) -> tuple[Tensor, int | None]:
    """(S,) float64, and where the first one stands that is not finite and above a bound."""
    found = np.array(values, dtype=np.float64)
    fits = (found > above) & (found < np.inf)
    return torch.from_numpy(found), None if fits.all() else int(fits.argmin())


def masked_targets(responses: Tensor, loss_mask: Tensor, ignore_index: int) -> Tensor:
    """``mask * (id - ignore) + ignore``, in place: half the time of any masked fill of integers."""
    ids = responses.numpy()
    ids -= ignore_index
    ids *= _as_numbers(loss_mask)
    ids += ignore_index
    return responses


def masked_weights(weights: Tensor, loss_mask: Tensor) -> Tensor:
    """0 where the mask is False, in place."""
    values = weights.numpy()
    values *= _as_numbers(loss_mask)
    return weights


def _as_numbers(mask: Tensor) -> np.ndarray:
    """0 and 1: half the time of a product with bools."""
    return mask.numpy().view(np.int8)
