"""Built-in parts that settings choose by name."""

from collections.abc import Mapping
from importlib.metadata import entry_points

from slime_like.config.reading.parts import PartDocs, documented
from slime_like.config.rollout import AGENT, ENVIRONMENT
from slime_like.plugins.entry_points import BACKEND_GROUP, ENGINE_GROUP
from slime_like.plugins.objective import ADVANTAGES, LOSSES, REDUCTIONS
from slime_like.sandbox.environments.worker import REGISTERED as ENVIRONMENTS
from slime_like.sandbox.rewards.registry import REGISTERED as REWARDS
from slime_like.weights.transports import names

_TRANSPORTS = {name: f"slime_like.weights.transports.{module}" for name, (module, _) in names.TRANSPORTS.items()}
_OWN_PACKAGES = ("backends.", "rollout.")


def named_parts() -> dict[str, tuple[PartDocs, ...]]:
    """Return the built-in parts by the setting that accepts their names."""
    places: dict[str, Mapping[str, str]] = {
        "reward.functions": REWARDS,
        "algorithm.loss": LOSSES,
        "algorithm.advantage": ADVANTAGES,
        "algorithm.reduction": REDUCTIONS,
        "rollout.environment.name": ENVIRONMENTS,
        "rollout.engine": _modules(ENGINE_GROUP),
        "trainer.backend": _modules(BACKEND_GROUP),
        "sync.transport": _TRANSPORTS,
    }
    found = {
        setting: tuple(documented(name, place) for name, place in named.items()) for setting, named in places.items()
    }
    found["reward.functions"] += (
        PartDocs(ENVIRONMENT, "The rewards that `rollout.environment` returned, summed over a conversation.", "", ()),
        PartDocs(AGENT, "The reward that `rollout.agent` returned.", "", ()),
    )
    return found


def _modules(group: str) -> dict[str, str]:
    """Return the modules of this distribution's entry points, which describe engines and trainers."""
    points = [point for point in entry_points(group=group) if point.value.startswith(_OWN_PACKAGES)]
    return {point.name: point.module for point in points}
