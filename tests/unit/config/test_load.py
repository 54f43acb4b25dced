"""Reading a configuration from YAML and flags, and writing it."""

import shlex
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from slime_like.checks.check import check
from slime_like.config import RewardFunction, RunConfig
from slime_like.config.reading.fields import all_fields, did_you_mean
from slime_like.config.reading.load import load_config, save_config
from slime_like.errors import ConfigError, Problem
from slime_like.examples.tiny_model import make_tiny_model
from tests.support.rejections import Rejects

MINIMAL = {"run_dir": "/runs/x", "model": {"path": "/models/x"}}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


# Non-default values for every kind of field.
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
    "algorithm": {"kl": {"coef": 0.01}, "loss": {"name": "ppo_clip", "dual_clip": 3.0}},
    "trainer": {"parallel": {"tensor": 2, "sequence": True}, "optimizer": {"lr": 5e-4}},
    "logging": {"progress": "off", "wandb_project": "2024-01-01", "wandb_tags": ["a", "1"]},
    "cluster": {"address": "10.0.0.1:6379"},
}


@pytest.mark.parametrize("data", [MINIMAL, UNUSUAL], ids=["minimal", "unusual"])
def test_a_file_and_its_saved_copy_are_equal(tmp_path: Path, data: dict[str, Any]) -> None:
    config = load_config(write(tmp_path, yaml.safe_dump(data)), [])
    assert config == RunConfig.model_validate(data)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", []) == config


COMMITS = {"acme/tiny": "0a" * 20, "acme/sums": "0b" * 20}


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A hub with the repositories of ``COMMITS``. Returns its calls: id, kind, revision, files."""
    calls = []

    def snapshot_download(repo: str, *, repo_type: str, revision: str | None, allow_patterns: str | None) -> str:
        calls.append((repo, repo_type, revision, allow_patterns))
        if repo == "acme/offline":
            raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")
        if repo not in COMMITS:
            raise OSError("404: no such repository\nsecond line")
        folder = f"{repo_type}s--{repo.replace('/', '--')}"
        return str(tmp_path / "hub" / folder / "snapshots" / (revision or COMMITS[repo]))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return calls


def test_hub_ids_become_snapshots_whose_commits_a_resumed_run_keeps(
    tmp_path: Path, downloads: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"name": "s", "files": ["acme/sums@v2/main/train-*.parquet"]}
    settings = {"run_dir": "run", "model": {"path": "acme/tiny"}, "data": {"mixture": [source]}}
    settings["distillation"] = {"coef": 1.0, "teachers": {"s": "acme/tiny"}}
    given = write(tmp_path, yaml.safe_dump({**settings, "evaluation": {"files": ["acme/sums", "held/out.jsonl"]}}))
    config = load_config(given)
    hub = tmp_path / "hub"
    assert config.model.path == hub / "models--acme--tiny" / "snapshots" / ("0a" * 20)
    assert config.distillation.teachers == {"s": config.model.path}
    assert config.data.training_files == (hub / "datasets--acme--sums" / "snapshots/v2/main/train-*.parquet",)
    assert config.evaluation.files == (
        hub / "datasets--acme--sums" / "snapshots" / ("0b" * 20), tmp_path / "held/out.jsonl"
    )  # fmt: skip
    assert downloads == [
        ("acme/tiny", "model", None, None),
        ("acme/sums", "dataset", "v2", "main/train-*.parquet"),
        ("acme/tiny", "model", None, None),
        ("acme/sums", "dataset", None, None),
    ]
    config.run_dir.mkdir()
    save_config(config, config.run_dir / "config.yaml")
    assert load_config(config.run_dir / "config.yaml") == config
    monkeypatch.setitem(COMMITS, "acme/tiny", "0c" * 20)
    assert load_config(given).model.path == config.model.path
    renewed = load_config(given, ["--resume", "never"]).model.path
    assert renewed.name == load_config(given, ["--model.path", f"acme/tiny@{'0c' * 20}"]).model.path.name == "0c" * 20


def test_ids_without_a_hub_and_local_paths_stay(tmp_path: Path, downloads: list[tuple[Any, ...]]) -> None:
    (tmp_path / "local").mkdir()
    for path in ("local/tiny", "acme/offline", "acme/tiny/deeper", "tiny", "./acme/tiny", str(tmp_path)):
        assert load_config(None, ["--run_dir", "r", "--model.path", path]).model.path == (tmp_path / path).absolute()
    assert [call[0] for call in downloads] == ["acme/offline"]
    for field in ("model.path", "critic.path", "distillation.teachers.sums"):
        with pytest.raises(ConfigError) as caught:
            load_config(None, ["--run_dir", "r", "--model.path", "tiny", f"--{field}", "acme/unknown"])
        assert (caught.value.problems[0].code, caught.value.problems[0].field) == ("hub-refuses", field)


FLAGS: list[tuple[list[str], str, Any]] = [
    (["--run-dir", "/z"], "run_dir", Path("/z")),
    (["--rollout.max-new-tokens", "7"], "rollout.max_new_tokens", 7),
    (["--rollout.engine-args.some-key", "1"], "rollout.engine_args", {"some-key": 1}),
    (["--trainer.optimizer.lr", "5e-4"], "trainer.optimizer.lr", 5e-4),
    (["--data.train", "/a.jsonl", "/b.jsonl"], "data.train", (Path("/a.jsonl"), Path("/b.jsonl"))),
    (["--data.train=[/a.jsonl, /b.jsonl]"], "data.train", (Path("/a.jsonl"), Path("/b.jsonl"))),
    (["--rollout.stop_token_ids", "none"], "rollout.stop_token_ids", ()),
    (["--rollout.engine_args.a.b", "1e-3"], "rollout.engine_args", {"a": {"b": 1e-3}}),
    (["--rollout.engine_args", "{a: 1}", "--rollout.engine_args.b", "2"], "rollout.engine_args", {"a": 1, "b": 2}),
    (["--trainer.parallel.sequence", "true"], "trainer.parallel.sequence", True),
    (["--rollout.max_model_len", "64", "--rollout.max_model_len", "none"], "rollout.max_model_len", None),
    (["--steps", "3", "--steps", "4"], "steps", 4),
    (["rollout.engine_args.a.b=[1, 2]"], "rollout.engine_args", {"a": {"b": [1, 2]}}),
    (["--logging.progress=off"], "logging.progress", "off"),
    (["--trainer.recompute", "5"], "trainer.recompute", 5),
    (["--logging.wandb_project", "2024"], "logging.wandb_project", "2024"),
    (["--logging.wandb_project=--x=y"], "logging.wandb_project", "--x=y"),
    (["--critic.optimizer.warmup_steps", "5", "--algorithm.advantage", "gae"], "critic.optimizer.lr", 1e-5),
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


@pytest.mark.parametrize(
    ("flags", "longest"),
    [
        ("", 128 + 32),
        ("--evaluation.max_new_tokens 64", 128 + 32),  # nothing is evaluated
        ("--evaluation.max_new_tokens 64 --evaluation.files a.jsonl", 128 + 64),
        ("--evaluation.max_new_tokens 64 --evaluation.files a.jsonl --rollout.max_model_len 170", 170),
    ],
)
def test_engines_hold_the_longest_sequence_of_training_and_evaluation(tmp_path: Path, flags: str, longest: int) -> None:
    base = "data: {train: [a.jsonl], max_prompt_tokens: 128}\nrollout: {max_new_tokens: 32}"
    path = write(tmp_path, f"run_dir: a\nmodel: {{path: b}}\n{base}")
    assert load_config(path, shlex.split(flags)).max_model_len == longest


def test_paths_are_relative_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    path = write(tmp_path / "deep", "run_dir: runs/a\nmodel: {path: model}\ndata: {train: [a.jsonl]}")
    monkeypatch.chdir(tmp_path)
    config = load_config(path, ["--evaluation.files", "b.jsonl"])
    assert config.run_dir == tmp_path / "runs/a"
    assert config.model.path == tmp_path / "model"
    assert config.data.train == (tmp_path / "a.jsonl",)
    assert config.evaluation.files == (tmp_path / "b.jsonl",)
    assert config.reference.path is None
    monkeypatch.chdir(tmp_path)
    sources = "[{name: a, files: [rows.jsonl]}, {name: b, files: [~/b/*.parquet]}]"
    config = load_config(None, ["--run_dir", "/x", "--model.path", "/y", "--data.mixture", sources])
    assert config.data.training_files == (tmp_path / "rows.jsonl", Path.home() / "b/*.parquet")


# YAML text below the two required keys, flags, the code and the field.
HEAD = "run_dir: /x\nmodel: {path: /y}\n"
AUTO, SIZE = "--trainer.parallel.data auto --rollout.num_engines auto", "--cluster.gpus_per_node 8 --cluster.nodes"


def _doubled(level: int) -> str:
    return f"a{level}: &a{level} {{x: *a{level - 1}, y: *a{level - 1}}}\n"


REFUSED: list[tuple[str, str, str, str]] = [
    ("steps: 0", "", "field-range", "steps"),
    ("steps: true", "", "field-value", "steps"),
    ("steps: 1.5", "", "field-type", "steps"),
    ("rollout:\n  engin: vllm", "", "field-unknown", "rollout.engin"),
    ("rollout: {temperature: .inf}", "", "field-range", "rollout.temperature"),
    ("data: {shuffle: 1}", "", "field-value", "data.shuffle"),
    ("trainer: 5", "", "field-type", "trainer"),
    ("trainer: {recompute: true}", "", "field-value", "trainer.recompute"),
    ("", "--trainer.recompute 0", "field-value", "trainer.recompute"),
    ("algorithm: {kl_reward: {estimator: k9}}", "", "field-choice", "algorithm.kl_reward.estimator"),
    ("algorithm: {kl: {coef: 1, estimator: k1}}", "", "fields-conflict", "algorithm.kl.estimator"),
    ("algorithm: {loss: sft, kl: {coef: 0.1}}", "", "fields-conflict", "algorithm.loss"),
    ("algorithm: {loss: sft, kl_reward: {coef: 0.1}}", "", "fields-conflict", "algorithm.loss"),
    ("algorithm: {loss: 5}", "", "field-type", "algorithm.loss"),
    ("distillation: {coef: 1, teachers: []}", "", "field-type", "distillation.teachers"),
    ("algorithm: {loss: [gspo]}", "", "field-type", "algorithm.loss"),
    ("algorithm: {kl_coef: 1}", "", "field-unknown", "algorithm.kl_coef"),
    ("algorithm: {importance: {low: 3}}", "", "fields-conflict", "algorithm.importance.low"),
    ("algorithm: {importance: {veto: 1.0e-4}}", "", "fields-conflict", "algorithm.importance.veto"),
    ("algorithm: {importance: {normalize: true}}", "", "fields-conflict", "algorithm.importance.normalize"),
    ("reward: {functions: [{name: a, wieght: 2}]}", "", "field-unknown", "reward.functions.0.wieght"),
    ("reward: {functions: []}", "", "field-range", "reward.functions"),
    ("", "--tensor 2", "field-unknown", "tensor"),
    ("", "--rollout x", "field-type", "rollout"),
    ("", "--steps", "flag-value", "steps"),
    ("", "--steps 1 2", "flag-value", "steps"),
    ("", "stray --steps 1", "flag-missing", ""),
    ("", "--rollout.environment.options.opening ']'", "flag-value", "rollout.environment.options.opening"),
    ("", "--reward.functions '[{name:math_verify}]'", "flag-value", "reward.functions"),
    ("", "--rollout.engine_args '{a: 1, b:2}'", "flag-value", "rollout.engine_args"),
    ("reward: {functions: [{name:math_verify}]}", "", "yaml-syntax", ""),
    ("steps: 3\nsteps: 4", "", "yaml-syntax", ""),
    ("a: b: c", "", "yaml-syntax", ""),
    ("a: !!python/object:os.system {}", "", "yaml-syntax", ""),
    ("a: &a {b: {c: *a}}", "", "yaml-syntax", ""),
    ("a: " + "[" * 100_000, "", "yaml-syntax", ""),
    ("a0: &a0 {}\n" + "".join(_doubled(level) for level in range(1, 30)), "", "yaml-syntax", ""),
    ("seed: " + "9" * 5000, "", "yaml-syntax", ""),
    ("a: \x07", "", "yaml-syntax", ""),
    ("", "--rollout.engine_args '&a [*a]'", "flag-value", "rollout.engine_args"),
    ("steps: 1000000", "", "field-range", "steps"),
    ("", "--seed " + "9" * 23, "field-range", "seed"),
    ("cluster: {address: 'ray://10.0.0.1:10001'}", "", "field-value", "cluster.address"),
    ("rollout: {agent: {command: [a], host: 0.0.0.0}}", "", "field-value", "rollout.agent.host"),
    ("rollout: {agent: {command: [a], host: '::'}}", "", "field-value", "rollout.agent.host"),
    ("rollout: {agent: {command: [a], host: gpu-1}}", "", "field-value", "rollout.agent.host"),
    ("reference: {path: ''}", "", "field-value", "reference.path"),
    ('data: {train: [a.jsonl, ""]}', "", "field-value", "data.train"),
    ("", "--run_dir ''", "field-value", "run_dir"),
    ("", "--model.path 'a\x00b'", "field-value", "model.path"),
    (f"debug: {{save_rollouts: {'a' * 256}}}", "", "field-value", "debug.save_rollouts"),
    (f"debug: {{save_rollouts: {'a/' * 3000}}}", "", "field-value", "debug.save_rollouts"),
    ("", "--model.lora.path=none-there", "fields-conflict", "model.lora.path"),
    ("", "--model.lora.alpha=8", "fields-conflict", "model.lora.alpha"),
    ("", "--model.lora.targets=q_proj", "fields-conflict", "model.lora.targets"),
    ("", "--reference.parallel.data auto", "field-type", "reference.parallel.data"),
    ("", f"{AUTO} {SIZE} 1 --cluster.placement colocated --rollout.tensor none", "field-type", "rollout.tensor"),
    # Of several fields, which its sentence names.
    ("", "--trainer.parallel.data auto", "auto-without-size", "trainer.parallel.data=auto needs cluster.nodes"),
    (
        "",
        "--rollout.num_engines auto --cluster.nodes 1",
        "auto-without-size",
        "auto needs cluster.nodes and cluster.gpus_per_node",
    ),
    ("", f"{AUTO} {SIZE} 2", "auto-ambiguous", "trainer.parallel.data=auto and rollout.num_engines=auto"),
    ("", f"{AUTO} {SIZE} 2", "auto-ambiguous", "set cluster.placement=colocated"),
]


@pytest.mark.parametrize(("text", "flags", "code", "field"), REFUSED, ids=[f"{c[0]} {c[1]}"[:60] for c in REFUSED])
def test_a_wrong_setting_is_rejected_with_its_field(
    tmp_path: Path, rejects: Rejects, text: str, flags: str, code: str, field: str
) -> None:
    path = write(tmp_path, HEAD + text)
    with rejects(ConfigError, code) as caught:
        load_config(path, shlex.split(flags))
    (problem,) = caught.value.problems
    assert field in str(problem) if " " in field else problem.field == field


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("rollout.enigne", "rollout.engine"),
        (
            "tensor",
            "reference.parallel.tensor or distillation.parallel.tensor or rollout.tensor or trainer.parallel.tensor",
        ),
        ("critic.lr", "critic.optimizer.lr"),
        ("no_such_thing", None),
        ("rollout.max_new_token", "rollout.max_new_tokens"),
    ],
)
def test_a_near_name_is_suggested(name: str, field: str | None) -> None:
    expected = "remove it" if field is None else f"did you mean {field}?"
    assert did_you_mean(name, list(all_fields())).startswith(expected)


def test_references_between_fields_and_undecided_ones(tmp_path: Path, rejects: Rejects) -> None:
    path = write(tmp_path, f"{HEAD}steps: 7\nlogging: {{wandb_project: 'p-${{steps}}'}}\n")
    assert load_config(path, ["steps=9"]).logging.wandb_project == "p-9"
    for text in ("${none.such}", "${"):
        with rejects(ConfigError, "yaml-syntax"):
            load_config(write(tmp_path, f"{HEAD}logging: {{wandb_project: '{text}'}}"))
    path = write(tmp_path, "run_dir: ???\nmodel: {path: /y}\nreward: {functions: '???'}\n")
    with rejects(ConfigError, "field-undecided") as caught:
        load_config(path)
    assert [problem.field for problem in caught.value.problems] == ["reward.functions", "run_dir"]
    assert load_config(path, ["--run_dir", "/x", "reward.functions=[{name: math_verify}]"]).run_dir == Path("/x")


def test_all_problems_are_reported_at_once(tmp_path: Path, rejects: Rejects) -> None:
    path = write(tmp_path, "steps: 0\nrollout: {num_engines: 0, enigne: x}\nbogus: 1\n")
    with rejects(ConfigError, "config") as caught:
        load_config(path, ["--trainer.parallel.tensor", "a", "--nope", "1"])
    assert sorted((problem.code, problem.field) for problem in caught.value.problems) == [
        ("field-missing", "model.path"),
        ("field-missing", "run_dir"),
        ("field-range", "rollout.num_engines"),
        ("field-range", "steps"),
        ("field-type", "trainer.parallel.tensor"),
        ("field-unknown", "bogus"),
        ("field-unknown", "nope"),
        ("field-unknown", "rollout.enigne"),
    ]


def test_conflicts_of_all_sections_are_reported_at_once_with_further_problems(tmp_path: Path, rejects: Rejects) -> None:
    """Conflicts between two sections are listed, too."""
    text = "critic: {lam: 1}\nalgorithm: {loss: ppo_clip, importance: {low: 3}}\n"
    fields = ["algorithm.importance.low", "critic.lam"]
    for more, found in ((lambda _: (), fields), (lambda _: [Problem("c", "x=1", "x")], [*fields, "x"])):
        with rejects(ConfigError, "fields-conflict" if found == fields else "config") as caught:
            load_config(write(tmp_path, HEAD + text), more=more)
        assert [problem.field for problem in caught.value.problems] == found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_tiny_model(directory := tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    return directory


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (
            "--trainer.optimizer.lr abc --rollout.temperature 0 --algorithm.loss ppo_clipp",
            ["algorithm.loss", "rollout.temperature", "trainer.optimizer.lr"],
        ),
        ("--rollout.engin x --rollout.engine_args.vllm.a 1", ["rollout.engin"]),
        ("--algorithm.importance.corection truncate --rollout.max_staleness 1", ["algorithm.importance.corection"]),
        ("--trainer.parallel.data auto --steps 0 --algorithm.loss x", ["algorithm.loss", "steps"]),
        ("--tensor 2 --reward.function []", ["reward.function", "tensor"]),
        ("--trainer.fsdp.accumulatee 1 --accumulate 1", ["accumulate", "trainer.fsdp.accumulatee"]),
        ("--rollout 5 --model.path '' --algorithm.advantage x", ["algorithm.advantage", "model.path", "rollout"]),
        ("--critic.path acme/unknown --seed x", ["critic.path", "seed"]),
        ("--reward.functions '[{name: a, weight:2}]' --steps 0", ["reward.functions", "steps"]),
        ("--model [1] --steps many", ["model", "steps"]),  # lists and sections are not merged
        ("--trainer [1] --rollout.temperature 0", ["rollout.temperature", "trainer"]),
        ("--reward.functions.0.name length", ["reward.functions"]),
    ],
)
def test_faults_of_fields_hide_no_other_faults_and_cause_none(
    tmp_path: Path, model: Path, downloads: list[tuple[Any, ...]], flags: str, fields: list[str]
) -> None:
    """All checks run, but none that reads a field at fault."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    given = ["--run_dir", "r", "--model.path", str(model), "--data.train", "a.jsonl"]
    given += ["--reward.functions", "[{name: math_verify}]", *shlex.split(flags)]
    with pytest.raises(ConfigError) as caught:
        load_config(None, given, more=check)
    assert sorted(problem.field for problem in caught.value.problems) == fields


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "file-unreadable"),
        (b"- a list", "file-content"),
        (b"5.0", "file-content"),
        (b"\xff\xfe\x00", "file-unreadable"),
    ],
    ids=["absent", "list", "number", "binary"],
)
def test_an_unusable_file_is_named(tmp_path: Path, rejects: Rejects, content: bytes | None, code: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    with rejects(ConfigError, code):
        load_config(path, [])


def test_sections_descriptions_and_names_of_files(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, f"{HEAD}rollout:\ntrainer:\n  parallel:\n"), [])
    assert config == RunConfig.model_validate(MINIMAL | {"run_dir": "/x", "model": {"path": "/y"}})
    (tmp_path / "below").mkdir()
    for given in (f"{tmp_path}/mine.py:f", f"{tmp_path}/below/../mine.py:f"):
        assert RewardFunction(name=given).name == f"{tmp_path}/mine.py:f"
    assert RewardFunction(name="package.module:f").name == "package.module:f"
    assert [name for name, field in all_fields().items() if len(field.description) < 8] == []
