"""The Ray actor of one trainer rank, whose methods the driver calls."""

import functools
import inspect
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from slime_like.algorithms.packing.pack import real_tokens
from slime_like.config import RunConfig, TrainerConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import PendingSave, RankCoordinates, RankPlacement, load_backend
from slime_like.orchestration.cluster.node import node_address, require_own_devices, use_cluster_interface, use_log
from slime_like.orchestration.trainer.rank_export import RankExport
from slime_like.system import heartbeat
from slime_like.system.gpus import compute_capability
from slime_like.system.interrupts import polls
from slime_like.system.network import is_free
from slime_like.system.profiler import profile_process
from slime_like.system.spans import Spans, take_spans

_RENDEZVOUS_PORTS = range(21_000, 32_000)
_UNWATCHED = ("address", "device", "sees", "setup", "shutdown")
"""Methods with bounds of their own. The first start on a machine compiles kernels for minutes."""


def _show_phases(kind: type["TrainerRank"]) -> type["TrainerRank"]:
    """Make every method that the driver calls a phase of the rank's heartbeat."""

    def shown(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            with heartbeat.phase(method.__name__):
                return method(*arguments, **options)

        return call

    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in _UNWATCHED:
            setattr(kind, name, shown(method))
    return kind


@_show_phases
class TrainerRank(RankExport):
    """One rank of a model: its start and end, and the state of its backend. Plain Python: Ray makes an actor of it.

    Args:
        role: name of the rank's log.
        shared: device of another actor that this rank uses, too, in ``CUDA_VISIBLE_DEVICES`` format.
    """

    def __init__(self, config: RunConfig, role: str, shared: str = "") -> None:
        use_log(role)
        heartbeat.tick_in_thread()
        if shared:  # Ray assigns no device to this actor; CUDA is not initialized yet
            os.environ["CUDA_VISIBLE_DEVICES"] = shared
        super().__init__(config)
        self._pending: PendingSave

    # -------------------------------------------------------------------------------------------------------- start
    def address(self) -> tuple[str, int]:
        """Return this node's address in the cluster and a free port on it, for the rendezvous of all ranks.

        Raises:
            TrainerError: the configured port is taken.
        """
        host = node_address()
        port = self.config.trainer.rendezvous_port
        if port is not None and not is_free(host, port):
            raise TrainerError(
                f"trainer.rendezvous_port={port} is taken on {host}",
                code="port-taken",
                remedy="set another port, or unset it to have a free one chosen",
            )
        return host, port or _free_port(host)

    def device(self) -> str:
        """Return the GPU that Ray assigned to this rank, in ``CUDA_VISIBLE_DEVICES`` format; "" on a CPU."""
        return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def sees(self, witness: Path, timeout_s: float) -> tuple[bool, str]:
        """Wait up to ``timeout_s`` seconds for ``witness``. Return whether it exists, and this node's address."""
        # Network file systems show new files late.
        return any(witness.exists() for _ in polls(0.1, timeout_s)), node_address()

    def setup(self, placement: RankPlacement, only_scores: bool, checkpoint: Path | None) -> RankCoordinates:
        """Set up for training, or without gradients and optimizer; see ``TrainerBackend.setup_for_scoring``."""
        require_own_devices()
        use_cluster_interface(gloo=True)
        for name, value in cuda_environment(self.config.trainer, compute_capability(self.device() or "0")).items():
            os.environ.setdefault(name, value)  # CUDA reads it on initialization, which comes later
        self.backend = load_backend(self.config.trainer.backend)(self.config, placement)
        self.place = self.backend.setup_for_scoring(checkpoint) if only_scores else self.backend.setup()
        return self.place

    # -------------------------------------------------------------------------------- the backend's state (its methods)
    def save(self, directory: Path) -> None:
        self.backend.save(directory)

    def start_save(self, directory: Path) -> None:
        """Start a save, which ``is_written`` and ``finish_save`` refer to."""
        self._pending = self.backend.start_save(directory)

    def is_written(self) -> bool:
        return self._pending.is_written()

    def finish_save(self) -> None:
        self._pending.finish()

    def load(self, directory: Path) -> None:
        self.backend.load(directory)

    def save_weights(self, directory: Path) -> None:
        self.backend.save_weights(directory)

    def load_weights(self, directory: Path, role: str) -> None:
        self.backend.load_weights(directory, role)

    def export_hf(self, directory: Path) -> None:
        self.backend.export_hf(directory)

    def perturb_adapter(self, size: float | None) -> None:
        self.backend.perturb_adapter(size)

    def offload(self, keep_weights: bool = False) -> None:
        self.backend.offload(keep_weights)

    def onload(self) -> None:
        self.backend.onload()

    def begin_gradient_export(self, index: int, denominator: float) -> None:
        """Make ``next_tensors`` return the gradients of minibatch ``index`` of the loaded batch. Updates nothing."""
        packs = self._minibatches[index]
        self.backend.begin_step(denominator, real_tokens(packs))
        self.backend.accumulate(packs, last=True)
        self._buckets = self.backend.export_gradients(denominator)

    # ---------------------------------------------------------------------------------------------------------- end
    def peak_memory_bytes(self) -> dict[str, int]:
        """Return peak memory so far: "rss", this process's resident memory, and on a GPU "gpu", its tensors there."""
        peak = {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if torch.cuda.is_available():
            peak["gpu"] = torch.cuda.max_memory_allocated()
        return peak

    def take_spans(self) -> Spans:
        return take_spans()

    def profile(self, path: str | None, memory: bool) -> None:
        profile_process(path, memory)

    def shutdown(self) -> None:
        """Close the weight transport and leave the process groups."""
        self.close_transport()
        if hasattr(self, "backend"):  # also after its setup has failed
            self.backend.shutdown()


def cuda_environment(trainer: TrainerConfig, capability: tuple[int, int] | None) -> dict[str, str]:
    """Return variables for a rank's CUDA.

    Megatron launches tensor-parallel messages before the matrix products that hide them, and relies on the device to
    start them in that order. Up to compute capability 9, only a single queue does. Everything else overlaps through
    several queues: FSDP's gathers, a pipeline's messages, copies.
    """
    ordered = trainer.backend == "megatron" and trainer.parallel.tensor > 1
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if ordered and (capability or (0, 0)) < (10, 0) else {}


def _free_port(host: str) -> int:
    """Find a free port below the kernel's own range, so no other process is given it first."""
    for port in random.SystemRandom().sample(_RENDEZVOUS_PORTS, 50):
        if is_free(host, port):
            return port
    raise TrainerError(
        f"no free port among 50 tried between {_RENDEZVOUS_PORTS[0]} and {_RENDEZVOUS_PORTS[-1]} on {host}",
        code="no-free-port",
    )
