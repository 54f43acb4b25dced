"""PromptSource: an endless, shuffled, resumable stream of prompts from one source or a mixture."""

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.config import DataConfig
from slime_like.data.encoding import EncodedRow, RowEncoder
from slime_like.data.rows import BadRows, data_files, read_rows
from slime_like.errors import DataError
from slime_like.interfaces.samples import PromptInput

_DIGEST_DIGITS = 12
"""Hexadecimal digits of a file's SHA-256."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One encoded prompt. Attributes that are missing below have the meaning of ``EncodedRow``'s.

    Attributes:
        group_id: number of prompts issued before this one; unique in the run, across epochs and restarts.
        source: name of its source; ``None`` without a mixture.
        epoch, row: epoch of the prompt's source; index among the source's usable rows, in file order.
        messages, whole_row: the row's chat messages, and the row as JSON, if they are kept.
    """

    input: PromptInput
    answer: str
    group_id: int
    epoch: int
    row: int
    response_tokens: tuple[int, ...] | None = None
    environment: dict[str, Any] | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    forks: tuple[int, ...] | None = None
    messages: list[dict[str, Any]] | None = None
    whole_row: str | None = None
    source: str | None = None


class _Rows:
    """Rows of the source ``name``, epoch after epoch, in an order from ``seed`` and its number; ``None``: in file
    order."""

    def __init__(self, name: str | None, rows: Sequence[EncodedRow], seed: list[int] | None) -> None:
        self.name, self.rows, self._seed = name, rows, seed
        self._order = (-1, np.arange(len(rows)))
        self.issued = 0
        self.skipped = 0  # when the data changed, the rest of the epoch

    def next(self) -> tuple[int, int, EncodedRow]:
        epoch, position = divmod(self.issued + self.skipped, len(self.rows))
        if self._seed is not None and epoch != self._order[0]:
            first, *others = self._seed
            self._order = (epoch, np.random.default_rng([first, epoch, *others]).permutation(len(self.rows)))
        self.issued += 1
        index = int(self._order[1][position])
        return epoch, index, self.rows[index]


class PromptSource:
    """Prompts of all files, epoch after epoch. Their order depends only on the seed and the epoch's number.

    In a mixture, the next prompt comes from the source that lacks most of its share. So each source always has its
    share, to within one prompt.

    Rows are checked and encoded on construction, so a bad row is found before anything else starts.

    Args:
        files: files like ``config.train``, read in this order; if empty, the training data of ``config`` is read.
        need_responses, stop_token_ids, needs: arguments of ``RowEncoder``.
        excess: reason to reject a demonstration with this many tokens, prompt included; ``None`` to accept it.
        may_change: whether a state of other data is accepted. Every source then begins a new epoch.

    Attributes:
        dropped_prompts: number of rows whose prompt is over ``max_prompt_tokens``; they are left out whole, never cut.

    Raises ``DataError`` if there is no usable row, or a bad one (``file:line: reason``), and ``ConfigError`` if there
    are several bad rows; one problem for each.
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
        may_change: bool = False,
        **needs: bool,
    ) -> None:
        self._may_change = may_change
        parts = [config.model_copy(update={"train": tuple(files), "mixture": ()})] if files else config.parts
        self.has_tools = False
        self._max_tokens = config.max_prompt_tokens
        self.dropped_prompts = 0
        self._excess = excess
        self._names = [source.name for source in config.mixture] if not files else []
        weights = [source.weight for source in config.mixture] if self._names else [1.0]
        self._shares = [weight / sum(weights) for weight in weights]
        self._seed = seed
        self._sources = []
        for number, part in enumerate(parts):
            rows = self._read(part.train, RowEncoder(tokenizer, part, need_responses, stop_token_ids, **needs))
            order = [seed, number] if self._names else [seed]
            name = self._names[number] if self._names else None
            self._sources.append(_Rows(name, rows, order if config.shuffle else None))
        self._issued = 0
        self._mixture = [[name, share] for name, share in zip(self._names, self._shares, strict=False)]
        self._files = [file for part in parts for path in part.train for file in data_files(path)]
        self._digests = []
        for file in self._files:
            with file.open("rb") as data:
                self._digests.append(hashlib.file_digest(data, "sha256").hexdigest()[:_DIGEST_DIGITS])

    @property
    def num_rows(self) -> int:
        return sum(len(source.rows) for source in self._sources)

    def num_shared(self, prompts: Iterable[Prompt]) -> int:
        """Count the distinct ``prompts`` that are also a row."""
        known = {tuple(prompt.input.token_ids) for prompt in prompts}
        return len(known.intersection(tuple(row.input.token_ids) for source in self._sources for row in source.rows))

    def longest(self, n: int) -> list[Sequence[int]]:
        """Return the token ids of the ``n`` longest prompts, or of all if there are fewer."""
        return heapq.nlargest(n, (row.input.token_ids for source in self._sources for row in source.rows), key=len)

    def next(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts. A batch may continue in the next epoch."""
        return [self._issue() for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the identity of its data, expressible in JSON."""
        return {
            "issued": self._issued,
            "seed": self._seed,
            "num_rows": self.num_rows,
            "files": self._digests,
            "mixture": self._mixture,
            "skipped": [source.skipped for source in self._sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume exactly where ``state_dict`` was taken.

        Raises:
            DataError: the mixture, the files (by content), the seed or the selection of rows differ, and may not.
        """
        here, files = self.state_dict(), zip(self._files, self._digests, state["files"], strict=False)
        changed = [file for file, digest, before in files if digest != before] or self._files
        others = [key for key in _IDENTITY if state[key] != here[key]]
        for key, what in _IDENTITY.items():
            if key in others and (key == "seed" or not self._may_change):
                accept = "" if key == "seed" else "set checkpoint.override: [data], "
                then, now = _listed(state[key]), _listed(here[key])
                raise DataError(
                    f"{what} differ from the checkpoint's ({then} then, {now} now), so its position means nothing here",
                    code="mixture-changed" if key == "mixture" else "data-changed",
                    who=", ".join(map(str, changed)),
                    remedy=f"restore them, {accept}or start a new run (resume: never)",
                )
        self._issued = 0
        for source in self._sources:
            source.issued = 0
        for _ in range(int(state["issued"])):
            self._choose().issued += 1
        earlier = state.get("skipped", [0] * len(self._sources))  # older checkpoints have none
        for source, skipped in zip(self._sources, earlier, strict=not others):
            source.skipped = -source.issued % len(source.rows) if others else skipped

    def _choose(self) -> _Rows:
        self._issued += 1
        pairs = zip(self._shares, self._sources, strict=True)
        lacks = [share * self._issued - source.issued for share, source in pairs]
        return self._sources[lacks.index(max(lacks))]

    def _issue(self) -> Prompt:
        source = self._choose()
        epoch, index, row = source.next()
        given = {field.name: getattr(row, field.name) for field in fields(row) if field.name != "has_tools"}
        given |= {"forks": row.forks or None, "messages": row.messages and json.loads(row.messages)}
        if row.response_tokens is not None:
            given["response_tokens"] = tuple(row.response_tokens)
        return Prompt(group_id=self._issued - 1, epoch=epoch, row=index, source=source.name, **given)

    def _read(self, files: Sequence[Path], encoder: RowEncoder) -> list[EncodedRow]:
        rows, bad, dropped = [], BadRows(), 0
        for file in files:
            for row in read_rows(file, bad):
                with bad.collect():
                    encoded = encoder.encode(row)
                    if len(encoded.input.token_ids) > self._max_tokens:
                        dropped += 1
                    elif encoded.response_tokens is not None and (problem := self._excess(encoded.total_len)):
                        raise row.fault("over-token-budget", problem)
                    else:
                        rows.append(encoded)
                        self.has_tools |= encoded.has_tools
        bad.raise_any()
        self.dropped_prompts += dropped
        if not rows:
            names = ", ".join(str(file) for file in files) or "(no file)"
            if not dropped:
                raise DataError("no rows", code="no-rows", who=names, remedy="give a file with rows")
            problem = f"all {dropped} prompts are longer than data.max_prompt_tokens={self._max_tokens}"
            remedy = "raise the limit, or give a file with shorter prompts"
            raise DataError(problem, code="prompts-too-long", who=names, remedy=remedy)
        return rows


_IDENTITY = {
    "mixture": "the names and shares of data.mixture",
    "files": "the contents of the files",
    "seed": "the seeds",
    "num_rows": "the numbers of usable rows",
}
"""Parts of the state that must be the same to resume."""


def _listed(value: Any) -> str:
    return str(value) if not isinstance(value, list) else ", ".join(map(str, value)) or "none"
