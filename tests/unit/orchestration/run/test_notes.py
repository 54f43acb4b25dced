"""Notes before the first step."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.fsdp.optimizer import learning_rate
from slime_like.config import DataConfig, RunConfig
from slime_like.data.prompts import PromptSource
from slime_like.examples.tiny_model import byte_tokenizer, make_tiny_model
from slime_like.orchestration.run.opening import critic_note, data_notes, router_note, settings_notes
from slime_like.orchestration.trainer.checkpoint import Checkpoint


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"run_dir": Path("run"), "model": {"path": Path("model")}, "steps": 5, **changes})


@pytest.mark.parametrize(
    ("rows", "dropped", "begin"),
    [
        (8, 0, []),
        (7, 0, ["7 rows for rollout.prompts_per_step=8: "]),
        (90, 10, ["10 of 100 prompts (10%) are longer than data.max_prompt_tokens=1024 "]),
        (1, 5, ["5 of 6 prompts (83%) are longer than ", "1 row for "]),
    ],
)
def test_prompts_that_are_left_out_or_repeated(rows: int, dropped: int, begin: list[str]) -> None:
    prompts: Any = SimpleNamespace(num_rows=rows, dropped_prompts=dropped, notes=[])
    notes = list(data_notes(1024, 8, prompts))
    assert len(notes) == len(begin) and all(map(str.startswith, notes, begin))


def test_held_out_prompts_that_are_trained_on(tmp_path: Path) -> None:
    for name, numbers in (("train", range(8)), ("seen", (1, 2, 2, 9)), ("new", (10, 11))):
        rows = (json.dumps({"prompt": f"{number}+1=", "answer": "x"}) for number in numbers)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    sources = [
        PromptSource([tmp_path / f"{name}.jsonl"], byte_tokenizer(), DataConfig(shuffle=False), seed=0)
        for name in ("train", "seen", "new")
    ]
    held_out = {name: source.next(source.num_rows) for name, source in zip("ab", sources[1:], strict=True)}
    (note,) = data_notes(1024, 4, sources[0], held_out)
    assert note.startswith("2 of 3 held-out prompts of a ")


def test_a_critic_that_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "step" / "critic").mkdir(parents=True)
    plain, whole = (Checkpoint(path, 1, {}) for path in (tmp_path, tmp_path / "step"))
    assert critic_note(whole, False).startswith("the checkpoint's critic is left out")
    assert [critic_note(whole, True), critic_note(plain, False), critic_note(None, False)] == [""] * 3


SAVING: dict[str, Any] = {"checkpoint": {"every": 2, "keep": 1}}


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (SAVING, 0),
        ({**SAVING, "algorithm": {"loss": "gspo"}}, 0),  # its bounds are its own
        ({}, 1),  # a run of five steps and a single checkpoint
        ({"steps": 1}, 0),
        ({"checkpoint": {"every": 0}}, 0),
        ({**SAVING, "algorithm": {"loss": "sft"}, "evaluation": {"files": ["eval.jsonl"]}}, 1),  # it starts no engines
    ],
)
def test_settings_that_lose_something(settings: dict[str, Any], count: int) -> None:
    assert len(list(settings_notes(config(**settings, rollout={"prompts_per_step": 4})))) == count


@pytest.mark.parametrize(("warmup", "reported"), [(0, False), (39, False), (40, False), (41, True)])
def test_a_warm_up_that_outlasts_the_run(warmup: int, reported: bool) -> None:
    """The run has 40 updates."""
    algorithm = {"minibatches": 4, "epochs": 2}
    found = config(trainer={"optimizer": {"warmup_steps": warmup}}, algorithm=algorithm)
    assert any("never reaches" in note for note in settings_notes(found)) == reported
    assert (
        max(learning_rate(found.trainer.optimizer, found.total_updates, update) for update in range(1, 41))
        < found.trainer.optimizer.lr
    ) == reported


def test_whether_routers_biases_move(tmp_path: Path) -> None:
    for family in ("qwen3_moe", "deepseek_v3"):
        make_tiny_model(tmp_path / family, family, num_hidden_layers=2)
    assert router_note(tmp_path / "qwen3_moe", 0.0) == ""
    notes = [router_note(tmp_path / "deepseek_v3", rate) for rate in (0.0, 1e-3)]
    assert "are frozen (trainer.router_bias_rate=0)" in notes[0] and "move" in notes[1] and "=0.001" in notes[1]
