"""`slime-like convert` before anything is read: what it is given, what it refuses, how it ends."""

import json
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime_like.checks.check import check
from slime_like.checks.needs import CONVERSION
from slime_like.commands.convert import size_in_bytes, size_text
from slime_like.commands.main import main
from slime_like.commands.weights_source import find_weights
from slime_like.config.reading.load import load_config
from tests.unit.checks.checkpoint import write_checkpoint


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face directory without weights, something converted, a run's checkpoint, something else."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    write_checkpoint(tmp_path / "meg" / "model")
    (tmp_path / "meg" / "trainer").mkdir()
    (tmp_path / "meg" / "conversion.json").write_text(json.dumps({"format": 1}))
    (tmp_path / "step-1" / "trainer").mkdir(parents=True)
    (tmp_path / "step-1" / "state.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep me")
    return tmp_path


def test_a_converted_checkpoint_has_its_model_with_it(root: Path) -> None:
    source = find_weights(Path("meg"), [])
    assert source.flags == ("--model.path", "meg/model") and source.weights == root / "meg" / "trainer"
    assert find_weights(Path("meg"), ["--model.path", "model"]).flags == ()


REFUSED: list[tuple[list[str], str]] = [
    (
        ["to-megatron", "model"],
        "HF_DIR and OUT are missing; they come first: slime-like convert to-megatron",
    ),
    (["to-hf", "--max-shard-size", "1GB", "meg", "out"], "CHECKPOINT and OUT are missing; they come first"),
    (["check", "model"], "A and B are missing"),
    (["to-megatron", "nowhere", "out"], "nowhere is no directory"),
    (
        ["to-megatron", "meg", "out"],
        "HF_DIR=meg is a training checkpoint already (what `slime-like convert to-megatron` wrote); train from it with "
        "--model.weights meg, or make a Hugging Face directory of it: slime-like convert to-hf meg OUT",
    ),
    (["to-megatron", "meg/trainer", "out"], "HF_DIR=meg/trainer is a training checkpoint already (what `slime-like"),
    (["to-megatron", "step-1", "out"], "HF_DIR=step-1 is a training checkpoint already (a run's); train from it with"),
    (["to-megatron", "notes", "out"], "notes: no config.json there; give a Hugging Face"),
    (["to-megatron", "model", "notes"], "OUT=notes is not empty; give another directory, or --force to replace"),
    (["to-megatron", "model", "notes", "--force"], "OUT=notes is neither a converted checkpoint nor a model"),
    (["to-megatron", "model", "model", "--force"], "OUT=model holds what is to be converted; give another directory"),
    (["to-hf", "meg", ".", "--force"], "OUT=. holds what is to be converted"),
    (["to-megatron", "model", "notes/mine.txt"], "OUT=notes/mine.txt"),
    (["to-megatron", "model", "out", "--model.path", "model"], "--model.path: HF_DIR=model is the model already"),
    (["to-megatron", "model", "out", "--trainer.parallel.tensor", "3"], "trainer.parallel.tensor=3 does not divide"),
    (["to-megatron", "model", "out", "--trainer.paralel.tensor", "3"], "--trainer.paralel.tensor is unknown"),
    (["to-megatron", "model", "out", "more"], "more is one argument too many; HF_DIR and OUT are all"),
    (["to-megatron", "model", "out", "--model.dtype", "float16"], "the type that is written is --dtype"),
    (["to-hf", "model", "out"], "CHECKPOINT=model is a Hugging Face directory already"),
    (["to-hf", "notes", "out"], "CHECKPOINT=notes is neither a Hugging Face directory"),
    (["to-hf", "meg/trainer", "out"], "CHECKPOINT=meg/trainer is the trainer/ of a checkpoint; give meg"),
    (["check", "notes", "meg"], "CHECKPOINT=notes is neither a Hugging Face directory"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED])
def test_refusals(root: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error
    assert not (root / "out").exists() and (root / "notes" / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    "options", [["--max-shard-size", "big"], ["--max-shard-size", "1"], ["--workers", "0"], ["--dtype", "int8"]]
)
def test_options_that_make_no_sense_are_refused(root: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["convert", "to-megatron", "model", "out", *options])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 500_000_000), ("1.5GiB", 1_610_612_736), ("2 gb", 2_000_000_000), ("123456", 123_456)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size
    with pytest.raises(ArgumentTypeError, match="is not a size; give one such as 500MB"):
        size_in_bytes(f"{text}x")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(500, "0.50 KB"), (1_999_000, "2.00 MB"), (999_000_000, "999.00 MB"), (1_000_000_000, "1.00 GB")],
)
def test_sizes_are_given_in_a_fitting_unit(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


def test_help_of_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    for what, text in (
        ([], "checkpoints from disk to disk"),
        (["to-megatron"], "--max-shard-size"),
        (["to-hf"], "--allow-nan"),
        (["check"], "Exit code 0 if they are the same, 1 if they differ"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["convert", *what, "--help"])
        assert caught.value.code == 0
        assert text in capsys.readouterr().out


def test_check_reports_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of any family, and without a config.json."""
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


def test_weights_to_start_from_must_be_a_checkpoint(root: Path) -> None:
    def problems(weights: str) -> list[str]:
        flags = ["--run_dir", "r", "--model.path", "model", "--model.weights", weights]
        return check(load_config(None, flags), CONVERSION)

    assert problems("meg") == []
    assert problems("notes") == [
        f"model.weights={root / 'notes'} is no checkpoint (no trainer/ in it); give what `slime-like convert "
        "to-megatron` wrote, or a run's checkpoints/step-N"
    ]


def test_engines_are_not_evaluated_with_weights_that_they_do_not_load(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "rows.jsonl").write_text("{}\n")
    flags = [
        "--run_dir",
        "run",
        "--model.path",
        "model",
        "--data.train",
        "rows.jsonl",
        "--data.max_prompt_tokens",
        "64",
    ]
    assert main(["eval", *flags, "--evaluation.files", "rows.jsonl", "--model.weights", "meg"]) == 2
    assert "they load model.path; make a Hugging Face directory of it with" in capsys.readouterr().err
