"""Sequences of token ids: the part of a micro-batch that they take, and rows of them to score.

A row is ``{"id", "prompt_tokens", "response_tokens"}``, optionally with ``"temperature"``.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from slime_like.algorithms.context import padded_length
from slime_like.config import TrainerConfig
from slime_like.data.rows import Row, read_rows
from slime_like.errors import DataError
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tower import placeholder_ids
from slime_like.trajectory import Trajectory, UnscoredTrajectory

TokenRow = tuple[str | int, UnscoredTrajectory]
"""The row's ``id``, and its sequence, named by file and line."""


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


class TokenRows:
    """Rows of one ``.jsonl`` or ``.parquet`` file. They are read again in every pass and never all held in memory.

    Every sequence must fit the checkpoint ``model`` and one of ``trainer``'s micro-batches, and be text. Iteration and
    ``count`` raise ``DataError`` (``file:line: reason``) at the first bad row.
    """

    def __init__(self, path: Path, model: Path, trainer: TrainerConfig) -> None:
        self._path = path
        self._dimensions = ModelDimensions.from_checkpoint(model)
        self._placeholders = placeholder_ids(model)
        self._budget = TokenBudget(trainer)

    def count(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[TokenRow]:
        return map(self._token_row, read_rows(self._path))

    def _token_row(self, row: Row) -> TokenRow:
        name = row.values.get("id")
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise row.fault("bad-id", "'id' is missing or neither text nor an integer", "give one")
        prompt, response = self._tokens(row, "prompt_tokens"), self._tokens(row, "response_tokens")
        length, longest = len(prompt) + len(response), self._dimensions.max_position_embeddings
        if length > longest:
            problem = f"has {length} tokens, more than the model's max_position_embeddings={longest}"
            raise row.fault("too-long", problem, "cut or remove the row")
        if excess := self._budget.excess(length):
            raise row.fault("over-token-budget", excess)
        tokens = (torch.tensor(ids, dtype=torch.int64) for ids in (prompt, response))
        sequence = UnscoredTrajectory.unsampled(
            f"{row.path}:{row.line}", *tokens, group_id=row.line, temperature=_temperature(row)
        )
        return name, sequence

    def _tokens(self, row: Row, key: str) -> list[int]:
        given = row.token_ids(key, row.values.get(key), self._dimensions.vocab_size, "model")
        if not given:
            raise row.fault("empty-tokens", f"{key!r} is empty, so nothing can be scored", "remove the row")
        row.require_text(given, self._placeholders)
        return given


def _temperature(row: Row) -> float:
    value: Any = row.values.get("temperature")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        problem, remedy = f"'temperature'={value!r} must be a number above 0", "give one, or leave it out for 1"
        raise row.fault("bad-temperature", problem, remedy)
    return float(value)
