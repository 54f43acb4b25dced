"""All trainer ranks as one object: their start, calls and end."""

import os
import secrets
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from slime_like.config import RunConfig
from slime_like.config.roles import CRITIC, POLICY
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement
from slime_like.observability.waiting import ignore_answers
from slime_like.orchestration.cluster.node import session_directory
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import Liveness, end_actors, gather
from slime_like.orchestration.trainer.calls import RankCalls
from slime_like.orchestration.trainer.rank import TrainerRank

_SEE_FILE_S = _SHUTDOWN_S = 10.0


class TrainerGroup:
    """One Ray actor per rank, ordered by rank.

    Args:
        worker: index of the worker that the ranks belong to; by default, they are the policy's trainers.
        beside: the policy's trainers, if these ranks are the critic's on the same devices.

    Attributes:
        ranks: calls methods of all ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        worker: int | None = None,
        beside: "TrainerGroup | None" = None,
    ) -> None:
        self._config = config
        self._placement = placement
        self._worker = worker
        self._beside = beside
        self._actors: list[Any] = []
        self._role = POLICY if beside is None else CRITIC
        self._options: Callable[[int], dict[str, Any]] = partial(placement.trainer_options, gpus=int(beside is None))
        if worker is not None:
            self._role, self._options = placement.workers[worker].name, partial(placement.worker_options, worker)
        self._owner = {POLICY: "trainer", CRITIC: CRITIC}.get(self._role, f"{self._role} worker {worker}")
        self.ranks = RankCalls(self._owner, config.trainer.step_timeout_s)

    # -------------------------------------------------------------------------------------------------------- start
    def launch(self) -> None:
        """Create the actors. They import in the background until ``setup`` waits for them."""
        actor = ray.remote(TrainerRank)
        devices = [""] * len(self) if self._beside is None else self._beside.devices()
        self._actors = [
            actor.options(**self._options(rank), max_restarts=0, runtime_env=self._environment(rank)).remote(
                self._config, self._log_name(rank), devices[rank]
            )
            for rank in range(len(self))
        ]
        self.ranks.connect(self._actors)

    def _environment(self, rank: int) -> dict[str, dict[str, str]]:
        """Return variables that torch reads on import. Ray would set one thread.

        A rank sets torch's threads again, based on its node's cores.
        """
        cores = len(os.sched_getaffinity(0)) // self._placement.ranks_on_node(rank, self._worker)
        threads = self._config.trainer.cpu_threads or max(1, cores)
        return {"env_vars": {"OMP_NUM_THREADS": str(threads)}}

    def _log_name(self, rank: int) -> str:
        if self._role in (POLICY, CRITIC):
            return f"{self._owner}-{rank}"
        return f"{self._role}-{self._worker}" + (f"-{rank}" if len(self) > 1 else "")

    def __len__(self) -> int:
        return self._config.trainer.parallel.world_size

    def setup(
        self,
        left: Callable[[Sequence[str]], None] = ignore_answers,
        only_scores: bool = False,
        checkpoint: Path | None = None,
    ) -> None:
        """Rendezvous, build and load, within ``trainer.start_timeout_s``.

        Args:
            left: called with the ranks that are not ready yet.
            only_scores: whether to set up without gradients and optimizer.
            checkpoint: weights to score with (from ``save``); by default those of ``model.path``.

        Raises:
            TrainerError: a rank died, raised, or was late. A rank's ConfigError passes through unchanged.
        """
        left(self.ranks.names)
        timeout, size = self._config.trainer.start_timeout_s, len(self._actors)
        first = self._actors[0].address.remote()
        host, port = gather([first], self.ranks.names[:1], phase="starting", timeout_s=timeout, error=TrainerError)[0]
        if self._placement.num_nodes > 1:
            self._require_shared_run_dir(timeout)
        key = secrets.token_hex(16)
        # Our own cluster is only this host, and no other user can reach its files.
        on_file = self._config.cluster.address is None and self._config.trainer.rendezvous_port is None
        store = session_directory() / f"ranks-{key}" if on_file else None
        on_node = self._placement.ranks_on_node
        # Ray shows every actor only its own device, so each is device 0 of its process.
        placements = [
            RankPlacement(rank, size, 0, host, port, on_node(rank, self._worker), store, key, self._role)
            for rank in range(size)
        ]
        arguments = [(placement, only_scores, checkpoint) for placement in placements]
        answers = self.ranks.start_each("setting up", TrainerRank.setup, dict(enumerate(arguments)))
        self.ranks.place(answers.result(timeout, left))

    def _require_shared_run_dir(self, timeout_s: float) -> None:
        """Require that every node sees the run directory, since all ranks write checkpoints there."""
        witness = self._config.run_dir / f".seen-{uuid.uuid4().hex}"
        witness.touch()
        try:
            answers = self.ranks.start("looking for run_dir", TrainerRank.sees, witness, _SEE_FILE_S).result(timeout_s)
        finally:
            witness.unlink(missing_ok=True)
        blind = sorted({address for seen, address in answers if not seen})
        if blind:
            raise TrainerError(
                f"run_dir={self._config.run_dir}: the directory of this node does not exist on {', '.join(blind)}",
                code="run-dir-not-shared",
                remedy="put it on a file system that all nodes share",
            )

    def devices(self) -> list[str]:
        """Return every rank's device in ``CUDA_VISIBLE_DEVICES`` format; empty strings on a CPU."""
        return self.ranks.start("starting", TrainerRank.device).result(self._config.trainer.start_timeout_s)

    def liveness(self) -> Liveness:
        """Return a liveness check of the ranks, for use while waiting for the engines."""
        return Liveness(self._actors, self.ranks.names, "waiting for the engines", TrainerError)

    # ------------------------------------------------------------------------------------------------------- devices
    def offload(self, keep_weights: bool = False) -> None:
        """Free device memory for the engines."""
        self.ranks.call("making room for the engines", TrainerRank.offload, keep_weights)

    def onload(self) -> None:
        """Bring back what ``offload`` moved."""
        self.ranks.call("coming back to the device", TrainerRank.onload)

    # ---------------------------------------------------------------------------------------------------------- end
    def peak_memory_bytes(self) -> dict[str, int]:
        """Return each kind's peak memory, of the rank that needed most; see ``TrainerRank.peak_memory_bytes``."""
        peaks = self.ranks.call("reporting memory", TrainerRank.peak_memory_bytes)
        return {kind: max(peak[kind] for peak in peaks) for kind in peaks[0]}

    def shutdown(self) -> None:
        """Leave the process groups and end the actors. Unresponsive actors are killed."""
        end_actors(self._actors, [actor.shutdown.remote() for actor in self._actors], _SHUTDOWN_S)
        self._actors = []
        self.ranks.connect([])
