"""`slime-like convert` before anything is read: arguments, rejections, exit codes."""

import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime_like.checks.check import check, require_valid
from slime_like.checks.definition import CONVERSION
from slime_like.checks.run_files import checkpoint_problem
from slime_like.commands.command import find_weights
from slime_like.commands.convert import size_in_bytes
from slime_like.commands.main import main
from slime_like.commands.root import run
from slime_like.config import ModelConfig, RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.models.converted import write_description
from slime_like.weights.adapter import adapter_facts
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face directory without weights, a converted checkpoint, a run's checkpoint, and another directory."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    write_checkpoint(tmp_path / "meg" / "model")
    (tmp_path / "meg" / "trainer").mkdir()
    write_description(tmp_path / "meg", {})
    (tmp_path / "step-1" / "trainer").mkdir(parents=True)
    (tmp_path / "step-1" / "state.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep me")
    return tmp_path


def test_a_converted_checkpoint_has_its_model_with_it(root: Path) -> None:
    assert find_weights(Path("meg"), []) == (("--model.path", "meg/model"), root / "meg" / "trainer")
    assert find_weights(Path("meg"), ["--model.path", "model"]) == ((), root / "meg" / "trainer")


REFUSED: list[tuple[str, str]] = [
    ("to-megatron meg out", "model.path"),
    ("to-megatron model notes", "output-not-empty"),
    ("to-megatron model notes --force", "output-unusable"),
    ("to-megatron model model --force", "output-unusable"),
    ("to-hf meg . --force", "output-unusable"),
    ("to-megatron model notes/mine.txt", "output-unusable"),
    ("to-megatron model out --model.path model", "flag-excluded"),
    ("to-megatron model out --trainer.parallel.tensor 3", "trainer.layout"),
    ("to-megatron model out --model.dtype float16", "flag-excluded"),
    ("to-hf model out", "wrong-checkpoint"),
    ("to-hf meg/trainer out", "wrong-checkpoint"),
    ("check notes meg", "wrong-checkpoint"),
]


@pytest.mark.parametrize(("arguments", "code"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refusals(root: Path, rejects: Rejects, arguments: str, code: str) -> None:
    with rejects(ConfigError, code):
        run(["convert", *arguments.split()])
    assert not (root / "out").exists() and (root / "notes" / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 500_000_000), ("1.5GiB", 1_610_612_736), ("2 gb", 2_000_000_000), ("123456", 123_456)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size
    with pytest.raises(ArgumentTypeError):
        size_in_bytes(f"{text}x")


def test_check_reports_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The directories may be of any family, and need no config.json."""
    tensors = {"one.weight": torch.randn(4, 3), "two.bias": torch.randn(5)}
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        changed = {"two.bias": tensors["two.bias"] + 1} if name == "c" else {}
        save_file(tensors | changed, tmp_path / name / "model.safetensors")
    assert main(["convert", "check", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "the same: 2 tensors, bit for bit\n"
    assert main(["convert", "check", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    out = capsys.readouterr().out
    assert out == "two.bias: values: 5 of 5 differ, by at most 1\ndifferent: 1 of 2 tensors\n"


def test_weights_to_start_from_must_be_a_checkpoint(root: Path, rejects: Rejects) -> None:
    def started_from(weights: str, backend: str) -> RunConfig:
        flags = f"--run_dir r --model.path model --model.weights {weights} --trainer.backend {backend}"
        return load_config(None, flags.split())

    assert check(started_from("meg", "megatron"), CONVERSION) == []
    for weights, backend in (("notes", "megatron"), ("meg", "fsdp")):
        with rejects(ConfigError, "model.weights") as caught:
            require_valid(started_from(weights, backend), CONVERSION)
        assert [problem.field for problem in caught.value.problems] == ["model.weights"]


def test_a_checkpoint_that_does_not_name_its_backend_is_accepted(tmp_path: Path) -> None:
    for state in (None, "{", "[]", '{"step": 1}'):
        if state is not None:
            (tmp_path / "state.json").write_text(state)
        assert checkpoint_problem(tmp_path, ModelConfig(path=tmp_path), "fsdp", "resume") is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rank": 2}, "rank 4 (now 2)"),
        ({"alpha": 7.0}, "alpha 6.0 (now 7.0)"),
        ({"targets": "q_proj"}, "targets ['all-linear'] (now ['q_proj'])"),
        ({"rank": None, "alpha": 32.0}, "rank 4 (now none)"),
        ({}, "base"),
    ],
)
def test_a_checkpoint_of_other_factors_or_another_base_is_rejected(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """So is one of factors for a run without, and one of whole weights for a run with factors."""
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(9)}, weights)
    wrote = ModelConfig(path=tmp_path, lora={"rank": 4, "alpha": 6.0})
    (tmp_path / "state.json").write_text(json.dumps({"backend": "megatron", "adapter": adapter_facts(wrote)}))
    assert checkpoint_problem(tmp_path, wrote, "megatron", "resume") is None
    now = ModelConfig(path=tmp_path, lora={"rank": 4, "alpha": 6.0, **changes})
    if not changes:
        save_file({"a": torch.ones(9)}, weights)
    assert named in str(checkpoint_problem(tmp_path, now, "megatron", "resume"))
    weights.unlink()  # its fingerprint is unknown
    assert checkpoint_problem(tmp_path, wrote, "megatron", "resume") is None
    (tmp_path / "state.json").write_text("{}")
    assert "rank none (now 4)" in str(checkpoint_problem(tmp_path, wrote, "megatron", "resume"))


@pytest.mark.parametrize("more", ["", "--evaluation.files rows.jsonl --model.weights meg"])
def test_eval_needs_files_and_weights_that_engines_load(root: Path, rejects: Rejects, more: str) -> None:
    (root / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    flags = f"--run_dir run --model.path model --data.max_prompt_tokens 64 {more}"
    with rejects(ConfigError, "evaluation"):
        run(["eval", *flags.split()])
    assert not (root / "run").exists()
