"""All trainer ranks as one object: every call goes to all of them, with a bound, and fails with one sentence."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import ray
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import BucketMetadata, RankCoordinates, RankPlacement, ScoredLogprobs
from slime_like.orchestration.cluster.health import Liveness
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import gather, one
from slime_like.orchestration.trainer.rank import FrozenLogprobs, StreamedStep, TrainerRank
from slime_like.trajectory import GRPOStats, PackedTrajectory

_SEE_FILE_S = 10.0

ReplicaBatch = list[list[PackedTrajectory]]  # [minibatch][micro-batch]

_ON_A_WINDOW = "training on a window"


class TrainerGroup:
    """One Ray actor per rank, ordered by rank.

    Args:
        placement: where they run.
        reference: index of the reference worker that they are, if they are one.
    """

    def __init__(self, config: RunConfig, placement: Placement, reference: int | None = None) -> None:
        self._config = config
        self._placement = placement
        self._reference = reference
        self._ranks: list[Any] = []
        self._coordinates: list[RankCoordinates] = []
        self._loading: list[Any] = []  # answers to load_batch that nobody has waited for
        self._under_way: list[list[Any]] = []  # calls of a streamed step, in order, each rank's answer in one list

    # -------------------------------------------------------------------------------------------------------- start
    def launch(self) -> None:
        """Create the actors; they import in the background until ``setup`` waits for them."""
        actor, runtime_env = ray.remote(TrainerRank), {"env_vars": self._environment()}
        self._ranks = [
            actor.options(**self._options(rank), max_restarts=0, runtime_env=runtime_env).remote(self._config, rank)
            for rank in range(self._config.trainer.parallel.world_size)
        ]

    def setup(self) -> None:
        """Rendezvous, build, load. Bounded by ``trainer.start_timeout_s``.

        Raises:
            TrainerError: a rank died, raised, or was late; ConfigError from a rank passes through as it is.
        """
        self._set_up("setup")

    def setup_for_scoring(self, checkpoint: Path | None = None) -> None:
        """As ``setup``, without gradients and optimizer; weights of ``checkpoint`` (what ``save`` wrote), if given."""
        self._set_up("setup_for_scoring", checkpoint)

    def _set_up(self, method: str, *arguments: Any) -> None:
        timeout = self._config.trainer.start_timeout_s
        host, port = gather(
            [self._ranks[0].address.remote()],
            [self._name(0)],
            phase="starting",
            timeout_s=timeout,
            error=TrainerError,
        )[0]
        if self._placement.num_nodes > 1:
            self._require_shared_run_dir(timeout)
        # Ray shows every actor its own device only, so that each is device 0 of its process.
        placements = [RankPlacement(rank, len(self._ranks), 0, host, port) for rank in range(len(self._ranks))]
        self._coordinates = self._call_each(
            method, [(placement, *arguments) for placement in placements], phase="setting up", timeout_s=timeout
        )

    def _require_shared_run_dir(self, timeout_s: float) -> None:
        """Checkpoints are written by all ranks into one directory: every node must see it."""
        witness = self._config.run_dir / f".seen-{uuid.uuid4().hex}"
        witness.touch()
        try:
            arguments = [(witness, _SEE_FILE_S)] * len(self._ranks)
            answers = self._call_each("sees", arguments, phase="looking for run_dir", timeout_s=timeout_s)
        finally:
            witness.unlink(missing_ok=True)
        blind = sorted({address for seen, address in answers if not seen})
        if blind:
            raise TrainerError(
                f"run_dir={self._config.run_dir} of this node is not seen on {', '.join(blind)}; put it on a file "
                "system that all nodes share"
            )

    def _environment(self) -> dict[str, str]:
        """Variables that torch and Megatron read when they are imported."""
        trainer = self._config.trainer
        cores = len(os.sched_getaffinity(0))
        threads = trainer.cpu_threads or max(1, cores // trainer.parallel.world_size)
        return {"OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def devices(self) -> list[str]:
        """Every rank's device, as ``CUDA_VISIBLE_DEVICES`` names it; empty strings on a CPU."""
        timeout = self._config.trainer.start_timeout_s
        return self._call_each("device", [()] * len(self._ranks), phase="starting", timeout_s=timeout)

    def liveness(self) -> Liveness:
        """Of the ranks, for whoever waits for somebody else."""
        names = [self._name(rank) for rank in range(len(self._ranks))]
        return Liveness(self._ranks, names, "waiting for the engines", TrainerError)

    # ----------------------------------------------------------------------------------------------------- training
    @property
    def data_parallel_size(self) -> int:
        return self._coordinates[0].data_size

    def load_batch(self, replicas: Sequence[ReplicaBatch]) -> None:
        """Hand every data-parallel replica its packs: one object-store copy per replica, shared by its ranks.

        Returns at once; what goes wrong is told by the next call that waits.
        """
        stored = [ray.put(replica) for replica in replicas]
        self._loading = self._start("load_batch", [(stored[place.data],) for place in self._coordinates])

    def score_batch(self, weights: Literal["policy", "reference"]) -> None:
        self._call("score_batch", weights, phase=f"scoring with the {weights} weights")

    def score(
        self,
        replicas: Sequence[list[PackedTrajectory]],
        weights: Literal["policy", "reference"] = "policy",
    ) -> list[list[ScoredLogprobs]]:
        """Logprobs and entropies of packs that are not kept: [replica][pack], as they came in.

        Every replica must be given the same number of packs. The step's loaded batch is left as it is.
        """
        stored = [ray.put(packs) for packs in replicas]
        arguments = [(stored[place.data], weights) for place in self._coordinates]
        answers = self._call_each("score", arguments, phase=f"scoring with the {weights} weights")
        by_replica = {
            place.data: scores for place, scores in zip(self._coordinates, answers, strict=True) if scores is not None
        }
        return [by_replica[replica] for replica in range(len(replicas))]

    def set_advantages(self, advantages: Mapping[str, float]) -> None:
        """Replace the advantages of the loaded batch, by sequence id."""
        self._call("set_advantages", dict(advantages), phase="receiving advantages")

    def train_minibatch(self, index: int, denominator: float) -> GRPOStats:
        answers = self._call("train_minibatch", index, denominator, phase="training")
        return next(stats for stats in answers if stats is not None)

    def begin_stream(self) -> None:
        """Start an optimizer step whose windows follow by ``send_window``; returns at once, as that does."""
        self._under_way = [self._start("begin_stream", [()] * len(self._ranks))]

    def send_window(self, replicas: Sequence[list[PackedTrajectory]], last: bool = False) -> None:
        """Let every rank accumulate its replica's micro-batches after those it was sent before.

        Args:
            replicas: [data-parallel replica][micro-batch], the same count for all.
            last: no window follows in this step.

        Raises:
            TrainerError: a rank has failed in a window before.
        """
        self._raise_failures()
        stored = [ray.put(packs) for packs in replicas]
        self._under_way.append(self._start("train_window", [(stored[place.data], last) for place in self._coordinates]))

    def finish_stream(self, denominator: float) -> StreamedStep:
        """Wait for every window, then update; seconds are means over ranks."""
        finished = self._start("finish_stream", [(denominator,)] * len(self._ranks))
        while self._under_way:  # each with a bound of its own, for it starts when the one before has ended
            self._gather(self._under_way.pop(0), phase=_ON_A_WINDOW)
        steps: list[StreamedStep] = self._gather(finished, phase="updating")
        stats = next(step.stats for step in steps if step.stats is not None)
        return StreamedStep(stats, fmean(step.busy_s for step in steps), fmean(step.reference_s for step in steps))

    def _raise_failures(self) -> None:
        """Of the calls that are under way; forgets those that every rank has answered. Never waits."""
        still_running = []
        for references in self._under_way:
            ended, running = ray.wait(references, num_returns=len(references), timeout=0)
            for reference in ended:
                rank = references.index(reference)
                one(reference, self._name(rank), phase=_ON_A_WINDOW, error=TrainerError)
            if running:
                still_running.append(references)
        self._under_way = still_running

    def response_logprobs(self, sequence_ids: list[str]) -> dict[str, FrozenLogprobs]:
        """Frozen logprobs of the named sequences of the loaded batch, from whichever rank holds them."""
        answers = self._call("response_logprobs", sequence_ids, phase="reporting logprobs")
        return {name: logprobs for answer in answers for name, logprobs in answer.items()}

    def probe(self, sequences: list[list[int]]) -> np.ndarray:
        return self.start_probe(sequences)()

    def start_probe(self, sequences: list[list[int]]) -> Callable[[], np.ndarray]:
        """Returns at once what waits for the answer."""
        references = self._start("probe", [(sequences,)] * len(self._ranks))

        def answer() -> np.ndarray:
            answers = self._gather(references, phase="scoring the weight-sync probe")
            return next(logprobs for logprobs in answers if logprobs is not None)

        return answer

    # ------------------------------------------------------------------------------------------------------ weights
    def open_transport(self, name: str, session: str, delta: bool) -> list[dict[str, Any]]:
        """The rendezvous of every rank that sends."""
        answers = self._call("open_transport", name, session, delta, phase="opening the weight transport")
        return [rendezvous for rendezvous in answers if rendezvous is not None]

    def start_export(self) -> Callable[[], list[BucketMetadata | None]]:
        """Returns at once what waits for the first buckets; ``next_buckets`` gives those after them."""
        everyone = [()] * len(self._ranks)
        begun, first = self._start("begin_export", everyone), self._start("next_bucket", everyone)

        def buckets() -> list[BucketMetadata | None]:
            self._gather(begun, phase="exporting weights")
            return self._gather(first, phase="exporting weights")

        return buckets

    def next_buckets(self) -> list[BucketMetadata | None]:
        """The next bucket of every rank that sends one; all ``None`` when the export is over."""
        return self._call("next_bucket", phase="exporting weights")

    def exported_tensors(self) -> Iterator[dict[str, Tensor]]:
        """The model under Hugging Face's names, in buckets of at most ``sync.bucket_mb``, to this process."""
        self._call("begin_export", phase="exporting weights")
        yield from self._tensors("exporting weights")

    def gradient_tensors(self, index: int, denominator: float) -> Iterator[dict[str, Tensor]]:
        """Gradients of the loaded batch's minibatch ``index``, as ``exported_tensors``; no weight is changed."""
        phase = "computing gradients"
        self._call("begin_gradient_export", index, denominator, phase=phase)
        yield from self._tensors(phase)

    def _tensors(self, phase: str) -> Iterator[dict[str, Tensor]]:
        while buckets := [own for own in self._call("next_tensors", phase=phase) if own is not None]:
            yield from buckets

    # -------------------------------------------------------------------------------------------------- checkpoints
    def save(self, directory: Path) -> None:
        self._call("save", directory, phase="saving a checkpoint")

    def start_save(self, directory: Path) -> None:
        """As ``save``; files may still be written when this returns."""
        self._call("start_save", directory, phase="copying a checkpoint to host memory")

    def is_save_written(self, timeout_s: float | None = None) -> bool:
        """Whether every rank has written its part. Raises CheckpointError where one could not."""
        phase = "writing a checkpoint in the background"
        return all(self._call("is_save_written", phase=phase, timeout_s=timeout_s))

    def finish_save(self, timeout_s: float | None = None) -> None:
        """Wait for every rank's part and make the save whole."""
        self._call("finish_save", phase="finishing a checkpoint", timeout_s=timeout_s)

    def load(self, directory: Path) -> None:
        self._call("load", directory, phase="loading a checkpoint")

    def save_weights(self, directory: Path) -> None:
        """Write the weights alone: what ``load_weights`` and ``setup_for_scoring`` read."""
        self._call("save_weights", directory, phase="saving weights")

    def load_weights(self, directory: Path, weights: Literal["policy", "reference"]) -> None:
        """Read what ``save`` or ``save_weights`` wrote; into the policy only where ranks just score."""
        self._call("load_weights", directory, weights, phase=f"loading the {weights} weights")

    def export_hf(self, directory: Path) -> None:
        self._call("export_hf", directory, phase="writing the Hugging Face model")

    # -------------------------------------------------------------------------------------------------------- turns
    def offload(self, keep_weights: bool = False) -> None:
        self._call("offload", keep_weights, phase="making room for the engines")

    def onload(self) -> None:
        self._call("onload", phase="coming back to the device")

    # ---------------------------------------------------------------------------------------------------------- end
    def peak_memory_bytes(self) -> int:
        return max(self._call("peak_memory_bytes", phase="reporting memory"))

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Leave the process groups and end the actors; an unresponsive one is killed."""
        references = [rank.shutdown.remote() for rank in self._ranks]
        ray.wait(references, num_returns=len(references), timeout=timeout_s)
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    # -------------------------------------------------------------------------------------------------------- calls
    def _call(self, method: str, *arguments: Any, phase: str, timeout_s: float | None = None) -> list[Any]:
        return self._call_each(method, [arguments] * len(self._ranks), phase=phase, timeout_s=timeout_s)

    def _call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, phase: str, timeout_s: float | None = None
    ) -> list[Any]:
        return self._gather(self._start(method, arguments), phase=phase, timeout_s=timeout_s)

    def _start(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """References to every rank's answer; a rank works on its calls in the order in which they were started."""
        return [getattr(rank, method).remote(*own) for rank, own in zip(self._ranks, arguments, strict=True)]

    def _gather(self, references: Sequence[Any], *, phase: str, timeout_s: float | None = None) -> list[Any]:
        loading, self._loading = self._loading, []
        if loading:
            self._gather(loading, phase="receiving a batch")
        names = [self._name(rank) for rank in range(len(references))]
        bound = timeout_s or self._config.trainer.step_timeout_s
        return gather(references, names, phase=phase, timeout_s=bound, error=TrainerError)

    def _name(self, rank: int) -> str:
        owner = "trainer" if self._reference is None else f"reference worker {self._reference}"
        return f"{owner} rank {rank}"

    def _options(self, rank: int) -> dict[str, Any]:
        if self._reference is None:
            return self._placement.trainer_options(rank)
        return self._placement.reference_options(self._reference, rank)
