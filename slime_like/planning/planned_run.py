"""What a plan is worked out from: a configuration, its model's sizes, its cluster and the workload of a step."""

import math
from dataclasses import dataclass
from typing import Self

from slime_like.algorithms.packing.prefixes import pays
from slime_like.config import RunConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.planning.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of a step.

    Attributes:
        samples: sequences of a step.
        mean_prompt, mean_response: their tokens on average.
        sharing: sequences that one computed prompt serves.
        micro_batches: per replica and optimizer step.
        per_micro_batch: sequences of mean length that fit into one.
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
        """Computed in one pass over all samples."""
        return self.samples * (self.mean_prompt / self.sharing + self.mean_response)

    @property
    def attention_length(self) -> float:
        """Length of sequences, by themselves, whose tokens see as many others as these do on average."""
        prompt, response, sharing = self.mean_prompt, self.mean_response, self.sharing
        return (prompt**2 + sharing * (2 * prompt + response) * response) / (prompt + sharing * response)

    @classmethod
    def of(cls, config: RunConfig, mean_prompt: float | None = None, mean_response: float | None = None) -> Self:
        """Lengths that are not given are the longest allowed, which is an upper bound."""
        prompt = config.data.max_prompt_tokens if mean_prompt is None else mean_prompt
        response = config.rollout.max_new_tokens if mean_response is None else mean_response
        samples = config.rollout.prompts_per_step * (1 if config.supervised else config.rollout.samples_per_prompt)
        per_update = samples / config.algorithm.minibatches / config.trainer.parallel.data
        budget, sharing, groups = config.trainer.target_tokens_per_batch, 1, samples
        if config.trainer.share_prefixes and not config.supervised and pays(prompt, response):
            groups = config.rollout.samples_per_prompt
            sharing = min(groups, max(1, int((budget - prompt) / response)))
        together = prompt + sharing * response
        # A group that does not fit is computed in parts, of which none shares its micro-batch with another group.
        bundles = max(1, int(budget / together)) if sharing in (1, groups) else 1
        filled = min(1.0, bundles * together / budget)
        fitting = bundles * sharing
        return cls(samples, prompt, response, sharing, math.ceil(per_update / fitting), fitting, filled)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A configuration with all that is planned from."""

    config: RunConfig
    dimensions: ModelDimensions
    hardware: Hardware
    workload: Workload

    @classmethod
    def of(cls, config: RunConfig, mean_prompt: float | None = None, mean_response: float | None = None) -> Self:
        """
        Raises:
            ConfigError: the model's ``config.json`` cannot be read.
        """
        dimensions = ModelDimensions.from_checkpoint(config.model.path)
        return cls(config, dimensions, Hardware.of(config), Workload.of(config, mean_prompt, mean_response))

    @property
    def weight_bytes(self) -> int:
        """The whole model in ``model.dtype``."""
        return self.dimensions.num_parameters * self.element_bytes

    @property
    def element_bytes(self) -> int:
        return 4 if self.config.model.dtype == "float32" else 2

    @property
    def colocated(self) -> bool:
        return self.config.cluster.placement == "colocated"

    @property
    def has_engines(self) -> bool:
        """The run has engines."""
        return not self.config.supervised and not self.config.debug.load_rollouts
