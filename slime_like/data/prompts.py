"""PromptSource: an endless, shuffled, resumable stream of prompts from one source or a mixture."""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_like.config import DataConfig
from slime_like.data.encoding import EncodedRow, RowEncoder
from slime_like.data.rows import BadRows, data_files, read_rows
from slime_like.errors import DataError
from slime_like.interfaces.samples import PromptInput
from slime_like.system.disk import file_digest

if TYPE_CHECKING:
    from slime_like.data.row_cache import CachedRows

_DIGEST_DIGITS = 12
"""Hexadecimal digits of a file's SHA-256."""
_LISTED_ROWS = 5000
"""Number of rows from which on they are cached."""
_BATCH_ROWS = 256


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

    def __init__(self, name: str | None, rows: "list[EncodedRow] | CachedRows", seed: list[int] | None) -> None:
        self.name, self.rows, self._seed = name, rows, seed
        self._order = (-1, np.arange(len(rows)))
        self.issued = 0
        self.skipped = 0  # when the data changed, the rest of the epoch

    def prompts(self) -> Iterator[Any]:
        """Yield the token ids of every row, an array of 4-byte integers."""
        return (row.input.token_ids for row in self.rows) if isinstance(self.rows, list) else self.rows.prompts()

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
        cache: directory of encoded rows for later starts, which sources of many rows use; ``None`` for none.

    Attributes:
        notes: sentences for the user.
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
        cache: Path | None = None,
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
        self._sources = list[_Rows]()
        self._files, self._digests = list[Path](), list[str]()
        self._cache = cache
        self.notes: list[str] = []
        for number, part in enumerate(parts):
            rows = self._read(part, tokenizer, need_responses, stop_token_ids, needs)
            order = [seed, number] if self._names else [seed]
            name = self._names[number] if self._names else None
            self._sources.append(_Rows(name, rows, order if config.shuffle else None))
        self._issued = 0
        self._mixture = [[name, share] for name, share in zip(self._names, self._shares, strict=False)]

    @property
    def num_rows(self) -> int:
        return sum(len(source.rows) for source in self._sources)

    def num_shared(self, prompts: Iterable[Prompt]) -> int:
        """Count the distinct ``prompts`` that are also a row."""
        known = {np.asarray(prompt.input.token_ids, np.int32).tobytes() for prompt in prompts}
        return len(known.intersection(ids.tobytes() for source in self._sources for ids in source.prompts()))

    def longest(self, n: int) -> list[Sequence[int]]:
        """Return the token ids of the ``n`` longest prompts, or of all if there are fewer."""
        return heapq.nlargest(n, chain.from_iterable(source.prompts() for source in self._sources), key=len)

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

    def _read(
        self, part: DataConfig, tokenizer: Any, need: bool, stops: Sequence[int], needs: Mapping[str, bool]
    ) -> "list[EncodedRow] | CachedRows":
        """Return a source's usable rows. Many rows come from the cache, after they were encoded into it once."""
        encoder, facts = RowEncoder(tokenizer, part, need, stops, **needs), dict[str, int]()
        files, cached = [file for path in part.train for file in data_files(path)], None
        encoded = self._encode(files, encoder, facts)
        listed = list(islice(encoded, _LISTED_ROWS))
        digests = [file_digest(file) for file in files]
        self._files += files
        self._digests += [digest[:_DIGEST_DIGITS] for digest in digests]
        if self._cache is not None and len(listed) == _LISTED_ROWS:
            from slime_like.data.row_cache import cached_rows, rows_key, write_rows

            if key := rows_key(tokenizer, part, digests, need, sorted(stops), needs):
                cached = cached_rows(self._cache, key, self.notes)
                if cached is None or (cached.facts["longest"] and self._excess(cached.facts["longest"])):
                    encoded = self._encode(files, encoder, facts)  # from the first row on, for it may have changed
                    cached = write_rows(self._cache, key, encoded, lambda: _of_unchanged(files, digests, facts))
                facts = cached.facts
        rows = [*listed, *encoded] if cached is None else cached
        self.dropped_prompts += (dropped := facts["dropped"])
        self.has_tools |= facts["has_tools"] > 0
        if not rows:
            names = ", ".join(str(file) for file in part.train) or "(no file)"
            if not dropped:
                raise DataError("no rows", code="no-rows", who=names, remedy="give a file with rows")
            problem = f"all {dropped} prompts are longer than data.max_prompt_tokens={self._max_tokens}"
            remedy = "raise the limit, or give a file with shorter prompts"
            raise DataError(problem, code="prompts-too-long", who=names, remedy=remedy)
        return rows

    def _encode(self, files: Sequence[Path], encoder: RowEncoder, facts: dict[str, int]) -> Iterator[EncodedRow]:
        """Yield the usable rows, then raise the bad ones. ``facts`` receives figures about those so far."""
        bad = BadRows()
        facts.update(dropped=0, longest=0, has_tools=0)
        for file in files:
            rows = read_rows(file, bad)
            while batch := list(islice(rows, _BATCH_ROWS)):
                for row, encoded in zip(batch, encoder.encode_all(batch), strict=True):
                    with bad.collect():
                        if isinstance(encoded, DataError):
                            raise encoded
                        if len(encoded.input.token_ids) > self._max_tokens:
                            facts["dropped"] += 1
                            continue
                        if encoded.response_tokens is not None:
                            if problem := self._excess(encoded.total_len):
                                raise row.fault("over-token-budget", problem)
                            facts["longest"] = max(facts["longest"], encoded.total_len)
                        facts["has_tools"] |= encoded.has_tools
                        yield encoded
        bad.raise_any()


def _of_unchanged(files: Sequence[Path], digests: Sequence[str], facts: dict[str, int]) -> dict[str, int]:
    for file, digest in zip(files, digests, strict=True):
        if file_digest(file) != digest:
            raise DataError("changed while it was read", code="file-changed", who=str(file), remedy="start again")
    return facts


_IDENTITY = {
    "mixture": "the names and shares of data.mixture",
    "files": "the contents of the files",
    "seed": "the seeds",
    "num_rows": "the numbers of usable rows",
}
"""Parts of the state that must be the same to resume."""


def _listed(value: Any) -> str:
    return str(value) if not isinstance(value, list) else ", ".join(map(str, value)) or "none"
