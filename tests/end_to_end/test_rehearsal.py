"""``slime-like rehearse`` finds each fault of a recipe in its stage, and none in a sound recipe."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from slime_like.commands.main import main
from slime_like.config.reading.load import load_config
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.system.processes import child_command
from slime_like.verification import rehearsal
from slime_like.verification.rehearsal import RANKS, small_recipe
from tests.conftest import Tiny
from tests.support.forked_command import ForkedCommand, worker_server

ROOT = Path(__file__).parents[2]
REWARD = """
from pathlib import Path
calls = 0

def judge(prompt, response, answer):
    global calls
    calls += 1
    if calls == {fails}:
        raise LookupError("one call")
    with Path({train!r}).open("a") as file:
        file.write('{{"prompt": "1+2=", "answer": "3"}}\\n' * (calls == {appends}))
    return float(len(response) % 3)
"""
GAME = """
from slime_like.interfaces import Step

class Game:
    def reset(self, task):
        return 0

    def step(self, state, response):
        return Step(state + 1, "again", reward=0.5) if state == 0 else {}["no such move"]
"""
STAGES = ["settings", "first steps", "resume", "metrics", "scoring", "ledger", "export"]


class Recipe:
    """The quickstart's recipe with a separate model and rows, and additional flags of a test."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.train = directory, directory / "train.jsonl"
        make_tiny_model(directory / "model")
        held_out = directory / "held.jsonl"
        self._write(self.train, [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(48)])
        self._write(held_out, [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)])
        places = {"model.path": directory / "model", "data.train": self.train, "evaluation.files": held_out}
        self.flags = [text for name, path in places.items() for text in (f"--{name}", str(path))]
        self.flags += ["--rollout.engine", "transformers", "--trainer.optimizer.warmup_steps", "0"]

    def _write(self, path: Path, rows: list[dict[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def code(self, code: str) -> str:
        (self.directory / "mine.py").write_text(code)
        return f"{self.directory}/mine.py"

    def judge(self, fails: int = 0, appends: int = 0) -> None:
        file = self.code(REWARD.format(train=str(self.train), fails=fails, appends=appends))
        self.flags += ["--reward.functions", json.dumps([{"name": f"{file}:judge"}]), "--reward.workers", "1"]

    def play(self) -> None:
        self.flags += ["--rollout.environment.name", f"{self.code(GAME)}:Game", "--rollout.max_new_tokens", "60"]
        self.flags += ["--reward.functions", "[{name: environment}]", "--rollout.environment.max_turn_tokens", "8"]

    def rehearse(self, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], dict[str, str]]:
        """Return the exit code, the stages in order, and the text of each stage that found a fault."""
        out = ["--directory", str(self.directory / "rehearsal"), "--small_steps", "2"]
        code = main(["rehearse", str(ROOT / "configs" / "quickstart.yaml"), *self.flags, *out])
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("ok ", "FOUND "))]
        stages = {line[7:18].strip(): line[20:] for line in lines if line.startswith("FOUND")}
        return code, [line[7:18].strip() for line in lines], stages


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Return the recipe. Its runs are forked, which takes a third of the time."""

    def fork(command: list[str], stderr: IO[bytes], **_: object) -> ForkedCommand:
        assert command[:4] == child_command([])
        return ForkedCommand(worker_server(), command[4:], Path(os.devnull), Path(stderr.name))

    monkeypatch.setattr(rehearsal, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": fork}))
    return Recipe(tmp_path)


def test_a_run_is_killed_resumed_and_exported_and_a_failing_reward_is_found(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.judge(fails=8)
    code, stages, faults = recipe.rehearse(capsys)
    assert (code, stages) == (1, STAGES), faults
    assert faults.keys() == {"scoring"} and re.match(r"[1-9] responses? failed", faults["scoring"])


def test_settings_are_checked_at_their_real_size(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.flags += ["--trainer.parallel.tensor", "8"]
    code, stages, _ = recipe.rehearse(capsys)
    assert (code, stages) == (2, [])


FACTORS = ["--model.lora.rank", "4", "--algorithm.kl.coef", "0.01", "--checkpoint.async_save", "true"]
FAULTS: dict[str, tuple[Callable[[Recipe], object], dict[str, str]]] = {
    "data that change before the resume": (lambda r: r.judge(appends=6), {"resume": "data-changed"}),
    "an environment that raises in its second turn": (lambda r: r.play(), {"scoring": "failed"}),
    "nothing": (lambda r: None, {}),
    "nothing with low-rank factors": (lambda r: r.flags.extend(FACTORS), {}),
}


@pytest.mark.acceptance
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_its_stage(fault: str, recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    put, expected = FAULTS[fault]
    put(recipe)
    code, stages, faults = recipe.rehearse(capsys)
    assert expected or stages == STAGES
    assert (code, faults.keys()) == (int(bool(expected)), expected.keys()), faults
    assert all(words in faults[stage] for stage, words in expected.items())


def test_a_recipe_without_held_out_rows_stays_without(tiny: Tiny, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["--evaluation.files", "[]", "--evaluation.every", "0"])
    small = small_recipe(config, tiny.model, tmp_path / "run", 3)
    assert (small.evaluation.files, small.evaluation.every) == ((), 0)


def test_a_rehearsal_calls_nobody_and_opens_no_port(tiny: Tiny, tmp_path: Path) -> None:
    flags = ["--health.webhook", "http://127.0.0.1:9/", "--health.stop_on", "[disk]"]
    flags += ["--logging.prometheus_port", "9400"]
    small = small_recipe(load_config(ROOT / "configs" / "quickstart.yaml", flags), tiny.model, tmp_path / "run", 3)
    assert (small.health.webhook, small.health.stop_on, small.logging.prometheus_port) == (None, (), None)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_small_recipes_keep_their_method_and_axes(name: str, tiny: Tiny, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml", [])
    small = small_recipe(config, tiny.model, tmp_path / "run", 3)
    assert small.trainer.parallel.world_size <= RANKS
    for axis in ("tensor", "pipeline", "context", "expert"):
        assert getattr(small.trainer.parallel, axis) == min(2, getattr(config.trainer.parallel, axis))
    for kept in ("loss", "advantage", "kl", "importance"):
        assert getattr(small.algorithm, kept) == getattr(config.algorithm, kept)
    assert small.algorithm.reduction.name == config.algorithm.reduction.name
    assert small.data == config.data and small.reward.functions == config.reward.functions
    assert small.cluster.placement == config.cluster.placement and small.rollout.engine == config.rollout.engine
