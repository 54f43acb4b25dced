"""Estimates of the kinds of ranks that a layout has."""

from collections.abc import Callable, Sequence

from slime_like.config import RunConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import TrainerBackend, load_backend
from slime_like.interfaces.estimate import RankEstimate, RankKind

Note = Callable[[str], None]
"""Receives progress messages."""


def plannable_backend(config: RunConfig) -> type[TrainerBackend]:
    """The trainer of ``config``.

    Raises:
        ConfigError: it is unknown, or has no estimate of what it needs.
    """
    backend = load_backend(config.trainer.backend)
    if not hasattr(backend, "planner"):
        problem = f"trainer.backend={config.trainer.backend} cannot be planned: it has no estimate; plan with megatron"
        raise ConfigError(problem, code="backend-not-planned")
    return backend


def estimated_kinds(
    config: RunConfig, backend: type[TrainerBackend], kinds: Sequence[RankKind], note: Note = lambda _: None
) -> list[tuple[RankKind, RankEstimate]]:
    """Pair every kind with the estimate of its first rank."""
    found = []
    for kind in kinds:
        note(f"{kind.name}: {len(kind.ranks)} ranks")
        found.append((kind, backend.planner().estimate(config, kind.ranks[0])))
    return found


def end_kinds(config: RunConfig, backend: type[TrainerBackend]) -> list[RankKind]:
    """The first and the last kind: one has most micro-batches under way, the other the head."""
    kinds = backend.planner().rank_kinds(config)
    return kinds if len(kinds) == 1 else [kinds[0], kinds[-1]]
