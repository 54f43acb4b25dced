"""A small run of a recipe on this machine: steps, a kill, a resume and an export.

A small random model like the real one is trained with the recipe's method, rows, template and rewards.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import transformers

from slime_like.checks.check import check_settings
from slime_like.checks.definition import training_needs
from slime_like.config import ModelConfig, RunConfig
from slime_like.config.reading.load import save_config
from slime_like.data.ledger import audit_run
from slime_like.data.tokenizer import load_tokenizer
from slime_like.errors import ConfigError, SlimeLikeError
from slime_like.examples.look_alike import make_look_alike
from slime_like.examples.tiny_model import without_progress_bar
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tower import loading_options
from slime_like.models.weight_files import header_shapes
from slime_like.observability.metrics import METRICS_FILE, read_metrics
from slime_like.orchestration.rollout.requests import stop_tokens
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.system.words import counted
from slime_like.verification.rehearsal.small_recipe import layers_of, small_recipe
from slime_like.weights.adapter import expected_factors, stored_factors

_START_S, _REST_S, _STOP_S = 900.0, 1800.0, 120.0
_LOOK_EVERY_S = 0.2
_ERROR = re.compile(r"^(?:slime-like: |  - )(.*\[[a-z][a-z.-]+\])$", re.MULTILINE)
_FAILURES = ("ref_actor_rewards/scoring_failures", "evaluation/scoring_failures")


class Outcome(NamedTuple):
    """One line of a rehearsal."""

    is_sound: bool
    stage: str
    text: str


def rehearse(config: RunConfig, directory: Path, steps: int) -> Iterator[Outcome]:
    """Run a small version of a recipe, in stages. A failed start or resume ends the rehearsal.

    Args:
        directory: empty directory for the small model, the small recipe, its run and the logs.
        steps: training steps of the small run, at least 2.

    Raises:
        ConfigError: the recipe's settings are invalid, or it has no small version.
    """
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    if problems := check_settings(config, dimensions, training_needs(config)):
        raise ConfigError(problems)
    yield Outcome(True, "settings", f"valid for {counted(config.trainer.parallel.world_size, 'rank')}")
    model = directory / "model"
    ends = [token for token in stop_tokens(config.rollout, config.model) if 0 <= token < dimensions.vocab_size]
    make_look_alike(config.model.path, model, layers_of(config.trainer.parallel, dimensions), ends=ends)
    try:
        small = small_recipe(config, model, directory / "run", steps)
    except ValueError as error:
        raise ConfigError(f"this recipe cannot be made small ({error})", code="rehearsal-size") from error
    save_config(small, directory / "recipe.yaml")
    latest = small.run_dir / "checkpoints" / "latest"
    problem = _train(directory, "first.log", _START_S, stop=latest.exists)
    yield Outcome(problem is None, "first steps", problem or "wrote a checkpoint; the run was killed")
    if problem is None:
        problem = _train(directory, "second.log", _REST_S)
        yield Outcome(problem is None, "resume", problem or f"finished {steps} steps")
    if problem is None:
        yield from _records(small.run_dir, steps, small.supervised)
        yield _export(small.run_dir / "hf", small.model)


def _train(directory: Path, name: str, timeout_s: float, stop: Callable[[], bool] = lambda: False) -> str | None:
    """Run ``slime-like train`` until it ends, or kill it when ``stop()`` is true. Return the problem, if any."""
    log, end = directory / name, time.monotonic() + timeout_s
    command = [sys.executable, "-m", "slime_like.commands.child_main", str(os.getpid()), "train"]
    command.append(str(directory / "recipe.yaml"))
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        while process.poll() is None and not stop():
            raise_if_interrupted()
            if time.monotonic() > end:
                return f"not finished after {timeout_s:.0f} s; see {log}"
            time.sleep(_LOOK_EVERY_S)
        if process.poll() in (None, 0):
            return None
    finally:
        process.kill()
        process.wait(_STOP_S)
    errors = _ERROR.findall(log.read_text(encoding="utf-8", errors="replace"))
    return "; ".join(errors) or f"ended with exit code {process.returncode}; see {log}"


def _records(run_dir: Path, steps: int, supervised: bool) -> Iterator[Outcome]:
    """Check that every step was logged, every response was scored and every group is accounted for."""
    records = read_metrics(run_dir / METRICS_FILE)
    trained = sorted({record["step"] for record in records if "train_actor_training/loss" in record})
    yield Outcome(trained == list(range(1, steps + 1)), "metrics", f"logged steps: {trained}")
    if supervised:
        return
    failed = sum(int(record.get(name, 0)) for record in records for name in _FAILURES)
    where = f"; the reasons are in {run_dir / 'driver.log'}" if failed else ""
    yield Outcome(not failed, "scoring", f"{counted(failed, 'response')} failed{where}")
    audit = audit_run(run_dir)
    text = f"{counted(audit.issued, 'group')} issued, {audit.trained} trained"
    yield Outcome(not audit.problems, "ledger", "; ".join([text, *audit.problems]))


def _export(path: Path, trained: ModelConfig) -> Outcome:
    """Load the exported model like a user."""
    try:
        if trained.lora.is_set:
            found = header_shapes(path)
            expected = stored_factors(expected_factors(trained), found)
            return Outcome(found == expected, "export", f"{path} is a PEFT adapter of {counted(len(found), 'factor')}")
        with without_progress_bar():
            model = transformers.AutoModelForCausalLM.from_pretrained(path, **loading_options(path))
        load_tokenizer(path, trained.trust_remote_code)
        same = ModelDimensions.from_checkpoint(path) == ModelDimensions.from_checkpoint(trained.path)
    except (OSError, ValueError, KeyError, SlimeLikeError) as error:
        return Outcome(False, "export", f"{path} cannot be loaded ({type(error).__name__}: {error})")
    return Outcome(same, "export", f"transformers loads {path}, {type(model).__name__}")
