"""Every wrong configuration and data row, given to the command as a user gives it: refused, in the expected words."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime_like.commands.main import main
from slime_like.commands.root import run
from slime_like.config.reading.fields import value_text
from slime_like.errors import ConfigError
from tests.conftest import Tiny
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import sound_flags, write_checkpoint
from tests.unit.checks.test_check import FAULTS
from tests.unit.config.test_load import HEAD, REFUSED
from tests.unit.data.test_prompts import CONFIG, FAULTY

_REFUSED = 2


@dataclass(frozen=True)
class Case:
    """What is given, and the error's code, or the beginning of its sentence, that must come back.

    TMP stands for the test's directory, FILE for the data file.
    """

    flags: list[str]
    code: str = ""
    begins: str = ""
    yaml: str | None = None
    rows: str | None = None


CASES = [
    *(Case(shlex.split(flags), code) for code, faults in FAULTS.items() for flags in faults),
    *(Case(shlex.split(flags), code, yaml=HEAD + text) for text, flags, code, _ in REFUSED),
    *(
        Case([f"--data.{name}={value_text(value)}" for name, value in changes.items()], begins="FILE:", rows=content)
        for content, changes, *_ in FAULTY
    ),
    Case(["--resume", "TMP"], "resume"),
]


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_bad_row_to_evaluate_on_is_refused_as_early_as_one_to_train_on(
    command: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**arguments: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", start)
    file = tmp_path / "eval.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2", "answer": "3"}\n')
    assert main([command, *tiny.rl_flags(tmp_path / "run", "--evaluation.files", str(file))[1:]]) == _REFUSED
    sentence = f"{file}:1: the key 'answer' occurs twice in one object; keep one [repeated-key]"
    assert capsys.readouterr().err == f"slime-like: {sentence}\n"


BAD_ROW, NO_TOKENIZER = "evaluation.rows", "model.tokenizer"
NO_MODEL = "--model.path x --trainer.parallel.sequence true --trainer.target_tokens_per_batch 600"
# what the held-out file has, whether the model is foreign, flags, and the codes of all problems in one list
TOGETHER: list[tuple[str, bool, list[str], list[str]]] = [
    ('{"prompt": "a"}', False, ["--rollout.top_k", "600"], ["rollout.sampling", BAD_ROW]),
    ('{"prompt": "a"}', False, ["--rollout.top_p", "5"], ["field-range"]),
    ("", True, ["--rollout.engine", "x"], ["rollout.engine", "model.family", NO_TOKENIZER, BAD_ROW]),
    ('{"prompt": "a"}', False, NO_MODEL.split(), ["model.path", "trainer.layout", "trainer.token-budget", BAD_ROW]),
    ("{}", False, ["--rollout.max_new_token", "8", "--algorithm.clip_low", "-1"], ["field-unknown", "field-range"]),
]


@pytest.mark.parametrize(("rows", "foreign", "flags", "codes"), TOGETHER, ids=[" ".join(c[2]) for c in TOGETHER])
def test_bad_files_are_reported_together_with_wrong_settings(
    rows: str, foreign: bool, flags: list[str], codes: list[str], tmp_path: Path, rejects: Rejects
) -> None:
    sound, file = sound_flags(tmp_path), tmp_path / "eval.jsonl"
    file.write_text(rows)
    if foreign:
        write_checkpoint(tmp_path / "model", architectures=["GPT2LMHeadModel"], model_type="gpt2")
        (tmp_path / "model" / "tokenizer_config.json").unlink()
    with rejects(ConfigError) as caught:
        run(["train", *sound, "--evaluation.files", str(file), *flags])
    assert [problem.code for problem in caught.value.problems] == codes


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code} {' '.join(case.flags)}"[:60])
def test_bad_input_gets_one_line(
    case: Case, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Ray, a trainer or an engine starts: nothing in here takes long enough to start one.

    Settings are refused without a tokenizer, which would be imported for seconds. The sentences are those of the tests
    that the cases come from.
    """
    if case.rows is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    arguments: list[str] = []
    flags = [flag.replace("TMP", str(tmp_path)) for flag in case.flags]
    file = tmp_path / ("run.yaml" if case.yaml is not None else "rows.jsonl")
    if case.yaml is not None:
        sound = sound_flags(tmp_path)
        file.write_text(case.yaml.replace("/x", sound[1], 1).replace("/y", sound[3], 1))
        arguments.append(str(file))
        flags += [] if "train:" in case.yaml else sound[4:]
    elif case.rows is not None:
        file.write_text(case.rows)
        limits = [f"--data.max_prompt_tokens={CONFIG.max_prompt_tokens}", "--data.shuffle=false"]
        arguments += tiny.rl_flags(tmp_path / "run", "--data.train", str(file), *limits)[1:]
    else:
        arguments += sound_flags(tmp_path)
    assert main(["train", *arguments, *flags]) == _REFUSED
    printed = capsys.readouterr()
    assert printed.out == ""
    begins = case.begins.replace("FILE", str(file)).replace("TMP", str(tmp_path))
    assert printed.err.startswith(f"slime-like: {begins}") and printed.err.count("\n") == 1
    assert printed.err.endswith(f"{case.code}]\n")
    assert case.rows is not None or not (tmp_path / "run").exists()


def test_the_sentence_names_what_is_there_instead(
    tmp_path: Path, rejects: Rejects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's name on the hub, a flag of another framework, a run's directory for its checkpoint, a row's keys."""
    sound, latest = sound_flags(tmp_path), tmp_path / "first" / "checkpoints" / "latest"
    latest.mkdir(parents=True)
    (latest / "state.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    for flags, codes in (
        (["--model.path", "Qwen/Qwen2.5-0.5B"], ["model.path", "data.rows"]),
        (["--rollout-batch-size", "8"], ["field-unknown"]),
        (["--resume", "first"], ["resume", "data.rows"]),
    ):
        with rejects(ConfigError) as caught:
            run(["train", *sound, *flags])
        assert [problem.code for problem in caught.value.problems] == codes
    assert not (tmp_path / "run").exists()
