"""The command line: exit codes, standard output and standard error."""

import json
import os
import re
import shlex
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from slime_like.checks.check import check
from slime_like.commands.command import Command
from slime_like.commands.main import main
from slime_like.commands.root import COMMANDS, run
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError, DataError, Problem, RewardError, TrainerError
from slime_like.evaluate import engines_alone
from slime_like.observability.tables import HeldOutSample
from slime_like.orchestration.cluster.bundles import pieces_of
from slime_like.orchestration.rollout.evaluation import EvaluationResult
from tests.conftest import Tiny
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import sound_flags

FIGURES = {"accuracy": 0.5, "num_responses": 2.0, "response_length_mean": 3.0, "truncated_fraction": 0.0}


def leaves(code: int, argv: list[str]) -> None:
    """Require the exit of argparse, for help and for wrong arguments."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == code


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that passes every check in the current directory."""
    monkeypatch.chdir(tmp_path)
    return ["train", *sound_flags(tmp_path)]


Train = Callable[..., tuple[int, str, list[RunConfig]]]


@pytest.fixture
def train(sound: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    """Run a sound command with more flags, whose training raises an error. Return the exit code, standard error, and
    the configurations that training received."""

    def run_it(error: BaseException, *flags: str) -> tuple[int, str, list[RunConfig]]:
        seen: list[RunConfig] = []

        def loop(config: RunConfig) -> None:
            seen.append(config)
            raise error

        monkeypatch.setitem(sys.modules, "slime_like.train", SimpleNamespace(train=loop))
        code = main([*sound, *flags])
        printed = capsys.readouterr()
        assert printed.out == ""
        return code, printed.err, seen

    return run_it


DISGUISED = ImportError("cannot import half a module")  # some libraries turn an interrupt into another error
DISGUISED.__context__ = KeyboardInterrupt()
ENDS: list[tuple[BaseException, int, str]] = [
    (TrainerError("rank 3, step: NaN loss"), 1, "slime-like: rank 3, step: NaN loss [trainer]\n"),
    (DataError("a.jsonl:3: no prompt"), 2, "slime-like: a.jsonl:3: no prompt [data]\n"),
    (ConfigError(["a=1 is wrong"]), 2, "slime-like: a=1 is wrong [config]\n"),
    (ConfigError(["a=1", Problem("b", "b=2")]), 2, "slime-like: 2 problems\n  - a=1 [config]\n  - b=2 [b]\n"),
    (KeyboardInterrupt(), 130, "slime-like: interrupted\n"),
    (DISGUISED, 130, "slime-like: interrupted\n"),
]


def test_closed_output_is_not_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """For example in ``slime-like report RUN_DIR | head``."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        monkeypatch.setattr("slime_like.commands.main._imported", lambda: lambda argv: print("figures") or 0)
        assert main([]) == 141
    assert capsys.readouterr().err == ""


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(argv: object) -> int:
        raise ModuleNotFoundError("No module named 'megatron.core'", name="megatron.core")

    monkeypatch.setattr("slime_like.commands.main._imported", lambda: run)
    assert main([]) == 1
    printed = capsys.readouterr().err
    assert "'megatron.core'" in printed and printed.endswith(" [package-missing]\n")


# Flags that a training run rejects and an evaluation ignores.
NOT_EVALUATED = [
    "--algorithm.loss sft", "--debug.load_rollouts nowhere", "--logging.wandb true", "--rollout.top_p 0.5",
    "--rollout.num_engines 2 --cluster.placement colocated", "--trainer.parallel.tensor 3",
    "--data.train missing.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("flags", [flags.split() for flags in NOT_EVALUATED], ids=NOT_EVALUATED)
def test_eval_ignores_what_only_training_uses(
    tmp_path: Path, sound: list[str], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no run directory either, because it leaves nothing behind."""
    (tmp_path / "eval.jsonl").write_text("{}\n")
    seen: list[tuple[RunConfig, bool]] = []

    def evaluate(config: RunConfig, temporary: bool, keep_all: bool) -> EvaluationResult:
        assert not keep_all
        seen.append((config, temporary))
        return EvaluationResult(FIGURES, {}, [])

    monkeypatch.setattr("slime_like.evaluate.evaluate", evaluate)
    needed = ["--model.path", "model", "--evaluation.files", "eval.jsonl", "--data.max_prompt_tokens", "512"]
    assert main(["eval", *needed, *flags]) == 0
    [(config, temporary)] = seen
    assert temporary and not config.run_dir.exists()
    assert pieces_of(engines_alone(config), with_trainers=False).bundles == [1] * config.rollout.num_engines
    assert main(["eval", *needed, *flags, "--run_dir", "kept"]) == 0
    assert seen[1][0].run_dir == tmp_path / "kept" and not seen[1][1]
    if "sft" not in flags:  # a model that was trained on demonstrations can be sampled
        assert main(["train", *needed, "--data.train", "eval.jsonl", "--run_dir", "run", *flags]) == 2


def test_eval_writes_every_response_after_it_has_printed_the_accuracy(
    tmp_path: Path, sound: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The accuracy is worth more than the file, so it is printed before a failed write."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    samples = [HeldOutSample(name, i, [40, 41], [42], "7", i > 0, "stop") for i, name in enumerate("ab")]
    result = EvaluationResult(FIGURES, {"a": FIGURES, "b": FIGURES}, samples)

    def evaluate(config: RunConfig, temporary: bool, keep_all: bool) -> EvaluationResult:
        return result if keep_all else replace(result, samples=[])

    monkeypatch.setattr("slime_like.evaluate.evaluate", evaluate)
    monkeypatch.setattr(
        "slime_like.evaluate.load_tokenizer", lambda *_: SimpleNamespace(decode=lambda ids, **_: str(ids))
    )
    flags = ["--model.path", "model", "--evaluation.files", "a.jsonl", "b.jsonl", "--output", "out.jsonl"]
    assert main(["eval", *flags]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    shared = {"Prompt": "[40, 41]", "Response": "[42]", "Answer": "7", "Finish Reason": "stop"}
    assert rows == [
        {"Sequence ID": 0, "Dataset": "a", "Success": False, **shared},
        {"Sequence ID": 1, "Dataset": "b", "Success": True, **shared},
    ]
    assert capsys.readouterr().out.endswith("\nresponses: out.jsonl\n")
    monkeypatch.setattr("slime_like.evaluate.whole_file", Mock(side_effect=OSError(28, "No space left on device")))
    assert main(["eval", *flags]) == 1
    printed = capsys.readouterr()
    assert "held-out accuracy: 0.500" in printed.out and "No space left on device" in printed.err


@pytest.mark.parametrize(
    "output", ["model", "no/out.jsonl", "model/../eval.jsonl", "train.jsonl", "mine.yaml", "/dev/null", "/proc/out"]
)
def test_eval_rejects_an_unusable_output(
    tmp_path: Path, sound: list[str], monkeypatch: pytest.MonkeyPatch, rejects: Rejects, output: str
) -> None:
    """It does so before anything starts, because an evaluation may take hours."""
    (tmp_path / "eval.jsonl").write_text("{}\n")
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    monkeypatch.setattr("slime_like.evaluate.evaluate", Mock(side_effect=AssertionError("started")))
    with rejects(ConfigError, "file-unusable"):
        run(["eval", "mine.yaml", *sound[1:], "--evaluation.files", "eval.jsonl", "--output", output])
    assert (tmp_path / "eval.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize(("error", "code", "text"), ENDS, ids=[type(case[0]).__name__ + str(case[1]) for case in ENDS])
def test_a_sentence_and_an_exit_code(tmp_path: Path, train: Train, error: BaseException, code: int, text: str) -> None:
    ended, printed, [config] = train(error)
    assert (ended, printed) == (code, text)
    error.add_note("resume from step 3")
    assert train(error)[1] == f"{text}slime-like: resume from step 3\n"
    assert (config.run_dir, config.data.max_prompt_tokens) == (tmp_path / "run", 512)


UNFORESEEN: list[tuple[Exception, str]] = [
    (ZeroDivisionError("a\nbug"), "ZeroDivisionError: a bug; unexpected error; traceback: "),
    (RuntimeError(), "RuntimeError; unexpected error; traceback: "),
    (ValueError("x" * 9999), f"ValueError: {'x' * 300}; unexpected error"),
    (OSError(28, "No space left on device", "/a/b"), "/a/b: No space left on device; check that path; traceback: "),
]


@pytest.mark.parametrize("has_run_dir", [True, False])
@pytest.mark.parametrize(("error", "text"), UNFORESEEN, ids=[type(case[0]).__name__ for case in UNFORESEEN])
def test_a_bug_is_one_sentence_that_names_the_file_with_its_traceback(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str, has_run_dir: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if has_run_dir:
        (tmp_path / "run").mkdir()
    error.add_note("resume from step 3")
    code, printed, _ = train(error)
    printed, *notes = printed.splitlines()
    assert code == 1 and printed.startswith(f"slime-like: {text}") and set(notes) == {"slime-like: resume from step 3"}
    sentence, _, fault = printed.rpartition(" ")
    assert fault == ("[disk-refused]" if isinstance(error, OSError) else "[unexpected]")
    kept = Path(sentence.rpartition(" traceback: ")[2])
    assert kept.parent == (tmp_path / "run" if has_run_dir else tmp_path)
    assert "in loop\n    raise error\n" in kept.read_text()


def test_the_traceback_of_custom_code_is_saved_too(tmp_path: Path, train: Train) -> None:
    (tmp_path / "run").mkdir()
    problem, kept = "reward function mine:f failed", tmp_path / "run" / "traceback.txt"
    code, printed, _ = train(RewardError(problem, remedy="correct it", users_traceback="Traceback: line 3"))
    assert (code, printed) == (1, f"slime-like: {problem}; correct it; traceback: {kept} [reward]\n")
    assert kept.read_text() == "Traceback: line 3"


# A case for each stage that rejects: a flag, a field, a combination of fields, and checks, all of whose problems count.
STAGES = [
    ("--steps", ["flag-value"]),
    ("--rollout.top_p 5", ["field-range"]),
    ("--rollout.top_k 600", ["fields-conflict"]),
    ("--model.path nowhere", ["model.path"]),
    ("--model.path nowhere --trainer.backend none", ["model.path", "trainer.backend"]),
    ("--rollout.top_k 600 --critic.lam 1 --model.path nowhere", ["fields-conflict", "fields-conflict", "model.path"]),
]


@pytest.mark.parametrize(("flags", "codes"), STAGES)
def test_nothing_starts_with_a_rejected_configuration(
    tmp_path: Path, train: Train, flags: str, codes: list[str]
) -> None:
    ended, printed, seen = train(AssertionError("started"), *flags.split())
    assert ended == 2 and re.findall(r" \[(\S+)\]\n", printed) == codes
    assert printed.count("\n") == (1 if len(codes) == 1 else 1 + len(codes))
    assert seen == [] and not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_bad_held_out_row_is_rejected_before_ray_starts(
    command: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", Mock(side_effect=AssertionError("Ray was started")))
    file = tmp_path / "eval.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2", "answer": "3"}\n')
    assert main([command, *tiny.rl_flags(tmp_path / "run", "--evaluation.files", str(file))[1:]]) == 2
    problem = "this is not valid JSON (the key 'answer' occurs twice in one object)"
    sentence = f"{file}:1: {problem}; give one object per line [not-json]"
    assert capsys.readouterr().err == f"slime-like: {sentence}\n"


NO_COMMAND = [
    "", "polish", "verify everything", "make-tiny-model ''", "report ''", "train ''", "score",
    "convert to-hf --max-shard-size 1GB meg out", "convert to-megatron model out more",
    *(f"convert to-megatron model out {more}"
      for more in ("--max-shard-size 1", "--workers 0")),
]  # fmt: skip


@pytest.mark.parametrize("arguments", NO_COMMAND)
def test_wrong_arguments_are_rejected(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty path does not mean the current directory. Paths come before options."""
    leaves(2, shlex.split(arguments))
    assert ("is empty; give a path" in capsys.readouterr().err) == arguments.endswith("''")


def test_make_tiny_model_writes_it_once(tmp_path: Path, rejects: Rejects, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny"
    command = ["make-tiny-model", str(out), "--family", "qwen2", "--seed", "3"]
    assert main(command) == 0
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    for name in ("model.safetensors", "tokenizer.json", "data/train.jsonl", "data/sft.jsonl", "data/eval.jsonl"):
        assert (out / name).is_file()
    before = (out / "data/train.jsonl").read_bytes()
    model, data, training = capsys.readouterr().out.splitlines()
    assert (model, data) == (f"model: {out}", f"data:  {out}/data")
    label, slime_like, train, *flags = shlex.split(training)
    assert (label, slime_like, train) == ("train:", "slime-like", "train")
    assert check(load_config(None, flags)) == []
    with rejects(ConfigError, "output-not-empty"):
        run(command)
    assert main([*command[:-1], "4", "--force"]) == 0
    assert (out / "data/train.jsonl").read_bytes() != before
    assert len({stat.S_IMODE(file.stat().st_mode) for file in out.iterdir() if file.is_file()}) == 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_shows_options_with_underscores(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*command.name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: slime-like {command.name} ")
    assert re.findall(r"^ +--[a-z]+-\S*", text, re.MULTILINE) == []
