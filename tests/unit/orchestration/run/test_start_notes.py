"""What is said before the first step."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.fsdp.optimizer import learning_rate
from slime_like.config import DataConfig, RunConfig
from slime_like.data.prompts import PromptSource
from slime_like.errors import ConfigError
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.models.dimensions import ModelDimensions
from slime_like.orchestration.run.start_notes import (
    algorithm_notes,
    checkpoint_notes,
    data_notes,
    held_out_notes,
    memory_notes,
    processor_notes,
)
from tests.unit.checks.checkpoint import write_checkpoint


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
    prompts: Any = SimpleNamespace(num_rows=rows, dropped_prompts=dropped)
    notes = list(data_notes(config(rollout={"prompts_per_step": 8}), prompts))
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
    (note,) = held_out_notes(sources[0], held_out)
    assert note.startswith("2 of 3 held-out prompts of a ")


@pytest.mark.parametrize(
    ("algorithm", "count"),
    [
        ({}, 0),
        ({"loss": "gspo"}, 1),
        ({"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, 0),
    ],
)
def test_bounds_that_clip_nothing(algorithm: dict[str, Any], count: int) -> None:
    assert len(list(algorithm_notes(config(algorithm=algorithm, rollout={"prompts_per_step": 4})))) == count


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 1), ({"steps": 1}, 0), ({"checkpoint": {"every": 0}}, 0), ({"checkpoint": {"every": 2, "keep": 1}}, 0)],
)
def test_runs_that_may_lose_every_step_say_so(settings: dict[str, Any], count: int) -> None:
    assert len(list(checkpoint_notes(config(**settings)))) == count


@pytest.mark.parametrize(("warmup", "reported"), [(0, False), (39, False), (40, False), (41, True)])
def test_a_warm_up_that_outlasts_the_run(warmup: int, reported: bool) -> None:
    """40 updates; that which ends with the last one has brought the learning rate to its value."""
    algorithm = {"minibatches": 4, "epochs": 2}
    found = config(trainer={"optimizer": {"warmup_steps": warmup}}, algorithm=algorithm)
    assert any("never reaches" in note for note in algorithm_notes(found)) == reported
    assert (max(learning_rate(found, update) for update in range(1, 41)) < found.trainer.optimizer.lr) == reported


def test_bfloat16_without_its_instructions() -> None:
    for dtype, capability, count in (("bfloat16", "avx2", 1), ("bfloat16", "amx_bf16", 0), ("float32", "avx2", 0)):
        found = config(model={"path": "m", "dtype": dtype})
        assert len(list(processor_notes(found, {capability: True, "avx512_bf16": False}))) == count


def test_more_memory_than_is_free(tmp_path: Path) -> None:
    """Of a rank's process 400 MiB, and per parameter what AdamW in mixed precision keeps: 2 + 4 + 12 bytes."""
    sizes = ModelDimensions.from_checkpoint(write_checkpoint(tmp_path))
    process, parameters = 400 * 2**20, sizes.num_parameters
    four: dict[str, Any] = {"trainer": {"parallel": {"data": 2, "tensor": 2}}, "rollout": {"num_engines": 3}}
    sft: dict[str, Any] = {"algorithm": {"loss": "sft"}, "model": {"path": Path("model"), "dtype": "float32"}}
    for changes, needed in (
        ({}, 2 * process + 20 * parameters),
        (four, 7 * process + (2 * 6 + 12 + 3 * 2) * parameters),
        (sft, process + 16 * parameters),
    ):
        assert len(list(memory_notes(config(**changes), sizes, needed - 1))) == 1
        assert list(memory_notes(config(**changes), sizes, needed)) == []
    with pytest.raises(ConfigError) as caught:
        list(memory_notes(config(**four), sizes, 30 * parameters - 1))
    assert [problem.code for problem in caught.value.problems] == ["memory"]
