"""The cluster that a plan is made for, and what is assumed of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from slime_like.config import RunConfig
from slime_like.config.gpus import GPUS, Gpu

GIB = 2**30

CONTEXT_BYTES = 3 * GIB // 2
"""Memory of a process on a GPU before its first tensor: CUDA's context and cuBLAS workspaces."""

COMMUNICATOR_BYTES = 2 * GIB // 5
"""NCCL's buffers for one group of ranks. Ranks of tensor 2, pipeline 2, data 2, expert 2 are in 16 groups, and with
their context have been seen to take 7 to 10 GB (verl issue 6266)."""

ENGINE_COMMUNICATORS = 2
"""Groups that a rank of an engine of several GPUs is in: all ranks, and its tensor-parallel group."""

GRAPHS_BYTES = GIB
"""CUDA graphs of an engine. Asleep with its context and groups, vLLM's engines of two GPUs have been seen to keep 2.4
to 7.4 GB (NeMo-RL issue 223)."""

PREFILL_BYTES = GIB // 2
"""Activations of an engine's prefill."""

HOST_MEMORY_GB_PER_S = 200.0
"""Of a node, in the update of offloaded optimizer state."""

FRAGMENTATION = 0.05
"""Share of activations and temporaries that the allocator loses."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Assumed shares: of the ceiling of bfloat16 products in a model's products and in flash attention; of the data
    sheet's memory bandwidth in decoding, in small kernels and in the optimizer; of a link's bandwidth in collectives.
    """

    matmul: float = 0.8
    attention: float = 0.63
    memory: float = 0.6
    link: float = 0.8


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs and links; rates are those of one GPU: to other nodes, and to its host's memory (PCIe).

    ``nodes`` is ``None`` for as many as are needed.
    """

    gpu: Gpu
    gpus_per_node: int
    nodes: int | None
    network_gb_per_s: float
    host_gb_per_s: float = 50.0
    efficiency: Efficiency = Efficiency()

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The configuration's ``cluster`` section."""
        cluster, sheet = config.cluster, GPUS[config.cluster.gpu]
        gpu = Gpu(
            cluster.gpu_memory_gib or sheet.memory_gib,
            sheet.tflops,
            sheet.memory_gb_per_s,
            cluster.nvlink_gb_per_s or sheet.nvlink_gb_per_s,
            sheet.measured_tflops,
        )
        return cls(gpu, cluster.gpus_per_node, cluster.nodes, cluster.network_gb_per_s)

    @property
    def memory_bytes(self) -> int:
        """Memory of one GPU."""
        return int(self.gpu.memory_gib * GIB)

    @staticmethod
    def process_bytes(communicators: int) -> int:
        """Memory that a process takes of its GPU beside its tensors, with so many groups of several ranks."""
        return CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES

    def crosses_nodes(self, ranks: Sequence[int]) -> bool:
        """Return whether these trainer ranks, numbered along nodes, lie on several."""
        return len({rank // self.gpus_per_node for rank in ranks}) > 1

    def link_seconds(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Time in which one of ``ranks`` sends ``nbytes`` to the others; the slowest link among them decides."""
        rate = self.network_gb_per_s if self.crosses_nodes(ranks) else self.gpu.nvlink_gb_per_s
        return nbytes / (rate * 1e9 * self.efficiency.link)

    def matmul_seconds(self, flops: float) -> float:
        return flops / (self.gpu.ceiling_tflops * 1e12 * self.efficiency.matmul)

    def attention_seconds(self, flops: float) -> float:
        return flops / (self.gpu.ceiling_tflops * 1e12 * self.efficiency.attention)

    def memory_seconds(self, nbytes: float) -> float:
        """Time in which a GPU reads or writes so many bytes of its memory."""
        return nbytes / (self.gpu.memory_gb_per_s * 1e9 * self.efficiency.memory)

    def host_seconds(self, nbytes: float) -> float:
        """Time in which a GPU moves so many bytes to or from its host."""
        return nbytes / (self.host_gb_per_s * 1e9 * self.efficiency.link)

    def host_update_seconds(self, nbytes: float, ranks: int) -> float:
        """Time in which a node's processors update so many bytes of optimizer state, of each of ``ranks`` ranks."""
        return nbytes * ranks / (HOST_MEMORY_GB_PER_S * 1e9)
