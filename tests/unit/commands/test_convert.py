"""`slime-like convert` before anything is read: what it is given, what it refuses, how it ends."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime_like.checks.check import check, require_valid
from slime_like.checks.definition import CONVERSION
from slime_like.checks.earlier_run import backend_problem
from slime_like.commands.convert import size_in_bytes, size_text
from slime_like.commands.main import main
from slime_like.commands.root import run
from slime_like.commands.weights_source import WeightsSource, find_weights
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.models.converted import write_description
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face directory without weights, something converted, a run's checkpoint, something else."""
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
    assert find_weights(Path("meg"), []) == WeightsSource(("--model.path", "meg/model"), root / "meg" / "trainer")
    assert find_weights(Path("meg"), ["--model.path", "model"]).flags == ()


REFUSED: list[tuple[str, str]] = [
    ("to-megatron model", "argument-missing"),
    ("to-hf --max-shard-size 1GB meg out", "argument-missing"),
    ("check model", "argument-missing"),
    ("to-megatron nowhere out", "model.path"),
    ("to-megatron meg out", "wrong-checkpoint"),
    ("to-megatron meg/trainer out", "wrong-checkpoint"),
    ("to-megatron step-1 out", "wrong-checkpoint"),
    ("to-megatron notes out", "model.path"),
    ("to-megatron model notes", "output-not-empty"),
    ("to-megatron model notes --force", "output-unusable"),
    ("to-megatron model model --force", "output-unusable"),
    ("to-hf meg . --force", "output-unusable"),
    ("to-megatron model notes/mine.txt", "output-unusable"),
    ("to-megatron model out --model.path model", "flag-excluded"),
    ("to-megatron model out --trainer.parallel.tensor 3", "trainer.layout"),
    ("to-megatron model out --trainer.paralel.tensor 3", "field-unknown"),
    ("to-megatron model out more", "argument-unexpected"),
    ("to-megatron model out --model.dtype float16", "flag-excluded"),
    ("to-hf model out", "wrong-checkpoint"),
    ("to-hf notes out", "wrong-checkpoint"),
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
    with pytest.raises(ArgumentTypeError, match="is not a size; give one such"):
        size_in_bytes(f"{text}x")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(500, "0.50 KB"), (1_999_000, "2.00 MB"), (999_000_000, "999.00 MB"), (1_000_000_000, "1.00 GB")],
)
def test_sizes_are_given_in_a_fitting_unit(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


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


def test_weights_to_start_from_must_be_a_checkpoint(root: Path, rejects: Rejects) -> None:
    """Of this backend."""

    def of(weights: str, backend: str) -> RunConfig:
        flags = f"--run_dir r --model.path model --model.weights {weights} --trainer.backend {backend}"
        return load_config(None, flags.split())

    assert check(of("meg", "megatron"), CONVERSION) == []
    for weights, backend in (("notes", "megatron"), ("meg", "fsdp")):
        with rejects(ConfigError, "model.weights") as caught:
            require_valid(of(weights, backend), CONVERSION)
        assert [problem.field for problem in caught.value.problems] == ["model.weights"]


def test_a_training_checkpoint_as_a_model_is_named(root: Path, rejects: Rejects) -> None:
    for path, name in (("step-1", "state.json"), ("step-1/trainer", "state.json"), ("step-1", "config.json")):
        (root / "step-1" / name).write_text("{}")
        with rejects(ConfigError, "model.path"):
            require_valid(RunConfig(run_dir=root, model={"path": root / path}), CONVERSION)


def test_a_checkpoint_that_does_not_say_who_wrote_it_is_believed(tmp_path: Path) -> None:
    for state in (None, "{", "[]", '{"step": 1}', '{"backend": 3}'):
        if state is not None:
            (tmp_path / "state.json").write_text(state)
        assert backend_problem(tmp_path, "fsdp", "resume") is None


def test_engines_are_not_evaluated_with_weights_that_they_do_not_load(root: Path, rejects: Rejects) -> None:
    (root / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    flags = "--run_dir run --model.path model --evaluation.files rows.jsonl --data.max_prompt_tokens 64"
    with rejects(ConfigError, "evaluation"):
        run(["eval", *flags.split(), "--model.weights", "meg"])
