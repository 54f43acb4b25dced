"""Weights from the trainer to every engine: versioned, streamed in buckets, and verified before they are used."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime_like.config import RunConfig
from slime_like.config.dimensions import ModelDimensions
from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import GenerationRequest, SamplingParams, UpdateReceipt
from slime_like.orchestration.placement import Placement
from slime_like.orchestration.rollout_manager import RolloutManager
from slime_like.orchestration.trainer_group import TrainerGroup
from slime_like.orchestration.turns import Turns
from slime_like.weights.transports.registry import resolve_transport

_BF16_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One finished sync.

    Attributes:
        version: what the engines now serve.
        nbytes: bytes sent to each engine.
        num_tensors: tensors sent.
        gather_s: seconds spent waiting for the trainers to gather and write buckets.
        probe_gap: largest engine-to-trainer logprob difference of the probe; ``None`` when not verified.
        restarted: engines that had died and were started anew for it, one sentence each.
    """

    version: int
    nbytes: int
    num_tensors: int
    gather_s: float
    probe_gap: float | None
    restarted: list[str]


class WeightSync:
    """Moves the policy's weights; one object for the run."""

    def __init__(
        self,
        config: RunConfig,
        trainers: TrainerGroup,
        engines: RolloutManager,
        placement: Placement,
        turns: Turns,
        run_name: str,
    ) -> None:
        self._config = config
        self._placement = placement
        self._turns = turns
        self._trainers = trainers
        self._engines = engines
        self._run_name = run_name
        self._probe = probe_sequences(config)

    def connect(self) -> None:
        """Open the transport on both sides.

        Raises:
            WeightSyncError: the transport does not reach from the trainers to the engines.
        """
        name = resolve_transport(self._config.sync.transport)
        if self._placement.num_nodes > 1:
            raise WeightSyncError(
                f"sync.transport={name} reaches one host, but trainers and engines lie on {self._placement.num_nodes}; "
                "use a layout that fits one host"
            )
        rendezvous = self._trainers.open_transport(name, self._run_name)
        self._engines.connect(name, rendezvous[0])  # senders of one session share one rendezvous

    def run(self, version: int) -> SyncReport:
        """Send the current weights as ``version``.

        Raises:
            WeightSyncError: a tensor's bytes arrived changed, or the engine's logprobs are not the trainer's.
        """
        self._turns.begin_sync()
        told: list[str] = []
        while True:
            restarted = self._engines.restart_dead()
            if restarted:
                told += restarted
                self.connect()
            try:
                report = self._send(version, told)
            except EngineError as error:
                if not self._engines.lose_dead(error):
                    raise
                continue  # whoever has half of the weights gets all of them, from the first bucket
            self._engines.admit()
            return report

    def _send(self, version: int, restarted: list[str]) -> SyncReport:
        verify = self._config.sync.verify
        expected = self._trainers.probe(self._probe) if verify else None
        self._engines.begin_update(version)
        sent, nbytes, gather_s = self._stream()
        receipts = self._engines.finish_update(version)
        self._turns.end_sync()
        if expected is None:
            return SyncReport(version, nbytes, len(sent), gather_s, None, restarted)
        for engine, receipt in enumerate(receipts):
            compare_checksums(sent, receipt, engine)
        return SyncReport(version, nbytes, len(sent), gather_s, self._verify_probe(version, expected), restarted)

    def _stream(self) -> tuple[dict[str, int], int, float]:
        """Gather bucket k+1 on the trainers while the engines load bucket k."""
        self._trainers.begin_export()
        sent: dict[str, int] = {}
        nbytes, gather_s = 0, 0.0
        loading: list[Any] = []
        while True:
            started = time.perf_counter()
            buckets = [bucket for bucket in self._trainers.next_buckets() if bucket is not None]
            gather_s += time.perf_counter() - started
            self._engines.wait_update(loading)
            if not buckets:
                return sent, nbytes, gather_s
            for bucket in buckets:
                sent.update({entry.name: entry.checksum for entry in bucket.entries})
                nbytes += bucket.nbytes
            loading = self._engines.start_update(buckets)

    def _verify_probe(self, version: int, expected: np.ndarray) -> float:
        """Teacher-forced logprobs of fixed tokens, engine against trainer: the engine *uses* what arrived."""
        tolerance = self._config.sync.probe_tolerance if self._config.model.dtype == "float32" else _BF16_TOLERANCE
        answers = [self._engines.ask_each(_probe_request(version, i, tokens)) for i, tokens in enumerate(self._probe)]
        worst = 0.0
        for engine in range(self._engines.num_engines):
            got = np.concatenate([_prompt_logprobs(answer[engine], engine) for answer in answers])
            gap = float(np.abs(got - expected).max())
            if not gap <= tolerance:
                raise WeightSyncError(
                    f"weight sync to version {version}: engine {engine}'s logprobs differ from the trainer's by up to "
                    f"{gap:.2e} (bound {tolerance:.0e}): it does not serve the weights it received; report this, with "
                    "the engine's version and log"
                )
            worst = max(worst, gap)
        return worst


def compare_checksums(sent: dict[str, int], receipt: UpdateReceipt, engine: int) -> None:
    """Every tensor sent must have arrived with the bytes it left with.

    Raises:
        WeightSyncError: names the missing, unexpected or changed tensors.
    """
    missing = sorted(sent.keys() - receipt.checksums.keys())
    unexpected = sorted(receipt.checksums.keys() - sent.keys())
    changed = sorted(name for name in sent.keys() & receipt.checksums.keys() if sent[name] != receipt.checksums[name])
    for what, names in (("did not arrive", missing), ("was never sent", unexpected), ("arrived changed", changed)):
        if names:
            raise WeightSyncError(
                f"weight sync to version {receipt.version}, engine {engine}: {names[0]} {what}"
                f" ({len(names)} tensors in all); the engine is stopped rather than served with mixed weights"
            )


def probe_sequences(config: RunConfig) -> list[list[int]]:
    """Fixed pseudo-random token sequences, the same in every run of a model."""
    vocab_size = ModelDimensions.from_checkpoint(config.model.path).vocab_size
    length = min(32, config.max_model_len - 1)
    generator = np.random.default_rng(20_240_607)
    return [generator.integers(0, vocab_size, length).tolist() for _ in range(2)]


def _probe_request(version: int, index: int, tokens: list[int]) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=1, training=False)
    return GenerationRequest(f"probe-{version}-{index}", tokens, sampling, prompt_logprobs=True)


def _prompt_logprobs(generation: object, engine: int) -> np.ndarray:
    logprobs = getattr(generation, "prompt_logprobs", None)
    if logprobs is None:
        raise WeightSyncError(f"engine {engine} returned no prompt logprobs for the probe; its adapter must")
    return np.asarray(logprobs, dtype=np.float64)
