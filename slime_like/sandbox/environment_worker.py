"""One environment worker, started by the pool as ``python -m slime_like.sandbox.environment_worker PARENT_PID``."""

import inspect
import math
import sys
from collections.abc import Mapping
from typing import Any

from slime_like.errors import ConfigError
from slime_like.interfaces.user_code import Environment, Step, Task
from slime_like.plugins.resolve import code_of, require_options, resolve_callable
from slime_like.sandbox.serving import Handler, serve, untrusted

REGISTERED: Mapping[str, str] = {"calculator": "slime_like.examples.calculator:Calculator"}
"""Included environments, as import paths. Workers import them; this package never does."""


def build_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Create an environment of the class registered as ``name``, or of the class at ``package.module:name``.

    Raises ``ValueError`` if there is no such class, or it does not take the options.
    """
    found = resolve_callable("environment", name, REGISTERED)
    require_options(f"environment {name!r}", found, options)
    try:
        return found(**options)
    except Exception as error:
        raise ValueError(f"environment {name!r} rejects its options: {type(error).__name__}: {error}") from error


def _prepare(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    name = setup["name"]
    try:
        environment = build_environment(name, setup["options"])
    except ValueError as error:
        raise ConfigError([f"rollout.environment: {error}"]) from error
    code = None if name in REGISTERED else code_of(environment.step)
    judges_cut_turns = "truncated" in inspect.signature(environment.step).parameters

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        with untrusted(name, code, "response" if name in REGISTERED else None):
            state = environment.reset(Task(**item["task"])) if item["first"] else item["state"]
            if item["response"] is None:
                return {"state": state}
            cut = {"truncated": item["truncated"]} if judges_cut_turns else {}
            return _as_message(environment.step(state, item["response"], **cut))

    return handle, {"judges_cut_turns": judges_cut_turns}


def _as_message(step: Any) -> dict[str, Any]:
    if not isinstance(step, Step):
        raise TypeError(f"step returned a {type(step).__name__}; return a Step")
    if not isinstance(step.observation, str):
        raise TypeError(f"its observation is a {type(step.observation).__name__}; give text")
    for name, value in (("done", step.done), ("success", step.success)):
        if value not in (True, False):  # e.g. a reward, given by position; NumPy's booleans are fine
            raise TypeError(f"its {name} is {value!r}; give true or false")
    if not math.isfinite(step.reward):
        raise ValueError(f"its reward is {step.reward}; give a finite number")
    plain = {"done": bool(step.done), "reward": float(step.reward), "success": bool(step.success)}
    return {"state": step.state, "observation": step.observation, "metadata": dict(step.metadata), **plain}


if __name__ == "__main__":
    sys.exit(serve(_prepare))
