"""Hardware of the cluster that a plan is made for, and the figures assumed about it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from slime_like.config import ClusterConfig
from slime_like.config.gpus import GPUS, Gpu

GIB = 2**30

CONTEXT_BYTES = 3 * GIB // 2
"""GPU memory of a process before its first tensor: CUDA's context and cuBLAS workspaces."""

COMMUNICATOR_BYTES = 2 * GIB // 5
"""NCCL's buffers for one group of ranks. Ranks of tensor 2, pipeline 2, data 2, expert 2 are in 16 groups. Including
their context, such ranks have been reported to take 7 to 10 GB (verl issue 6266)."""

ENGINE_COMMUNICATORS = 2
"""Groups of a rank in an engine with several GPUs: all ranks, and its tensor-parallel group or its pipeline."""

GRAPHS_BYTES = GIB
"""CUDA graphs of an engine. Sleeping vLLM engines of two GPUs have been reported to keep 2.4 to 7.4 GB, including
context and groups (NeMo-RL issue 223)."""

PREFILL_BYTES = GIB // 2
"""Activations of an engine's prefill."""

HOST_MEMORY_GB_PER_S = 200.0
"""Memory bandwidth of a node while it updates offloaded optimizer state."""

FRAGMENTATION = 0.05
"""Share of activations and temporaries that the allocator loses."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs and links of a cluster, with the assumed share of each peak rate that is reached.

    Attributes:
        nodes: number of nodes; ``None`` for as many as are needed.
        network_gb_per_s, host_gb_per_s: rates of one GPU to other nodes, and to its host's memory (PCIe).
        matmul_efficiency, attention_efficiency: shares of the ceiling of bfloat16 products that a model's products and
            flash attention reach.
        memory_efficiency: share of the data sheet's memory bandwidth in decoding, small kernels and the optimizer.
        link_efficiency: share of a link's bandwidth in collectives.
    """

    gpu: Gpu
    gpus_per_node: int
    nodes: int | None
    network_gb_per_s: float
    host_gb_per_s: float = 50.0
    matmul_efficiency: float = 0.8
    attention_efficiency: float = 0.63
    memory_efficiency: float = 0.6
    link_efficiency: float = 0.8

    @classmethod
    def of(cls, cluster: ClusterConfig) -> Self:
        sheet = GPUS[cluster.gpu]
        memory, nvlink = cluster.gpu_memory_gib or sheet.memory_gib, cluster.nvlink_gb_per_s or sheet.nvlink_gb_per_s
        gpu = replace(sheet, memory_gib=memory, nvlink_gb_per_s=nvlink)
        return cls(gpu, cluster.gpus_per_node, cluster.nodes, cluster.network_gb_per_s)

    @property
    def memory_bytes(self) -> int:
        return int(self.gpu.memory_gib * GIB)

    @staticmethod
    def process_bytes(communicators: int) -> int:
        """Return the GPU memory of a process without its tensors, given its number of groups of several ranks."""
        return CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES

    def crosses_nodes(self, ranks: Sequence[int]) -> bool:
        """Return whether these trainer ranks, which are numbered node by node, are on several nodes."""
        return len({rank // self.gpus_per_node for rank in ranks}) > 1

    def link_seconds(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds in which one of ``ranks`` sends ``nbytes`` to the others over their slowest link."""
        rate = self.network_gb_per_s if self.crosses_nodes(ranks) else self.gpu.nvlink_gb_per_s
        return nbytes / (rate * 1e9 * self.link_efficiency)

    def matmul_seconds(self, flops: float) -> float:
        return flops / (self.gpu.ceiling_tflops * 1e12 * self.matmul_efficiency)

    def attention_seconds(self, flops: float) -> float:
        return flops / (self.gpu.ceiling_tflops * 1e12 * self.attention_efficiency)

    def memory_seconds(self, nbytes: float) -> float:
        """Return the seconds in which a GPU reads or writes ``nbytes`` of its memory."""
        return nbytes / (self.gpu.memory_gb_per_s * 1e9 * self.memory_efficiency)

    def host_seconds(self, nbytes: float) -> float:
        return nbytes / (self.host_gb_per_s * 1e9 * self.link_efficiency)
