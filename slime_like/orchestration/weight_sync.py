"""Transfer of weights from the trainer to all engines: versioned, streamed in buckets, and verified before use."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime_like.config import SyncConfig
from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import BucketMetadata, Generation, UpdateReceipt
from slime_like.observability.names import PERFORMANCE, ratio, time_metrics
from slime_like.orchestration.cluster.ray_calls import Answers
from slime_like.orchestration.rollout.engine_instance import EngineInstance
from slime_like.orchestration.rollout.engines import DeviceSwitch, Engines
from slime_like.orchestration.rollout.sync_probe import Probe
from slime_like.orchestration.trainer.model_ranks import ModelRanks, present
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.system.spans import span
from slime_like.system.words import pluralize
from slime_like.weights.transport import is_base_lost
from slime_like.weights.transports.registry import join_buckets, join_rendezvous, use_delta

_PHASE = "exporting weights"
_PERTURBATIONS = (0.1, 0.4, 1.6, 6.4)
"""Sizes of a perturbed adapter. The first one that the probe notices is used, since rounding grows with the size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One finished sync.

    Attributes:
        verification_s: upper bound of verification's share of ``total_s``: hashing on the slowest trainer and on the
            slowest engine, which other work partly hides, plus the engines' part of the probe.
        nbytes, wire_nbytes: bytes of the weights, and bytes sent to each engine.
        changed_fraction: fraction of elements that changed since the last sync; ``None`` if they were not compared.
        gather_s: seconds spent waiting for the trainers to gather and write buckets.
        probe_gap: largest engine-to-trainer logprob difference of the probe; ``None`` if not verified.
        note: note on the probe for the user; empty if there is none.
    """

    total_s: float
    verification_s: float
    nbytes: int
    wire_nbytes: int
    changed_fraction: float | None
    transport: str
    gather_s: float
    probe_gap: float | None
    note: str = ""

    def metrics(self, step_s: float) -> dict[str, float]:
        """Return the sync's metrics, after a step of ``step_s`` seconds."""
        optional = {"changed_fraction": self.changed_fraction, "probe_gap": self.probe_gap}
        return {
            "weights/sync (s)": self.total_s,
            "weights/sync_bytes": float(self.nbytes),
            "weights/wire_bytes": float(self.wire_nbytes),
            "weights/verification (s)": self.verification_s,
            "weights/verification (%)": 100 * ratio(self.verification_s, self.total_s),
            **{f"weights/{name}": value for name, value in optional.items() if value is not None},
            **time_metrics(PERFORMANCE, "weight_gather", self.gather_s, step_s),
        }

    def __str__(self) -> str:
        share = 100 * self.verification_s / self.total_s
        sent = f"{self.nbytes / 1e6:,.1f} MB over {self.transport}"
        if self.changed_fraction is not None:
            sent += f" ({self.wire_nbytes / 1e6:,.1f} MB sent, {100 * self.changed_fraction:.2f} % of elements changed)"
        verified = f"of which verification took at most {share:.0f} %" if self.probe_gap is not None else "not verified"
        return f"weight sync: {sent} in {self.total_s:.2f} s, {verified}"


@dataclass(slots=True)
class _Sent:
    """A sync that is sent, or the part that already is.

    Attributes:
        hash_s: seconds that the slowest trainer hashed.
        receipts: of the engines, in order.
        expected: the ranks' logprobs of the probe; ``None`` until everything is sent, or without a probe.
        answers: of the engines to the probe's requests, by request.
        sent_s, probe_s: seconds until the engines had finished, and until they had answered the probe after that.
    """

    buckets: list[BucketMetadata] = field(default_factory=list)
    gather_s: float = 0.0
    hash_s: float = 0.0
    receipts: list[UpdateReceipt] = field(default_factory=list)
    expected: Answers[np.ndarray | None] | None = None
    answers: list[list[list[Generation]]] = field(default_factory=list)
    sent_s: float = 0.0
    probe_s: float = 0.0


class WeightSync:
    """Sync of the policy's weights, which have ``dtype``; one object per run."""

    def __init__(
        self,
        config: SyncConfig,
        transport: str,
        dtype: str,
        probe: Probe,
        policy: ModelRanks,
        engines: Engines,
        turns: DeviceSwitch,
        run_name: str,
    ) -> None:
        self._verifies = config.verify
        self._turns = turns
        self._policy = policy
        self._engines = engines
        self._run_name = run_name
        self._probe = probe
        self._transport = transport
        self._delta = use_delta(config.delta, transport, dtype)
        self._version = 0
        engines.replace_and_sync = lambda: self.run(self._version)
        self._connected: list[EngineInstance] = []  # those that have joined the transport

    def connect(self) -> None:
        """Open the transport on both sides, even if it is already open. Replaced engines join this way, too."""
        phase, arguments = "opening the weight transport", (self._transport, self._run_name, self._delta)
        rendezvous = self._policy.call(phase, TrainerRank.open_transport, *arguments)
        self._engines.connect(self._transport, join_rendezvous(present(rendezvous)))
        self._connected = list(self._engines.instances)

    def run(self, version: int) -> SyncReport:
        """Send the current weights as ``version``, after replacing dead engines.

        After a failed sync, engines sample nothing until another sync succeeds. That sync sends all weights.

        Raises:
            WeightSyncError: a tensor arrived changed, or an engine's logprobs differ from the trainer's.
        """
        self._version = version
        if self._verifies and self._probe.trial_due:
            self._sync_perturbed(version)
        with span("weight sync/updates", f"version {version}", version=version):
            return self._run(version)

    def _sync_perturbed(self, version: int) -> None:
        """Sync a perturbed adapter, then restore the real one, which the caller syncs next.

        A new adapter (B = 0) changes no logprob, so an engine that ignores adapters would pass its probe. Now such an
        engine serves the same model in both syncs, and fails one of the two probes. Merged weights are not tested like
        this, since it costs a whole transfer.
        """
        probe, phase = self._probe, "perturbing the adapter"
        before = present(self._policy.call(phase, TrainerRank.probe, probe.sequences))[0]
        for size in _PERTURBATIONS:
            self._policy.call(phase, TrainerRank.perturb_adapter, size)
            after = present(self._policy.call(phase, TrainerRank.probe, probe.sequences))[0]
            if probe.notices(after, before):
                break
        else:
            problem = "no perturbed adapter changes the logprobs of the probe by more than its bound"
            raise WeightSyncError(problem, code="trial-unnoticed", remedy="lower sync.probe_tolerance")
        self._run(version)
        self._turns.training(keep_weights=True)
        self._policy.call(phase, TrainerRank.perturb_adapter, None)
        probe.trial_due, probe.baseline = False, None

    def _run(self, version: int) -> SyncReport:
        while True:
            if self._engines.dead:
                self._turns.starting_engines()
                self._engines.replace_dead()
            try:
                self._turns.begin_sync()
                if self._engines.dead:
                    continue
                sent = self._send(version)
            except (EngineError, WeightSyncError) as error:
                # Over a network, an engine's death may first show at the sender or at other engines.
                if not self._engines.find_dead(error):
                    raise
                continue  # an engine that has half of the weights gets all of them, from the first bucket
            report = self._report(version, sent)  # no death excuses a failed check
            self._engines.admit()
            return report

    def _send(self, version: int) -> _Sent:
        started = time.perf_counter()
        try:
            sent = self._transfer(version)
        except WeightSyncError as error:
            if not (self._delta and is_base_lost(error)):
                raise
            sent = self._transfer(version)  # an engine has lost the base of the changes: send everything
        self._turns.end_sync()  # trainers score the probe before they leave the device, since they work in order
        sent.sent_s = time.perf_counter() - started
        if sent.expected is not None:
            phase = "answering the weight-sync probe"
            asked = [self._engines.ask("generate", request, phase=phase) for request in self._probe.requests(version)]
            sent.answers = [answers.result() for answers in asked]
        sent.probe_s = time.perf_counter() - started - sent.sent_s
        return sent

    def _report(self, version: int, sent: _Sent) -> SyncReport:
        """Compare hashes, then logprobs, which prove that engines use what arrived. Return the sync's figures."""
        checking = time.perf_counter()
        gap, note = None, ""
        if sent.expected is not None:
            checksums = {entry.name: entry.checksum for bucket in sent.buckets for entry in bucket.entries}
            for engine, receipt in enumerate(sent.receipts):
                compare_checksums(checksums, receipt, engine)
            by_engine = [[answer[engine][0] for answer in sent.answers] for engine in range(len(sent.receipts))]
            gap, note = self._probe.judge(version, by_engine, present(sent.expected.result())[0])
        probe_s = sent.probe_s + time.perf_counter() - checking
        hash_s = sent.hash_s + max(receipt.hash_s for receipt in sent.receipts)
        nbytes, compared = sum(each.nbytes for each in sent.buckets), sum(each.compared for each in sent.buckets)
        return SyncReport(
            transport=self._transport,
            nbytes=nbytes,
            wire_nbytes=nbytes - sum(each.saved_nbytes for each in sent.buckets),
            changed_fraction=sum(each.changed for each in sent.buckets) / compared if compared else None,
            total_s=sent.sent_s + probe_s,
            gather_s=sent.gather_s,
            verification_s=hash_s + (0.0 if gap is None else probe_s),
            probe_gap=gap,
            note=note,
        )

    def _transfer(self, version: int) -> _Sent:
        if self._connected != self._engines.instances:
            self.connect()
        connected, self._connected = self._connected, []  # until the transfer has succeeded
        manifests = self._policy.start(_PHASE, TrainerRank.begin_export)
        first = self._policy.start(_PHASE, TrainerRank.next_bucket)
        begun = self._engines.ask(
            "begin_update", version, *manifests.references.values(), phase="beginning a weight update"
        )
        manifests.result()  # otherwise, the engines would report a trainer's failure
        sent = self._stream(first, begun, version)
        self._policy.defer(self._policy.start(_PHASE, TrainerRank.end_export))
        self._connected = connected
        return sent

    def _stream(self, gathered: Answers[BucketMetadata | None], asked: Answers[Any], version: int) -> _Sent:
        """Gather bucket k+1 on the trainers while the engines load bucket k.

        Ray starts an engine's call once all engines have answered the one before, without a round trip through this
        process.
        """
        sent = _Sent()
        while True:
            started = time.perf_counter()
            buckets = join_buckets(gathered.result())
            sent.gather_s += time.perf_counter() - started
            if not buckets and self._verifies:
                # Trainers are done while engines still load the last buckets and activate the version.
                phase = "scoring the weight-sync probe"
                sent.expected = self._policy.start(phase, TrainerRank.probe, self._probe.sequences)
            before = asked
            answered = before.references.values()
            if buckets:
                asked = self._engines.ask("update", buckets, *answered, phase="loading weights")
            else:
                asked = self._engines.ask("finish_update", version, *answered, phase="finishing a weight update")
            before.result()
            if not buckets:
                sent.receipts = asked.result()
                return sent
            sent.hash_s += max(bucket.hash_s for bucket in buckets)
            sent.buckets += buckets
            gathered = self._policy.start(_PHASE, TrainerRank.next_bucket)


def compare_checksums(sent: dict[str, int], receipt: UpdateReceipt, engine: int) -> None:
    """Check that every sent tensor arrived unchanged.

    Raises:
        WeightSyncError: names the missing, unexpected or changed tensors.
    """
    missing = sorted(sent.keys() - receipt.checksums.keys())
    unexpected = sorted(receipt.checksums.keys() - sent.keys())
    changed = sorted(name for name in sent.keys() & receipt.checksums.keys() if sent[name] != receipt.checksums[name])
    for what, names in (("did not arrive", missing), ("was never sent", unexpected), ("arrived changed", changed)):
        if names:
            raise WeightSyncError(
                f"{names[0]} {what} ({pluralize(len(names), 'tensor')} in all), so the engine has mixed weights and is "
                "not used",
                code="tensors-differ",
                who=f"weight sync to version {receipt.version}, engine {engine}",
            )
