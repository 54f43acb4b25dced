"""Faults across fields and against files, found before anything starts."""

import json
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.algorithms.advantages import ESTIMATORS, compute_advantages
from slime_like.algorithms.losses.policy import POLICY_LOSSES
from slime_like.checks import names
from slime_like.checks.check import check, require_valid
from slime_like.checks.definition import CONVERSION, evaluation_needs
from slime_like.checks.layout import layers_per_stage
from slime_like.checks.packages import missing_flash_attention
from slime_like.checks.prefixes import prefix_problems
from slime_like.config import RunConfig
from slime_like.config.algorithm import ADVANTAGES, BATCH_ADVANTAGES, GROUP_ADVANTAGES, LOSSES
from slime_like.config.reading.load import load_config, save_config
from slime_like.data.dump import dump_path
from slime_like.errors import ConfigError, Problem
from slime_like.models.config_json import LatentAttention
from slime_like.models.dimensions import ModelDimensions
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import DEEPSEEK_V3, EXPERTS, sound_flags, write_checkpoint, write_weights

ROOT = Path(__file__).parents[3]

Rejected = Callable[[list[str], str], Problem]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return sound_flags(tmp_path)


@pytest.fixture
def rejected(rejects: Rejects) -> Rejected:
    """Require of flags exactly one problem, with this code and the golden file's sentence."""

    def only_problem(flags: list[str], code: str) -> Problem:
        with rejects(ConfigError, code) as caught:
            require_valid(load_config(None, flags))
        (problem,) = caught.value.problems
        return problem

    return only_problem


def test_a_sound_configuration_has_no_problem_and_a_check_leaves_nothing_behind(
    flags: list[str], tmp_path: Path
) -> None:
    assert check(load_config(None, flags)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "train.jsonl"]
    assert check(load_config(None, [*flags, "--algorithm.loss", "sft", "--data.max_prompt_tokens", "9999"])) == []


def test_the_configuration_that_a_run_writes_is_accepted_again(flags: list[str], tmp_path: Path) -> None:
    config = load_config(None, flags)
    save_config(config, tmp_path / "config.yaml")  # with all defaults
    assert check(load_config(tmp_path / "config.yaml")) == []


def test_the_asynchronous_fsdp_recipe_lacks_its_model_and_data_only(flags: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", max_position_embeddings=32768)
    recipe = load_config(Path("configs/async_grpo_fsdp.yaml"), flags)
    assert check(recipe) == []
    assert recipe.algorithm.reduction == "samples" and recipe.algorithm.epochs * recipe.algorithm.minibatches == 1


@pytest.mark.parametrize("attention", ["transformer_engine", "ring_flash_attn"])
def test_attention_must_be_installed_and_compute_in_the_models_precision(
    attention: str, flags: list[str], rejected: Rejected, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags += ["--logging.tensorboard", "false", "--trainer.attention", attention, "--model.dtype"]
    monkeypatch.setattr("slime_like.checks.packages.find_spec", lambda name: None)
    rejected([*flags, "bfloat16"], "trainer.attention")
    monkeypatch.setattr("slime_like.checks.packages.find_spec", lambda name: object())
    monkeypatch.setattr("slime_like.checks.packages.has_transformer_engine", lambda: True)
    assert check(load_config(None, [*flags, "bfloat16"])) == []
    if attention == "transformer_engine":
        rejected([*flags, "float32"], "trainer.attention")


@pytest.mark.parametrize(("backend", "others"), [("megatron", "ring or allgather"), ("fsdp", "allgather")])
def test_flash_attention_is_required_on_cuda_and_the_backends_others_are_named(
    backend: str, others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = ["flash_attn"]  # version 4 has this name, too
    monkeypatch.setattr("slime_like.checks.packages.find_spec", lambda name: name in found or None)
    trainer = {"backend": backend, "attention": "ring_flash_attn"}
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, trainer=trainer)
    assert list(missing_flash_attention(config, on_cuda=False)) == []
    (problem,) = missing_flash_attention(config, on_cuda=True)
    assert problem.endswith(f" or use trainer.attention={others}")
    found.append("flash_attn_2_cuda")
    assert list(missing_flash_attention(config, on_cuda=True)) == []


@pytest.mark.parametrize("trainer", [{"attention": "transformer_engine"}, {"backend": "custom"}])
def test_shared_prefixes_name_what_cannot_compute_them(trainer: dict[str, str], tmp_path: Path) -> None:
    found = {}
    for sharing in (False, "tree"):
        settings = {"share_prefixes": sharing, **trainer}
        config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, trainer=settings)
        found[sharing] = list(prefix_problems(config))
    ((name, value),) = trainer.items()
    assert found[False] == [] and f"trainer.{name}={value}" in found["tree"][0]


STREAM = ["--rollout.stream", "true"]
FSDP = ["--trainer.backend", "fsdp"]
AHEAD = "--rollout.max_staleness 1 --algorithm.importance_correction truncate"
AGENT = "--reward.functions '[{name: agent}]'"

# Flags by the check that finds their fault. TMP stands for the test's directory.
FAULTS: dict[str, list[str]] = {
    "trainer.fsdp": [
        "--trainer.backend fsdp --trainer.parallel.tensor 2",
        "--trainer.backend fsdp --trainer.parallel.pipeline 2",
        "--trainer.backend fsdp --trainer.attention ring",
        "--trainer.backend fsdp --trainer.optimizer.distributed false",
        "--trainer.backend fsdp --trainer.activation_offload true",
        "--trainer.fsdp.accumulate sharded",
    ],
    "trainer.backend-args": ["--trainer.backend_args.rank 8"],
    "rollout.engine-args": [
        "--rollout.engine vllm --rollout.engine_args.tensor_parallel_size 2",
        "--rollout.engine sglang --rollout.engine_args.enable_lora true",
        "--rollout.engine vllm --rollout.engine_args.gpu_memory_utilization much",
        "--rollout.engine sglang --rollout.engine_args.mem_fraction_static 1.5",
        "--rollout.engine vllm --rollout.engine_args.kv_cache_memory_bytes 8G",
        "--rollout.engine transformers --rollout.engine_args.block_size 32",
        "--rollout.engine vllm --rollout.engine_args.gpu_memory_utilisation 0.5",
        "--rollout.engine sglang --rollout.engine_args.mem_fraction 0.5",
        "--rollout.engine sglang --rollout.engine_args.bananas 1",
        "--rollout.engine transformers --rollout.tensor 2",
    ],
    "rollout.tensor": ["--rollout.engine sglang --rollout.tensor 3"],
    "reward.functions": [
        "--reward.functions '[{name: format, options: {pattern: \"(\"}}]'",
        "--reward.functions '[{name: length, options: {limit: many}}]'",
        "--reward.functions '[{name: \"slime_like.sandbox.rewards.math_answer:mathverify\"}]'",
        "--reward.functions '[{name: environment}]'",
        "--reward.functions '[{name: agent}]'",
        "--rollout.agent.command [sh]",
        "--reward.functions '[{name: maths}]'",
        "--reward.functions '[{name: \"mine:\"}]'",
        "--reward.functions '[{name: length, options: {limit: 1}}, {name: length, options: {limit: 1}}]'",
        "--reward.functions '[{name: format}]'",
        "--reward.functions '[{name: math_verify, weight: 0}]'",
        "--reward.functions '[{name: judge, options: {url: \"http://127.0.0.1/v1\", model: m, instructions: Good}}]'",
        "--reward.functions '[{name: length, options: {limit: 4, max: 5}}]'",
        "--reward.functions '[{name: judge, options: {url: \"http://127.0.0.1/v1\", model: m}}]'",
        "--reward.functions '[{name: http, options: {url: \"http://127.0.0.1\", timeout_s: 9}}]' --reward.timeout_s 9",
    ],
    "data.prompts": [
        "--data.system_prompt 'Be brief.' --data.apply_chat_template false",
    ],
    "data.mixture": [
        "--data.mixture '[{name: a, files: [TMP/train.jsonl]}]'",
        "--data.train [] --data.mixture '[{name: a, files: [TMP/train.jsonl]}, {name: a, files: [TMP/train.jsonl]}]'",
    ],
    "reference.unused": ["--reference.placement workers"],
    "model.path": ["--model.path TMP/none", "--model.path TMP"],
    "run_dir": [
        "--run_dir TMP/train.jsonl",
        "--run_dir TMP/train.jsonl/run",
        "--run_dir /",
        "--run_dir /usr/..",
        "--run_dir /proc/run",
        "--run_dir /sys/run",
    ],
    "sync.transport": [
        "--sync.transport directory",
        "--sync.directory TMP/buckets",
        "--sync.transport nccl --cluster.placement colocated --trainer.parallel.data 2",
        "--sync.transport colocated",
        "--sync.transport colocated --sync.delta always --cluster.placement colocated --trainer.parallel.data 2",
    ],
    "sync.directory": ["--sync.transport directory --sync.directory TMP/train.jsonl"],
    "debug.save-rollouts": ["--debug.save_rollouts TMP/train.jsonl"],
    "debug.load-rollouts": ["--debug.load_rollouts TMP/none", "--debug.load_rollouts TMP/model --steps 3"],
    "resume": ["--resume Auto"],
    "data.mixture-files": ["--data.train [] --data.mixture '[{name: a, files: [TMP/no.jsonl]}]'"],
    "data.train": ["--data.train none", "--data.train TMP/no.jsonl", "--data.train /usr"],
    "evaluation.sampling": ["--evaluation.temperature 0.001", "--evaluation.samples_per_prompt 4"],
    "evaluation.files": ["--evaluation.files TMP/a.csv"],
    "evaluation.every": ["--evaluation.every 5"],
    "rollout.engine": ["--rollout.engine vlm", "--rollout.engine hf"],
    "trainer.backend": ["--trainer.backend fdsp"],
    "algorithm.loss": ["--algorithm.loss ppo", "--algorithm.loss no_such.place:thing", "--algorithm.loss a-b:c"],
    "algorithm.advantage": ["--algorithm.advantage gae", "--algorithm.advantage slime_like.algorithms.advantage:x"],
    "algorithm.kl-estimator": ["--algorithm.kl_estimator k9", "--algorithm.kl_estimator no_such.place:thing"],
    "algorithm.importance-correction": ["--algorithm.importance_correction tiss"],
    "rollout.sampling": [
        "--rollout.top_p 0.9 --rollout.top_k 513 --rollout.engine transformers",
        "--rollout.min_p 0.1 --rollout.top_k 2000",
        f"{AHEAD} --cluster.placement colocated",
        "--rollout.max_staleness 2",
        f"{AHEAD} --rollout.oversample 1.5",
        "--rollout.drop_zero_spread true --rollout.samples_per_prompt 1 --algorithm.advantage reinforce_pp",
        "--rollout.top_k 600",
        "--rollout.samples_per_prompt 1",
        "--algorithm.overlong_buffer 257",
    ],
    "rollout.stream": [
        "--rollout.stream true --cluster.placement colocated",
        "--rollout.stream true --algorithm.minibatches 2",
        "--rollout.stream true --algorithm.advantage reinforce_pp_baseline",
        "--rollout.stream true --algorithm.kl_reward_coef 0.1",
        f"{AHEAD} --rollout.stream true --algorithm.importance_normalize true",
        "--rollout.stream true --debug.shuffle_advantages true",
    ],
    "rollout.environment": [
        "--rollout.environment.name calculators",
        "--rollout.environment.name slime_like.examples.calculator:Calculators",
        "--rollout.environment.name calculator --rollout.environment.options.open x",
        "--rollout.environment.name calculator --rollout.environment.template '<tool>'",
        "--rollout.environment.name calculator --rollout.environment.max_turn_tokens 300",
        "--rollout.environment.max_turns 3",
    ],
    "rollout.agent": [
        "--rollout.agent.max_calls 3",
        f"{AGENT} --rollout.agent.name my_agent",
        f"{AGENT} --rollout.agent.name slime_like.examples.calculator:solver",
        f"{AGENT} --rollout.agent.name docs/examples/agents/calculator_agent.py:solve --rollout.agent.command [sh]",
        f"{AGENT} --rollout.agent.command '[sh, \"{{url}}\"]'",
        f"{AGENT} --rollout.agent.command [sh] --rollout.agent.options.x y",
        f"{AGENT} --rollout.agent.command [sh] --rollout.environment.name calculator",
        f"{AGENT} --rollout.agent.command [sh] --algorithm.overlong_buffer 10",
    ],
    "rollout.agent-custom": [
        f"{AGENT} --rollout.agent.command [no-such-program]",
        f"{AGENT} --rollout.agent.command ['python agent.py']",
    ],
    "rollout.agent-rows": [f"{AGENT} --rollout.agent.command [sh] --algorithm.loss gspo"],
    "rollout.agent-length": [
        f"{AGENT} --rollout.agent.command [sh] --rollout.max_model_len 2000 --trainer.target_tokens_per_batch 1500"
    ],
    "rollout.python": ["--rollout.python TMP/python"],
    "reference.model": [
        "--algorithm.kl_reward_coef 0.1 --reference.path TMP/none",
        "--algorithm.kl_coef 0.1 --reference.path TMP/none",
        "--algorithm.kl_coef 0 --reference.path TMP/none",
        "--algorithm.kl_coef 0.1 --reference.path TMP",
        "--algorithm.kl_coef 0.1 --reference.placement workers --reference.parallel.tensor 3",
    ],
    "algorithm.minibatches": [
        "--algorithm.minibatches 65",
        "--trainer.parallel.data 9 --rollout.prompts_per_step 2 --algorithm.minibatches 2",
        "--trainer.parallel.data 3 --rollout.prompts_per_step 2 --algorithm.loss sft",
    ],
    "data.messages-key": ["--data.messages_key messages"],
    "algorithm.balancing": ["--algorithm.moe_aux_loss_coef 0.01"],
    "trainer.offload": [
        "--trainer.optimizer.offload true --model.dtype float32",
        "--trainer.optimizer.offload true --trainer.optimizer.distributed false",
    ],
    "trainer.schedule": [
        "--trainer.optimizer.weight_decay 0.1 --trainer.optimizer.final_weight_decay 0",
        "--trainer.optimizer.min_lr 1",
        "--trainer.optimizer.warmup_steps 100 --trainer.optimizer.decay cosine",
    ],
    "rollout.length": ["--data.max_prompt_tokens 1800", "--rollout.max_model_len 700"],
    "trainer.token-budget": ["--trainer.target_tokens_per_batch 700"],
    "rollout.max-model-len": ["--rollout.max_model_len 4096"],
    "evaluation.length": [
        "--evaluation.files TMP/train.jsonl --evaluation.max_new_tokens 300 --rollout.max_model_len 768"
    ],
    "rollout.stop-tokens": ["--rollout.stop_token_ids 2 300"],
    "trainer.layout": ["--trainer.parallel.tensor 3"],
    "trainer.share-prefixes": [
        "--trainer.share_prefixes prompts --trainer.attention ring --trainer.parallel.context 2",
        "--trainer.share_prefixes tree --trainer.backend fsdp --trainer.attention ring_flash_attn "
        "--trainer.parallel.context 2",
        "--trainer.share_prefixes tree --trainer.attention ring --reference.placement workers "
        "--reference.parallel.context 2 --algorithm.kl_coef 0.1",
    ],
}


@pytest.mark.parametrize(("code", "more"), [(code, more) for code, cases in FAULTS.items() for more in cases])
def test_a_fault_is_named_with_its_field(
    tmp_path: Path, flags: list[str], rejected: Rejected, code: str, more: str
) -> None:
    """The golden sentence begins with the field."""
    problem = rejected([*flags, *shlex.split(more.replace("TMP", str(tmp_path)))], code)
    assert problem.field and problem.text.startswith(problem.field)


def test_kept_rollouts_must_cover_what_is_left_to_train(tmp_path: Path, flags: list[str], rejected: Rejected) -> None:
    """They can be neither evaluated nor shuffled: a control that silently is none would prove the opposite."""
    kept, checkpoints = tmp_path / "kept", tmp_path / "run" / "checkpoints"
    kept.mkdir()
    for step in (1, 2, 3):
        dump_path(kept, step).touch()
    flags += ["--debug.load_rollouts", str(kept), "--steps", "3"]
    assert check(load_config(None, flags)) == []
    rejected([*flags, "--debug.shuffle_advantages", "true"], "debug.load-rollouts")
    rejected([*flags, "--evaluation.files", str(tmp_path / "train.jsonl")], "debug.load-rollouts")
    dump_path(kept, 2).unlink()
    rejected(flags, "debug.load-rollouts")
    (checkpoints / "step-000002").mkdir(parents=True)
    (checkpoints / "latest").symlink_to("step-000002")
    assert check(load_config(None, flags)) == []
    rejected([*flags, "--resume", "never"], "debug.load-rollouts")


def test_the_highest_temperature_is_vllms_own(flags: list[str], rejected: Rejected) -> None:
    """Its source is searched for the bound: an import takes seconds. An evaluation does not sample at training's."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM")
    source = (Path(spec.origin).parent / "sampling_params.py").read_text(encoding="utf-8")
    (bound,) = re.findall(r"if self\.temperature > (\S+):\n\s+raise VLLMValidationError", source)
    held_out = ["--evaluation.files", flags[flags.index("--data.train") + 1]]
    flags += ["--rollout.engine", "vllm"]
    above = str(float(bound) + 0.1)
    for field, code, more in (("rollout", "rollout.sampling", []), ("evaluation", "evaluation.sampling", held_out)):
        name = f"--{field}.temperature"
        assert check(load_config(None, [*flags, *more, name, bound])) == []
        rejected([*flags, *more, name, above], code)
        assert check(load_config(None, [*flags, *more, name, above, "--rollout.engine", "sglang"])) == []
    config = load_config(None, [*flags, *held_out, "--rollout.temperature", above])
    assert check(config, evaluation_needs(config)) == []
    assert check(load_config(None, [*flags, "--evaluation.temperature", above])) == []


def test_an_engine_that_is_not_installed_is_named_before_anything_starts(
    flags: list[str], rejected: Rejected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "is_installed", lambda engine: False)
    rejected([*flags, "--rollout.engine", "sglang"], "rollout.engine-installed")


_CUSTOM = ("loss", "advantage", "kl_estimator", "importance_correction")


@pytest.mark.parametrize("field", [*(f"algorithm.{name}" for name in _CUSTOM), "rollout.environment.name"])
@pytest.mark.parametrize("source", ["thing = (", "thing = 'text'"])
def test_faults_of_custom_code_that_its_source_shows_are_found_before_it_is_imported(
    tmp_path: Path, flags: list[str], rejected: Rejected, field: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "custom_things.py").write_text(f"raise RuntimeError('imported')\n{source}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rejected([*flags, f"--{field}", "custom_things:thing"], field.removesuffix(".name").replace("_", "-"))


@pytest.mark.parametrize("spelled", ["home", "home/", "link", "home/run/.."])
def test_a_run_does_not_take_the_home_directory(
    tmp_path: Path, flags: list[str], rejected: Rejected, spelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to("home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    rejected([*flags, "--run_dir", f"{tmp_path}/{spelled}"], "run_dir")
    assert check(load_config(None, [*flags, "--run_dir", f"{tmp_path}/home/run"])) == []


def _write_index(weights: Path, text: str) -> None:
    Path(f"{weights}.index.json").write_text(text)


TWO_FILES = json.dumps({"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}})
MODEL_FILES: dict[str, Callable[[Path], object]] = {
    "none": lambda weights: weights.unlink(),
    "empty": lambda weights: weights.write_bytes(b""),
    "noise": lambda weights: weights.write_bytes(b"\xff" * 64),
    "cut off": lambda weights: weights.write_bytes(weights.read_bytes()[:100]),
    "header of another kind": lambda weights: weights.write_bytes(b"\x02" + bytes(7) + b"[]"),
    "a byte less": lambda weights: weights.write_bytes(weights.read_bytes()[:-1]),
    "a file less": lambda weights: _write_index(weights, TWO_FILES),
    "index of another kind": lambda weights: _write_index(weights, "[]"),
    "a layer less": lambda weights: write_weights(weights, range(11)),
}


@pytest.mark.parametrize("field", ["model.path", "reference.path"])
@pytest.mark.parametrize("damage", MODEL_FILES)
def test_weights_that_are_missing_or_damaged_are_found_before_anything_starts(
    tmp_path: Path, flags: list[str], rejected: Rejected, field: str, damage: str
) -> None:
    model = write_checkpoint(tmp_path / "damaged")
    MODEL_FILES[damage](model / "model.safetensors")
    flags += [f"--{field}", str(model), "--algorithm.kl_coef", "0.1"]
    rejected(flags, f"{field.removesuffix('.path')}.weight-files")


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path, flags: list[str], rejected: Rejected) -> None:
    write_checkpoint(tmp_path / "other", vocab_size=301)
    flags += ["--algorithm.kl_coef", "0.1", "--reference.path", str(tmp_path / "other")]
    rejected(flags, "reference.model")
    assert check(load_config(None, [*flags, "--algorithm.kl_coef", "0"])) == []


def layered(layers: int, vocab_size: int) -> ModelDimensions:
    """Layers of 16 * 16 * 4 + 16 * 64 * 3 = 4,096 elements in matrix products."""
    return ModelDimensions(
        family="qwen3",
        num_layers=layers,
        hidden_size=16,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        ffn_hidden_size=64,
        vocab_size=vocab_size,
        max_position_embeddings=64,
        tied_embeddings=False,
        eos_token_ids=(0,),
    )


@pytest.mark.parametrize(
    ("layers", "vocab_size", "stages", "expected"),
    [
        (12, 1, 4, [3, 3, 3, 3]),
        (61, 1, 4, [15, 16, 15, 15]),
        (63, 1, 4, [16, 16, 16, 15]),
        (7, 1024, 1, [7]),
        (3, 1024, 2, [2, 1]),
        (12, 256, 4, [3, 4, 3, 2]),  # 1 layer: 12 + 1 on 4 stages
        (64, 410, 2, [33, 31]),  # 1.6 layers: 33 and 32.6
        (24, 2329, 2, [17, 7]),  # 9.1 layers: 17 and 16.1
        (4, 4096, 3, [1, 2, 1]),  # more than all layers: every stage has one
    ],
)
def test_layers_spread_over_stages_beside_the_head(
    layers: int, vocab_size: int, stages: int, expected: list[int]
) -> None:
    assert layers_per_stage(layered(layers, vocab_size), stages) == expected


def test_a_published_model_weighs_its_head() -> None:
    """By hand: a layer has 2 x 5120 x 128 x 72 + 3 x 5120 x 25600, the head 151936 x 5120: 1.6 layers."""
    model = ModelDimensions.from_checkpoint(ROOT / "configs" / "models" / "Qwen3-32B")
    assert layers_per_stage(model, 2) == [33, 31]
    assert layers_per_stage(model, 4) == [16, 17, 16, 15]


# Changes of config.json, the layout, and the axis that is wrong.
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"tensor": 4, "sequence": True, "pipeline": 3, "virtual_pipeline": 2, "context": 5, "data": 7}, ""),
    ({}, {"tensor": 16}, ""),  # two ranks for each KV head
    ({"num_attention_heads": 12, "num_key_value_heads": 6}, {"tensor": 4}, "tensor"),
    ({"intermediate_size": 100}, {"tensor": 8}, "tensor"),
    ({}, {"sequence": True}, "sequence"),
    ({}, {"pipeline": 13}, "pipeline"),
    ({}, {"pipeline": 5, "virtual_pipeline": 3}, "pipeline"),
    ({}, {"virtual_pipeline": 2}, "virtual_pipeline"),
    ({}, {"expert": 2}, "expert"),
    (EXPERTS, {"expert": 4, "data": 4}, ""),
    (EXPERTS, {"expert": 8, "tensor": 8, "sequence": True}, ""),
    (EXPERTS, {"expert": 3, "data": 3}, "expert"),
    (EXPERTS, {"expert": 4, "data": 2}, "expert"),
    (EXPERTS, {"tensor": 2}, "tensor"),
    (DEEPSEEK_V3, {"tensor": 8, "sequence": True, "pipeline": 4, "expert": 8}, ""),
    (DEEPSEEK_V3 | {"kv_lora_rank": 500}, {"tensor": 8, "sequence": True, "expert": 8}, "tensor"),
    (DEEPSEEK_V3 | {"moe_intermediate_size": 1028}, {"tensor": 8, "sequence": True, "expert": 8}, "tensor"),
]


@pytest.mark.parametrize(
    "change",
    [
        {"topk_method": "greedy"},
        {"scoring_func": "softmax"},
        {"norm_topk_prob": False},
        {"attention_bias": True},
        {"moe_layer_freq": 2},
        {"first_k_dense_replace": 61},
        {"topk_group": 2},
        {"n_group": 7},
        {"kv_lora_rank": None},
    ],
    ids=str,
)
def test_deepseek_v3_is_computed_as_published_only(tmp_path: Path, rejects: Rejects, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | change))
    with rejects(ConfigError) as caught:
        require_valid(RunConfig(run_dir=tmp_path / "run", model={"path": tmp_path}), CONVERSION)
    assert {problem.code for problem in caught.value.problems} <= {"model.path", "model.family"}


def test_deepseek_v3_s_published_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    found = ModelDimensions.from_checkpoint(tmp_path)
    assert found.latent == LatentAttention(1536, 512, 128, 64, 128, interleaved=True)
    assert (found.head_dim, found.rotary_dim, found.value_dim, found.num_kv_heads) == (192, 64, 128, 128)
    assert found.expert_layers == range(3, 61) and found.moe_shared_ffn_hidden_size == 2048
    assert found.rope_scaling is not None and found.rope_scaling["mscale_all_dim"] == 1.0
    assert found.active_parameters / 1e9 == pytest.approx(37.0, abs=1.0)  # its paper says 37 billion
    assert found.is_draft("model.layers.61.eh_proj.weight") and not found.is_draft("model.layers.60.mlp.gate.weight")


@pytest.mark.parametrize(("model", "layout", "axis"), LAYOUTS, ids=[str(case[1]) for case in LAYOUTS])
def test_layouts(tmp_path: Path, rejects: Rejects, model: dict[str, Any], layout: dict[str, Any], axis: str) -> None:
    path = write_checkpoint(tmp_path / "model", **model)
    config = RunConfig(run_dir=tmp_path / "run", model={"path": path}, trainer={"parallel": layout})
    if not axis:
        assert check(config, CONVERSION) == []
        return
    with rejects(ConfigError, "trainer.layout") as caught:
        require_valid(config, CONVERSION)
    assert [problem.field for problem in caught.value.problems] == [f"trainer.parallel.{axis}"]


FOREIGN: list[dict[str, Any]] = [
    {"architectures": ["GraniteForCausalLM"]},
    {"hidden_act": "gelu"},
    {"use_sliding_window": True, "sliding_window": 1280},
    {"architectures": ["MistralForCausalLM"]},
    {**EXPERTS, "mlp_only_layers": [0]},
    {**EXPERTS, "decoder_sparse_step": 2},
    {"attention_bias": True},
    {"architectures": ["LlamaForCausalLM"], "mlp_bias": True},
    {"rope_scaling": {"rope_type": "longrope"}},
]


@pytest.mark.parametrize("changes", FOREIGN, ids=str)
def test_fsdp_has_more_families(changes: dict[str, Any], flags: list[str], rejected: Rejected, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", **changes)
    rejected(flags, "model.family")
    assert check(load_config(None, [*flags, *FSDP])) == []


def test_of_another_family_what_is_not_known_is_refused(flags: list[str], rejects: Rejects, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", use_sliding_window=True, sliding_window=200)
    with rejects(ConfigError) as caught:
        require_valid(load_config(None, [*flags, *FSDP, "--algorithm.moe_aux_loss_coef", "0.1"]))
    codes = ["model.family", "model.family", "algorithm.balancing"]
    assert [problem.code for problem in caught.value.problems] == codes


def test_numba_must_be_able_to_compile(flags: list[str], rejected: Rejected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    rejected(flags, "trainer.cpu-kernels")
    assert check(load_config(None, [*flags, "--trainer.cpu_kernels", "off"])) == []
    for value in ("0", ""):
        monkeypatch.setenv("NUMBA_DISABLE_JIT", value)
        assert check(load_config(None, flags)) == []


def test_where_nothing_is_trained_no_trainer_need_compute_the_model(flags: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", use_sliding_window=True, sliding_window=200)
    flags = [*flags, "--evaluation.files", str(tmp_path / "train.jsonl")]
    given = [[], FSDP, ["--trainer.parallel.tensor", "3"], ["--algorithm.moe_aux_loss_coef", "0.1"]]
    for more in given:
        config = load_config(None, [*flags, *more])
        assert check(config) != []
        assert check(config, evaluation_needs(config)) == []
    config = load_config(None, [*flags, "--data.max_prompt_tokens", "9999"])
    assert check(config, evaluation_needs(config))[0].field == "data.max_prompt_tokens"


# A whole config.json, or changes of a sound one.
UNREADABLE: list[bytes | dict[str, Any]] = [
    b"{",
    b"\xff\xfe",
    b"[]",
    b'{"architectures": ["GPT2LMHeadModel"]}',
    b'{"architectures": ["Qwen3ForCausalLM"]}',
    b'{"architectures": [["x"]]}',
    b'{"architectures": 3}',
    b"[" * 100_000,
    b'{"vocab_size": ' + b"9" * 5000 + b"}",
    {"num_attention_heads": 0, "head_dim": None},
    {"rope_theta": "x"},
    {"architectures": ["Qwen2VLForConditionalGeneration"]},
    {"num_hidden_layers": "3"},
    {**EXPERTS, "num_experts_per_tok": 9},
    {"num_attention_heads": 15},
    {"num_attention_heads": [4]},
    {"hidden_size": 64.0},
    {"head_dim": True},
    {"vocab_size": 0},
    {"rms_norm_eps": "1e-6"},
    {"rope_theta": -1},
    {"rope_scaling": "linear"},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
    {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    },
    {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "max_position_embeddings": None},
    {"tie_word_embeddings": "false"},
    {"eos_token_id": "2"},
    {"eos_token_id": [2, None]},
    {"eos_token_id": 300},
    {"eos_token_id": [2, -1]},
    {"architectures": ["NoneForCausalLM"], "eos_token_id": 300},
    {"head_dim": None, "num_attention_heads": 7},
    {"layer_types": ["full_attention"] * 3},
    {**EXPERTS, "num_experts_per_tok": "2"},
]


@pytest.mark.parametrize("case", UNREADABLE, ids=lambda case: str(case)[:60])
def test_an_unreadable_config_json_is_named(tmp_path: Path, rejects: Rejects, case: bytes | dict[str, Any]) -> None:
    write_checkpoint(tmp_path, **(case if isinstance(case, dict) else {}))
    if isinstance(case, bytes):
        (tmp_path / "config.json").write_bytes(case)
    with rejects(ConfigError):
        ModelDimensions.from_checkpoint(tmp_path)


def test_ends_of_a_generation_config_are_tokens_of_the_model(tmp_path: Path, rejects: Rejects) -> None:
    """Also where ``config.json`` names others: engines read both. A damaged file is named."""
    write_checkpoint(tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [299, 0]}')
    assert ModelDimensions.from_checkpoint(tmp_path).eos_token_ids == (299, 0)
    for text in ('{"eos_token_id": [2, 300]}', "{"):
        generation.write_text(text)
        with rejects(ConfigError):
            ModelDimensions.from_checkpoint(tmp_path)
    generation.write_text('{"eos_token_id": 2}')
    with rejects(ConfigError):
        ModelDimensions.from_checkpoint(write_checkpoint(tmp_path, eos_token_id=300))


def test_known_names_are_those_of_the_registries() -> None:
    assert set(LOSSES) == set(POLICY_LOSSES)
    assert set(ADVANTAGES) == set(ESTIMATORS)
    assert set(BATCH_ADVANTAGES) == {name for name, estimator in ESTIMATORS.items() if estimator.scope == "batch"}


def test_a_balancing_loss_does_not_stream(tmp_path: Path, flags: list[str], rejected: Rejected) -> None:
    write_checkpoint(tmp_path / "model", **EXPERTS)
    flags += ["--algorithm.moe_aux_loss_coef", "0.01"]
    assert check(load_config(None, flags)) == []
    rejected([*flags, *STREAM], "rollout.stream")


@pytest.mark.parametrize("name", ADVANTAGES)
def test_group_estimators_are_those_that_learn_nothing_from_groups_of_one(name: str) -> None:
    advantages = compute_advantages(torch.tensor([0.0, 1.0, 3.0]), [1, 2, 3], name)
    assert bool((advantages == 0).all()) == (name in GROUP_ADVANTAGES)
