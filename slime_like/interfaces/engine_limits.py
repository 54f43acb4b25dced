"""Limits of engines: arguments, memory, versions. They are known before an engine is imported."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from slime_like.config.rollout import ENGINES, RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sections import ModelConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.plugins.resolve import ENGINE_GROUP, installed_places


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of an engine, for checks and plans. The defaults are for an engine that states none.

    Attributes:
        name: ``rollout.engine``.
        packages, tested: distributions that provide its library, and the beginning of the versions that are tested.
        share_argument, default_share: engine argument with its share of a GPU's memory; the share without it.
        max_temperature: highest sampling temperature.
        spans_nodes: an engine may have ranks on several nodes.
        splits_heads: its tensor ranks have equal numbers of attention heads.
        refused: arguments that would break a guarantee, and which. ``rollout.allow_engine_args`` lifts a refusal.
    """

    name: str
    packages: tuple[str, ...] = ()
    tested: str = ""
    share_argument: str = ""
    default_share: float = 0.9
    max_temperature: float = math.inf
    spans_nodes: bool = False
    splits_heads: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)

    def argument_problems(self, rollout: RolloutConfig, is_here: bool) -> Iterator[str]:
        """Yield what is wrong with ``rollout.engine_args`` and the engine's ranks, one sentence per problem.

        Args:
            is_here: whether the engine's library is looked up in this environment.
        """
        return iter(())

    def lifted_arguments(self, rollout: RolloutConfig) -> dict[str, Any]:
        """Return the arguments that are passed though they break a guarantee (``rollout.allow_engine_args``)."""
        return {}

    def argument_notes(self, rollout: RolloutConfig) -> Iterator[str]:
        """Yield one sentence on each guarantee that is lifted, and one on arguments that nobody has tried."""
        return iter(())

    def adapter_problems(self, model: ModelConfig, dimensions: ModelDimensions) -> Iterator[str]:
        """Yield why the engine cannot apply the factors of ``model.lora``, which are sent to it."""
        return iter(())

    def quantization_problem(self, on_cuda: bool) -> str | None:
        """Return why the engine cannot sample with 8-bit weights (``sync.quantization``), with a remedy."""
        return f"rollout.engine={self.name} does not load 8-bit weights; use {' or '.join(ENGINES)}"

    def keeps_weights(self, config: RunConfig, dimensions: ModelDimensions) -> bool:
        """Return whether a sleeping engine must be able to keep its weights in host memory."""
        return True

    def copies_weights(self, config: RunConfig, dimensions: ModelDimensions) -> bool:
        """Return whether the engine copies its weights to host memory at every sleep."""
        return True


@cache
def engine_limits(name: str) -> EngineLimits:
    """Return ``LIMITS`` of the module ``limits`` in the package of the engine registered as ``name``, if it has one.

    Neither the engine nor its libraries are imported.
    """
    package = installed_places(ENGINE_GROUP).get(name, "").partition(":")[0].rpartition(".")[0]
    spec = None
    with suppress(ImportError):
        spec = find_spec(f"{package}.limits") if package else None
    found: EngineLimits = EngineLimits(name=name) if spec is None else import_module(spec.name).LIMITS
    return found
