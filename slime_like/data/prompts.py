"""PromptSource: an endless, shuffled, resumable stream of prompts, of one source or of a mixture."""

import hashlib
import heapq
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.config import DataConfig
from slime_like.data.encoding import EncodedRow, RowEncoder
from slime_like.data.rows import BadRows, data_files, read_rows
from slime_like.errors import DataError

_SHOWN_DIGITS = 12
"""Of a content's checksum."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, encoded.

    Attributes:
        group_id: unique over the run, also across epochs and restarts: how many prompts were issued before this one.
        epoch, row: of its source; ``row`` is the index among the rows that are in use, in file order.
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


class _Rows:
    """Rows of one source, epoch after epoch.

    Args:
        seed: with the epoch's number, of the epoch's order; ``None`` keeps the order of the files.
    """

    def __init__(self, rows: Sequence[EncodedRow], seed: list[int] | None) -> None:
        self._rows, self._seed = rows, seed
        self._order = (-1, np.arange(len(rows)))
        self.issued = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[EncodedRow]:
        return iter(self._rows)

    def next(self) -> tuple[int, int, EncodedRow]:
        """Epoch, index and row."""
        epoch, position = divmod(self.issued, len(self._rows))
        if self._seed is not None and epoch != self._order[0]:
            first, *others = self._seed
            self._order = (epoch, np.random.default_rng([first, epoch, *others]).permutation(len(self._rows)))
        self.issued += 1
        index = int(self._order[1][position])
        return epoch, index, self._rows[index]


class PromptSource:
    """Prompts of all files, epoch after epoch; the order depends on the seed and the epoch's number alone.

    Of a mixture, the next prompt is of the source that has had least of its share so far: after any number of prompts
    each has had its share, to a prompt.

    Rows are checked and encoded when the source is made, so that a bad row is found before anything else starts.

    Args:
        files: as of ``config.train``, read in this order, instead of what ``config`` names; none: its training data.
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
        parts = [config.model_copy(update={"train": tuple(files), "mixture": ()})] if files else config.parts
        self._files = tuple(file for part in parts for file in part.train)
        self._max_tokens = config.max_prompt_tokens
        self.dropped_prompts = 0
        self._excess = excess
        self._names = [source.name for source in config.mixture] if not files else []
        weights = [source.weight for source in config.mixture] if self._names else [1.0]
        self._shares = [weight / sum(weights) for weight in weights]
        self._seed = seed
        self._sources = []
        for number, part in enumerate(parts):
            rows = self._read(part.train, RowEncoder(tokenizer, part, need_responses, stop_token_ids, keep_messages))
            order = [seed, number] if self._names else [seed]
            self._sources.append(_Rows(rows, order if config.shuffle else None))
        self._issued = array("H")  # of which source, by group id
        self._mixture = [[name, share] for name, share in zip(self._names, self._shares, strict=False)]
        self._digests = [(file, _digest(file)) for path in self._files for file in data_files(path)]
        mixture = [self._names, self._shares] if self._names else []
        self._fingerprint = _fingerprint([digest for _, digest in self._digests], mixture)

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return sum(map(len, self._sources))

    def num_shared(self, prompts: Iterable[Prompt]) -> int:
        """How many of ``prompts`` are those of a row."""
        known = {prompt.tokens for prompt in prompts}
        rows = {tokens for source in self._sources for row in source if (tokens := tuple(row.tokens)) in known}
        return len(rows)

    def longest(self, n: int) -> list[Sequence[int]]:
        """Return the token ids of the ``n`` longest prompts, or of all if there are fewer."""
        return heapq.nlargest(n, (row.tokens for source in self._sources for row in source), key=len)

    def source_of(self, group_id: int) -> str | None:
        """Name of the source of a prompt that was issued; ``None`` without a mixture."""
        return self._names[self._issued[group_id]] if self._names else None

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; a batch may continue in the next epoch."""
        return [self._issue() for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """The position, and the identity of the data that it belongs to; expressible in JSON."""
        return {
            "issued": len(self._issued),
            "seed": self._seed,
            "num_rows": self.num_rows,
            "fingerprint": self._fingerprint,
            "files": [digest.hex()[:_SHOWN_DIGITS] for _, digest in self._digests],
            "mixture": self._mixture,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume exactly where ``state_dict`` was taken.

        Raises:
            DataError: other files (by content), another seed or another selection of rows than then.
        """
        here = self.state_dict()
        names = ", ".join(self._changed(state.get("files", [])))
        if (before := state.get("mixture", self._mixture)) != self._mixture:
            raise DataError(
                f"the names and shares of data.mixture are not those of the checkpoint ({_listed(before)} then, "
                f"{_listed(self._mixture)} now), so its position means nothing here",
                code="mixture-changed",
                who=names,
                remedy="restore them, or start a new run (resume: never)",
            )
        for key, what in (("fingerprint", "content"), ("seed", "seed"), ("num_rows", "number of usable rows")):
            if state[key] != here[key]:
                raise DataError(
                    f"the {what} is not that of the checkpoint ({_short(state[key])} then, {_short(here[key])} now), "
                    "so its position means nothing here",
                    code="data-changed",
                    who=names,
                    remedy="restore it, or start a new run (resume: never)",
                )
        self._issued = array("H")
        for source in self._sources:
            source.issued = 0
        for _ in range(int(state["issued"])):
            self._choose().issued += 1

    def _changed(self, digests: Sequence[str]) -> list[str]:
        """Files whose content is not that of the checkpoint, where it says; else all."""
        pairs = zip(self._digests, digests, strict=False)
        changed = [str(file) for (file, digest), before in pairs if digest.hex()[:_SHOWN_DIGITS] != before]
        return changed if changed and len(digests) == len(self._digests) else [str(file) for file in self._files]

    def _choose(self) -> _Rows:
        """The source of the next prompt."""
        total = len(self._issued) + 1
        lacks = [share * total - source.issued for share, source in zip(self._shares, self._sources, strict=True)]
        chosen = lacks.index(max(lacks))
        self._issued.append(chosen)
        return self._sources[chosen]

    def _issue(self) -> Prompt:
        epoch, index, row = self._choose().next()
        return Prompt(
            tokens=tuple(row.tokens),
            answer=row.answer,
            group_id=len(self._issued) - 1,
            epoch=epoch,
            row=index,
            response_tokens=None if row.response_tokens is None else tuple(row.response_tokens),
            environment=row.environment,
            spans=row.spans,
            messages=None if row.messages is None else json.loads(row.messages),
        )

    def _read(self, files: Sequence[Path], encoder: RowEncoder) -> list[EncodedRow]:
        rows, bad, dropped = [], BadRows(), 0
        for file in files:
            for row in read_rows(file, bad):
                with bad.collect():
                    encoded = encoder.encode(row)
                    if len(encoded.tokens) > self._max_tokens:
                        dropped += 1
                    elif encoded.response_tokens is not None and (problem := self._excess(encoded.total_len)):
                        raise row.fault("over-token-budget", problem)
                    else:
                        rows.append(encoded)
        bad.raise_any()
        self.dropped_prompts += dropped
        if not rows:
            names = ", ".join(str(file) for file in files) or "(no file)"
            if not dropped:
                raise DataError("no rows", code="no-rows", who=names, remedy="give a file with rows")
            raise DataError(
                f"no row is left: every prompt, {dropped} in all, is over data.max_prompt_tokens={self._max_tokens}",
                code="prompts-too-long",
                who=names,
                remedy="raise the limit, or give a file with shorter ones",
            )
        return rows


def _listed(mixture: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{name} {share:.3g}" for name, share in mixture) or "none"


def _short(value: Any) -> Any:
    return value[:_SHOWN_DIGITS] if isinstance(value, str) else value


def _digest(file: Path) -> bytes:
    """SHA-256 of the content."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").digest()


def _fingerprint(digests: Iterable[bytes], mixture: list[Any]) -> str:
    """SHA-256 over the contents of the files, in order, and over names and shares of a mixture; names of files do not
    count."""
    total = hashlib.sha256(json.dumps(mixture).encode() if mixture else b"")
    for digest in digests:
        total.update(digest)
    return total.hexdigest()
