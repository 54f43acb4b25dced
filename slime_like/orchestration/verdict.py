"""What the probe of a sync says of one engine: asked at once, and heard before anything that the engine samples."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from slime_like.errors import WeightSyncError
from slime_like.weights.probe_gap import ProbeGap


class Verdict:
    """Of one engine and one version. Any thread may ask; all are told the same."""

    def __init__(
        self,
        version: int,
        engine: str,
        served: Callable[[], np.ndarray],
        wanted: Callable[[], np.ndarray],
        compare: Callable[[np.ndarray, np.ndarray], ProbeGap],
    ) -> None:
        """
        Args:
            engine: its name, for the message.
            served: waits for the engine's logprobs (n,), and may raise.
            wanted: the same of the trainer's.
            compare: of the engine's and the trainer's.
        """
        self._version, self._engine = version, engine
        self._served, self._wanted, self._compare = served, wanted, compare
        self._turn = threading.Lock()
        self._gap: ProbeGap | None = None

    def settle(self) -> float:
        """The largest difference of a logprob, as soon as it is known.

        Raises:
            WeightSyncError: the engine does not serve what it was sent.
            EngineError, TrainerError: one of both gave no logprobs.
        """
        with self._turn:
            if self._gap is None:
                self._gap = self._compare(self._served(), self._wanted())
        if not self._gap.is_sound:
            raise WeightSyncError(
                f"weight sync to version {self._version}: {self._engine}'s logprobs differ from the trainer's "
                f"{self._gap}: it does not serve the weights it received; report this, with the engine's version and "
                "log"
            )
        return self._gap.largest
