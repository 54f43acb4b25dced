"""The cluster that a plan is made for, and what is assumed of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from slime_like.config import RunConfig
from slime_like.config.gpus import GPUS, Gpu

GIB = 2**30

TRAINER_RESERVE_BYTES = 2 * GIB
"""Of every trainer's GPU: CUDA's context, cuBLAS workspaces, NCCL's buffers."""

ENGINE_RESERVE_BYTES = 3 * GIB
"""Of every engine's GPU, beside weights and KV cache: CUDA's context, CUDA graphs, a prefill's activations."""

SLEEPING_ENGINE_BYTES = GIB
"""What a sleeping engine keeps of a GPU: CUDA's context and graphs."""

HOST_MEMORY_GB_PER_S = 200.0
"""Of a node, in the update of offloaded optimizer state."""

FRAGMENTATION = 0.05
"""Share of activations and temporaries that the allocator loses."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the data sheet's figures that are assumed, not measured: of the dense bfloat16 rate in matrix products
    and in flash attention, of memory bandwidth in decoding and in the optimizer, of a link's bandwidth in collectives.
    """

    matmul: float = 0.5
    attention: float = 0.4
    memory: float = 0.6
    link: float = 0.7


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
        )
        return cls(gpu, cluster.gpus_per_node, cluster.nodes, cluster.network_gb_per_s)

    @property
    def memory_bytes(self) -> int:
        """Memory of one GPU."""
        return int(self.gpu.memory_gib * GIB)

    def crosses_nodes(self, ranks: Sequence[int]) -> bool:
        """Return whether these trainer ranks, numbered along nodes, lie on several."""
        return len({rank // self.gpus_per_node for rank in ranks}) > 1

    def link_seconds(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Time in which one of ``ranks`` sends ``nbytes`` to the others; the slowest link among them decides."""
        rate = self.network_gb_per_s if self.crosses_nodes(ranks) else self.gpu.nvlink_gb_per_s
        return nbytes / (rate * 1e9 * self.efficiency.link)

    def matmul_seconds(self, flops: float) -> float:
        return flops / (self.gpu.tflops * 1e12 * self.efficiency.matmul)

    def attention_seconds(self, flops: float) -> float:
        return flops / (self.gpu.tflops * 1e12 * self.efficiency.attention)

    def memory_seconds(self, nbytes: float) -> float:
        """Time in which a GPU reads or writes so many bytes of its memory."""
        return nbytes / (self.gpu.memory_gb_per_s * 1e9 * self.efficiency.memory)

    def host_seconds(self, nbytes: float) -> float:
        """Time in which a GPU moves so many bytes to or from its host."""
        return nbytes / (self.host_gb_per_s * 1e9 * self.efficiency.link)

    def host_update_seconds(self, nbytes: float, ranks: int) -> float:
        """Time in which a node's processors update so many bytes of optimizer state, of each of ``ranks`` ranks."""
        return nbytes * ranks / (HOST_MEMORY_GB_PER_S * 1e9)
