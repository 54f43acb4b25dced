"""Commands before anything starts: what is refused, and ``convert`` and ``score`` before anything is read."""

import json
import shutil
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slime_like.checks import CONVERSION
from slime_like.checks.check import check, require_valid
from slime_like.checks.run_files import checkpoint_problem
from slime_like.commands.command import find_weights
from slime_like.commands.convert import size_in_bytes
from slime_like.commands.main import main
from slime_like.commands.root import run
from slime_like.config import ModelConfig, RunConfig
from slime_like.config.reading.load import load_config, save_config
from slime_like.errors import ConfigError, DataError
from slime_like.models.converted import write_description
from slime_like.score import output_line, windows
from slime_like.weights.adapter import adapter_facts
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint
from tests.unit.orchestration.trainer.test_scoring import sequence

ROW = '{"id": 1, "prompt_tokens": [1], "response_tokens": [2]}\n'


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a Hugging Face model, its dimensions alone, a converted checkpoint, a run with one
    checkpoint, one without its run, inputs of ``score``, a row of data, and a directory with another file."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    (tmp_path / "dimensions").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "dimensions")
    write_checkpoint(tmp_path / "meg" / "model")
    (tmp_path / "meg" / "trainer").mkdir()
    write_description(tmp_path / "meg", {})
    step = tmp_path / "run" / "checkpoints" / "step-000002"
    for directory, state in ((tmp_path / "step-1", "{}"), (step, '{"step": 2, "backend": "megatron"}')):
        (directory / "trainer").mkdir(parents=True)
        (directory / "state.json").write_text(state)
    (step.parent / "latest").symlink_to(step.name)
    config = RunConfig(run_dir=tmp_path / "run", model={"path": tmp_path / "model", "dtype": "float32"})
    save_config(config, tmp_path / "run" / "config.yaml")
    texts = {
        "in": ROW,
        "empty": "\n",
        "foreign": ROW + ROW.replace("2]", "300]"),
        "rows": '{"prompt": "a", "answer": "b"}\n',
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep me")
    return tmp_path


FILES, VERIFY, EVAL = "--output out.jsonl --input", "verify layouts --model model", "eval --run_dir out"
# Code of the error, and the command that has it.
REFUSED = [
    line.split(maxsplit=1)
    for line in f"""
model.path convert to-megatron meg out
output-not-empty convert to-megatron model notes
output-unusable convert to-megatron model notes --force
output-unusable convert to-megatron model model --force
output-unusable convert to-hf meg . --force
output-unusable convert to-megatron model notes/mine.txt
flag-excluded convert to-megatron model out --model.path model
trainer.layout convert to-megatron model out --trainer.parallel.tensor 3
flag-excluded convert to-megatron model out --model.dtype float16
wrong-checkpoint convert to-hf model out
wrong-checkpoint convert to-hf meg/trainer out
wrong-checkpoint convert check notes meg
no-weights convert check dimensions meg
no-gguf convert from-gguf model/config.json out
wrong-checkpoint score nowhere {FILES} in.jsonl
wrong-checkpoint score run {FILES} in.jsonl
flag-excluded score model {FILES} in.jsonl --model.path model
trainer.backend score model {FILES} in.jsonl --trainer.backend none_such
model.weights score run/checkpoints/step-000002 {FILES} in.jsonl --trainer.backend fsdp
file-unusable score model {FILES} in.jsonl --output ./in.jsonl
run_dir score model {FILES} in.jsonl --run_dir in.jsonl
model.weight-files score dimensions {FILES} in.jsonl
empty-input score model {FILES} empty.jsonl
unknown-token-id score model {FILES} foreign.jsonl
file-type score model {FILES} in.txt
file-not-readable score model {FILES} none.jsonl
config {VERIFY} --layouts tp2 xp2
config {VERIFY} --baseline pp
config {VERIFY} --model nowhere
flag-excluded {VERIFY} --trainer.parallel.tensor 2
flag-excluded {VERIFY} --trainer.optimizer.distributed=true
flag-excluded {VERIFY} --model.path model
trainer.backend {VERIFY} --trainer.backend none_such
no-dump {VERIFY} --batch none.pt
damaged-dump {VERIFY} --batch model/config.json
run_dir {VERIFY} --run_dir /proc/run
config {VERIFY} --layouts tp2 tp3
config {VERIFY} --layouts dp2-ep2
fields-conflict {VERIFY} --trainer.optimizer.offload true
config {VERIFY} --trainer.backend fsdp --layouts dp2 tp2
config {VERIFY} --layouts dp17
evaluation {EVAL} --model.path model --data.max_prompt_tokens 64
evaluation {EVAL} --model.path model --data.max_prompt_tokens 64 --evaluation.files rows.jsonl --model.weights meg
node-list launch --slurm_nodes gpu[1-
options-conflict launch --slurm_nodes gpu[1-2] --nodes 3
nodes-missing launch --head 10.0.0.1
option-range launch --nodes 2 --silence_s 3
flag-excluded launch -- --cluster.address 10.0.0.1:1
output-unusable make-tiny-model notes/mine.txt
field-range make-tiny-model out --seed {2**32}
""".strip().splitlines()
]
OF_DATA = {"empty-input", "unknown-token-id", "file-type", "file-not-readable", "no-dump", "damaged-dump"}


@pytest.mark.parametrize(("code", "command"), REFUSED, ids=[case[1] for case in REFUSED])
def test_a_command_is_refused_before_anything_starts(root: Path, rejects: Rejects, code: str, command: str) -> None:
    before = sorted(root.rglob("*"))
    with rejects(DataError if code in OF_DATA else ConfigError, code):
        run(command.split())
    assert sorted(root.rglob("*")) == before and (root / "notes" / "mine.txt").read_text() == "keep me"


def test_a_converted_checkpoint_has_its_model_with_it(root: Path) -> None:
    assert find_weights(Path("meg"), []) == (("--model.path", "meg/model"), root / "meg" / "trainer")
    assert find_weights(Path("meg"), ["--model.path", "model"]) == ((), root / "meg" / "trainer")


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


@pytest.mark.parametrize("name", ["step-000002", "latest"])
def test_a_runs_configuration_names_the_model_of_its_checkpoint(root: Path, name: str) -> None:
    """The user's flags come later and override these. A Hugging Face directory is the model itself."""
    assert find_weights(Path("model"), []) == (("--model.path", "model"), None)
    model, weights = find_weights(root / "run" / "checkpoints" / name, [])
    config = load_config(None, ["--run_dir", "x", *model, "--model.dtype", "bfloat16"])
    assert config.model.path == root / "model" and config.model.dtype == "bfloat16"
    assert load_config(None, ["--run_dir", "x", *model]).model.dtype == "float32"
    assert weights == root / "run" / "checkpoints" / "step-000002" / "trainer"


@pytest.mark.parametrize("flag", [["--model.path", "model"], ["--model.path=model"]])
def test_a_checkpoint_without_its_run_needs_the_model(root: Path, rejects: Rejects, flag: list[str]) -> None:
    (root / "run" / "config.yaml").unlink()
    step = root / "run" / "checkpoints" / "step-000002"
    assert find_weights(step, flag)[0] == ()
    with rejects(ConfigError, "model-unknown"):
        find_weights(step, [])


def test_windows_are_bounded_and_lose_nothing() -> None:
    rows = [(index, sequence(index, *pair)) for index, pair in enumerate([(1, 3), (2, 2), (9, 9), (1, 1)])]
    assert [[name for name, _ in window] for window in windows(rows, 8)] == [[0, 1], [2], [3]]
    assert [[name for name, _ in window] for window in windows(rows, 100)] == [[0, 1, 2, 3]]
    assert list(windows([], 8)) == []


def test_numbers_are_short_and_exact() -> None:
    values = torch.randn(500) * torch.logspace(-20, 3, 500)
    text = output_line("a", {"old_logprobs": values, "entropy": values.abs()})
    row = json.loads(text)
    assert list(row) == ["id", "logprobs", "entropy"] and row["id"] == "a"
    assert np.array_equal(np.array(row["logprobs"], dtype=np.float32), values.numpy())
    assert np.array_equal(np.array(row["entropy"], dtype=np.float32), values.abs().numpy())
    assert max(len(repr(value)) for value in row["logprobs"]) <= 15
    assert output_line(7, {"old_logprobs": torch.tensor([-0.1]), "entropy": torch.tensor([2.0])}) == (
        '{"id": 7, "logprobs": [-0.1], "entropy": [2.0]}\n'
    )
