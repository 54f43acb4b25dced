"""Index arithmetic on the lengths and masks of a pack's sequences, on the CPU.

Computed by NumPy, which is faster at repeating (four times) and at masking integers (twice) than torch.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


class PackLengths:
    """Lengths of one pack, as lists and as arrays, padding apart from the sequences."""

    def __init__(self, prompts: list[int], responses: list[int], budget: int | None) -> None:
        self.prompt_list, self.response_list = prompts, responses
        self.prompt, self.response = (np.array(lengths, dtype=np.int64) for lengths in (prompts, responses))
        self.total = self.prompt + self.response
        self.ends = self.total.cumsum()
        self.starts = self.ends - self.total
        self.actual, self.num_responses = int(self.ends[-1]), int(self.response.sum())
        self.packed = self.actual if budget is None else budget
        self.padding = self.packed - self.actual

    def per_token(self, per_sequence: Array) -> Array:
        """Repeat every sequence's value on its response tokens."""
        return np.repeat(per_sequence, self.response)

    def owner(self, response_token: int) -> tuple[int, int]:
        """The sequence that a response token of the pack belongs to, and its place in that response."""
        ends = self.response.cumsum()
        sequence = int(np.searchsorted(ends, response_token, side="right"))
        return sequence, response_token - int(ends[sequence] - self.response[sequence])


def layout(lengths: PackLengths) -> dict[str, Tensor]:
    """Compute the tensors that depend on lengths alone. Padding is a segment too, and belongs to no sequence."""
    segments = np.append(lengths.total, lengths.padding)
    firsts = np.append(lengths.starts, lengths.actual).astype(np.int32)
    positions = np.arange(lengths.packed, dtype=np.int32)
    positions -= np.repeat(firsts, segments)
    owners = np.append(np.arange(lengths.total.size), -1).astype(np.int32)
    # By turns a prompt and its response; last the padding.
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


def masked_targets(tokens: Array, response_mask: Array, loss_mask: Array, ignore_index: int) -> Array:
    """(R,) the response tokens, ``ignore_index`` where the loss mask is False.

    Read off the tokens, which lie together: half the time of joining the responses once more. Masked as
    ``mask * (id - ignore) + ignore`` in place: half the time of any masked fill of integers.
    """
    ids = tokens[response_mask]
    ids -= ignore_index
    ids *= _as_numbers(loss_mask)
    ids += ignore_index
    return ids


def masked_weights(per_sequence: Array, lengths: PackLengths, loss_mask: Array) -> Array:
    """(R,) each sequence's weight on its tokens, 0 where the mask is False."""
    if bool((per_sequence == per_sequence[0]).all()):  # reduction "tokens": nothing as long as the pack to repeat
        return np.multiply(_as_numbers(loss_mask), per_sequence[0], dtype=np.float64)
    weights = lengths.per_token(per_sequence)
    weights *= _as_numbers(loss_mask)
    return weights


def _as_numbers(mask: Array) -> Array:
    """0 and 1: half the time of a product with bools."""
    return mask.view(np.int8)
