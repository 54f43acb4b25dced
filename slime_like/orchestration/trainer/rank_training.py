"""Scoring and training on one rank. It holds the step's packs, so they cross the cluster only once."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from slime_like.algorithms.packing.fields import RESPONSE_FIELDS
from slime_like.algorithms.packing.pack import pack_sequences, real_tokens, unpack_response_logprobs
from slime_like.config import RunConfig
from slime_like.interfaces import RankCoordinates, Scores, TrainerBackend
from slime_like.trajectory import PackedTrajectory, UnscoredTrajectory

Minibatch = list[PackedTrajectory]


@dataclass(frozen=True, slots=True)
class StreamedStep:
    """One optimizer step with streamed windows.

    Attributes:
        stats: ``GRPOStats`` of the step; ``None`` on ranks that do not have them.
        busy_s: seconds spent on the step, without waiting for windows.
        scoring_s: seconds of ``busy_s`` spent on scores, by frozen role.
    """

    stats: Any
    busy_s: float
    scoring_s: Mapping[str, float]


class RankTraining:
    """Part of ``TrainerRank``: the packs of the current step, and computations on them.

    Attributes:
        backend, place: set by ``TrainerRank.setup``.
    """

    backend: TrainerBackend
    place: RankCoordinates

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._scoring = config.roles.scoring
        self._minibatches: list[Minibatch] = []
        self._busy_s = 0.0
        self._scoring_s = defaultdict[str, float](float)

    @property
    def packs(self) -> Iterator[PackedTrajectory]:
        """Packs of all minibatches."""
        return (pack for minibatch in self._minibatches for pack in minibatch)

    # ------------------------------------------------------------------------------------------------ a whole batch
    def load_batch(self, minibatches: list[Minibatch]) -> None:
        """Accept this replica's micro-batches of the step, by minibatch."""
        self._minibatches = minibatches
        for pack in self.packs:
            pack.old_logprobs = None  # saved rollouts may still have logprobs of their own step

    def score_batch(self, role: str) -> None:
        """Store the role's scores in the loaded packs, under their fields' names. They are frozen for the step."""
        self._store_scores(list(self.packs), role)

    def set_tokens(self, field: str, given: Mapping[str, ArrayLike]) -> None:
        """Replace a field of all loaded packs: (response_len,), or one value to spread, by sequence id."""
        for pack in self.packs:
            pairs = zip(pack.sequence_ids, pack.response_lens.tolist(), strict=True)
            values = np.concatenate([np.broadcast_to(np.asarray(given[name]), length) for name, length in pairs])
            dtype = RESPONSE_FIELDS[field].dtype
            setattr(pack, field, torch.from_numpy(values).to(dtype).to(pack.response_lens.device))

    def train_minibatch(self, index: int, denominator: float) -> Any:
        """Run one optimizer step on minibatch ``index`` of the loaded batch, and return the ``StepStats``."""
        packs = self._minibatches[index]
        self.backend.begin_step(denominator, real_tokens(packs))
        self.backend.accumulate(packs, last=True)
        return self.backend.finish_step(denominator)

    # ----------------------------------------------------------------------------------------------- streamed windows
    def begin_stream(self) -> None:
        """Start an optimizer step whose windows are not all known yet."""
        started = time.perf_counter()
        self._minibatches = [[]]
        self._scoring_s.clear()
        self.backend.begin_step()
        self._busy_s = time.perf_counter() - started

    def train_window(self, packs: list[PackedTrajectory], last: bool) -> None:
        """Score what the loss needs, then accumulate. The weights are from the start of the step.

        Args:
            last: whether this is the step's last window.
        """
        started = time.perf_counter()
        self._minibatches[0] += packs
        for pack in packs:
            pack.old_logprobs = None  # see load_batch
        for role in self._scoring:
            scoring = time.perf_counter()
            self._store_scores(packs, role.name)
            if not role.trained:
                self._scoring_s[role.name] += time.perf_counter() - scoring
        self.backend.accumulate(packs, last=last)
        self._busy_s += time.perf_counter() - started

    def finish_stream(self, denominator: float) -> StreamedStep:
        """Update with everything that ``train_window`` got since ``begin_stream``."""
        started = time.perf_counter()
        stats = self.backend.finish_step(denominator)
        return StreamedStep(stats, self._busy_s + time.perf_counter() - started, dict(self._scoring_s))

    # -------------------------------------------------------------------------------------------------------- scores
    def score(self, packs: list[PackedTrajectory]) -> list[Scores] | None:
        """Return scores of ``packs`` on the host, from one rank per replica; ``None`` elsewhere."""
        scored = self.backend.score(packs)
        if scored is None or self.place.tensor > 0 or self.place.context > 0:
            return None
        return [{name: values.cpu() for name, values in scores.items()} for scores in scored]

    def stored_scores(self, sequence_ids: Sequence[str], *fields: str) -> dict[str, Scores]:
        """Return these ``fields``, as far as they are set, of the named sequences in packs that have the first one."""
        wanted, found = set(sequence_ids), dict[str, Scores]()
        for pack in self.packs:
            present = {name: values for name in fields if (values := getattr(pack, name)) is not None}
            if fields[0] not in present or wanted.isdisjoint(pack.sequence_ids):
                continue
            columns = [unpack_response_logprobs(pack, values) for values in present.values()]
            for name, *row in zip(pack.sequence_ids, *columns, strict=True):
                if name in wanted:
                    found.setdefault(name, {field: part.cpu() for field, part in zip(present, row, strict=True)})
        return found

    def probe(self, sequences: list[list[int]]) -> np.ndarray | None:
        """Score every token but the first, teacher-forced at temperature 1, with all sequences concatenated."""
        probes = [
            UnscoredTrajectory.unsampled(f"probe-{index}", tokens[:1], tokens[1:], group_id=index)
            for index, tokens in enumerate(map(torch.tensor, sequences))
        ]
        scored = self.backend.score([pack_sequences(probes)])
        return None if scored is None else scored[0]["old_logprobs"].cpu().numpy()

    def _store_scores(self, packs: list[PackedTrajectory], role: str) -> None:
        """Store scores of the packs of the role's source, of which every replica has the same number."""
        source = next((one.source for one in self._scoring if one.name == role), None)
        own = [pack for pack in packs if source in (None, pack.source)]
        scored = self.backend.score(own, role) if own else None
        for pack, scores in () if scored is None else zip(own, scored, strict=True):
            for name, values in scores.items():  # rows of hidden states would fill a device
                setattr(pack, name, values.cpu() if values.ndim > 1 else values)
