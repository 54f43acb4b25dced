"""Faults across fields and against files, found before anything starts."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.algorithms.advantages import ESTIMATORS, compute_advantages
from slime_like.algorithms.losses.policy import POLICY_LOSSES
from slime_like.checks.check import check
from slime_like.checks.layout import layers_per_stage, layout_problems
from slime_like.checks.needs import CONVERSION, evaluation_needs
from slime_like.config import ParallelConfig, RunConfig
from slime_like.config.algorithm import ADVANTAGES, BATCH_ADVANTAGES, GROUP_ADVANTAGES, LOSSES
from slime_like.config.reading.load import load_config
from slime_like.data.dump import dump_path
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.latent_attention import LatentAttention
from tests.unit.checks.checkpoint import (
    DEEPSEEK_V3,
    EXPERTS,
    QWEN3_8_KV_HEADS,
    sound_flags,
    write_checkpoint,
    write_weights,
)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return sound_flags(tmp_path)


def test_a_sound_configuration_has_no_problem(flags: list[str]) -> None:
    assert check(load_config(None, flags)) == []
    assert check(load_config(None, [*flags, "--algorithm.loss", "sft", "--data.max_prompt_tokens", "9999"])) == []


def test_the_asynchronous_fsdp_recipe_lacks_its_model_and_data_only(flags: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", max_position_embeddings=32768)
    recipe = load_config(Path("configs/async_grpo_fsdp.yaml"), flags)
    assert check(recipe) == []
    assert recipe.algorithm.reduction == "samples" and recipe.algorithm.epochs * recipe.algorithm.minibatches == 1


@pytest.mark.parametrize("attention", ["transformer_engine", "ring_flash_attn"])
def test_attention_that_is_not_installed_is_refused(
    attention: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*flags, "--trainer.attention", attention, "--model.dtype", "bfloat16"]
    monkeypatch.setattr("slime_like.checks.attention.find_spec", lambda name: None)
    (problem,) = check(load_config(None, flags))
    assert problem.startswith(f"trainer.attention={attention} needs the package {attention}, which is not installed;")
    assert "pip install" in problem and "trainer.attention=auto" in problem
    monkeypatch.setattr("slime_like.checks.attention.find_spec", lambda name: object())
    assert check(load_config(None, flags)) == []


def test_transformer_engine_in_float32_is_refused(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_like.checks.attention.find_spec", lambda name: object())
    flags = [*flags, "--trainer.attention", "transformer_engine", "--model.dtype", "float32"]
    (problem,) = check(load_config(None, flags))
    assert problem.startswith("trainer.attention=transformer_engine computes in bfloat16, and model.dtype=float32; set")


STREAM = ["--rollout.stream", "true"]
FSDP = ["--trainer.backend", "fsdp"]

AHEAD = ["--rollout.max_staleness", "1", "--algorithm.importance_correction", "truncate"]

# TMP stands for the test's directory.
FAULTS: list[tuple[list[str], str]] = [
    *(
        (
            [*FSDP, f"--trainer.parallel.{axis}", "2", *more],
            f"trainer.parallel.{axis}=2: trainer.backend=fsdp knows data and context ranks only, and shards the model "
            f"over all of them; set {axis} to 1 and raise data, or use trainer.backend=megatron",
        )
        for axis, more in (("tensor", []), ("pipeline", []))
    ),
    (
        [*FSDP, "--trainer.attention", "ring"],
        "trainer.attention=ring is not computed by trainer.backend=fsdp; use auto (allgather), or ring_flash_attn",
    ),
    (
        [*FSDP, "--trainer.optimizer.distributed", "false"],
        "trainer.optimizer.distributed=false: trainer.backend=fsdp always shards optimizer state; leave it true",
    ),
    (
        [*FSDP, "--trainer.activation_offload", "true"],
        "trainer.activation_offload is not offered by trainer.backend=fsdp; use trainer.recompute=full, or "
        "trainer.backend=megatron",
    ),
    (
        ["--trainer.fsdp.accumulate", "sharded"],
        "trainer.fsdp is set, but trainer.backend=megatron does not read it; use trainer.backend=fsdp",
    ),
    (
        ["--rollout.engine", "vllm", "--rollout.engine_args.tensor_parallel_size", "2"],
        "rollout.engine_args.tensor_parallel_size is refused: set rollout.tensor instead",
    ),
    (
        ["--rollout.engine", "sglang", "--rollout.engine_args.enable_lora", "true"],
        "rollout.engine_args.enable_lora is refused: weights are updated whole",
    ),
    (
        ["--rollout.engine", "vllm", "--rollout.engine_args.gpu_memory_utilization", "much"],
        "rollout.engine_args.gpu_memory_utilization=much is no share of a GPU; give a number above 0, at most 1",
    ),
    (
        ["--rollout.engine", "sglang", "--rollout.engine_args.mem_fraction_static", "1.5"],
        "rollout.engine_args.mem_fraction_static=1.5 is no share of a GPU",
    ),
    (
        ["--rollout.engine", "vllm", "--rollout.engine_args.kv_cache_memory_bytes", "8G"],
        "rollout.engine_args.kv_cache_memory_bytes=8G is no number of bytes; give one above 0",
    ),
    (
        ["--rollout.engine", "transformers", "--rollout.engine_args.block_size", "32"],
        "rollout.engine_args.block_size: the transformers engine has no such argument; it knows attn_implementation, ",
    ),
    (
        ["--rollout.engine", "transformers", "--rollout.tensor", "2"],
        "rollout.tensor=2: the transformers engine runs on one device; use 1, or rollout.engine=vllm",
    ),
    (
        ["--rollout.engine", "sglang", "--rollout.tensor", "3"],
        "rollout.tensor=3 does not divide the model's 16 attention heads; use 1, 2, 4, 8 or 16",
    ),
    (
        ["--reward.functions", "[{name: format, options: {pattern: '('}}]"],
        "reward.functions.0.options={'pattern': '('} do not fit: reward function 'format' cannot work with them: ",
    ),
    (
        ["--reward.functions", "[{name: length, options: {limit: many}}]"],
        "reward.functions.0.options={'limit': 'many'} do not fit: reward function 'length' cannot work with them: ",
    ),
    (["--model.path", "TMP/none"], "model.path=TMP/none is no directory; give a Hugging Face checkpoint directory"),
    (["--model.path", "TMP"], "model.path=TMP: no config.json there; give a Hugging Face checkpoint directory"),
    (["--run_dir", "TMP/train.jsonl"], "run_dir=TMP/train.jsonl is a file; give a directory"),
    (
        ["--run_dir", "TMP/train.jsonl/run"],
        "run_dir=TMP/train.jsonl/run is below TMP/train.jsonl, which is a file; give a path below a directory",
    ),
    (
        ["--run_dir", "/"],
        "run_dir=/ is the root of the file system, which holds more than one run; give a directory in",
    ),
    (["--run_dir", "/usr/.."], "run_dir=/usr/.. is the root of the file system"),
    (["--run_dir", "/proc/run"], "run_dir=/proc/run cannot be written to ("),
    (["--sync.transport", "directory"], "sync.transport=directory needs sync.directory, one that trainers and engines"),
    (
        ["--sync.transport", "directory", "--sync.directory", "TMP/train.jsonl"],
        "sync.directory=TMP/train.jsonl is a file; give a directory",
    ),
    (
        ["--sync.directory", "TMP/buckets"],
        "sync.directory=TMP/buckets is used by sync.transport=directory only",
    ),
    (
        ["--sync.transport", "nccl", "--cluster.placement", "colocated", "--trainer.parallel.data", "2"],
        "sync.transport=nccl needs a device of its own for every process, but with cluster.placement=colocated",
    ),
    (["--sync.transport", "cuda_ipc"], "sync.transport=cuda_ipc needs engines on the trainers' devices"),
    (["--run_dir", "TMP/" + "x" * 256], f"run_dir=TMP/{'x' * 256} cannot be written to (File name too long)"),
    (["--debug.save_rollouts", "TMP/train.jsonl"], "debug.save_rollouts=TMP/train.jsonl is a file; give a directory"),
    (
        ["--debug.load_rollouts", "TMP/none"],
        "debug.load_rollouts=TMP/none is no directory; give one that debug.save_rollouts filled",
    ),
    (
        ["--debug.load_rollouts", "TMP/model", "--steps", "3"],
        "debug.load_rollouts=TMP/model lacks step-000001.pt, and every one of steps=3 needs its own; train for fewer",
    ),
    (
        ["--resume", "Auto"],
        "resume=Auto is neither auto nor never, nor a directory; give the path of a checkpoint, such as",
    ),
    (["--data.train", "none"], "data.train=[] is empty; give at least one .jsonl or .parquet file"),
    (["--data.train", "TMP/no.jsonl"], "data.train=TMP/no.jsonl does not exist; give an existing file"),
    (["--data.train", "TMP"], "data.train=TMP is a directory; give .jsonl or .parquet files"),
    (
        ["--evaluation.temperature", "0.001"],
        "evaluation.temperature=0.001 is lower than engines sample at; use 0 (greedy), or at least 0.01",
    ),
    (
        ["--evaluation.files", "TMP/a.csv"],
        "evaluation.files=TMP/a.csv is of an unknown type; give .jsonl or .parquet files",
    ),
    (
        ["--evaluation.every", "5"],
        "evaluation.every=5, but evaluation.files is empty; give held-out files, or every: 0",
    ),
    (
        ["--evaluation.samples_per_prompt", "4"],
        "evaluation.samples_per_prompt=4 at evaluation.temperature=0 samples the same",
    ),
    (["--rollout.engine", "vlm"], "rollout.engine=vlm is unknown; use one of: "),
    (["--trainer.backend", "fdsp"], "trainer.backend=fdsp is unknown; use one of: "),
    (["--algorithm.loss", "ppo"], "algorithm.loss=ppo is unknown; use one of: ppo_clip, "),
    (["--algorithm.advantage", "gae"], "algorithm.advantage=gae is unknown; use one of: grpo, "),
    (
        ["--rollout.top_p", "0.9"],
        "rollout.top_p=0.9 cuts the distribution that the loss assumes whole; use 1 for training",
    ),
    (
        [*AHEAD, "--cluster.placement", "colocated"],
        "rollout.max_staleness=1 lets engines and trainers work at once, but cluster.placement=colocated has them take",
    ),
    (
        ["--rollout.max_staleness", "2"],
        "rollout.max_staleness=2 trains on samples of older weights, which biases the gradient unless",
    ),
    (
        [*AHEAD, "--rollout.oversample", "1.5"],
        "rollout.oversample=1.5 aborts what is late, but with rollout.max_staleness=1 it is trained later instead;",
    ),
    (
        [
            "--rollout.drop_zero_spread",
            "true",
            "--rollout.samples_per_prompt",
            "1",
            "--algorithm.advantage",
            "reinforce_pp",
        ],
        "rollout.drop_zero_spread=True drops every group of rollout.samples_per_prompt=1; use at least 2 samples",
    ),
    (
        [*STREAM, "--cluster.placement", "colocated"],
        "rollout.stream=true has trainers work while engines do, but cluster.placement=colocated has them take turns",
    ),
    (
        [*STREAM, "--algorithm.minibatches", "2"],
        "rollout.stream=true goes through a batch once, but algorithm.epochs=1 and algorithm.minibatches=2 make",
    ),
    (
        [*STREAM, "--algorithm.advantage", "reinforce_pp_baseline"],
        "rollout.stream=true needs advantages before the batch is complete, and algorithm.advantage=reinforce_pp_basel",
    ),
    (
        [*STREAM, "--algorithm.kl_reward_coef", "0.1"],
        "rollout.stream=true needs advantages before anything is scored, but algorithm.kl_reward_coef=0.1 takes the KL",
    ),
    (
        [*STREAM, "--debug.shuffle_advantages", "true"],
        "debug.shuffle_advantages=true permutes the advantages of a whole batch, which rollout.stream=true does not",
    ),
    (
        ["--rollout.top_k", "50"],
        "rollout.top_k=50 cuts the distribution that the loss assumes whole; use -1 for training",
    ),
    (
        ["--rollout.samples_per_prompt", "1"],
        "rollout.samples_per_prompt=1 gives algorithm.advantage=grpo nothing to compare",
    ),
    (
        ["--algorithm.loss", "no_such.place:thing"],
        "algorithm.loss=no_such.place:thing leads nowhere: there is no module no_such; install it, or start with",
    ),
    (
        ["--algorithm.advantage", "slime_like.algorithms.advantage:x"],
        "algorithm.advantage=slime_like.algorithms.advantage:x leads nowhere: there is no module "
        "slime_like.algorithms.advantage; install it",
    ),
    (
        ["--reward.functions", "[{name: 'slime_like.sandbox.rewards.math_answer:mathverify'}]"],
        "reward.functions.0.name=slime_like.sandbox.rewards.math_answer:mathverify leads nowhere: ",
    ),
    (
        ["--rollout.environment.name", "calculators"],
        "rollout.environment.name=calculators is unknown; use calculator or `package.module:name`",
    ),
    (
        ["--rollout.environment.name", "slime_like.examples.calculator:Calculators"],
        "rollout.environment.name=slime_like.examples.calculator:Calculators leads nowhere: ",
    ),
    (
        ["--rollout.environment.name", "calculator", "--rollout.environment.options.open", "x"],
        "rollout.environment.options={'open': 'x'} do not fit: options of environment 'calculator': got an unexpected",
    ),
    (
        ["--rollout.environment.name", "calculator", "--rollout.environment.template", "<tool>"],
        "rollout.environment.template='<tool>' must hold {observation} once",
    ),
    (
        ["--rollout.environment.name", "calculator", "--rollout.environment.max_turn_tokens", "300"],
        "rollout.environment.max_turn_tokens=300 is more than rollout.max_new_tokens=256",
    ),
    (
        ["--rollout.environment.max_turns", "3"],
        "rollout.environment.max_turns is set, but rollout.environment.name is none",
    ),
    (
        ["--reward.functions", "[{name: environment}]"],
        "reward.functions.0.name=environment needs an environment that gives rewards; set rollout.environment.name",
    ),
    (["--rollout.python", "TMP/python"], "rollout.python=TMP/python is no program; give the path of a Python"),
    (["--algorithm.loss", "a-b:c"], "algorithm.loss=a-b:c is no import path; give `package.module:name`"),
    (
        ["--algorithm.overlong_buffer", "257"],
        "algorithm.overlong_buffer=257 is more than rollout.max_new_tokens=256, below which the penalty grows",
    ),
    (["--algorithm.kl_reward_coef", "0.1", "--reference.path", "TMP/none"], "reference.path=TMP/none is no directory"),
    (["--algorithm.minibatches", "65"], "algorithm.minibatches=65 is more than rollout.prompts_per_step=64"),
    (
        ["--trainer.parallel.data", "9", "--rollout.prompts_per_step", "2", "--algorithm.minibatches", "2"],
        "trainer.parallel.data=9 is more than the 8 samples of a minibatch",
    ),
    (
        ["--trainer.parallel.data", "3", "--rollout.prompts_per_step", "2", "--algorithm.loss", "sft"],
        "trainer.parallel.data=3 is more than the 2 samples of a minibatch",
    ),
    (
        ["--algorithm.moe_aux_loss_coef", "0.01"],
        "algorithm.moe_aux_loss_coef=0.01, but the model has no experts to balance; set it to 0",
    ),
    (
        ["--trainer.optimizer.offload", "true", "--model.dtype", "float32"],
        "trainer.optimizer.offload: Megatron's host optimizer takes no float32 weights; set model.dtype: bfloat16",
    ),
    (
        ["--trainer.optimizer.offload", "true", "--trainer.optimizer.distributed", "false"],
        "trainer.optimizer.offload needs trainer.optimizer.distributed, also on one rank; set distributed: true",
    ),
    (
        ["--trainer.optimizer.weight_decay", "0.1", "--trainer.optimizer.final_weight_decay", "0"],
        "trainer.optimizer.final_weight_decay=0 is below trainer.optimizer.weight_decay=0.1",
    ),
    (["--trainer.optimizer.min_lr", "1"], "trainer.optimizer.min_lr=1 is above trainer.optimizer.lr=1e-06"),
    (
        ["--trainer.optimizer.warmup_steps", "100", "--trainer.optimizer.decay", "cosine"],
        "trainer.optimizer.warmup_steps=100 leaves nothing of the run's 100 optimizer steps to decay=cosine",
    ),
    (
        ["--data.max_prompt_tokens", "1800"],
        "data.max_prompt_tokens=1800 and rollout.max_new_tokens=256 make 2056 tokens, more than the model's "
        "max_position_embeddings=2048; lower them",
    ),
    (
        ["--trainer.target_tokens_per_batch", "700"],
        "data.max_prompt_tokens=512 and rollout.max_new_tokens=256 make 768 tokens, more than "
        "trainer.target_tokens_per_batch=700; lower them, or raise it",
    ),
    (
        ["--rollout.max_model_len", "700"],
        "data.max_prompt_tokens=512 and rollout.max_new_tokens=256 make 768 tokens, more than rollout.max_model_len=",
    ),
    (
        ["--rollout.max_model_len", "4096"],
        "rollout.max_model_len=4096 is more than the model's max_position_embeddings=2048",
    ),
    (
        ["--evaluation.files", "TMP/train.jsonl", "--evaluation.max_new_tokens", "300"],
        "data.max_prompt_tokens=512 and evaluation.max_new_tokens=300 make 812 tokens, more than rollout.",
    ),
    (
        ["--rollout.stop_token_ids", "2", "300"],
        "rollout.stop_token_ids=300 is no token of the model; its ids are 0 to 299",
    ),
    (["--reward.functions", "[{name: maths}]"], "reward.functions.0.name=maths is unknown; use math_verify, "),
    (["--reward.functions", "[{name: 'mine:'}]"], "reward.functions.0.name=mine: is unknown; use math_verify, "),
    (
        ["--reward.functions", "[{name: length, options: {limit: 1}}, {name: length, options: {limit: 1}}]"],
        "reward.functions.1.name=length is used twice",
    ),
    (
        ["--reward.functions", "[{name: format}]"],
        "reward.functions.0.options={} do not fit: options of reward function 'format': missing",
    ),
    (
        ["--reward.functions", "[{name: length, options: {limit: 4, max: 5}}]"],
        "reward.functions.0.options={'limit': 4, 'max': 5} do not fit",
    ),
    (["--algorithm.kl_coef", "0.1", "--reference.path", "TMP/none"], "reference.path=TMP/none is no directory"),
    (["--algorithm.kl_coef", "0", "--reference.path", "TMP/none"], "reference.path=TMP/none is no directory"),
    (["--algorithm.kl_coef", "0.1", "--reference.path", "TMP"], "reference.path=TMP: no config.json there"),
    (
        ["--algorithm.kl_coef", "0.1", "--reference.placement", "workers", "--reference.parallel.tensor", "3"],
        "reference.parallel.tensor=3 does not divide the model's 16 attention heads; use 1, 2, 4, 8 or 16",
    ),
    (
        ["--trainer.parallel.tensor", "3"],
        "trainer.parallel.tensor=3 does not divide the model's 16 attention heads; use 1, 2, 4, 8 or 16",
    ),
]


@pytest.mark.parametrize(("more", "sentence"), FAULTS, ids=[" ".join(case[0]) for case in FAULTS])
def test_a_fault_is_named_with_field_value_and_remedy(
    tmp_path: Path, flags: list[str], more: list[str], sentence: str
) -> None:
    problems = check(load_config(None, [*flags, *(flag.replace("TMP", str(tmp_path)) for flag in more)]))
    assert len(problems) == 1, problems
    assert problems[0].startswith(sentence.replace("TMP", str(tmp_path)))


def keep_rollouts(directory: Path, steps: Iterable[int]) -> list[str]:
    directory.mkdir(exist_ok=True)
    for step in steps:
        dump_path(directory, step).touch()
    return ["--debug.load_rollouts", str(directory), "--steps", "3"]


def test_kept_advantages_are_not_shuffled(tmp_path: Path, flags: list[str]) -> None:
    """A control that silently is none would prove the opposite of what it says."""
    flags += [*keep_rollouts(tmp_path / "kept", (1, 2, 3)), "--debug.shuffle_advantages", "true"]
    [problem] = check(load_config(None, flags))
    assert problem.startswith("debug.shuffle_advantages=true permutes advantages as they are computed, and ")


def test_kept_rollouts_must_cover_what_is_left_to_train(tmp_path: Path, flags: list[str]) -> None:
    flags += keep_rollouts(tmp_path / "kept", (1, 3))
    [problem] = check(load_config(None, flags))
    assert "kept lacks step-000002.pt" in problem
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-000002").mkdir(parents=True)
    (checkpoints / "latest").symlink_to("step-000002")
    assert check(load_config(None, flags)) == []
    assert len(check(load_config(None, [*flags, "--resume", "never"]))) == 1


def test_kept_rollouts_cannot_be_evaluated(tmp_path: Path, flags: list[str]) -> None:
    flags += keep_rollouts(tmp_path / "kept", (1, 2, 3))
    assert check(load_config(None, flags)) == []
    flags += ["--evaluation.files", str(tmp_path / "train.jsonl"), "--evaluation.every", "1"]
    [problem] = check(load_config(None, flags))
    assert "starts no engine, so that evaluation.files cannot be sampled from; set evaluation.files: none" in problem


@pytest.mark.parametrize("field", ["algorithm.loss", "algorithm.advantage", "rollout.environment.name"])
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("thing = (", "cannot be imported: PLACE:2: SyntaxError: '(' was never closed; correct it"),
        ("thing = 'text'", "is 'text' (PLACE:2), which cannot be called; correct the name"),
    ],
)
def test_what_the_source_tells_of_ones_own_code_is_told_before_it_is_imported(
    tmp_path: Path, flags: list[str], field: str, source: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_things.py"
    file.write_text(f"raise RuntimeError('imported')\n{source}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = check(load_config(None, [*flags, f"--{field}", "own_things:thing"]))
    assert f"{field}=own_things:thing {sentence.replace('PLACE', str(file))}" in problems


@pytest.mark.parametrize("spelled", ["home", "home/", "link", "home/run/.."])
def test_a_run_does_not_take_the_home_directory(
    tmp_path: Path, flags: list[str], spelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to("home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    [problem] = check(load_config(None, [*flags, "--run_dir", f"{tmp_path}/{spelled}"]))
    assert "is your home directory, which holds more than one run; give a directory in it, such as" in problem
    assert check(load_config(None, [*flags, "--run_dir", f"{tmp_path}/home/run"])) == []


def test_a_check_leaves_nothing_behind(tmp_path: Path, flags: list[str]) -> None:
    check(load_config(None, flags))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "train.jsonl"]


def _weights(model: Path) -> Path:
    return model / "model.safetensors"


def _write_index(model: Path, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text)


TWO_FILES = json.dumps({"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}})
MODEL_FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda model: _weights(model).unlink(), "MODEL holds no *.safetensors file, so the model has no weights; copy or"),
    (lambda model: _weights(model).write_bytes(b""), "MODEL/model.safetensors is cut off or no safetensors file"),
    (lambda model: _weights(model).write_bytes(b"\xff" * 64), "MODEL/model.safetensors is cut off or no safetensors"),
    (
        lambda model: _weights(model).write_bytes(_weights(model).read_bytes()[:100]),
        "MODEL/model.safetensors is cut off or no safetensors file: its header does not fit its 100 bytes; copy or",
    ),
    (
        lambda model: _weights(model).write_bytes(b"\x02" + bytes(7) + b"[]"),
        "MODEL/model.safetensors is no safetensors file: its header cannot be read (",
    ),
    (
        lambda model: _weights(model).write_bytes(_weights(model).read_bytes()[:-1]),
        "MODEL/model.safetensors has ",
    ),
    (
        lambda model: _write_index(model, TWO_FILES),
        "MODEL/more.safetensors is missing, though model.safetensors.index.json lists it; copy or download it again",
    ),
    (
        lambda model: _write_index(model, "[]"),
        "MODEL/model.safetensors.index.json is no index of safetensors files (",
    ),
    (
        lambda model: write_weights(_weights(model), range(11)),
        "MODEL/config.json says num_hidden_layers=12, but the weights beside it are of 11 layers; use the config.json",
    ),
]


@pytest.mark.parametrize("field", ["model.path", "reference.path"])
@pytest.mark.parametrize(("damage", "sentence"), MODEL_FILES, ids=[case[1] for case in MODEL_FILES])
def test_weights_that_are_missing_or_damaged_are_found_before_anything_starts(
    tmp_path: Path, flags: list[str], field: str, damage: Callable[[Path], object], sentence: str
) -> None:
    model = write_checkpoint(tmp_path / "damaged")
    damage(model)
    [problem] = check(load_config(None, [*flags, f"--{field}", str(model), "--algorithm.kl_coef", "0.1"]))
    assert problem.startswith(f"{field}: {sentence.replace('MODEL', str(model))}")


def test_all_faults_are_told_at_once(tmp_path: Path, flags: list[str]) -> None:
    more = [
        "--data.train",
        "x.jsonl",
        "--rollout.top_p",
        "0.5",
        "--trainer.parallel.pipeline",
        "13",
        "--rollout.engine",
        "x",
    ]
    assert len(check(load_config(None, [*flags, *more]))) == 4


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path, flags: list[str]) -> None:
    write_checkpoint(tmp_path / "other", vocab_size=301)
    more = ["--algorithm.kl_coef", "0.1", "--reference.path", str(tmp_path / "other")]
    problems = check(load_config(None, [*flags, *more]))
    assert len(problems) == 1
    assert "has 301 tokens and model.path 300" in problems[0]
    assert check(load_config(None, [*flags, *more, "--algorithm.kl_coef", "0"])) == []


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(12, 4, [3, 3, 3, 3]), (3, 2, [2, 1]), (61, 4, [15, 16, 15, 15]), (63, 4, [16, 16, 16, 15]), (7, 1, [7])],
)
def test_layers_spread_over_stages(layers: int, stages: int, expected: list[int]) -> None:
    assert layers_per_stage(layers, stages) == expected


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {"tensor": 4, "sequence": True, "pipeline": 3, "virtual_pipeline": 2, "context": 5, "data": 7}, []),
    ({}, {"tensor": 16}, []),  # two ranks for each KV head
    (
        {"num_attention_heads": 12, "num_key_value_heads": 6},
        {"tensor": 4},
        ["trainer.parallel.tensor=4 is neither a divisor nor a multiple of the model's 6 KV heads; use 1, 2, 3, 6"],
    ),
    (
        {"intermediate_size": 100},
        {"tensor": 8},
        ["trainer.parallel.tensor=8 does not divide the model's 100 FFN columns; use 1, 2 or 4"],
    ),
    ({}, {"sequence": True}, ["trainer.parallel.sequence=true needs trainer.parallel.tensor above 1"]),
    (
        {},
        {"pipeline": 13},
        ["trainer.parallel.pipeline=13 is more than the model's 12 layers; every stage needs one, so use at most 12"],
    ),
    (
        {},
        {"pipeline": 5, "virtual_pipeline": 3},
        ["trainer.parallel.pipeline=5 times virtual_pipeline=3 is more than the model's 12 layers; every stage needs"],
    ),
    (
        {},
        {"virtual_pipeline": 2},
        ["trainer.parallel.virtual_pipeline=2 needs trainer.parallel.pipeline above 1; set it to 1"],
    ),
    ({}, {"expert": 2}, ["trainer.parallel.expert=2, but the model has no experts; set it to 1"]),
    (EXPERTS, {"expert": 4, "data": 4}, []),
    (EXPERTS, {"expert": 8, "tensor": 8, "sequence": True}, []),
    (
        EXPERTS,
        {"expert": 3, "data": 3},
        ["trainer.parallel.expert=3 does not divide the model's 8 experts; use 1, 2, 4 or 8"],
    ),
    (
        EXPERTS,
        {"expert": 4, "data": 2},
        ["trainer.parallel.expert=4 does not divide tensor * context * data = 2; use 1 or 2"],
    ),
    (EXPERTS, {"tensor": 2}, ["trainer.parallel.tensor=2 on a mixture of experts needs sequence parallelism"]),
    (DEEPSEEK_V3, {"tensor": 8, "sequence": True, "pipeline": 4, "expert": 8}, []),
    (
        DEEPSEEK_V3 | {"kv_lora_rank": 500},
        {"tensor": 8, "sequence": True, "expert": 8},
        ["trainer.parallel.tensor=8 does not divide the model's 564 columns of compressed keys and values; use 1, 2"],
    ),
    (
        DEEPSEEK_V3 | {"moe_intermediate_size": 1028},
        {"tensor": 8, "sequence": True, "expert": 8},
        ["trainer.parallel.tensor=8 does not divide the model's 1028 FFN columns of the shared experts; use 1, 2 or 4"],
    ),
]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"topk_method": "greedy"}, "topk_method=greedy is not noaux_tc"),
        ({"scoring_func": "softmax"}, "scoring_func=softmax is not sigmoid"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not True"),
        ({"attention_bias": True}, "its latent attention has biases"),
        ({"moe_layer_freq": 2}, "layers without experts lie between layers with them"),
        ({"first_k_dense_replace": 61}, "first_k_dense_replace=61 leaves no layer of 61 with experts"),
        ({"topk_group": 2}, "num_experts_per_tok=8 of topk_group=2 groups: groups are ranked"),
        ({"n_group": 7}, "n_group=7 does not divide n_routed_experts=256"),
        ({"kv_lora_rank": None}, "key 'kv_lora_rank' is missing"),
    ],
)
def test_what_is_not_computed_of_deepseek_v3_is_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | change))
    config = RunConfig(run_dir=tmp_path / "run", model={"path": tmp_path})
    problems = check(config, CONVERSION)
    assert any(sentence in problem for problem in problems), problems


def test_deepseek_v3_s_published_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    found = ModelDimensions.from_checkpoint(tmp_path)
    assert found.latent == LatentAttention(1536, 512, 128, 64, 128, interleaved=True)
    assert (found.head_dim, found.rotary_dim, found.value_dim, found.num_kv_heads) == (192, 64, 128, 128)
    assert found.expert_layers == range(3, 61) and found.moe_shared_ffn_hidden_size == 2048
    assert found.rope_scaling is not None and found.rope_scaling["mscale_all_dim"] == 1.0
    assert found.active_parameters / 1e9 == pytest.approx(37.0, abs=1.0)  # its paper says 37 billion
    assert found.is_draft("model.layers.61.eh_proj.weight") and not found.is_draft("model.layers.60.mlp.gate.weight")


@pytest.mark.parametrize(("model", "layout", "sentences"), LAYOUTS, ids=[str(case[1]) for case in LAYOUTS])
def test_layouts(tmp_path: Path, model: dict[str, Any], layout: dict[str, Any], sentences: list[str]) -> None:
    dimensions = ModelDimensions.from_checkpoint(write_checkpoint(tmp_path, **model))
    problems = layout_problems(ParallelConfig(**layout), dimensions)
    assert len(problems) == len(sentences), problems
    for problem, sentence in zip(problems, sentences, strict=True):
        assert problem.startswith(sentence)


UNREADABLE = {
    "no JSON": ("{", "not valid JSON"),
    "binary": (b"\xff\xfe", "not valid JSON"),
    "list": ("[]", "no JSON object"),
    "architecture": (
        '{"architectures": ["GPT2LMHeadModel"]}',
        "model_type (none) gives no 'hidden_size', by this name or another that is known",
    ),
    "missing": ('{"architectures": ["Qwen3ForCausalLM"]}', "is missing"),
    "nested architectures": ('{"architectures": [["x"]]}', "architecture ['x'] is no causal language model; use "),
    "architectures of another type": ('{"architectures": 3}', "architecture 3 is no causal language model; use "),
    "nested too deep": ("[" * 100_000, "not valid JSON"),
    "endless number": ('{"vocab_size": ' + "9" * 5000 + "}", "not valid JSON"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_checkpoint_is_named(tmp_path: Path, case: str) -> None:
    content, reason = UNREADABLE[case]
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        ModelDimensions.from_checkpoint(tmp_path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0, "head_dim": None},
        {"rope_theta": "x"},
        {"architectures": ["Qwen2VLForConditionalGeneration"]},
    ],
    ids=str,
)
def test_a_checkpoint_that_cannot_be_computed_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ModelDimensions.from_checkpoint(write_checkpoint(tmp_path, **changes))


FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GraniteForCausalLM"]}, "architecture GraniteForCausalLM is none of LlamaForCausalLM, "),
    ({"hidden_act": "gelu"}, "hidden_act=gelu is not silu (SwiGLU)"),
    ({"use_sliding_window": True, "sliding_window": 1280}, "it has sliding-window attention"),
    ({"architectures": ["MistralForCausalLM"]}, "it has sliding-window attention"),
    ({**EXPERTS, "mlp_only_layers": [0]}, "layers without experts lie between layers with them"),
    ({"attention_bias": True}, "its attention's output projection has a bias"),
    ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "its MLPs have biases"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope' is none of default, linear, llama3, yarn"),
]


@pytest.mark.parametrize(("changes", "reason"), FOREIGN, ids=[reason for _, reason in FOREIGN])
def test_what_megatron_does_not_compute_is_for_fsdp(
    changes: dict[str, Any], reason: str, flags: list[str], tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "model", **changes)
    (problem,) = check(load_config(None, flags))
    assert problem.startswith(f"{model}/config.json: {reason}") and "use trainer.backend=fsdp" in problem
    assert check(load_config(None, [*flags, *FSDP])) == []


def test_of_another_family_what_is_not_known_is_refused(flags: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", use_sliding_window=True, sliding_window=200)
    reach, balance = check(load_config(None, [*flags, *FSDP, "--algorithm.moe_aux_loss_coef", "0.1"]))[:2]
    assert "attend to 200 at most" in reach and "keep both within 200 tokens" in reach
    assert balance.startswith("algorithm.moe_aux_loss_coef=0.1: how routers of")


@pytest.mark.parametrize(("value", "problems"), [("1", 1), ("0", 0), ("", 0)])
def test_numba_must_be_allowed_to_compile(
    value: str, problems: int, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", value)
    found = check(load_config(None, flags))
    assert len(found) == problems
    assert all(problem.startswith("NUMBA_DISABLE_JIT=1 in the environment") for problem in found)
    assert check(load_config(None, [*flags, "--trainer.cpu_kernels", "off"])) == []


def test_where_nothing_is_trained_no_trainer_need_compute_the_model(flags: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", use_sliding_window=True, sliding_window=200)
    flags = [*flags, "--evaluation.files", str(tmp_path / "train.jsonl")]
    given = [[], FSDP, ["--trainer.parallel.tensor", "3"], ["--algorithm.moe_aux_loss_coef", "0.1"]]
    for more in given:
        config = load_config(None, [*flags, *more])
        assert check(config) != []
        assert check(config, evaluation_needs(config)) == []
    config = load_config(None, [*flags, "--data.max_prompt_tokens", "9999"])
    assert "data.max_prompt_tokens=9999" in check(config, evaluation_needs(config))[0]


def test_a_family_without_what_every_decoder_has_is_refused_by_name(flags: list[str], tmp_path: Path) -> None:
    sizes = {"max_position_embeddings": None}
    write_checkpoint(tmp_path / "model", architectures=["BloomForCausalLM"], model_type="bloom", **sizes)
    problem = check(load_config(None, [*flags, *FSDP]))[0]
    assert "model_type bloom gives no 'max_position_embeddings', by this name or another that is known" in problem


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": "3"}, "num_hidden_layers='3' must be a whole number of at least 1"),
    ({**EXPERTS, "num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than its 8 experts"),
    ({"num_attention_heads": 15}, "num_key_value_heads=8 does not divide num_attention_heads=15"),
    ({"num_attention_heads": [4]}, "num_attention_heads=[4] must be a whole number of at least 1"),
    ({"hidden_size": 64.0}, "hidden_size=64.0 must be a whole number of at least 1"),
    ({"head_dim": True}, "head_dim=True must be a whole number of at least 1"),
    ({"vocab_size": 0}, "vocab_size=0 must be a whole number of at least 1"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' must be a number above 0"),
    ({"rope_theta": -1}, "rope_theta=-1 must be a number above 0"),
    ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "key 'original_max_position_embeddings' is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor='2' must be a number above 0"),
    (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        },
        "rope_parameters and rope_scaling say different things; keep one, with its rope_theta",
    ),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
    ({"eos_token_id": "2"}, "eos_token_id='2' is neither a token id nor a list of them"),
    ({"eos_token_id": [2, None]}, "eos_token_id=[2, None] is neither a token id nor a list of them"),
    ({"eos_token_id": 300}, "eos_token_id=300: 300 is no token of the model, whose ids are 0 to 299; re-export"),
    ({"eos_token_id": [2, -1]}, "eos_token_id=[2, -1]: -1 is no token of the model, whose ids are 0 to 299"),
    ({"architectures": ["NoneForCausalLM"], "eos_token_id": 300}, "eos_token_id=300: 300 is no token of the model"),
    ({"head_dim": None, "num_attention_heads": 7}, "num_attention_heads=7 does not divide hidden_size=64, and there"),
    ({"layer_types": ["full_attention"] * 3}, "num_hidden_layers=12, but layer_types has 3 entries"),
    ({**EXPERTS, "num_experts_per_tok": "2"}, "num_experts_per_tok='2' must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("changes", "reason"), WRONG_TYPES, ids=[case[1] for case in WRONG_TYPES])
def test_a_value_of_the_wrong_type_is_named_with_its_key(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelDimensions.from_checkpoint(write_checkpoint(tmp_path, **changes))
    assert str(caught.value).startswith(f"{tmp_path}/config.json: {reason}")


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"/generation_config\.json: not valid JSON"):
        ModelDimensions.from_checkpoint(tmp_path)


def test_ends_of_a_generation_config_are_tokens_of_the_model(tmp_path: Path) -> None:
    """Also where ``config.json`` names others: engines read both."""
    write_checkpoint(tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [299, 0]}')
    assert ModelDimensions.from_checkpoint(tmp_path).eos_token_ids == (299, 0)
    generation.write_text('{"eos_token_id": [2, 300]}')
    with pytest.raises(ConfigError, match=r"=\[2, 300\] in generation_config.json beside it: 300 is no token of the"):
        ModelDimensions.from_checkpoint(tmp_path)
    generation.write_text('{"eos_token_id": 2}')
    with pytest.raises(ConfigError, match=r"config.json: eos_token_id=300: 300 is no token of the model"):
        ModelDimensions.from_checkpoint(write_checkpoint(tmp_path, eos_token_id=300))


def test_dimensions_are_those_of_the_file(tmp_path: Path) -> None:
    found = ModelDimensions.from_checkpoint(write_checkpoint(tmp_path))
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (16, 8, 16)
    assert found.vocab_size == QWEN3_8_KV_HEADS["vocab_size"]
    assert found.eos_token_ids == (2,)


def test_known_names_are_those_of_the_registries() -> None:
    assert set(LOSSES) == set(POLICY_LOSSES)
    assert set(ADVANTAGES) == set(ESTIMATORS)
    assert set(BATCH_ADVANTAGES) == {name for name, estimator in ESTIMATORS.items() if estimator.scope == "batch"}


def test_a_balancing_loss_does_not_stream(tmp_path: Path, flags: list[str]) -> None:
    write_checkpoint(tmp_path / "model", **EXPERTS)
    flags += ["--algorithm.moe_aux_loss_coef", "0.01"]
    assert check(load_config(None, flags)) == []
    [problem] = check(load_config(None, [*flags, *STREAM]))
    assert problem.startswith(
        "algorithm.moe_aux_loss_coef=0.01 adds a loss with a denominator of its own, and with roll"
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_group_estimators_are_those_that_learn_nothing_from_groups_of_one(name: str) -> None:
    advantages = compute_advantages(torch.tensor([0.0, 1.0, 3.0]), [1, 2, 3], name)
    assert bool((advantages == 0).all()) == (name in GROUP_ADVANTAGES)
