"""One model of a run on its trainer ranks: their start, batches, scores, turns on shared devices, and end."""

import os
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import unpack_response_logprobs
from slime_like.config import RunConfig
from slime_like.config.roles import CRITIC, POLICY
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement, Scores
from slime_like.observability.timing import ignore_answers
from slime_like.orchestration.cluster.node import session_directory
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import ActorGroup, Answers
from slime_like.orchestration.trainer.batcher import ExperienceBatcher, TrainingBatch
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.trajectory import ScoredTrajectory, Trajectory

_SEE_FILE_S = _SHUTDOWN_S = 10.0

T = TypeVar("T")


def present(answers: Iterable[T | None]) -> list[T]:
    """Return the answers of the ranks that have one."""
    return [answer for answer in answers if answer is not None]


class ModelRanks(ActorGroup):
    """One model of a run on its trainer ranks: one ``TrainerRank`` actor per rank, ordered by rank.

    Args:
        config: the run's configuration for this model's ranks (``RunConfig.for_critic``, ``RunConfig.for_worker``).
        worker: index of the worker that the ranks are; by default, they are on the policy's devices.
        shares_devices_with: the policy's ranks, if these are the critic's on the same devices.
        pad_token_id: id of padding in batches.

    Attributes:
        role: the model.
        name: name of its ranks in messages, logs and checkpoints: "trainer" for the policy, "critic", or the worker's.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        worker: int | None = None,
        shares_devices_with: "ModelRanks | None" = None,
        pad_token_id: int = 0,
    ) -> None:
        super().__init__(config.trainer.step_timeout_s, TrainerError)
        self.config = config
        self._placement = placement
        self._worker = worker
        self._policy = shares_devices_with
        self._pad_token_id = pad_token_id
        if worker is not None:
            self.role = placement.workers[worker]
        else:
            self.role = config.roles[POLICY if shares_devices_with is None else CRITIC]
        self.name = {POLICY: "trainer", CRITIC: CRITIC}.get(self.role.name, f"{self.role.name} worker {worker}")
        self._replicas: list[int] = []
        self._weights: Path | None = None
        self._guard = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return self.config.trainer.parallel.world_size

    # -------------------------------------------------------------------------------------------------------- start
    def launch(self) -> None:
        """Create the actors. They import in the background until ``setup`` waits for them."""
        devices = [""] * len(self) if self._policy is None else self._policy.devices()
        self.names = [f"{self.name} rank {rank}" for rank in range(len(self))]
        log = self.name if self.role.trained else f"{self.role.name}-{self._worker}"
        self.actors = []
        for rank in range(len(self)):
            cores = len(os.sched_getaffinity(0)) // self._placement.ranks_on_node(rank, self._worker)
            # Torch reads this on import, and Ray would set one. A rank sets it again, based on its node's cores.
            threads = self.config.trainer.cpu_threads or max(1, cores)
            actor = ray.remote(TrainerRank).options(
                **self._placement.rank_options(rank, self._worker, gpus=int(self._policy is None)),
                max_restarts=0,
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
            )
            role = f"{log}-{rank}" if self.role.trained or len(self) > 1 else log
            self.actors.append(actor.remote(self.config, role, devices[rank]))

    def setup(
        self,
        on_waiting: Callable[[Sequence[str]], None] = ignore_answers,
        only_scores: bool = False,
        checkpoint: Path | None = None,
    ) -> None:
        """Rendezvous, build and load, within ``trainer.start_timeout_s``.

        Args:
            on_waiting: called with the ranks that are not ready yet.
            only_scores: whether to set up without gradients and optimizer, as for every model that is not trained.
            checkpoint: weights to score with (from ``save``); by default those of ``model.path``.

        Raises:
            TrainerError: a rank died, raised, or was late. A rank's ConfigError passes through unchanged.
        """
        on_waiting(self.names)
        timeout, size = self.config.trainer.start_timeout_s, len(self)
        host, port = self.start_each("starting", TrainerRank.address, {0: ()}).result(timeout)[0]
        if self._placement.num_nodes > 1:
            self._require_shared_run_dir(timeout)
        key = secrets.token_hex(16)
        # Our own cluster is only this host, and no other user can reach its files.
        on_file = self.config.cluster.address is None and self.config.trainer.rendezvous_port is None
        store = session_directory() / f"ranks-{key}" if on_file else None
        on_node, scores = self._placement.ranks_on_node, only_scores or not self.role.trained
        arguments = {}
        for rank in range(size):
            # Ray shows every actor only its own device, so each is device 0 of its process.
            place = RankPlacement(rank, size, 0, host, port, on_node(rank, self._worker), store, key, self.role.name)
            arguments[rank] = (place, scores, checkpoint)
        coordinates = self.start_each("setting up", TrainerRank.setup, arguments).result(timeout, on_waiting)
        self._replicas = [place.data for place in coordinates]

    def _require_shared_run_dir(self, timeout_s: float) -> None:
        """Require that every node sees the run directory, since all ranks write checkpoints there."""
        witness = self.config.run_dir / f".seen-{uuid.uuid4().hex}"
        witness.touch()
        try:
            answers = self.start("looking for run_dir", TrainerRank.sees, witness, _SEE_FILE_S).result(timeout_s)
        finally:
            witness.unlink(missing_ok=True)
        blind = sorted({address for seen, address in answers if not seen})
        if blind:
            raise TrainerError(
                f"run_dir={self.config.run_dir}: the directory of this node does not exist on {', '.join(blind)}",
                code="run-dir-not-shared",
                remedy="put it on a file system that all nodes share",
            )

    # ------------------------------------------------------------------------------------------------------- devices
    def devices(self) -> list[str]:
        """Return every rank's device in ``CUDA_VISIBLE_DEVICES`` format; empty strings on a CPU."""
        return self.start("starting", TrainerRank.device).result(self.config.trainer.start_timeout_s)

    def offload(self, keep_weights: bool = False) -> None:
        """Free device memory for others."""
        self.call("leaving the devices", TrainerRank.offload, keep_weights)

    def onload(self) -> None:
        """Bring back what ``offload`` moved."""
        self.call("coming back to the devices", TrainerRank.onload)

    @contextmanager
    def on_devices(self, starts: bool = False) -> Iterator[None]:
        """Swap this model in for the policy inside, if they share devices; otherwise change nothing.

        Args:
            starts: whether this model is set up inside, so it isn't offloaded yet.
        """
        if self._policy is not None:
            self._policy.offload()
            if not starts:
                self.onload()
        yield
        if self._policy is not None:
            self.offload()
            self._policy.onload()

    def peak_memory_bytes(self) -> dict[str, int]:
        """Return each kind's peak memory, of the rank that needed most; see ``TrainerRank.peak_memory_bytes``."""
        peaks = self.call("reporting memory", TrainerRank.peak_memory_bytes)
        return {kind: max(peak[kind] for peak in peaks) for kind in peaks[0]}

    # -------------------------------------------------------------------------------------------- batches and scores
    @property
    def num_replicas(self) -> int:
        """Number of data-parallel replicas."""
        return max(self._replicas) + 1

    @cached_property
    def batcher(self) -> ExperienceBatcher:
        """Packs batches for these ranks' layout."""
        config = self.config
        return ExperienceBatcher(config.algorithm, config.trainer, config.model, self.num_replicas, self._pad_token_id)

    def scatter(self, phase: str, method: Callable[..., T], replicas: Sequence[Any], *more: Any) -> Answers[T]:
        """Call each rank with its replica's element of ``replicas``, then ``more``, without waiting.

        Ranks of a replica share one stored copy of the element.
        """
        stored = [ray.put(value) for value in replicas]
        arguments = {rank: (stored[replica], *more) for rank, replica in enumerate(self._replicas)}
        return self.start_each(phase, method, arguments)

    def load_batch(self, rows: Sequence[ScoredTrajectory]) -> TrainingBatch:
        """Pack a step's rows and send every rank its packs, without waiting. See ``ExperienceBatcher.batch``."""
        batch = self.batcher.batch(rows, by_source=bool(self.config.distillation.teachers))
        self.defer(self.scatter("receiving a batch", TrainerRank.load_batch, batch.replicas))
        return batch

    def stored_scores(self, rows: Sequence[Trajectory], *fields: str) -> dict[str, Scores]:
        """Return frozen scores of these rows of the loaded batch by sequence id, from whichever rank holds them."""
        answers = self.call("reporting scores", TrainerRank.stored_scores, [row.sequence_id for row in rows], *fields)
        return {name: scores for answer in answers for name, scores in answer.items()}

    def score(self, sequences: Sequence[Trajectory]) -> list[Scores]:
        """Return this model's scores of every response token, at each sequence's own temperature.

        Args:
            sequences: all scored or all unscored, with different ids. Memory holds a packed copy of them.

        Returns:
            (response_len, ...) float32 each, on the CPU, in the order of ``sequences``.

        Raises:
            DataError: a sequence is over the token budget.
            TrainerError: a rank failed, or a value is not finite; the message names the sequence.
        """
        if not sequences:
            return []
        packs, found = self.batcher.pack_all(sequences), dict[str, Scores]()
        answers = self.scatter("scoring", TrainerRank.score, packs).result()
        for replica, scored in zip(self._replicas, answers, strict=True):
            for pack, scores in () if scored is None else zip(packs[replica], scored, strict=True):
                columns = [unpack_response_logprobs(pack, column) for column in scores.values()]
                for name, *row in () if pack.is_filler else zip(pack.sequence_ids, *columns, strict=True):
                    found[name] = _finite(dict(zip(scores, row, strict=True)), name)
        return [found[sequence.sequence_id] for sequence in sequences]

    def export(
        self, begin: Callable[..., object] = TrainerRank.begin_export, *arguments: Any
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the model under Hugging Face names, in buckets of at most ``sync.bucket_mb``, to this process.

        Args:
            begin: method of ``TrainerRank`` that starts the export of weights or gradients; gets ``arguments``.
        """
        phase = "exporting tensors"
        self.call(phase, begin, *arguments)
        while buckets := present(self.call(phase, TrainerRank.next_tensors)):
            yield from buckets

    # ------------------------------------------------------------------------------------------ a worker's weights, end
    def use(self, weights: Path) -> None:
        """Load these weights of the model's role (from ``save_weights``), unless it has them."""
        if weights != self._weights:
            self.call(f"loading the {self.role.name} weights", TrainerRank.load_weights, weights, self.role.name)
            self._weights = weights

    def restart(self, weights: Path | None) -> None:
        """End what is left of the ranks, and start others with these weights; ``None``: the configured ones."""
        self.shutdown(TrainerRank.shutdown, _SHUTDOWN_S)
        self._weights = weights
        with self._guard:  # a concurrent close finds either all new ranks or none
            if self._closed:
                raise TrainerError("the run has ended", code="run-ended", who=self.name, phase="starting again")
            self.launch()
        self.setup(checkpoint=weights)

    def close(self) -> None:
        """Leave the process groups and end the actors, once. Unresponsive actors are killed. Thread-safe."""
        with self._guard:
            closed, self._closed = self._closed, True
        if not closed:
            self.shutdown(TrainerRank.shutdown, _SHUTDOWN_S)


@contextmanager
def policy_ranks(config: RunConfig) -> Iterator[ModelRanks]:
    """Reserve devices for the policy only, and launch its ranks, without setting them up. Cleans up on exit.

    Needs a running ``Cluster``.
    """
    with Placement(config, with_engines=False) as placement:
        policy = ModelRanks(config, placement)
        try:
            policy.launch()
            yield policy
        finally:
            policy.close()


def _finite(scores: Scores, sequence_id: str) -> Scores:
    if not all(bool(torch.isfinite(values).all()) for values in scores.values()):
        raise TrainerError(
            "a score is not finite; the weights hold NaN or infinity, or overflow in this model.dtype",
            code="not-finite",
            who=f"sequence {sequence_id}",
        )
    return scores
