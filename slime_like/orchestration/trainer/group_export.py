"""Export of weights, gradients and probe logprobs from all ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from slime_like.interfaces import BucketMetadata
from slime_like.orchestration.trainer.calls import Mapped, Pending, RankCalls
from slime_like.orchestration.trainer.rank_export import RankExport
from slime_like.orchestration.trainer.rank_training import RankTraining

_PHASE = "exporting weights"


class GroupExport:
    """``RankExport`` of all ranks: the trainers' side of a weight sync.

    Methods that wait raise ``TrainerError`` if a rank died, raised, or was late.
    """

    def __init__(self, calls: RankCalls) -> None:
        self._calls = calls

    # ------------------------------------------------------------------------------------------------- to the engines
    def open_transport(self, name: str, session: str, delta: bool) -> list[dict[str, Any]]:
        """Open the transport, and return the rendezvous of every rank that sends."""
        answers = self._calls.call("opening the weight transport", RankExport.open_transport, name, session, delta)
        return [rendezvous for rendezvous in answers if rendezvous is not None]

    def start_export(self) -> Pending[list[BucketMetadata | None]]:
        """Start over and gather the first buckets. ``next_buckets`` returns the following ones."""
        self._calls.defer(self._calls.start(_PHASE, RankExport.begin_export))
        return self._calls.start(_PHASE, RankExport.next_bucket)

    def next_buckets(self) -> list[BucketMetadata | None]:
        """Return the next bucket of every rank that sends one; all ``None`` when the export is over."""
        return self._calls.call(_PHASE, RankExport.next_bucket)

    def end_export(self) -> None:
        """Record that the engines have all buckets. Returns immediately."""
        self._calls.defer(self._calls.start(_PHASE, RankExport.end_export))

    def start_probe(self, sequences: list[list[int]]) -> Pending[np.ndarray]:
        """Start to score all tokens but the first of every sequence, teacher-forced; see ``RankTraining.probe``."""
        answers = self._calls.start("scoring the weight-sync probe", RankTraining.probe, sequences)
        return Mapped(answers, lambda found: next(logprobs for logprobs in found if logprobs is not None))

    # ------------------------------------------------------------------------------------------------- to the driver
    def exported_tensors(self) -> Iterator[dict[str, Tensor]]:
        """Yield the model under Hugging Face names, in buckets of at most ``sync.bucket_mb``, to this process."""
        self._calls.call(_PHASE, RankExport.begin_export)
        yield from self._tensors(_PHASE)

    def gradient_tensors(self, index: int, denominator: float) -> Iterator[dict[str, Tensor]]:
        """Yield gradients of minibatch ``index`` of the loaded batch, like ``exported_tensors``. Changes no weight."""
        phase = "computing gradients"
        self._calls.call(phase, RankExport.begin_gradient_export, index, denominator)
        yield from self._tensors(phase)

    def _tensors(self, phase: str) -> Iterator[dict[str, Tensor]]:
        while buckets := [found for found in self._calls.call(phase, RankExport.next_tensors) if found is not None]:
            yield from buckets
