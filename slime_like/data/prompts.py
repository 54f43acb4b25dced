"""PromptSource: an endless, shuffled, resumable stream of prompts."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.config import DataConfig
from slime_like.data.encoding import EncodedRow, RowEncoder
from slime_like.data.rows import read_rows
from slime_like.data.tokenizer import load_tokenizer as load_tokenizer
from slime_like.errors import DataError

_HASH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, encoded.

    Attributes:
        tokens: prompt token ids, at least one.
        answer: ground truth.
        group_id: unique over the run, also across epochs and restarts: how many prompts were issued before this one.
        epoch: from 0.
        row: index among the rows that are in use, in file order.
        response_tokens: the demonstration, EOS included; ``None`` where the row has none.
        environment: the row's settings for an environment, expressible in JSON; ``None`` where it has none.
    """

    tokens: tuple[int, ...]
    answer: str
    group_id: int
    epoch: int
    row: int
    response_tokens: tuple[int, ...] | None = None
    environment: dict[str, Any] | None = None


class PromptSource:
    """Prompts of all files, epoch after epoch; the order depends on the seed and the epoch's number alone.

    Rows are checked and encoded when the source is made, so that a bad row is found before anything else starts.

    Args:
        files: ``.jsonl`` and ``.parquet`` files, read in this order.
        tokenizer: Hugging Face tokenizer.
        config: keys, template, length limit, shuffling; ``config.train`` is ignored, ``files`` is used instead.
        seed: seed of the order.
        need_responses: every row must have a demonstration (supervised mode).

    Attributes:
        dropped_prompts: rows whose prompt is over ``max_prompt_tokens``; they are left out whole, never cut.

    Raises:
        DataError: no usable row, or a bad one (``file:line: reason``).
    """

    def __init__(
        self, files: Sequence[Path], tokenizer: Any, config: DataConfig, seed: int, need_responses: bool = False
    ) -> None:
        self._files = tuple(Path(file) for file in files)
        self._max_tokens = config.max_prompt_tokens
        self.dropped_prompts = 0
        self._rows = _Rows()
        self._read(RowEncoder(tokenizer, config, need_responses))
        self._order = _Order(self.num_rows, seed, config.shuffle)
        self._issued = 0
        self._fingerprint = _fingerprint(self._files)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._issued // self.num_rows

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; a batch may continue in the next epoch."""
        return [self._issue() for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """The position, and the identity of the data that it belongs to; expressible in JSON."""
        return {
            "issued": self._issued,
            "seed": self._order.seed,
            "num_rows": self.num_rows,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume exactly where ``state_dict`` was taken.

        Raises:
            DataError: other files (by content), another seed or another selection of rows than then.
        """
        here = self.state_dict()
        names = ", ".join(str(file) for file in self._files)
        for key, what in (("fingerprint", "content"), ("seed", "seed"), ("num_rows", "number of usable rows")):
            if state[key] != here[key]:
                raise DataError(
                    f"{names}: the {what} is not that of the checkpoint ({state[key]} then, {here[key]} now), so its "
                    "position means nothing here; restore it, or start a new run"
                )
        self._issued = int(state["issued"])

    def _issue(self) -> Prompt:
        epoch, position = divmod(self._issued, self.num_rows)
        prompt = self._rows.prompt(self._order.row(epoch, position), group_id=self._issued, epoch=epoch)
        self._issued += 1
        return prompt

    def _read(self, encoder: RowEncoder) -> None:
        for file in self._files:
            for row in read_rows(file):
                encoded = encoder.encode(row)
                if len(encoded.tokens) > self._max_tokens:
                    self.dropped_prompts += 1
                else:
                    self._rows.append(encoded)
        if len(self._rows) == 0:
            names = ", ".join(str(file) for file in self._files) or "(no file)"
            if not self.dropped_prompts:
                raise DataError(f"{names}: no rows; give a file with rows")
            raise DataError(
                f"{names}: no row is left: every prompt, {self.dropped_prompts} in all, is over data.max_prompt_tokens="
                f"{self._max_tokens}; raise the limit, or give a file with shorter ones"
            )


class _Order:
    """The row at every position of every epoch; shuffled by the seed and the epoch's number."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        self.seed = seed
        self._num_rows = num_rows
        self._shuffle = shuffle
        self._epoch = -1
        self._rows = np.empty(0, dtype=np.int64)

    def row(self, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        if epoch != self._epoch:
            self._rows = np.random.default_rng([self.seed, epoch]).permutation(self._num_rows)
            self._epoch = epoch
        return int(self._rows[position])


class _Rows:
    """The rows in use, encoded."""

    def __init__(self) -> None:
        self._prompts, self._responses = _Ragged(), _Ragged()
        self._answers: list[str] = []
        self._has_response: list[bool] = []
        self._environments: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def append(self, encoded: EncodedRow) -> None:
        if encoded.environment is not None:
            self._environments[len(self._answers)] = encoded.environment
        self._prompts.append(encoded.tokens)
        self._responses.append(encoded.response_tokens or ())
        self._has_response.append(encoded.response_tokens is not None)
        self._answers.append(encoded.answer)

    def prompt(self, row: int, group_id: int, epoch: int) -> Prompt:
        return Prompt(
            tokens=self._prompts[row],
            answer=self._answers[row],
            group_id=group_id,
            epoch=epoch,
            row=row,
            response_tokens=self._responses[row] if self._has_response[row] else None,
            environment=self._environments.get(row),
        )


class _Ragged:
    """Many short id lists in one compact buffer: a million prompts as Python integers would fill the memory."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._ends = array("q", [0])

    def append(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)
        self._ends.append(len(self._ids))

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self._ids[self._ends[index] : self._ends[index + 1]])


def _fingerprint(files: Sequence[Path]) -> str:
    """SHA-256 over the contents of the files, in order; their names do not count."""
    total = hashlib.sha256()
    for file in files:
        content = hashlib.sha256()
        with file.open("rb") as data:
            while block := data.read(_HASH_BYTES):
                content.update(block)
        total.update(content.digest())
    return total.hexdigest()
