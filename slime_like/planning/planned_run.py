"""Input of a plan: a configuration, its model's sizes, its cluster, a step's workload, and the estimates of ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from slime_like.algorithms.packing.prefixes import is_worth_sharing
from slime_like.checks.model_directories import target_problems
from slime_like.config import ParallelConfig, RunConfig
from slime_like.config.roles import POLICY
from slime_like.errors import ConfigError
from slime_like.interfaces import TrainerBackend, load_backend
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.models.dimensions import ModelDimensions
from slime_like.planning.hardware import Hardware
from slime_like.planning.lengths import Lengths
from slime_like.weights.adapter import ADAPTER, factor_shapes

Note = Callable[[str], None]
"""Receiver of progress messages."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of a step.

    Attributes:
        samples: sequences of a step.
        mean_prompt: mean tokens of their prompts.
        lengths: tokens of their responses.
        sharing: sequences for which one prompt is computed once.
        micro_batches: micro-batches per replica and optimizer step.
        per_micro_batch: sequences of mean length that fit into a micro-batch.
        filled: share of a micro-batch's token budget that whole sequences of mean length fill.
    """

    samples: int
    mean_prompt: float
    lengths: Lengths
    sharing: int
    micro_batches: int
    per_micro_batch: int
    filled: float

    @property
    def mean_response(self) -> float:
        return self.lengths.mean

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
        seen = prompt**2 + sharing * (2 * prompt * response + self.lengths.square)
        return seen / (prompt + sharing * response)

    @classmethod
    def of(cls, config: RunConfig, mean_prompt: float | None = None, lengths: Lengths | None = None) -> Self:
        """Compute the workload. Lengths that are not given are the longest allowed, which is an upper bound."""
        prompt = config.data.max_prompt_tokens if mean_prompt is None else mean_prompt
        most = config.rollout.max_new_tokens
        lengths = Lengths(most, most) if lengths is None else lengths
        response = lengths.mean
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
        return cls(samples, prompt, lengths, sharing, math.ceil(per_update / fitting), fitting, filled)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A configuration and everything else a plan is computed from. ``factors`` counts elements of low-rank factors."""

    config: RunConfig
    dimensions: ModelDimensions
    hardware: Hardware
    workload: Workload
    factors: int = 0

    @classmethod
    def of(cls, config: RunConfig, mean_prompt: float | None = None, lengths: Lengths | None = None) -> Self:
        """
        Raises:
            ConfigError: the model's ``config.json`` cannot be read, or it has no matrix of a name in ``lora.targets``.
        """
        dimensions = ModelDimensions.from_checkpoint(config.model.path)
        workload, lora, factors = Workload.of(config, mean_prompt, lengths), config.model.lora, 0
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
        workload = Workload.of(config, self.workload.mean_prompt, self.workload.lengths)
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
