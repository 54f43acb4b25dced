"""Checks of the engines: names, packages in this environment or that of ``rollout.python``, arguments and ranks.

Packages are looked up, not imported.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from slime_like.checks.layout import divisors, either
from slime_like.config import RunConfig
from slime_like.config.rollout import ENGINES
from slime_like.interfaces.engine_limits import engine_limits
from slime_like.models.dimensions import ModelDimensions
from slime_like.plugins.resolve import ENGINE_GROUP, installed_names, unknown
from slime_like.weights.transports.names import Libraries

_PROBE = """
import sys
from importlib.metadata import version
print("Python {}.{}".format(*sys.version_info), "ray", version("ray"), "slime-like", version("slime-like"))
"""


def name_problems(config: RunConfig) -> Iterator[str]:
    """Check the engine's name. Engines of another environment are found when they start."""
    if config.rollout.python is None:
        yield from unknown("rollout.engine", config.rollout.engine, installed_names(ENGINE_GROUP))


def installation_problems(config: RunConfig) -> Iterator[str]:
    """Check that the interpreter exists, or that this environment has the engine's package."""
    engine, python = config.rollout.engine, config.rollout.python
    if python is None and not is_installed(engine):
        remedy = f"install this distribution with the extra [{engine}], or set rollout.python to a Python with it"
        yield f"rollout.engine={engine} is not installed; {remedy}"
    elif python is not None and (problem := interpreter_problem(python)):
        yield f"rollout.python={python} {problem}"


def argument_problems(config: RunConfig) -> Iterator[str]:
    yield from engine_limits(config.rollout.engine).argument_problems(config.rollout, config.rollout.python is None)
    refused = {name for engine in (*ENGINES, config.rollout.engine) for name in engine_limits(engine).refused}
    for name in config.rollout.allow_engine_args:
        if name not in refused:
            yield f"rollout.allow_engine_args={name} is refused by no engine; correct the name, or remove it"


def temperature_problems(config: RunConfig) -> Iterator[str]:
    limits, held_out = engine_limits(config.rollout.engine), config.evaluation
    found = {"rollout": config.rollout.temperature, "evaluation": held_out.temperature if held_out.files else 0}
    for field, value in found.items():
        if value > (most := limits.max_temperature):
            yield f"{field}.temperature={value}: {limits.name} allows at most {most}; lower it, or use another engine"


def adapter_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    if config.model.lora.sends_factors:
        yield from engine_limits(config.rollout.engine).adapter_problems(config.model, dimensions)


def rank_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    """Check that all ranks get the same number of heads, and each stage a layer. The engine checks the rest."""
    tensor, pipeline, heads = config.rollout.tensor, config.rollout.pipeline, dimensions.num_heads
    if engine_limits(config.rollout.engine).splits_heads and heads % tensor:
        remedy = f"use {either(divisors(heads))}"
        yield f"rollout.tensor={tensor} does not divide the model's {heads} attention heads; {remedy}"
    if pipeline > (most := dimensions.num_layers):
        yield f"rollout.pipeline={pipeline} is more than the model's {most} layers; use at most {most}"


def node_problems(config: RunConfig) -> Iterator[str]:
    """Check that an engine's ranks are spread evenly: whole stages per node, or equal parts of each stage."""
    rollout, per_node = config.rollout, config.cluster.gpus_per_node
    nodes, given = -(-rollout.ranks // per_node), f"rollout.tensor={rollout.tensor}"
    if rollout.pipeline > 1:
        given += f", rollout.pipeline={rollout.pipeline}"
        for setting, is_set in {
            "model.lora.sync=adapter": config.model.lora.sends_factors,
            "algorithm.routing_replay=rollout": config.algorithm.routing_replay == "rollout",
        }.items():
            if is_set:
                yield f"{given}: {setting} needs every layer on each rank of an engine; use rollout.pipeline=1"
    if nodes == 1:
        return
    if not engine_limits(rollout.engine).spans_nodes:
        problem = f"rollout.engine={rollout.engine} does not span nodes; use one that does, or lower it"
        yield f"{given} is more than cluster.gpus_per_node={per_node}, and {problem}"
    of_stage = max(1, nodes // rollout.pipeline)
    if (rollout.pipeline % nodes and nodes % rollout.pipeline) or rollout.tensor % of_stage:
        problem = f"{rollout.ranks} ranks do not split evenly over the {nodes} nodes that they need"
        yield f"{given}: {problem}; use a multiple of cluster.gpus_per_node={per_node}"


def is_installed(engine: str) -> bool:
    """Return whether this environment has the engine's package. Custom engines are assumed to be installed."""
    packages = engine_limits(engine).packages
    return not packages or bool(_versions(None, packages)) or find_spec(engine) is not None


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
    limits = engine_limits(engine)
    for name, version in _versions(python, limits.packages).items():
        if not f"{version.partition('+')[0]}.".startswith(f"{limits.tested}."):
            return f"{name} {version} has not been tested with rollout.engine={engine}; tested: {limits.tested}"
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
