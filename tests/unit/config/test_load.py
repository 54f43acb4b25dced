"""YAML and flags to a configuration, and back."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from slime_like.config import RunConfig
from slime_like.config.reading.fields import all_fields, value_text
from slime_like.config.reading.load import load_config, save_config
from slime_like.config.reading.reference import reference_text
from slime_like.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
MINIMAL = {"run_dir": "/runs/x", "model": {"path": "/models/x"}}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def problems_of(path: Path | None, flags: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, flags)
    return caught.value.problems


# What differs from the defaults in every kind of field there is.
UNUSUAL: dict[str, Any] = {
    "run_dir": "/runs/odd name",
    "steps": 7,
    "model": {"path": "/models/x", "dtype": "float32"},
    "reference": {"path": "/models/ref"},
    "data": {"train": ["/data/a.jsonl", "/data/b.parquet"], "shuffle": False, "prompt_key": "123"},
    "rollout": {
        "stop_token_ids": [3, 5],
        "max_model_len": 99,
        "temperature": 0.5,
        "engine_args": {"block_size": 32, "nested": {"flag": True, "rate": 5e-4}, "text": "off", "nothing": None},
    },
    "reward": {"functions": [{"name": "math_verify", "weight": 2.0}, {"name": "length", "options": {"limit": 9}}]},
    "algorithm": {"kl_coef": 0.01, "dual_clip": 3.0},
    "trainer": {"parallel": {"tensor": 2, "sequence": True}, "optimizer": {"lr": 5e-4}},
    "logging": {"progress": "off", "wandb_project": "2024-01-01"},
    "cluster": {"address": "10.0.0.1:6379"},
}


def as_flags(config: RunConfig) -> list[str]:
    """The whole configuration as flags, one per field."""
    flags = []
    for name, field in all_fields().items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        if field.kind == "many":
            flags += [f"--{name}", *([value_text(item) for item in value] or ["none"])]
        elif field.kind == "sections":
            flags += [f"--{name}", yaml.safe_dump([item.model_dump(mode="json") for item in value])]
        elif field.kind == "entries":
            for key, item in value.items():
                flags += [f"--{name}.{key}", yaml.safe_dump(item)]
        else:
            flags.append(f"--{name}={value_text(value)}")
    return flags


@pytest.mark.parametrize("data", [MINIMAL, UNUSUAL], ids=["minimal", "unusual"])
def test_a_file_its_saved_copy_and_the_same_values_as_flags_are_equal(tmp_path: Path, data: dict[str, Any]) -> None:
    config = load_config(write(tmp_path, yaml.safe_dump(data)), [])
    assert config == RunConfig.model_validate(data)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", []) == config
    assert load_config(None, as_flags(config)) == config


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.text("abcXYZ_", min_size=1)


def value_types(data: Any) -> Any:
    """1, 1.0 and True are equal in Python, and not the same here."""
    if isinstance(data, dict):
        return {key: value_types(value) for key, value in data.items()}
    return [value_types(item) for item in data] if isinstance(data, list) else type(data)


FLAGS: list[tuple[list[str], str, Any]] = [
    (["--rollout.engine", "sglang"], "rollout.engine", "sglang"),
    (["--trainer.parallel.tensor=2"], "trainer.parallel.tensor", 2),
    (["--trainer.optimizer.lr", "5e-4"], "trainer.optimizer.lr", 5e-4),
    (["--rollout.top_k", "-1"], "rollout.top_k", -1),
    (["--data.train", "/a.jsonl", "/b.jsonl"], "data.train", (Path("/a.jsonl"), Path("/b.jsonl"))),
    (["--data.train=[/a.jsonl, /b.jsonl]"], "data.train", (Path("/a.jsonl"), Path("/b.jsonl"))),
    (["--rollout.stop_token_ids", "none"], "rollout.stop_token_ids", ()),
    (["--rollout.engine_args.a.b", "1e-3"], "rollout.engine_args", {"a": {"b": 1e-3}}),
    (
        ["--rollout.engine_args", "{a: 1}", "--rollout.engine_args.b", "[x]"],
        "rollout.engine_args",
        {"a": 1, "b": ["x"]},
    ),
    (["--trainer.parallel.sequence", "true"], "trainer.parallel.sequence", True),
    (["--rollout.max_model_len", "64", "--rollout.max_model_len", "none"], "rollout.max_model_len", None),
    (["--steps", "3", "--steps", "4"], "steps", 4),
    (["--logging.wandb_project", "2024"], "logging.wandb_project", "2024"),
    (["--logging.wandb_project=--x=y"], "logging.wandb_project", "--x=y"),
]


@pytest.mark.parametrize(
    ("flags", "name", "value"), FLAGS, ids=lambda case: " ".join(case) if isinstance(case, list) else ""
)
def test_flags_set_their_field(tmp_path: Path, flags: list[str], name: str, value: Any) -> None:
    found: Any = load_config(write(tmp_path, yaml.safe_dump(MINIMAL)), flags)
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_a_flag_changes_its_field_alone(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(UNUSUAL))
    before, after = load_config(path, []), load_config(path, ["--trainer.parallel.pipeline", "2"])
    expected = before.model_dump()
    expected["trainer"]["parallel"]["pipeline"] = 2
    assert after.model_dump() == expected


def test_relative_paths_are_relative_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    path = write(tmp_path / "deep", "run_dir: runs/a\nmodel: {path: model}\ndata: {train: [a.jsonl]}")
    monkeypatch.chdir(tmp_path)
    config = load_config(path, ["--evaluation.files", "b.jsonl"])
    assert config.run_dir == tmp_path / "runs/a"
    assert config.model.path == tmp_path / "model"
    assert config.data.train == (tmp_path / "a.jsonl",)
    assert config.evaluation.files == (tmp_path / "b.jsonl",)
    assert config.reference.path is None


# YAML text below the two required keys, flags, and the sentence that must come out (FILE stands for the file's path).
HEAD = "run_dir: /x\nmodel: {path: /y}\n"
REFUSED: list[tuple[str, list[str], str]] = [
    ("steps: 0", [], "FILE:3: steps=0 is out of range; it must be at least 1"),
    ("steps: true", [], "FILE:3: steps=true must be a number"),
    ("steps: 1.5", [], "FILE:3: steps=1.5 has the wrong type; give integer"),
    ("steps: 3\nsteps: 4", [], "FILE:4: steps is set a second time (first in line 3); keep one of the two"),
    ("rollout:\n  engin: vllm", [], "FILE:4: rollout.engin is unknown; did you mean rollout.engine?"),
    ("engine: vllm", [], "FILE:3: engine is unknown; did you mean rollout.engine?"),
    ("1: 2", [], "FILE:3: 1=1 is not the name of a field; remove it (slime-like train --help lists every field)"),
    ("rollout: {temperature: 1e-3}", [], "FILE:3: rollout.temperature=0.001 is out of range; it must be at least 0.01"),
    ("zzz: 1", [], "FILE:3: zzz is unknown; remove it (slime-like train --help lists every field)"),
    ("rollout: {temperature: .inf}", [], "FILE:3: rollout.temperature=inf is not finite; give a finite number"),
    ("data: {shuffle: yes}", [], "FILE:3: data.shuffle=yes is neither true nor false; use one of these two"),
    ("data: {shuffle: 1}", [], "FILE:3: data.shuffle=1 is neither true nor false; use one of these two"),
    ("data: {train: a.jsonl}", [], "FILE:3: data.train="),
    ("trainer: 5", [], "FILE:3: trainer=5 is one value where a section belongs; write its fields below it"),
    ("algorithm: {kl_estimator: k9}", [], "FILE:3: algorithm.kl_estimator=k9 must be one of: 'k1'"),
    ("algorithm: {kl_coef: 1, kl_estimator: k1}", [], "FILE:3: algorithm.kl_estimator=k1 has zero expected gradient"),
    (
        "algorithm:\n  loss: gspo\n  reduction: constant",
        [],
        "FILE:5: algorithm.reduction=constant and constant_length=none do not go together; constant_length is",
    ),
    ("algorithm:\n  loss: gspo\n  constant_length: 8", [], "FILE:5: algorithm.reduction=tokens and constant_length=8"),
    (
        "algorithm: {loss: gspo}",
        ["--algorithm.reduction", "constant"],
        "--algorithm.reduction=constant and constant_length=none do not go together",
    ),
    (
        "algorithm: {reduction: tokens}",
        ["--algorithm.constant_length", "8"],
        "--algorithm.constant_length: algorithm.reduction=tokens and constant_length=8 do not go together",
    ),
    (
        "algorithm: {kl_estimator: k1}",
        ["--algorithm.kl_coef", "0.5"],
        "--algorithm.kl_coef: algorithm.kl_estimator=k1 has zero expected gradient in a loss with kl_coef=0.5; use k2",
    ),
    ("algorithm: {loss: gspo}", ["--algorithm.importance_low", "3"], "--algorithm.importance_low=3.0 is above"),
    (
        "algorithm: {importance_low: 1}",
        ["--algorithm.importance_high", "0.5"],
        "--algorithm.importance_high: algorithm.importance_low=1.0 is above importance_high=0.5; swap them",
    ),
    (
        "reward: {functions: [{name: a, wieght: 2}]}",
        [],
        "FILE:3: reward.functions.0.wieght is unknown; did you mean reward.functions.0.weight",
    ),
    ("reward: {functions: []}", [], "FILE:3: reward.functions=[] is too short; give at least 1"),
    ("", ["--rollout.engin", "x"], "--rollout.engin is unknown; did you mean --rollout.engine?"),
    ("", ["--tensor", "2"], "--tensor is unknown; did you mean --"),
    ("", ["--rollout", "x"], "--rollout is a section; set its fields, e.g. --rollout.engine"),
    ("", ["--steps"], "--steps: has no value; give integer"),
    ("", ["--steps", "1", "2"], "--steps: takes one value and got 2 (1 2)"),
    ("", ["--steps", "many"], "--steps=many has the wrong type; give integer"),
    ("", ["stray", "--steps", "1"], "'stray' is not a flag; write --section.field value"),
    (
        "",
        ["--reward.functions.0.weight", "2"],
        "--reward.functions.0.weight cannot be set alone; give the whole list as YAML",
    ),
    (
        "",
        ["--rollout.environment.options.opening", "]"],
        "--rollout.environment.options.opening: ']' is not valid YAML (expected the node content, but found ']'); "
        "correct it, or write '\"]\"' if text is meant",
    ),
    ("", ["--reward.functions", "[{name"], "--reward.functions: '[{name' is not valid YAML"),
    ("", ["--rollout.engine_args.", "2"], "--rollout.engine_args. is unknown"),
    ("steps: 0", ["--steps", "-4"], "--steps=-4 is out of range; it must be at least 1"),
    ("a: [", [], "FILE:3: not valid YAML"),
    ("a: b: c", [], "FILE:3: not valid YAML"),
    ("a: !!python/object:os.system {}", [], "FILE:3: not valid YAML"),
    ("a: &a [*a]", [], "FILE:3: not valid YAML (an alias stands inside its anchor); correct this line"),
    ("a: &a {b: {c: *a}}", [], "FILE:3: not valid YAML (an alias stands inside its anchor)"),
    ("a: " + "[" * 1000, [], "FILE: not valid YAML (nested too deep)"),
    ("seed: " + "9" * 5000, [], "FILE: not valid YAML (Exceeds the limit"),
    ("a: \x07", [], "FILE: not valid YAML (unacceptable character #x0007"),
    ("", ["--rollout.engine_args", "&a [*a]"], "--rollout.engine_args: '&a [*a]' is not valid YAML (an alias stands"),
    ("steps: 1000000", [], "FILE:3: steps=1000000 is out of range; it must be at most 999999"),
    ("", ["--seed", "9" * 23], f"--seed={'9' * 23} is out of range; it must be at most 4294967295"),
    (
        "cluster: {address: 'ray://10.0.0.1:10001'}",
        [],
        "FILE:3: cluster.address=ray://10.0.0.1:10001 is a Ray client's address, which is not supported; start the run "
        "on a node of the cluster, and give auto or the HOST:PORT that `ray start --head` printed",
    ),
    ("reference: {path: ''}", [], "FILE:3: reference.path='' is empty; give a path"),
    ('data: {train: [a.jsonl, ""]}', [], "FILE:3: data.train="),
    ("", ["--run_dir", ""], "--run_dir='' is empty; give a path"),
    ("", ["--evaluation.files="], "--evaluation.files=[] is empty; give a path"),
    ("", ["--model.path", "a\0b"], "--model.path="),
]


@pytest.mark.parametrize(("text", "flags", "sentence"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_is_wrong_is_refused_with_place_value_and_remedy(
    tmp_path: Path, text: str, flags: list[str], sentence: str
) -> None:
    path = write(tmp_path, HEAD + text)
    problems = problems_of(path, flags)
    assert len(problems) == 1, problems
    assert problems[0].startswith(sentence.replace("FILE", str(path)))


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "steps: 0\nsteps: 1\nrollout: {num_engines: 0, enigne: x}\nbogus: 1\n")
    problems = problems_of(path, ["--trainer.parallel.tensor", "a", "--nope", "1"])
    for name in ("steps", "rollout.num_engines", "rollout.enigne", "bogus", "trainer.parallel.tensor", "--nope"):
        assert any(name in problem for problem in problems), name
    assert "run_dir is missing; set it in the file or with --run_dir" in problems
    assert "model.path is missing; set it in the file or with --model.path" in problems
    assert len(problems) == 8


@pytest.mark.parametrize("content", [None, b"- a list", b"\xff\xfe\x00"], ids=["absent", "list", "binary"])
def test_an_unusable_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    assert all(str(path) in problem for problem in problems_of(path, []))


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, f"{HEAD}rollout:\ntrainer:\n  parallel:\n"), [])
    assert config == RunConfig.model_validate(MINIMAL | {"run_dir": "/x", "model": {"path": "/y"}})


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_loads(path: Path) -> None:
    assert load_config(path, []).run_dir.is_absolute()


def test_the_written_reference_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert page == reference_text(), "run: python -m slime_like.config.reading.reference"
    assert all(f"| `{name}` |" in page for name in all_fields())


def test_every_field_has_a_description() -> None:
    assert [name for name, field in all_fields().items() if len(field.description) < 8] == []
