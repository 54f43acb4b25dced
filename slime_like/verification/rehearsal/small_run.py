"""The small run of a rehearsal: started, killed, resumed, exported."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import transformers

from slime_like.config import RunConfig
from slime_like.data.ledger import audit_run
from slime_like.data.tokenizer import load_tokenizer
from slime_like.errors import SlimeLikeError
from slime_like.examples.tiny_model import without_progress_bar
from slime_like.models.dimensions import ModelDimensions
from slime_like.observability.metrics import read_metrics
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.system.words import counted

_START_S, _REST_S, _STOP_S = 900.0, 1800.0, 120.0
_LOOK_EVERY_S = 0.2
_PREFIX = "slime-like: "
_CODE = re.compile(r"\[[a-z][a-z.-]+\]$")

Outcome = tuple[bool | None, str, str]
"""Sound, unsound or neither; what was tried; what was found."""


class SmallRun:
    """``slime-like train`` on ``directory``/recipe.yaml, twice."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory

    def stages(self) -> Iterator[Outcome]:
        """What was tried, in this order; a stage without which the rest means nothing is the last one."""
        began = time.monotonic()
        problem = self._until_first_checkpoint()
        yield problem is None, "first steps", problem or f"a checkpoint after {time.monotonic() - began:.0f} s"
        if problem is not None:
            yield None, "not tried", "resume, scoring, evaluation and export, which need a checkpoint"
            return
        began = time.monotonic()
        problem = self._resumed()
        what = f"killed, resumed, and finished {self._config.steps} steps in {time.monotonic() - began:.0f} s"
        yield problem is None, "resume", problem or what
        if not self._config.supervised:
            yield from self._rewards()
        if problem is None:
            yield from self._books()
            yield self._export()

    def _until_first_checkpoint(self) -> str | None:
        """Run until there is a checkpoint, and kill the driver; what went wrong instead."""
        latest = self._config.run_dir / "checkpoints" / "latest"
        with self._started("first.log") as (process, log):
            end = time.monotonic() + _START_S
            while not latest.exists():
                raise_if_interrupted()
                if process.poll() is not None:
                    return _last_words(log, process.returncode)
                if time.monotonic() > end:
                    return f"no checkpoint after {_START_S:.0f} s; see {log}"
                time.sleep(_LOOK_EVERY_S)
            process.kill()
            process.wait(_STOP_S)
        return None

    def _resumed(self) -> str | None:
        with self._started("second.log") as (process, log):
            end = time.monotonic() + _REST_S
            while process.poll() is None:
                raise_if_interrupted()
                if time.monotonic() > end:
                    return f"not finished after {_REST_S:.0f} s; see {log}"
                time.sleep(_LOOK_EVERY_S)
            return None if process.returncode == 0 else _last_words(log, process.returncode)

    def _started(self, name: str) -> "_Child":
        return _Child(["train", str(self._directory / "recipe.yaml")], self._directory / name)

    def _rewards(self) -> Iterator[Outcome]:
        """What the steps' figures say of rewards and lengths."""
        records = read_metrics(self._config.run_dir / "metrics.jsonl")
        steps = [record for record in records if "rollout/groups" in record]
        names = ("ref_actor_rewards/scoring_failures", "evaluation/scoring_failures")
        failed = sum(int(record.get(name, 0)) for record in records for name in names)
        if failed:
            said = [line for line in self._notes() if "scoring failed" in line]
            yield False, "scoring", f"{counted(failed, 'response')} failed: {said[0] if said else 'see driver.log'}"
        else:
            yield True, "scoring", f"none failed in {counted(len(steps), 'step')}"
        if all(step["rollout/zero_spread_groups"] == step["rollout/groups"] for step in steps):
            text = "no group's rewards differ: a random model shows nothing of whether rewards tell responses apart"
            yield None, "scoring", text
        if all(step["rollout/truncated_fraction"] == 1 for step in steps):
            yield None, "lengths", "every response was cut off, as a random model's are"

    def _notes(self) -> list[str]:
        log = self._config.run_dir / "driver.log"
        return log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []

    def _books(self) -> Iterator[Outcome]:
        """Every step once, every evaluation, and every group accounted for."""
        records = read_metrics(self._config.run_dir / "metrics.jsonl")
        trained = [r["step"] for r in records if "train_actor_training/loss" in r]
        wanted = list(range(1, self._config.steps + 1))
        if sorted(set(trained)) != wanted:
            yield False, "metrics", f"steps {sorted(set(trained))} were logged, not {wanted}"
        if self._config.evaluation.files:
            evaluated = sorted({r["step"] for r in records if "evaluation/accuracy" in r})
            yield evaluated == [0, self._config.steps], "evaluation", f"after steps {', '.join(map(str, evaluated))}"
        if not self._config.supervised:
            audit = audit_run(self._config.run_dir)
            text = f"{counted(audit.issued, 'group')} issued, {audit.trained} trained"
            yield not audit.problems, "ledger", "; ".join([text, *audit.problems])

    def _export(self) -> Outcome:
        """The exported model as a user would load it."""
        path = self._config.run_dir / "hf"
        try:
            with without_progress_bar():
                model = transformers.AutoModelForCausalLM.from_pretrained(path)
            load_tokenizer(path)
            same = ModelDimensions.from_checkpoint(path) == ModelDimensions.from_checkpoint(self._config.model.path)
        except (OSError, ValueError, KeyError, SlimeLikeError) as error:
            return False, "export", f"{path} cannot be loaded ({type(error).__name__}: {error})"
        return same, "export", f"transformers loads {path}, {type(model).__name__}"


class _Child:
    """A command of ``slime-like`` whose output goes to a log. Context manager: outside, it has ended."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log
        self._command = [sys.executable, "-m", "slime_like.commands.child_main", str(os.getpid()), *arguments]

    def __enter__(self) -> tuple["subprocess.Popen[bytes]", Path]:
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        return self._process, self._log

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_STOP_S)


def _last_words(log: Path, code: int) -> str:
    """The command's error, or the problems that it lists; each ends with its code."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    listed = [line.removeprefix("  - ") for line in lines if line.startswith("  - ") and _CODE.search(line)]
    said = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX) and _CODE.search(line)]
    return "; ".join(listed or said) or f"ended with exit code {code}; see {log}"
