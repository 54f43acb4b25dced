"""Limits and arguments that our engines share. Importing this imports neither an engine nor torch."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sections import ClusterConfig, ModelConfig
from slime_like.interfaces.engine_limits import EngineLimits
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import WeightFilesError, model_shapes
from slime_like.weights.adapter import factor_shapes

_MOST_SEQUENCES = 512

MERGED = "use model.lora.sync=merged"


class Guarantee(StrEnum):
    """Guarantees that an argument of vLLM or SGLang could break."""

    TYPE = "weights, activations and caches have the type model.dtype, like the trainer's"
    MODEL = "the engine must compute what the trainer computes, from the files of model.path"
    TOKENS = "prompts and responses are token ids of the tokenizer of model.path"
    DISTRIBUTION = "requests set the distribution that is sampled, and the trainer computes the same one"
    SEEDS = "every sample has a seed of its own, from the run's seed and the group's id"
    RANKS = "rollout.tensor, pipeline and num_engines set the ranks, and cluster.gpus_per_node their nodes"
    EXPERTS = "weight updates need every expert in its place"
    CACHE = "its keys and values would outlive a weight update"


_UNCHANGED: Collection[Any] = (None, False, "", "auto", "none", "null", "safetensors", "{}", {}, [])
"""Values with which a refused argument changes nothing. So does 1 as a number of ranks or nodes."""


def by_argument(names: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of every argument, from the names by reason."""
    return {argument: reason for reason, arguments in names.items() for argument in arguments.split()}


def owned_arguments(adapter: str, **fields: str) -> dict[str, str]:
    """Return the remedy for each argument that the adapter needs, or that a field of the configuration sets."""
    owned = {argument: f"set {field} instead" for argument, field in fields.items()}
    return owned | dict.fromkeys(adapter.split(), "remove it, because the adapter depends on its value")


@dataclass(frozen=True, kw_only=True)
class OwnLimits(EngineLimits):
    """Limits of an engine of this distribution."""

    def adapter_problems(self, model: ModelConfig, dimensions: ModelDimensions) -> Iterator[str]:
        with suppress(WeightFilesError):  # another check reports it
            names = factor_shapes(model.lora, model_shapes(model.path))
            if dimensions.num_experts and any(".self_attn." not in name for name in names):
                problem = f"{self.name} applies factors only to attention in a model with experts"
                yield f"model.lora.targets={list(model.lora.targets)}: {problem}; target attention, or {MERGED}"


@dataclass(frozen=True, kw_only=True)
class ServerLimits(OwnLimits):
    """Limits of vLLM or SGLang.

    Attributes:
        owned: arguments that the adapter sets, whatever the value, with the remedy or the reason.
        drafts: arguments that turn speculative decoding on.
        tried: further arguments that ran in training. A note names those that are neither.
    """

    owned: Mapping[str, str] = field(default_factory=dict)
    drafts: Collection[str] = ()
    tried: str = ""
    spans_nodes: bool = True
    splits_heads: bool = True

    def argument_problems(self, rollout: RolloutConfig, is_here: bool) -> Iterator[str]:
        arguments = rollout.engine_args_of(self.name)
        known = self.known_arguments() if arguments and is_here else None
        for name, value in arguments.items():
            if name in self.owned:
                yield f"rollout.engine_args.{name} is not supported: {self.owned[name]}"
            elif known is not None and name not in known:
                yield f"rollout.engine_args.{name} is not an argument of {self.name}; see `{self.name} serve --help`"
            elif name not in rollout.allow_engine_args and self._changes(name, value):
                remedy = f"remove it, or add {name} to rollout.allow_engine_args to train without this guarantee"
                yield f"rollout.engine_args.{name}={value} is refused: {self.refused[name]}; {remedy}"
        drafts = [name for name in arguments.keys() & {*self.drafts} if arguments[name] is not None]
        if drafts and rollout.bounded_top_k != -1 and drafts[0] not in rollout.allow_engine_args:
            problem = "supports of drafted tokens have not been compared with the trainer's"
            remedy = "use top_p: 1, top_k: -1 and min_p: 0 of rollout, or add it to rollout.allow_engine_args"
            yield f"rollout.engine_args.{drafts[0]} with truncated sampling: {problem}; {remedy}"
        share = arguments.get(self.share_argument, 1)
        if not (is_number(share) and share <= 1):
            yield f"rollout.engine_args.{self.share_argument}={share} must be a number above 0, at most 1"

    def lifted_arguments(self, rollout: RolloutConfig) -> dict[str, Any]:
        arguments = rollout.engine_args_of(self.name)
        return {name: arguments[name] for name in rollout.allow_engine_args if name in arguments.keys() & self.refused}

    def argument_notes(self, rollout: RolloutConfig) -> Iterator[str]:
        arguments = rollout.engine_args_of(self.name)
        for name, value in self.lifted_arguments(rollout).items():
            yield f"rollout.allow_engine_args lifts a guarantee: engine_args.{name}={value}, but {self.refused[name]}"
        if any(_is_model(arguments.get(name)) for name in self.drafts):
            yield "the weight sync does not reach the draft model, so its tokens are accepted less as the policy moves"
        known = {*self.tried.split(), *self.refused, self.share_argument}
        if untried := sorted(arguments.keys() - known):
            guards = "the probe of every sync and the metric engine_gap_mean show if the engine computes another model"
            yield f"rollout.engine_args: {', '.join(untried)} has not been tried in training; {guards}"

    def _changes(self, name: str, value: Any) -> bool:
        """Return whether the argument is refused, with a value that changes something."""
        if isinstance(value, int) and not isinstance(value, bool):  # False equals 0
            return name in self.refused and not (value == 1 and name.endswith(("_size", "nnodes")))
        return name in self.refused and value not in _UNCHANGED

    def known_arguments(self) -> Collection[str] | None:
        """Return the names of all arguments; ``None`` if the engine rejects others itself, or is not installed."""
        return None

    def adapter_problems(self, model: ModelConfig, dimensions: ModelDimensions) -> Iterator[str]:
        if special := dimensions.attention.special:
            yield f"model.lora.sync=adapter: {self.name} may compute {special} without the factors; {MERGED}"
        if dimensions.tower:
            yield f"model.lora.sync=adapter: {self.name} may not find the modules of a model with a tower; {MERGED}"
        yield from OwnLimits.adapter_problems(self, model, dimensions)

    def quantization_problem(self, on_cuda: bool) -> str | None:
        return None if on_cuda else f"{self.name} has no 8-bit products on a CPU; use rollout.engine=transformers"

    def keeps_weights(self, config: RunConfig, dimensions: ModelDimensions) -> bool:
        return config.samples_after_saves or must_stay(config, dimensions)


def _is_model(drafts: Any) -> bool:
    """Return whether a value of ``ServerLimits.drafts`` describes a model, not a search for repeated tokens."""
    method = drafts.get("method", "model") if isinstance(drafts, Mapping) else drafts
    return method is not None and str(method).lower() not in ("ngram", "ngram_gpu", "suffix")


def is_number(value: Any) -> bool:
    """Return whether the value is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def must_stay(config: RunConfig, dimensions: ModelDimensions) -> bool:
    """Return whether an update does not replace every tensor, so an engine must not drop its weights."""
    return config.model.lora.sends_factors or not dimensions.attention.reloads


def on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def sequences_at_once(rollout: RolloutConfig) -> int:
    return min(rollout.max_concurrent_requests * rollout.samples_per_prompt, _MOST_SEQUENCES)


def sleep_mode(rollout: RolloutConfig, cluster: ClusterConfig, argument: str) -> bool:
    """Return whether the engine must be able to release its memory: by its ``argument``, else on shared devices."""
    return bool(rollout.own_engine_args.get(argument, cluster.placement == "colocated"))
