"""Scoring and training on one rank. It holds the step's packs, so they cross the cluster only once."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import pack_sequences, real_tokens, unpack_response_logprobs
from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import RankCoordinates, ScoredLogprobs, TrainerBackend
from slime_like.trajectory import GRPOStats, PackedTrajectory, UnscoredTrajectory

Minibatch = list[PackedTrajectory]
Weights = Literal["policy", "reference"]


@dataclass(frozen=True, slots=True)
class FrozenLogprobs:
    """Logprobs (response_len,) of one sequence, frozen at the step's start. No reference without a KL term."""

    policy: Tensor
    reference: Tensor | None

    @property
    def required_reference(self) -> Tensor:
        if self.reference is None:
            raise TrainerError(
                "the KL penalty needs reference logprobs, and a sequence has none",
                code="no-reference-logprobs",
                remedy="train on rollouts that were saved with them, or set reference.placement: trainer",
            )
        return self.reference


@dataclass(frozen=True, slots=True)
class StreamedStep:
    """One optimizer step with streamed windows.

    Attributes:
        stats: metrics of the step; ``None`` on ranks that do not have them.
        busy_s: seconds spent on the step, without waiting for windows.
        reference_s: seconds of ``busy_s`` spent on reference logprobs.
    """

    stats: GRPOStats | None
    busy_s: float
    reference_s: float


class RankTraining:
    """The packs of the current step on one rank, and computations on them by a backend that is set up."""

    def __init__(self, config: RunConfig, backend: TrainerBackend, place: RankCoordinates) -> None:
        self._config = config
        self._backend = backend
        self._place = place
        self._minibatches: list[Minibatch] = []
        self._busy_s = self._scoring_s = 0.0

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

    def score_batch(self, weights: Weights) -> None:
        """Fill the loaded packs' ``old_logprobs`` (policy) or ``ref_logprobs`` (reference), frozen for the step."""
        self._freeze(list(self.packs), weights)

    def set_advantages(self, advantages: dict[str, float]) -> None:
        """Replace the advantages of all loaded packs. Every sequence of the batch must be named."""
        for pack in self.packs:
            values = torch.tensor([advantages[name] for name in pack.sequence_ids], dtype=torch.float32)
            pack.advantages = values.to(pack.response_lens.device).repeat_interleave(pack.response_lens)

    def train_minibatch(self, index: int, denominator: float) -> GRPOStats | None:
        """Run one optimizer step on minibatch ``index`` of the loaded batch."""
        self.accumulate_minibatch(index, denominator)
        return self._backend.finish_step(denominator)

    def accumulate_minibatch(self, index: int, denominator: float) -> None:
        """Compute the gradients of minibatch ``index`` without an update."""
        packs = self._minibatches[index]
        self._backend.begin_step(denominator, real_tokens(packs))
        self._backend.accumulate(packs, last=True)

    # ----------------------------------------------------------------------------------------------- streamed windows
    def begin_stream(self) -> None:
        """Start an optimizer step whose windows are not all known yet."""
        started = time.perf_counter()
        self._minibatches = [[]]
        self._scoring_s = 0.0
        self._backend.begin_step()
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
        if not self._config.supervised:
            if self._config.algorithm.scores_policy:
                self._freeze(packs, "policy")
            if self._config.reference_in_trainer:
                scoring = time.perf_counter()
                self._freeze(packs, "reference")
                self._scoring_s += time.perf_counter() - scoring
        self._backend.accumulate(packs, last=last)
        self._busy_s += time.perf_counter() - started

    def finish_stream(self, denominator: float) -> StreamedStep:
        """Update with everything that ``train_window`` got since ``begin_stream``."""
        started = time.perf_counter()
        stats = self._backend.finish_step(denominator)
        return StreamedStep(stats, self._busy_s + time.perf_counter() - started, self._scoring_s)

    # -------------------------------------------------------------------------------------------------------- scores
    def score(self, packs: list[PackedTrajectory]) -> list[ScoredLogprobs] | None:
        """Return logprobs and entropies of ``packs`` on the host, from one rank per replica; ``None`` elsewhere."""
        scored = self._backend.score(packs, "policy")
        if scored is None or self._place.tensor > 0 or self._place.context > 0:
            return None
        return [ScoredLogprobs(values.logprobs.cpu(), values.entropy.cpu()) for values in scored]

    def response_logprobs(self, sequence_ids: list[str]) -> dict[str, FrozenLogprobs]:
        """Return policy and reference logprobs of the named sequences that this rank holds and has scored."""
        wanted = set(sequence_ids)
        found: dict[str, FrozenLogprobs] = {}
        for pack in self.packs:
            if pack.old_logprobs is None or wanted.isdisjoint(pack.sequence_ids):
                continue
            policies = unpack_response_logprobs(pack, pack.old_logprobs)
            frozen = pack.ref_logprobs
            references = [None] * len(policies) if frozen is None else unpack_response_logprobs(pack, frozen)
            for name, policy, reference in zip(pack.sequence_ids, policies, references, strict=True):
                if name in wanted:
                    host = None if reference is None else reference.cpu()
                    found.setdefault(name, FrozenLogprobs(policy.cpu(), host))
        return found

    def probe(self, sequences: list[list[int]]) -> np.ndarray | None:
        """Score every token but the first, teacher-forced at temperature 1, with all sequences concatenated."""
        probes = [
            UnscoredTrajectory.unsampled(f"probe-{index}", tokens[:1], tokens[1:], group_id=index)
            for index, tokens in enumerate(map(torch.tensor, sequences))
        ]
        pack = pack_sequences(probes)
        scored = self._backend.score([pack], "policy")
        return None if scored is None else scored[0].logprobs.cpu().numpy()

    def _freeze(self, packs: list[PackedTrajectory], weights: Weights) -> None:
        scored = self._backend.score(packs, weights)
        if scored is None:
            return
        for pack, values in zip(packs, scored, strict=True):
            if weights == "policy":
                pack.old_logprobs = values.logprobs
            else:
                pack.ref_logprobs = values.logprobs
