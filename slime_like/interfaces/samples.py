"""Tokens and other inputs of a prompt, on the way from its row to its pack, and the supports of sampled tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Everything that a model receives for a prompt.

    Attributes:
        token_ids: the prompt's ids.
        fields: further arrays by name, each a ``TensorField`` over "prompt" of ``SampledFields``. The prompt of a later
            turn keeps the fields of the first one, which describe its first tokens.
    """

    token_ids: Sequence[int]
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Supports:
    """The support of each of n tokens, concatenated. Most have a few tokens, the longest hundreds.

    Attributes:
        token_ids: (sum of ``sizes``,) int32.
        sizes: (n,) int32; 0 means the whole vocabulary.
    """

    token_ids: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> Self:
        """Concatenate the ids of one token after another."""
        sizes = np.array([len(part) for part in parts], np.int32)
        return cls(np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32), sizes)

    @classmethod
    def whole(cls, count: int) -> Self:
        """Create supports for ``count`` tokens that nobody sampled, or that were drawn from the whole vocabulary."""
        return cls(np.zeros(0, np.int32), np.zeros(count, np.int32))

    @classmethod
    def concatenate(cls, parts: Sequence["Supports"]) -> Self:
        """Concatenate the supports of several parts."""
        return cls(np.concatenate([part.token_ids for part in parts]), np.concatenate([part.sizes for part in parts]))

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(np.split(self.token_ids, np.cumsum(self.sizes)[:-1]) if len(self) else ())

    def first(self, count: int) -> "Supports":
        """Return the supports of the first ``count`` tokens."""
        return Supports(self.token_ids[: int(self.sizes[:count].sum())], self.sizes[:count])

    def hold(self, token_ids: np.ndarray) -> np.ndarray:
        """Return whether each token is in its support, (n,) bool."""
        owners = np.repeat(np.arange(len(self)), self.sizes)
        found = np.zeros(len(self), bool)
        found[owners[self.token_ids == token_ids[owners]]] = True
        return found | (self.sizes == 0)
