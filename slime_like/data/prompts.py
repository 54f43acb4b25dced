"""PromptSource: an endless, shuffled, resumable stream of prompts."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.config import DataConfig
from slime_like.data.encoding import EncodedRow, RowEncoder
from slime_like.data.rows import BadRows, data_files, read_rows
from slime_like.errors import DataError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, encoded.

    Attributes:
        group_id: unique over the run, also across epochs and restarts: how many prompts were issued before this one.
        row: index among the rows that are in use, in file order.
        response_tokens: the demonstration, EOS included; ``None`` where the row has none.
        spans: ``[start, end)`` in ``response_tokens`` of what carries loss; ``None``: all of it.
        environment: the row's settings for an environment, expressible in JSON.
        messages: of the row, where they are kept.
    """

    tokens: tuple[int, ...]
    answer: str
    group_id: int
    epoch: int
    row: int
    response_tokens: tuple[int, ...] | None = None
    environment: dict[str, Any] | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    messages: list[dict[str, Any]] | None = None


class PromptSource:
    """Prompts of all files, epoch after epoch; the order depends on the seed and the epoch's number alone.

    Rows are checked and encoded when the source is made, so that a bad row is found before anything else starts.

    Args:
        files: as of ``config.train``, read in this order, instead of those.
        tokenizer: Hugging Face tokenizer.
        need_responses: every row must have a demonstration (supervised mode).
        stop_token_ids: tokens that may end a turn of a demonstrated conversation; none: the tokenizer's EOS token.
        excess: why a demonstration of so many tokens, prompt included, is rejected; ``None`` if it is not.
        keep_messages: prompts keep their chat messages, for agents.

    Attributes:
        dropped_prompts: rows whose prompt is over ``max_prompt_tokens``; they are left out whole, never cut.

    Raises:
        DataError: no usable row, or a bad one (``file:line: reason``).
        ConfigError: several bad rows, a problem for each.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Any,
        config: DataConfig,
        seed: int,
        need_responses: bool = False,
        stop_token_ids: Sequence[int] = (),
        excess: Callable[[int], str | None] = lambda _: None,
        keep_messages: bool = False,
    ) -> None:
        self._files = tuple(Path(file) for file in files)
        self._max_tokens = config.max_prompt_tokens
        self.dropped_prompts = 0
        self._excess = excess
        self._rows = self._read(RowEncoder(tokenizer, config, need_responses, stop_token_ids, keep_messages))
        self._seed, self._shuffle = seed, config.shuffle
        self._order = (-1, np.arange(self.num_rows))
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
            "seed": self._seed,
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
                    f"the {what} is not that of the checkpoint ({state[key]} then, {here[key]} now), so its position "
                    "means nothing here",
                    code="data-changed",
                    who=names,
                    remedy="restore it, or start a new run",
                )
        self._issued = int(state["issued"])

    def _issue(self) -> Prompt:
        epoch, position = divmod(self._issued, self.num_rows)
        if self._shuffle and epoch != self._order[0]:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self.num_rows))
        index = int(self._order[1][position])
        row = self._rows[index]
        prompt = Prompt(
            tokens=tuple(row.tokens),
            answer=row.answer,
            group_id=self._issued,
            epoch=epoch,
            row=index,
            response_tokens=None if row.response_tokens is None else tuple(row.response_tokens),
            environment=row.environment,
            spans=row.spans,
            messages=None if row.messages is None else json.loads(row.messages),
        )
        self._issued += 1
        return prompt

    def _read(self, encoder: RowEncoder) -> list[EncodedRow]:
        rows, bad = [], BadRows()
        for file in self._files:
            for row in read_rows(file, bad):
                with bad.collect():
                    encoded = encoder.encode(row)
                    if len(encoded.tokens) > self._max_tokens:
                        self.dropped_prompts += 1
                    elif encoded.response_tokens is not None and (problem := self._excess(encoded.total_len)):
                        raise row.fault("over-token-budget", problem)
                    else:
                        rows.append(encoded)
        bad.raise_any()
        if not rows:
            names = ", ".join(str(file) for file in self._files) or "(no file)"
            if not self.dropped_prompts:
                raise DataError("no rows", code="no-rows", who=names, remedy="give a file with rows")
            raise DataError(
                f"no row is left: every prompt, {self.dropped_prompts} in all, is over data.max_prompt_tokens="
                f"{self._max_tokens}",
                code="prompts-too-long",
                who=names,
                remedy="raise the limit, or give a file with shorter ones",
            )
        return rows


def _fingerprint(files: Sequence[Path]) -> str:
    """SHA-256 over the contents of the files, in order; their names do not count."""
    total = hashlib.sha256()
    for file in (part for path in files for part in data_files(path)):
        with file.open("rb") as data:
            total.update(hashlib.file_digest(data, "sha256").digest())
    return total.hexdigest()
