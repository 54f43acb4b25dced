"""Capsules: directories with everything that ``slime-like replay`` needs to train one step again.

``RUN_DIR/capsules/step-N`` is laid out like a run's directory: ``config.yaml``, the newest checkpoint before the step,
if there is one, and ``rollouts`` of every step since. Its other files hold what the run computed, for comparison.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from slime_like.algorithms.packing.fields import RESPONSE_FIELDS
from slime_like.config.reading.load import save_config
from slime_like.config.roles import CRITIC
from slime_like.data.dump import dump_path, save_trajectories
from slime_like.interfaces import Scores
from slime_like.orchestration.run.directory import CONFIG_FILE
from slime_like.orchestration.run.milestones import is_due
from slime_like.orchestration.run.sources import Run
from slime_like.orchestration.run.step import TrainedStep
from slime_like.orchestration.trainer.checkpoint import saved_steps
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.statistics import StepStats
from slime_like.system.disk import link_tree, replace_directory, whole_file
from slime_like.trajectory import ScoredTrajectory

CAPSULES, ROLLOUTS, RECORDS = "capsules", "rollouts", "records"
DESCRIPTION, TOKENS = "capsule.json", "tokens.pt"
AFTER = "after."
"""Prefix of scores under the weights after the step."""
_PACKAGES = ("torch", "numpy", "transformers", "megatron-core")


class Capsules:
    """Recorder of a run's capsules. Files of recent steps stay in ``.recent`` as long as a capsule needs them."""

    def __init__(self, run: Run) -> None:
        self._run, self._root = run, run.config.run_dir / CAPSULES
        self._recent, self._machine = self._root / ".recent", machine(run)
        self._wanted = {step for step in run.config.debug.capsule if isinstance(step, int)}
        self._on_alarm = "health" in run.config.debug.capsule
        self._remove(run.finished_steps + 1, run.config.steps)  # of an earlier start
        if self._is_needed(run.finished_steps + 1):
            self._save(run.finished_steps, {"weights": self._weights()})

    def record(self, step: int, trained: TrainedStep, is_alarmed: bool = False) -> None:
        """Keep what capsules need of a step, and write the step's own one. Call before the next batch is loaded."""
        config, found, rows = self._run.config, dict[str, Any](), trained.trajectories
        is_wanted = step in self._wanted or (is_alarmed and self._on_alarm)
        base = 0 if (newest := self._run.checkpoints.newest) is None else newest.step
        self._remove(0, base - 1)
        dump_path(self._recent / ROLLOUTS, base).unlink(missing_ok=True)
        if self._is_needed(step):
            given = trained.given_advantages or [row.advantages for row in rows]
            kept = [replace(row, advantages=each) for row, each in zip(rows, given, strict=True)]
            save_trajectories(dump_path(self._recent / ROLLOUTS, step), kept)
            found["figures"] = figures(trained)
        starts_replays = is_due(step, config.checkpoint.every, config.steps) and self._is_needed(step + 1)
        if starts_replays or is_wanted or step + 1 in self._wanted:
            found["weights"] = self._weights()
        if found:
            self._save(step, found)
        if is_wanted:
            self._write(step, base, rows)

    def _is_needed(self, step: int) -> bool:
        """Return whether a capsule contains the step. An asynchronous save may be one interval late."""
        every = self._run.config.checkpoint.every * (2 if self._run.config.checkpoint.async_save else 1)
        return self._on_alarm or any(0 <= wanted - step < (every or wanted) for wanted in self._wanted)

    def _weights(self) -> dict[str, Any]:
        self._run.devices.training(keep_weights=True)
        return weights(self._run)

    def _save(self, step: int, content: Any) -> None:
        (self._recent / RECORDS).mkdir(parents=True, exist_ok=True)
        with whole_file(self._recent / RECORDS / f"step-{step:06d}.json") as file:
            json.dump(content, file)

    def _write(self, step: int, base: int, rows: Sequence[ScoredTrajectory]) -> None:
        run, newest = self._run, self._run.checkpoints.newest
        batches = [dump_path(self._recent / ROLLOUTS, each) for each in range(base + 1, step + 1)]
        if missing := [path.stem for path in batches if not path.is_file()]:
            why = f"the batch of {missing[0]} was not kept, since checkpoint.every or debug.capsule has changed"
            run.progress.note(f"no capsule of step {step}: {why}")
            return
        final = self._root / f"step-{step:06d}"
        partial = self._root / f".partial-{final.name}"
        shutil.rmtree(partial, ignore_errors=True)
        link_tree(self._recent, partial)
        if newest is not None:
            link_tree(newest.path, partial / "checkpoints" / f"step-{base:06d}")
        save_config(run.config, partial / CONFIG_FILE)
        torch.save(trained_tokens(run, rows) | scored_tokens(run, rows), partial / TOKENS)
        text = json.dumps({"step": step, "base": base, "machine": self._machine}, indent=1)
        (partial / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        replace_directory(partial, final)
        run.progress.note(f"capsule of step {step}: {final}")
        for old in sorted(saved_steps(self._root))[: -run.config.debug.keep_capsules]:
            shutil.rmtree(old)

    def _remove(self, first: int, last: int) -> None:
        """Remove the files of recent steps from ``first`` to ``last``."""
        for path in self._recent.glob("*/step-*"):
            if first <= int(path.stem.removeprefix("step-")) <= last:
                path.unlink()


def machine(run: Run) -> dict[str, Any]:
    """Return what the bits of a step depend on besides its configuration and inputs."""
    device = "gpu" if any(run.policy.devices()) else "cpu"
    cpu = f"{torch.backends.cpu.get_cpu_capability()}, {len(os.sched_getaffinity(0))} cores"
    return {"device": device, "cpu": cpu} | {name: version(name) for name in _PACKAGES}


def weights(run: Run) -> dict[str, dict[str, Any]]:
    """Return fingerprints of every trained model's weights, by its name and the tensor's."""
    found = {}
    for model in (each for each in run.models.values() if each.role.trained):
        with model.on_devices():
            answers = model.call("hashing weights", TrainerRank.fingerprints)
        found[model.name] = {name: asdict(each) for answer in answers for name, each in answer.items()}
    return found


def figures(trained: TrainedStep) -> dict[str, list[dict[str, float]]]:
    """Return the scalar figures of each optimizer step, of the policy and of the critic."""

    def scalars(update: StepStats) -> dict[str, float]:
        named = {each.name: getattr(update, each.name) for each in fields(update)}
        return {name: float(each) for name, each in named.items() if isinstance(each, Tensor) and each.ndim == 0}

    return {"policy": list(map(scalars, trained.updates)), CRITIC: list(map(scalars, trained.critic))}


def trained_tokens(run: Run, rows: Sequence[ScoredTrajectory]) -> dict[tuple[str, str], Tensor]:
    """Return the loaded batch as the loss got it, (response_len,) by field and sequence id; nothing if the policy did
    not score it."""
    others = [name for name, each in RESPONSE_FIELDS.items() if each.is_per_token and name != "old_logprobs"]
    scores = [run.policy.stored_scores(rows, "old_logprobs", *others)]
    if (critic := run.models.get(CRITIC)) is not None:
        scores.append(critic.stored_scores(rows, "values", "returns"))
    return {(name, row): each for found in scores for row, values in found.items() for name, each in values.items()}


def scored_tokens(run: Run, rows: Sequence[ScoredTrajectory]) -> dict[tuple[str, str], Tensor]:
    """Return the policy's scores of the rows under the current weights, like ``trained_tokens``."""
    scores: list[Scores] = run.policy.score(rows)
    pairs = zip(rows, scores, strict=True)
    return {(AFTER + name, row.sequence_id): each for row, found in pairs for name, each in found.items()}
