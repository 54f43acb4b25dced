"""Input of a plan: a configuration, its model's sizes, its cluster, a step's workload, and the estimates of ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from slime_like.algorithms.packing.prefixes import is_worth_sharing
from slime_like.checks.model_directories import target_problems
from slime_like.config import ClusterConfig, ParallelConfig, RunConfig
from slime_like.config.roles import POLICY
from slime_like.config.sections import GpuName
from slime_like.errors import ConfigError
from slime_like.interfaces import TrainerBackend, load_backend
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.models.dimensions import ModelDimensions
from slime_like.weights.adapter import ADAPTER, factor_shapes

GIB = 2**30

CONTEXT_BYTES = 3 * GIB // 2
"""GPU memory of a process before its first tensor: CUDA's context and cuBLAS workspaces."""

COMMUNICATOR_BYTES = 2 * GIB // 5
"""NCCL's buffers for one group of ranks. Ranks of tensor 2, pipeline 2, data 2, expert 2 are in 16 groups. Including
their context, such ranks have been reported to take 7 to 10 GB (verl issue 6266)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_gib: total memory as CUDA reports it.
        tflops: dense bfloat16 rate, in 1e12 per second.
        nvlink_gb_per_s: bandwidth to the other GPUs of the node, in one direction.
        measured_tflops: highest rate measured for large bfloat16 matrix products; ``None``: never measured.
    """

    memory_gib: float
    tflops: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float
    measured_tflops: float | None = None

    @property
    def ceiling_tflops(self) -> float:
        """The measured rate, or the fraction of the data sheet's rate that an H100 reaches."""
        return self.measured_tflops or 0.8 * self.tflops


# SXM modules, from NVIDIA's data sheets. Sparse rates and NVLink's two directions are halved.
GPUS: dict[GpuName, Gpu] = {
    "a100-80gb": Gpu(79.1, 312, 2039, 300),
    "h100-80gb": Gpu(79.1, 989, 3350, 450, 790),
    "h200-141gb": Gpu(139.8, 989, 4800, 450, 790),
    "b200": Gpu(178.3, 2250, 7700, 900),
}


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


Note = Callable[[str], None]
"""Receiver of progress messages."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of a step.

    Attributes:
        samples: sequences of a step.
        mean_prompt, mean_response: mean tokens of their prompts and responses.
        sharing: sequences for which one prompt is computed once.
        micro_batches: micro-batches per replica and optimizer step.
        per_micro_batch: sequences of mean length that fit into a micro-batch.
        filled: share of a micro-batch's token budget that whole sequences of mean length fill.
    """

    samples: int
    mean_prompt: float
    mean_response: float
    sharing: int
    micro_batches: int
    per_micro_batch: int
    filled: float

    @property
    def mean_length(self) -> float:
        return self.mean_prompt + self.mean_response

    @property
    def tokens(self) -> float:
        """Tokens computed in one pass over all samples."""
        return self.samples * (self.mean_prompt / self.sharing + self.mean_response)

    @property
    def attention_length(self) -> float:
        """Length of unshared sequences with the same attention cost per token."""
        prompt, response, sharing = self.mean_prompt, self.mean_response, self.sharing
        return (prompt**2 + sharing * (2 * prompt + response) * response) / (prompt + sharing * response)

    @classmethod
    def of(cls, config: RunConfig, mean_prompt: float | None = None, mean_response: float | None = None) -> Self:
        """Compute the workload. Lengths that are not given are the longest allowed, which is an upper bound."""
        prompt = config.data.max_prompt_tokens if mean_prompt is None else mean_prompt
        response = config.rollout.max_new_tokens if mean_response is None else mean_response
        samples = config.rollout.prompts_per_step * config.samples_per_row
        per_update = samples / config.algorithm.minibatches / config.trainer.parallel.data
        budget, sharing, groups = config.trainer.target_tokens_per_batch, 1, samples
        if config.trainer.share_prefixes and not config.supervised and is_worth_sharing(prompt, response):
            groups = config.rollout.samples_per_prompt
            sharing = min(groups, max(1, int((budget - prompt) / response)))
        together = prompt + sharing * response
        # A group that does not fit is computed in parts, and a part has its micro-batch to itself.
        bundles = max(1, int(budget / together)) if sharing in (1, groups) else 1
        filled = min(1.0, bundles * together / budget)
        fitting = bundles * sharing
        return cls(samples, prompt, response, sharing, math.ceil(per_update / fitting), fitting, filled)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A configuration and everything else a plan is computed from. ``factors`` counts elements of low-rank factors."""

    config: RunConfig
    dimensions: ModelDimensions
    hardware: Hardware
    workload: Workload
    factors: int = 0

    @classmethod
    def of(cls, config: RunConfig, mean_prompt: float | None = None, mean_response: float | None = None) -> Self:
        """
        Raises:
            ConfigError: the model's ``config.json`` cannot be read, or it has no matrix of a name in ``lora.targets``.
        """
        dimensions = ModelDimensions.from_checkpoint(config.model.path)
        workload, lora, factors = Workload.of(config, mean_prompt, mean_response), config.model.lora, 0
        if lora.is_set:
            one_rank = config.trainer.model_copy(update={"parallel": ParallelConfig()})
            backend: Any = plannable_backend(config.trainer.backend)
            tensors = backend.converter(config.model, one_rank).prove()
            if wrong := list(target_problems(lora, tensors)):
                raise ConfigError(wrong, code="model.lora")
            factors = sum(map(math.prod, factor_shapes(lora, tensors).values()))
        return cls(config, dimensions, Hardware.of(config.cluster), workload, factors)

    def for_critic(self) -> Self:
        config = self.config.for_critic()
        dimensions = ModelDimensions.from_checkpoint(config.model.path, values=True)
        workload = Workload.of(config, self.workload.mean_prompt, self.workload.mean_response)
        return replace(self, config=config, dimensions=dimensions, workload=workload, factors=0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model as engines get it. Norms and routers count as 8-bit, too, if matrices are."""
        parameters, dimensions = self.dimensions.num_parameters, self.dimensions
        outer = dimensions.vocab_size * dimensions.hidden_size * (1 if dimensions.tied_embeddings else 2)
        rounded = 0 if self.config.sync.quantization == "none" else parameters - outer
        return (parameters - rounded) * self.element_bytes + rounded + rounded // 4096

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the factors, if engines get only these."""
        return self.factors * self.element_bytes if self.config.model.lora.sync == ADAPTER else 0

    @property
    def element_bytes(self) -> int:
        return 4 if self.config.model.dtype == "float32" else 2

    @property
    def colocated(self) -> bool:
        return self.config.cluster.placement == "colocated"


def plannable_backend(name: str) -> type[TrainerBackend]:
    """Return the trainer backend ``name``. Raises ``ConfigError`` if it is unknown or cannot estimate a rank."""
    backend = load_backend(name)
    if not hasattr(backend, "planner"):
        problem = f"trainer.backend={name} cannot be planned: it has no estimate; plan with megatron"
        raise ConfigError(problem, code="backend-not-planned")
    return backend


def estimate_kinds(
    config: RunConfig,
    backend: type[TrainerBackend],
    kinds: Sequence[RankKind],
    note: Note = lambda _: None,
    role: str = POLICY,
) -> list[tuple[RankKind, RankEstimate]]:
    """Pair every kind with the estimate of its first rank."""
    found = []
    for kind in kinds:
        note(f"{kind.name}: {len(kind.ranks)} ranks")
        found.append((kind, backend.planner().estimate(config, kind.ranks[0], role)))
    return found
