"""GPUs and links of a cluster, and the table of everything that a predicted time assumes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from slime_like.config import ClusterConfig
from slime_like.interfaces.estimate import Pattern
from slime_like.system.gpus import GPUS, Gpu

GIB = 2**30

CONTEXT_BYTES = 3 * GIB // 2
"""GPU memory of a process before its first tensor: CUDA's context and cuBLAS workspaces."""

COMMUNICATOR_BYTES = 2 * GIB // 5
"""NCCL's buffers for one group of ranks. Ranks of tensor 2, pipeline 2, data 2, expert 2 are in 16 groups. Including
their context, such ranks have been reported to take 7 to 10 GB (verl issue 6266)."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Everything that predicted times assume about hardware and kernels. None is fitted to a single run.

    "Published" names the half of ``benchmarks/published.yaml`` that constants may be chosen from.
    """

    matmul: float = 0.8
    """Share of the ceiling in a model's products: cuBLAS with narrow and short matrices; published, LoRA rows."""
    fp8: float = 0.65
    """Share of twice the ceiling in FP8 products, whose scales and shorter times cost more; not measured."""
    attention: float = 0.63
    """Share of the ceiling in flash attention, both passes: 500 TFLOP/s (FlashAttention-3, arXiv:2407.08608)."""
    grouped: float = 0.7
    """Share of the ceiling in experts' grouped products, besides incomplete tiles (CUTLASS's grouped kernels)."""
    memory: float = 0.6
    """Share of the memory bandwidth in decoding and in the optimizer: kernels of microseconds reach no more."""
    fused: float = 0.5
    """Share of the traced bytes of small kernels that remains after fusion (Transformer Engine, torch's compiler)."""
    launch_s: float = 4e-6
    """Seconds between two kernels that the host launches (PyTorch's eager mode)."""
    link: float = 0.8
    """Share of a link's bandwidth in collectives (NCCL tests on NVLink and InfiniBand)."""
    base_s: float = 8.4e-6
    nvlink_hop_s: float = 3.4e-6
    network_hop_s: float = 14e-6
    """Latency of a collective, and of each hop of its ring inside and between nodes (NCCL's tuning table, `Simple`)."""
    decode_all_reduce_s: float = 20e-6
    """Latency of an all-reduce of a decoded token in a node; between nodes, twice that (vLLM's custom all-reduce)."""
    decode_step_s: float = 1e-3
    """The engine's own time per decoded token: scheduling, sampling, and launches that CUDA graphs leave."""
    prefill: float = 0.8
    """Prefill's share of the rate of training's forward products: chunks of prompts share batches with decoding."""
    host_memory_gb_per_s: float = 200.0
    """Memory bandwidth of a node while it updates offloaded optimizer state (eight DDR5 channels, STREAM)."""
    sync_gb_per_s: dict[str, float] = field(
        default_factory=lambda: {
            "nccl": 40.0,
            "colocated": 40.0,
            "shared_memory": 8.0,
            "gloo": 2.0,
            "directory": 1.0,
        }
    )
    """Rates of weight transports. Between nodes, NCCL's, which colocated also uses, is bounded by the network."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs and links of a cluster, with the assumed share of each peak rate that is reached.

    Attributes:
        nodes: number of nodes; ``None`` for as many as are needed.
        network_gb_per_s, host_gb_per_s: rates of one GPU to other nodes, through its network card, and to its host's
            memory (PCIe).
    """

    gpu: Gpu
    gpus_per_node: int
    nodes: int | None
    network_gb_per_s: float
    host_gb_per_s: float = 50.0
    assumed: Assumed = Assumed()

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

    def link_seconds(self, nbytes: float, ranks: Sequence[int], pattern: Pattern = "gather", calls: int = 1) -> float:
        """Return the seconds in which each of ``ranks`` sends ``nbytes`` to the others, in ``calls`` exchanges.

        NCCL lays a ring through every network card next to the group's GPUs, so a ring that crosses nodes with k ranks
        on a node has k cards. In an all-to-all exchange, each rank sends the part for other nodes through its own card,
        while the rest crosses NVLink. A message to a neighbor on another node takes the sender's card.
        """
        nvlink, card = self.gpu.nvlink_gb_per_s * 1e9, self.network_gb_per_s * 1e9
        nodes = len({rank // self.gpus_per_node for rank in ranks})
        size, on_node = len(ranks), len(ranks) / nodes
        if nodes == 1:
            seconds = nbytes / nvlink
        elif pattern == "all_to_all":
            outside = (size - on_node) / (size - 1)
            seconds = max(nbytes * (1 - outside) / nvlink, nbytes * outside / card)
        elif pattern == "message":
            seconds = nbytes / card
        else:
            seconds = nbytes / min(nvlink, on_node * card)
        hops, crossing = (1, nodes > 1) if pattern in ("message", "all_to_all") else (size - 1, nodes - 1)
        if pattern == "all_reduce":
            hops, crossing = 2 * hops, 2 * nodes if nodes > 1 else 0
        latency = (hops - crossing) * self.assumed.nvlink_hop_s + crossing * self.assumed.network_hop_s
        return seconds / self.assumed.link + calls * (self.assumed.base_s + latency)

    def matmul_seconds(self, flops: float, fp8_share: float = 0.0) -> float:
        per_flop = (1 - fp8_share) / self.assumed.matmul + fp8_share / (2 * self.assumed.fp8)
        return flops * per_flop / (self.gpu.ceiling_tflops * 1e12)

    def attention_seconds(self, flops: float) -> float:
        return flops / (self.gpu.ceiling_tflops * 1e12 * self.assumed.attention)

    def grouped_seconds(self, flops: float) -> float:
        return flops / (self.gpu.ceiling_tflops * 1e12 * self.assumed.grouped)

    def memory_seconds(self, nbytes: float) -> float:
        """Return the seconds in which a GPU reads or writes ``nbytes`` of its memory."""
        return nbytes / (self.gpu.memory_gb_per_s * 1e9 * self.assumed.memory)

    def host_seconds(self, nbytes: float) -> float:
        return nbytes / (self.host_gb_per_s * 1e9 * self.assumed.link)
