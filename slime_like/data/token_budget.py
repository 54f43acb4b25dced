"""Sizes of sequences in a micro-batch, and a check that they fit."""

from collections.abc import Sequence

from slime_like.algorithms.context import padded_length
from slime_like.config import TrainerConfig
from slime_like.errors import DataError
from slime_like.trajectory import Trajectory


class TokenBudget:
    """The ``trainer.target_tokens_per_batch`` limit, and the padding that ``trainer.parallel.context`` adds."""

    def __init__(self, trainer: TrainerConfig) -> None:
        self._context = trainer.parallel.context
        self._tokens = trainer.target_tokens_per_batch

    def padded_lengths(self, sequences: Sequence[Trajectory]) -> list[int]:
        """Return the number of tokens that each sequence takes of a micro-batch.

        Raises ``DataError`` if a sequence does not fit; the message names it.
        """
        for sequence in sequences:
            if excess := self.excess(sequence.total_len):
                raise DataError(f"sequence {sequence.sequence_id} {excess}", code="over-token-budget")
        return [padded_length(sequence.total_len, self._context) for sequence in sequences]

    def excess(self, tokens: int) -> str | None:
        """Return why a sequence of this many tokens does not fit a micro-batch, or ``None`` if it does."""
        padded = padded_length(tokens, self._context)
        if padded <= self._tokens:
            return None
        return (
            f"takes {padded} tokens of a micro-batch (padding for trainer.parallel.context={self._context} included), "
            f"more than trainer.target_tokens_per_batch={self._tokens}; raise that, or keep sequences shorter"
        )
