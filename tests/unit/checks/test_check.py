"""Conflicts of fields, and checks against files, before anything starts."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import CONFIG_MAPPING

from slime_like.checks import CONVERSION, engines
from slime_like.checks.check import check, require_valid
from slime_like.checks.layout import layers_per_stage, length_problems
from slime_like.checks.packages import missing_flash_attention
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config, save_config
from slime_like.data.dump import dump_path
from slime_like.errors import ConfigError, Problem
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.families.deepseek_v3 import LatentAttention
from slime_like.models.tower import language_names
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import (
    DEEPSEEK_V3,
    EXPERTS,
    GPT_OSS,
    LINEAR,
    sound_flags,
    write_checkpoint,
    write_weights,
)

ROOT = Path(__file__).parents[3]

Rejected = Callable[[list[str], str], Problem]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return sound_flags(tmp_path)


@pytest.fixture
def rejected(rejects: Rejects) -> Rejected:
    """Require flags to have exactly one problem, with this code."""

    def only_problem(flags: list[str], code: str) -> Problem:
        with rejects(ConfigError, code) as caught:
            require_valid(load_config(None, flags))
        (problem,) = caught.value.problems
        return problem

    return only_problem


def test_a_sound_configuration_has_no_problem(flags: list[str], tmp_path: Path) -> None:
    """Neither has the configuration that a run writes. Checks leave nothing behind."""
    config = load_config(None, flags)
    assert check(config) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "train.jsonl"]
    assert check(load_config(None, [*flags, "--algorithm.loss", "sft", "--data.max_prompt_tokens", "9999"])) == []
    save_config(config, tmp_path / "config.yaml")
    assert check(load_config(tmp_path / "config.yaml")) == []


@pytest.mark.parametrize("attention", ["transformer_engine", "ring_flash_attn"])
def test_attention_must_be_installed(
    attention: str, flags: list[str], rejected: Rejected, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags += ["--logging.tensorboard", "false", "--trainer.attention", attention]
    monkeypatch.setattr("slime_like.checks.packages.find_spec", lambda name: None)
    rejected(flags, "trainer.attention")
    monkeypatch.setattr("slime_like.checks.packages.find_spec", lambda name: object())
    monkeypatch.setattr("slime_like.checks.packages.has_transformer_engine", lambda: True)
    assert check(load_config(None, flags)) == []
    if attention == "transformer_engine":
        rejected([*flags, "--model.dtype", "float32"], "trainer.attention")


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("trainer.attention", "MISSING"),
        ("fields-conflict", "UNCORRECTED"),
        ("fields-conflict", "--trainer.backend fsdp"),
        ("fields-conflict", "--trainer.attention ring"),
        ("fields-conflict", "--model.lora.rank 8"),
        ("fields-conflict", "--model.dtype float32"),
        ("model.family", "GPT_OSS"),
        ("model.family", "LINEAR"),
        ("model.family", "--trainer.parallel.tensor 8"),
        ("model.family", "--trainer.fp8_bf16_layers 7"),
    ],
)
def test_what_fp8_needs(
    code: str, wrong: str, flags: list[str], rejected: Rejected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_like.checks.packages.has_transformer_engine", lambda: wrong != "MISSING")
    flags += ["--trainer.fp8", "blockwise", "--logging.tensorboard", "false"]
    if wrong != "UNCORRECTED":
        flags += ["--algorithm.importance.correction", "truncate"]
    if (model := {"GPT_OSS": GPT_OSS, "LINEAR": LINEAR}.get(wrong)) is not None:
        write_checkpoint(tmp_path / "model", **model)
    problem = rejected([*flags, *(wrong.split() if wrong.startswith("--") else ())], code)
    assert problem.field.startswith("trainer.fp8")


def test_flash_attention_is_required_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = ["flash_attn"]  # version 4 has this name, too
    monkeypatch.setattr("slime_like.checks.packages.find_spec", lambda name: name in found or None)
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, trainer={"attention": "ring_flash_attn"})
    assert list(missing_flash_attention(config.trainer, on_cuda=False)) == []
    assert len(list(missing_flash_attention(config.trainer, on_cuda=True))) == 1
    found.append("flash_attn_2_cuda")
    assert list(missing_flash_attention(config.trainer, on_cuda=True)) == []


FSDP = ["--trainer.backend", "fsdp"]
RATE = ["--trainer.router_bias_rate", "0.001"]
SHORT = {
    "COMMAND": "AGENT --rollout.agent.command [sh]",
    "AGENT": "--reward.functions '[{name: agent}]'",
    "AHEAD": "--rollout.max_staleness 1 --algorithm.importance.correction truncate",
}

# Code and field of the only problem, and the flags that have it. TMP represents the test's directory.
FAULTS = [
    line.split(maxsplit=2)
    for line in r"""
rollout.engine-args rollout.engine_args.tensor_parallel_size --rollout.engine vllm --rollout.engine_args.tensor_parallel_size 2
rollout.engine-args rollout.engine_args.no_such_argument --rollout.engine vllm --rollout.engine_args.no_such_argument 1
rollout.engine-args rollout.engine_args.enable_lora --rollout.engine sglang --rollout.engine_args.enable_lora true
rollout.engine-args rollout.engine_args.kv_cache_dtype --rollout.engine vllm --rollout.engine_args.kv_cache_dtype fp8
rollout.engine-args rollout.allow_engine_args --rollout.engine vllm --rollout.allow_engine_args kv_cache_dtyp
rollout.engine-args rollout.engine_args.gpu_memory_utilization --rollout.engine vllm --rollout.engine_args.gpu_memory_utilization much
rollout.engine-args rollout.engine_args.mem_fraction_static --rollout.engine sglang --rollout.engine_args.mem_fraction_static 1.5
rollout.engine-args rollout.engine_args.kv_cache_memory_bytes --rollout.engine vllm --rollout.engine_args.kv_cache_memory_bytes 8G
rollout.engine-args rollout.engine_args.block_size --rollout.engine transformers --rollout.engine_args.block_size 32
rollout.engine-args rollout.tensor --rollout.engine transformers --rollout.tensor 2
rollout.tensor rollout.tensor --rollout.engine sglang --rollout.tensor 3
reward.functions reward.functions.0.options --reward.functions '[{name: format, options: {pattern: "("}}]'
reward.functions reward.functions.0.name --reward.functions '[{name: maths}]'
custom.code reward.functions.0.name --reward.functions '[{name: "mine:"}]'
reward.functions reward.functions.0.options --reward.functions '[{name: length, options: {limit: 4, max: 5}}]'
reward.functions reward.timeout_s --reward.functions '[{name: http, options: {url: "http://127.0.0.1", timeout_s: 9}}]' --reward.timeout_s 9
model.path model.path --model.path TMP/none
run_dir run_dir --run_dir TMP/train.jsonl
run_dir run_dir --run_dir /
run_dir run_dir --run_dir /proc/run
sync.directory sync.directory --sync.transport directory --sync.directory TMP/train.jsonl
debug.save-rollouts debug.save_rollouts --debug.save_rollouts TMP/train.jsonl
debug.load-rollouts debug.load_rollouts --debug.load_rollouts TMP/model --steps 3
data.train data.mixture.0.files --data.train [] --data.mixture '[{name: a, files: [TMP/no.jsonl]}]'
data.train data.train --data.train TMP/no.jsonl
data.train data.train --data.train /usr
evaluation.files evaluation.files --evaluation.files TMP/a.csv
rollout.engine rollout.engine --rollout.engine vlm
trainer.backend trainer.backend --trainer.backend fdsp
algorithm algorithm.loss --algorithm.loss trpo
algorithm algorithm.loss.clip --algorithm.loss.clip 0.1
algorithm algorithm.loss.dual_clip --algorithm.loss '{name: cispo, dual_clip: 3}'
algorithm algorithm.loss.clip_low --algorithm.loss.clip_low much
algorithm algorithm.loss.clip_low --algorithm.loss.clip_low none
algorithm algorithm.reduction.length --algorithm.reduction constant
algorithm algorithm.reduction.length --algorithm.reduction.length 8
algorithm.advantage algorithm.advantage.ddof --algorithm.advantage.ddof 0.5
algorithm.options algorithm.loss.clip_low --algorithm.loss.clip_low 1.5
algorithm.options algorithm.loss.clip_low --algorithm.loss.clip_low -0.1
algorithm.options algorithm.loss.clip_low --algorithm.loss '{name: cispo, clip_low: 2.0}'
algorithm.options algorithm.loss.clip_low --algorithm.loss '{name: gspo, clip_low: .nan}'
algorithm.options algorithm.loss.clip_high --algorithm.loss.clip_high -0.1
algorithm algorithm.loss.clip_low --algorithm.loss '{name: sft, clip_low: 0.2}'
algorithm.options algorithm.loss.dual_clip --algorithm.loss.dual_clip 1
algorithm.options algorithm.loss.clip_high --algorithm.loss '{name: cispo, clip_high: -1}'
algorithm.options algorithm.reduction.length --algorithm.loss sft --algorithm.reduction '{name: constant, length: 0}'
algorithm.options algorithm.advantage.eps --algorithm.advantage.eps -1
algorithm algorithm.loss --algorithm.loss a-b:c
algorithm.advantage algorithm.advantage --algorithm.advantage gea
algorithm algorithm.kl.estimator --algorithm.kl.estimator k9
algorithm algorithm.importance.correction --algorithm.importance.correction tiss
rollout.environment rollout.environment.name --rollout.environment.name calculators
rollout.environment rollout.environment.options --rollout.environment.name calculator --rollout.environment.options.open x
rollout.environment rollout.environment.template --rollout.environment.name calculator --rollout.environment.template '<tool>'
custom.code rollout.agent.name AGENT --rollout.agent.name my_agent
rollout.agent rollout.agent.command AGENT --rollout.agent.command '[sh, "{url}"]'
rollout.agent-custom rollout.agent.command AGENT --rollout.agent.command [no-such-program]
rollout.agent-custom rollout.agent.environment COMMAND --rollout.agent.environment [NO_SUCH_VARIABLE]
rollout.agent rollout.agent.host COMMAND --rollout.agent.host node
rollout.agent rollout.agent.host COMMAND --rollout.agent.host 198.51.100.7 --cluster.nodes 2 --cluster.allow_idle_gpus true
rollout.agent-custom rollout.agent.host COMMAND --rollout.agent.host 198.51.100.7
trainer.token-budget rollout.max_model_len COMMAND --rollout.max_model_len 2000 --trainer.target_tokens_per_batch 1500
reference.model reference.path --algorithm.kl_reward.coef 0.1 --reference.path TMP/none
reference.model reference.path --algorithm.kl.coef 0.1 --reference.path TMP/none
reference.model reference.path --algorithm.kl.coef 0 --reference.path TMP/none
reference.model reference.parallel.tensor --algorithm.kl.coef 0.1 --reference.placement workers --reference.parallel.tensor 3
algorithm.minibatches algorithm.minibatches --algorithm.minibatches 65
algorithm.minibatches trainer.parallel.data --trainer.parallel.data 9 --rollout.prompts_per_step 2 --algorithm.minibatches 2
algorithm.minibatches trainer.parallel.data --trainer.parallel.data 3 --rollout.prompts_per_step 2 --algorithm.loss sft
model.family algorithm.moe_aux_loss_coef --algorithm.moe_aux_loss_coef 0.01
model.family trainer.router_bias_rate --trainer.router_bias_rate 0.001
rollout.length data.max_prompt_tokens --data.max_prompt_tokens 1800
rollout.length data.max_prompt_tokens --rollout.max_model_len 700
trainer.token-budget data.max_prompt_tokens --trainer.target_tokens_per_batch 700
rollout.length rollout.max_model_len --rollout.max_model_len 4096
rollout.length data.max_prompt_tokens --evaluation.files TMP/train.jsonl --evaluation.max_new_tokens 300 --rollout.max_model_len 768
rollout.nodes rollout.tensor --rollout.tensor 4 --rollout.pipeline 3
rollout.nodes rollout.tensor --rollout.tensor 4 --rollout.pipeline 2 --cluster.gpus_per_node 3
rollout.tensor rollout.pipeline --rollout.pipeline 16
rollout.stop-tokens rollout.stop_token_ids --rollout.stop_token_ids 2 300
fields-conflict trainer.parallel.tensor --trainer.backend fsdp --trainer.parallel.tensor 2
fields-conflict trainer.attention --trainer.backend fsdp --trainer.attention ring
fields-conflict trainer.optimizer.distributed --trainer.backend fsdp --trainer.optimizer.distributed false
fields-conflict trainer.activation_offload --trainer.backend fsdp --trainer.activation_offload true
fields-conflict trainer.fsdp --trainer.fsdp.accumulate sharded
fields-conflict trainer.fusion --trainer.backend fsdp --trainer.fusion.moe_permute off
trainer.attention trainer.attention_kernels --trainer.attention_kernels fa3
fields-conflict trainer.backend_args --trainer.backend_args.rank 8
fields-conflict reward.functions --reward.functions '[{name: environment}]'
fields-conflict reward.functions AGENT
rollout.agent reward.functions --rollout.agent.command [sh]
fields-conflict reward.functions.1.name --reward.functions '[{name: length, options: {limit: 1}}, {name: length, options: {limit: 1}}]'
fields-conflict reward.functions --reward.functions '[{name: math_verify, weight: 0}]'
fields-conflict data.system_prompt --data.system_prompt 'Be brief.' --data.apply_chat_template false
fields-conflict data.chat_template_kwargs --data.chat_template_kwargs.tools x
fields-conflict rollout.stop --rollout.stop '["</a>", ""]'
fields-conflict rollout.ignore_eos --rollout.ignore_eos true
fields-conflict data.train --data.mixture '[{name: a, files: [TMP/train.jsonl]}]'
fields-conflict data.mixture --data.train [] --data.mixture '[{name: a, files: [TMP/train.jsonl]}, {name: a, files: [TMP/train.jsonl]}]'
fields-conflict reference.placement --reference.placement workers
fields-conflict critic.lam --critic.lam 1
fields-conflict critic.value_clip --algorithm.loss sft --critic.value_clip 0.1
fields-conflict critic.optimizer.min_lr --algorithm.advantage gae --critic.optimizer.min_lr 1
algorithm.demonstrations rollout.samples_per_prompt --algorithm.loss sft --rollout.samples_per_prompt 4
algorithm.demonstrations rollout.temperature --algorithm.loss sft --rollout.temperature 0.5 --evaluation.files TMP/train.jsonl
algorithm.demonstrations rollout.engine --algorithm.loss sft --rollout.engine transformers
algorithm.demonstrations rollout.environment --algorithm.loss sft --rollout.environment.name calculator
algorithm.demonstrations reward.functions --algorithm.loss sft --reward.functions '[{name: gsm8k}]'
algorithm.demonstrations sync.verify --algorithm.loss sft --sync.verify false --evaluation.files TMP/train.jsonl
algorithm.options algorithm.advantage.gamma --algorithm.advantage '{name: gae, gamma: -1}'
algorithm.options algorithm.advantage.lam --algorithm.advantage '{name: gae, lam: 2}'
reference.model critic.path --algorithm.advantage gae --critic.path TMP/none
fields-conflict critic.warmup_steps --algorithm.advantage gae --critic.warmup_steps 4 --steps 4
fields-conflict critic.placement --algorithm.advantage gae --critic.parallel.data 3
fields-conflict rollout.stream --algorithm.advantage gae --rollout.stream true
fields-conflict distillation.coef --distillation.coef 1
fields-conflict distillation.path --distillation.path TMP/none
fields-conflict algorithm.loss --algorithm.loss sft --distillation.coef 1 --distillation.path TMP/none
fields-conflict rollout.stream --rollout.stream true --distillation.coef 1 --distillation.path TMP/none
fields-conflict distillation.mode --distillation.coef 1 --distillation.path TMP/none --distillation.mode exact --rollout.top_k 9
reference.model distillation.path --distillation.coef 1 --distillation.path TMP/none
fields-conflict sync.transport --sync.transport directory
fields-conflict sync.directory --sync.directory TMP/buckets
fields-conflict sync.transport --sync.transport nccl --cluster.placement colocated --trainer.parallel.data 2
fields-conflict sync.transport --sync.transport colocated
fields-conflict sync.transport --sync.transport colocated --sync.delta always --cluster.placement colocated --trainer.parallel.data 2
fields-conflict evaluation.temperature --evaluation.temperature 0.001
fields-conflict evaluation.samples_per_prompt --evaluation.samples_per_prompt 4
fields-conflict evaluation.files --evaluation.every 5
fields-conflict rollout.max_staleness AHEAD --cluster.placement colocated
fields-conflict rollout.max_staleness --rollout.max_staleness 2
fields-conflict sync.quantization --sync.quantization fp8_blocks
fields-conflict sync.quantization --sync.quantization fp8_blocks --algorithm.importance.correction none --model.lora.rank 4 --model.lora.sync adapter
fields-conflict rollout.top_p --rollout.top_k 513
fields-conflict rollout.oversample AHEAD --rollout.oversample 1.5
fields-conflict rollout.drop_zero_spread --rollout.drop_zero_spread true --rollout.samples_per_prompt 1 --algorithm.advantage reinforce_pp
fields-conflict rollout.drop_zero_spread --rollout.drop_zero_spread true --algorithm.advantage remax
fields-conflict rollout.samples_per_prompt --rollout.samples_per_prompt 1
fields-conflict algorithm.overlong.buffer --algorithm.overlong.buffer 257
fields-conflict rollout.stream --rollout.stream true --cluster.placement colocated
fields-conflict rollout.stream --rollout.stream true --algorithm.minibatches 2
fields-conflict rollout.stream --rollout.stream true --algorithm.advantage reinforce_pp_baseline
fields-conflict rollout.stream --rollout.stream true --algorithm.kl_reward.coef 0.1
fields-conflict rollout.stream AHEAD --rollout.stream true --algorithm.importance.normalize true
fields-conflict rollout.stream --rollout.stream true --debug.shuffle_advantages true
fields-conflict rollout.environment.max_turn_tokens --rollout.environment.name calculator --rollout.environment.max_turn_tokens 300
fields-conflict rollout.environment.max_turns --rollout.environment.max_turns 3
fields-conflict rollout.agent.max_calls --rollout.agent.max_calls 3
fields-conflict rollout.agent.name AGENT --rollout.agent.name docs/examples/agents/calculator_agent.py:solve --rollout.agent.command [sh]
fields-conflict rollout.agent.environment AGENT --rollout.agent.name docs/examples/agents/calculator_agent.py:solve --rollout.agent.environment [PATH]
fields-conflict rollout.agent.options COMMAND --rollout.agent.options.x y
fields-conflict rollout.agent COMMAND --rollout.environment.name calculator
fields-conflict algorithm.overlong.buffer COMMAND --algorithm.overlong.buffer 10
fields-conflict algorithm.loss COMMAND --algorithm.loss gspo
fields-conflict data.messages_key --data.messages_key messages
fields-conflict trainer.optimizer.offload --trainer.optimizer.offload true --model.dtype float32
fields-conflict trainer.optimizer.offload --trainer.optimizer.offload true --trainer.optimizer.distributed false
fields-conflict trainer.optimizer.final_weight_decay --trainer.optimizer.weight_decay 0.1 --trainer.optimizer.final_weight_decay 0
fields-conflict trainer.optimizer.min_lr --trainer.optimizer.min_lr 1
fields-conflict trainer.optimizer.warmup_steps --trainer.optimizer.warmup_steps 100 --trainer.optimizer.decay cosine
fields-conflict trainer.share_prefixes --trainer.share_prefixes tree --trainer.attention transformer_engine
fields-conflict trainer.share_prefixes --trainer.share_prefixes tree --trainer.backend custom
fields-conflict trainer.optimizer.overlap_bucket_params --trainer.backend fsdp --trainer.optimizer.overlap_bucket_params 1
fields-conflict trainer.parallel.sequence --trainer.backend fsdp --trainer.parallel.sequence true
fields-conflict data.messages_key --algorithm.loss sft --data.messages_key m --data.response_key other
fields-conflict data.messages_key --algorithm.loss sft --data.messages_key m --data.apply_chat_template false
fields-conflict data.system_prompt --algorithm.loss sft --data.messages_key m --data.system_prompt brief
fields-conflict rollout.top_p --rollout.top_k 1
fields-conflict rollout.top_p --rollout.top_p 0.9 --rollout.engine custom
fields-conflict trainer.backend --rollout.top_p 0.9 --trainer.backend custom
fields-conflict rollout.stream --rollout.stream true --algorithm.moe_aux_loss_coef 0.01
fields-conflict trainer.router_bias_rate --trainer.router_bias_rate 0.001 --model.lora.rank 4
fields-conflict trainer.parallel.context --trainer.share_prefixes prompts --trainer.attention ring --trainer.parallel.context 2
fields-conflict reference.parallel.context --trainer.share_prefixes tree --trainer.attention ring --reference.placement workers --reference.parallel.context 2 --algorithm.kl.coef 0.1
""".strip().splitlines()  # noqa: E501
]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"rollout": {"tensor": 16}}, None),
        ({"rollout": {"tensor": 4, "pipeline": 4}}, None),
        ({"rollout": {"tensor": 6, "pipeline": 2}}, None),  # six on each of two nodes
        ({"rollout": {"tensor": 32, "pipeline": 2}}, None),  # four nodes per stage
        ({"rollout": {"tensor": 9}}, "9 ranks do not split evenly over the 2 nodes"),
        ({"rollout": {"tensor": 8, "pipeline": 2, "engine": "custom"}}, "rollout.engine=custom does not span nodes"),
        ({"rollout": {"pipeline": 2}, "model": {"lora": {"rank": 8, "sync": "adapter"}}}, "model.lora.sync=adapter"),
        ({"rollout": {"pipeline": 2}, "algorithm": {"routing_replay": "rollout"}}, "algorithm.routing_replay=rollout"),
    ],
)
def test_engines_that_span_nodes_are_checked(sections: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    model = {"path": tmp_path, **sections.get("model", {})}
    fixed = {"run_dir": tmp_path, "model": model, "cluster": {"gpus_per_node": 8}}
    found = list(engines.node_problems(RunConfig.model_validate(sections | fixed)))
    assert len(found) == (expected is not None) and all(expected in problem for problem in found if expected)


@pytest.mark.parametrize(("code", "field", "more"), FAULTS, ids=[case[2] for case in FAULTS])
def test_a_fault_is_named_with_its_field(
    tmp_path: Path, rejected: Rejected, monkeypatch: pytest.MonkeyPatch, code: str, field: str, more: str
) -> None:
    """transformers is not imported, because that takes seconds."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name, meaning in (*SHORT.items(), ("TMP", str(tmp_path))):
        more = more.replace(name, meaning)
    problem = rejected([*sound_flags(tmp_path), *shlex.split(more)], code)
    assert problem.field == field and problem.text.startswith(field)


def test_demonstrations_keep_settings_that_are_read(flags: list[str]) -> None:
    """With held-out files, ``slime-like eval`` of the trained model reads settings of engines and rewards."""
    read = "--rollout.prompts_per_step 2 --rollout.max_new_tokens 9 --rollout.num_engines 2 --rollout.stop_token_ids 3"
    flags += ["--algorithm.loss", "sft", *read.split()]
    assert check(load_config(None, flags)) == []
    flags += ["--evaluation.files", flags[flags.index("--data.train") + 1]]
    assert check(load_config(None, [*flags, "--rollout.engine", "vllm", "--reward.functions", "[{name: gsm8k}]"])) == []


def test_axes_that_a_critic_inherits_keep_their_name(tmp_path: Path, flags: list[str], rejected: Rejected) -> None:
    """Only a critic with other sizes can lack them."""
    critic = write_checkpoint(tmp_path / "critic", num_attention_heads=12, num_key_value_heads=6)
    flags += ["--algorithm.advantage", "gae", "--critic.path", str(critic), "--trainer.parallel.tensor", "4"]
    inherited = rejected([*flags, "--critic.parallel.pipeline", "1"], "reference.model")
    assert inherited.field == "trainer.parallel.tensor" and "critic.parallel.tensor" in inherited.text
    ring = ["--trainer.attention", "ring", "--trainer.parallel.context", "2", "--trainer.share_prefixes", "prompts"]
    given = ["--critic.parallel.tensor", "2"]
    assert check(load_config(None, [*flags, *given])) == []
    assert rejected([*flags, *given, *ring], "fields-conflict").field == "trainer.parallel.context"


def test_saved_rollouts_must_reach_the_last_step(tmp_path: Path, flags: list[str], rejected: Rejected) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    dump_path(kept, 3).touch()
    flags += ["--debug.load_rollouts", str(kept), "--steps", "3"]
    assert check(load_config(None, flags)) == []
    rejected([*flags, "--debug.shuffle_advantages", "true"], "fields-conflict")
    rejected([*flags, "--evaluation.files", str(tmp_path / "train.jsonl")], "debug.load-rollouts")
    workers = ["--reference.placement", "workers", "--algorithm.kl.coef", "0.1"]
    rejected([*flags, *workers], "fields-conflict")
    rejected([*flags, "--steps", "4"], "debug.load-rollouts")


def test_the_highest_temperature_is_vllms(flags: list[str], rejected: Rejected) -> None:
    """The bound is read from vLLM's source, because an import takes seconds."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM")
    source = (Path(spec.origin).parent / "sampling_params.py").read_text(encoding="utf-8")
    (bound,) = re.findall(r"if self\.temperature > (\S+):\n\s+raise VLLMValidationError", source)
    held_out = ["--evaluation.files", flags[flags.index("--data.train") + 1]]
    flags += ["--rollout.engine", "vllm"]
    above = str(float(bound) + 0.1)
    for field, more in (("rollout", []), ("evaluation", held_out)):
        name = f"--{field}.temperature"
        assert check(load_config(None, [*flags, *more, name, bound])) == []
        rejected([*flags, *more, name, above], "rollout.temperature")
        assert check(load_config(None, [*flags, *more, name, above, "--rollout.engine", "sglang"])) == []
    assert check(load_config(None, [*flags, "--evaluation.temperature", above])) == []


def test_an_engine_that_is_not_installed_is_named(
    flags: list[str], rejected: Rejected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "is_installed", lambda engine: False)
    rejected([*flags, "--rollout.engine", "sglang"], "rollout.engine-installed")


@pytest.mark.parametrize("spelled", ["home", "link", "home/run/.."])
def test_a_run_directory_is_not_the_home_directory(
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
    "header that is a list": lambda weights: weights.write_bytes(b"\x02" + bytes(7) + b"[]"),
    "last byte missing": lambda weights: weights.write_bytes(weights.read_bytes()[:-1]),
    "file missing": lambda weights: _write_index(weights, TWO_FILES),
    "index that is a list": lambda weights: _write_index(weights, "[]"),
    "layer missing": lambda weights: write_weights(weights, range(11)),
}


@pytest.mark.parametrize("field", ["model.path", "reference.path"])
@pytest.mark.parametrize("damage", MODEL_FILES)
def test_missing_and_damaged_weights_are_found(
    tmp_path: Path, flags: list[str], rejected: Rejected, field: str, damage: str
) -> None:
    model = write_checkpoint(tmp_path / "damaged")
    MODEL_FILES[damage](model / "model.safetensors")
    flags += [f"--{field}", str(model), "--algorithm.kl.coef", "0.1"]
    rejected(flags, f"{field.removesuffix('.path')}.weight-files")


def test_a_reference_with_another_vocabulary_is_rejected(tmp_path: Path, flags: list[str], rejected: Rejected) -> None:
    write_checkpoint(tmp_path / "other", vocab_size=301)
    flags += ["--algorithm.kl.coef", "0.1", "--reference.path", str(tmp_path / "other")]
    rejected(flags, "reference.model")
    assert check(load_config(None, [*flags, "--algorithm.kl.coef", "0"])) == []


def test_a_teacher_of_other_sizes_needs_workers(tmp_path: Path, flags: list[str], rejected: Rejected) -> None:
    """On the trainer's ranks it computes with the policy's modules."""
    teacher = write_checkpoint(tmp_path / "teacher", num_hidden_layers=3)
    given = [*flags, "--distillation.coef", "1", "--distillation.path", str(teacher)]
    assert rejected(given, "reference.model").field == "distillation.path"
    assert check(load_config(None, [*given, "--distillation.placement", "workers"])) == []


def test_a_teacher_with_other_token_ids_is_rejected(tmp_path: Path, flags: list[str], rejected: Rejected) -> None:
    teacher, model = write_checkpoint(tmp_path / "teacher"), Path(flags[flags.index("--model.path") + 1])
    flags += ["--distillation.coef", "1", "--distillation.path", str(teacher)]
    for directory, letters in ((model, "abc"), (teacher, "abcd")):  # more tokens are no fault
        Tokenizer(WordLevel({letter: index for index, letter in enumerate(letters)})).save(
            str(directory / "tokenizer.json")
        )
    assert check(load_config(None, flags)) == []
    Tokenizer(WordLevel({"a": 0, "b": 2, "c": 1})).save(str(teacher / "tokenizer.json"))
    rejected(flags, "reference.model")


def layered(layers: int, vocab_size: int) -> ModelDimensions:
    """Layers of 16 * 16 * 4 + 16 * 64 * 3 = 4,096 elements in matrix products."""
    sizes = {"hidden_size": 16, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "ffn_hidden_size": 64}
    sizes |= {"num_layers": layers, "vocab_size": vocab_size, "max_position_embeddings": 64}
    return ModelDimensions(family="qwen3", tied_embeddings=False, eos_token_ids=(0,), **sizes)


@pytest.mark.parametrize(
    ("layers", "vocab_size", "stages", "expected"),
    [
        (12, 1, 4, [3, 3, 3, 3]),
        (61, 1, 4, [15, 16, 15, 15]),
        (7, 1024, 1, [7]),
        (3, 1024, 2, [2, 1]),
        (12, 256, 4, [3, 4, 3, 2]),  # 1 layer: 12 + 1 on 4 stages
        (64, 410, 2, [33, 31]),  # 1.6 layers: 33 and 32.6
        (24, 2329, 2, [17, 7]),  # 9.1 layers: 17 and 16.1
        (4, 4096, 3, [1, 2, 1]),  # more than all layers: every stage has one
    ],
)
def test_stages_balance_layers_and_head(layers: int, vocab_size: int, stages: int, expected: list[int]) -> None:
    assert layers_per_stage(layered(layers, vocab_size), stages) == expected


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
    (GPT_OSS, {"tensor": 2, "sequence": True}, "expert"),
    (GPT_OSS, {"tensor": 2, "sequence": True, "expert": 2}, ""),
    (EXPERTS, {"tensor": 2}, "tensor"),
    (DEEPSEEK_V3, {"tensor": 8, "sequence": True, "pipeline": 4, "expert": 8}, ""),
    (DEEPSEEK_V3 | {"kv_lora_rank": 500}, {"tensor": 8, "sequence": True, "expert": 8}, "tensor"),
    (LINEAR, {"tensor": 2, "context": 2}, ""),
    (LINEAR, {"tensor": 8}, "tensor"),
    (LINEAR, {"tensor": 2, "context": 4}, "context"),
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
def test_variants_of_deepseek_v3_are_rejected(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | change))
    problems = check(RunConfig(run_dir=tmp_path / "run", model={"path": tmp_path}), CONVERSION)
    assert problems and {problem.code for problem in problems} <= {"model.path", "model.family"}


def test_the_published_configuration_of_deepseek_v3(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    found = ModelDimensions.from_checkpoint(tmp_path)
    assert found.attention == LatentAttention(1536, 512, 128, 64, 128, interleaved=True)
    assert (found.head_dim, found.rotary_dim, found.value_dim, found.num_kv_heads) == (192, 64, 128, 128)
    assert found.expert_layers == range(3, 61) and found.moe_shared_ffn_hidden_size == 2048
    assert found.rope_scaling is not None and found.rope_scaling["mscale_all_dim"] == 1.0
    assert found.active_parameters / 1e9 == pytest.approx(37.0, abs=1.0)  # its paper says 37 billion
    last, draft = "model.layers.60.mlp.gate.weight", "model.layers.61.eh_proj.weight"
    assert language_names(tmp_path, [last, draft, "mtp.norm.weight"]) == {last: last}


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
    {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
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


def test_settings_that_fsdp_families_do_not_support(flags: list[str], rejects: Rejects, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", hidden_act="gelu", attention_chunk_size=200)
    with rejects(ConfigError, "model.family") as caught:
        require_valid(load_config(None, [*flags, *FSDP, "--algorithm.moe_aux_loss_coef", "0.1", *RATE]))
    assert len(caught.value.problems) == 4


def test_layers_that_transformer_engine_lacks(
    flags: list[str], rejected: Rejected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 has norms after attention and MLPs even without windows, so it never gets Transformer Engine's layers."""
    write_checkpoint(tmp_path / "model", architectures=["Gemma3ForCausalLM"], sliding_window=None)
    monkeypatch.setattr("slime_like.checks.packages.has_transformer_engine", lambda: True)
    assert check(load_config(None, flags)) == []
    problem = rejected([*flags, "--trainer.attention", "transformer_engine"], "model.family")
    assert problem.field == "trainer.attention"


def test_windows_and_sinks_need_the_all_gather(flags: list[str], rejected: Rejected, tmp_path: Path) -> None:
    two, package = ["--trainer.parallel.context", "2"], ["--trainer.attention", "ring_flash_attn"]
    longest = load_config(None, flags).max_model_len
    for width, rejects_them in ((longest - 1, True), (longest, False)):
        write_checkpoint(tmp_path / "model", architectures=["MistralForCausalLM"], sliding_window=width)
        found = [
            [problem.code for problem in check(load_config(None, [*flags, *more]))]
            for backend in ([], FSDP)
            for more in ([*backend, "--trainer.share_prefixes", "tree"], [*backend, *two, *package])
        ]
        assert [("model.family" in codes) for codes in found] == [rejects_them] * 4
        assert all(check(load_config(None, [*flags, *backend, *two])) == [] for backend in ([], FSDP))
    write_checkpoint(tmp_path / "model", **GPT_OSS | {"sliding_window": None})
    assert rejected([*flags, *FSDP, *two, *package], "model.family").field == "trainer.attention"
    assert check(load_config(None, [*flags, *FSDP, "--trainer.share_prefixes", "tree"])) == []


def test_states_do_not_branch_and_sigmoid_routers_have_biases(
    flags: list[str], rejected: Rejected, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", **LINEAR)
    for backend in ([], FSDP):
        assert check(load_config(None, [*flags, *backend])) == []
        problem = rejected([*flags, *backend, "--trainer.share_prefixes", "tree"], "model.family")
        assert problem.field == "trainer.share_prefixes"
    write_checkpoint(tmp_path / "model", **DEEPSEEK_V3 | {"num_hidden_layers": 4})
    assert "model.family" not in [problem.code for problem in check(load_config(None, [*flags, *RATE]))]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_rotary_values_that_a_file_leaves_out_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    for scaling in ({"type": "yarn", "factor": 4.0}, {"rope_type": "linear", "type": "linear", "factor": 2.5}):
        write_checkpoint(tmp_path, architectures=[name], rope_theta=None, rope_scaling=scaling, sliding_window=None)
        file = tmp_path / "config.json"
        raw = json.loads(file.read_text())
        del raw["rope_theta"]
        file.write_text(json.dumps(raw))
        known = CONFIG_MAPPING[name.removesuffix("ForCausalLM").lower()].from_dict(raw)
        found = ModelDimensions.from_checkpoint(tmp_path)
        assert found.rope_theta == known.rope_parameters["rope_theta"] == 10_000.0
        assert found.rope_scaling is not None
        for key, value in found.rope_scaling.items():
            assert value == known.rope_parameters[key], key
        assert found.max_position_embeddings == {"yarn": 2048, "linear": 5120}[found.rope_scaling["rope_type"]]


def test_scalings_and_the_lengths_they_allow(tmp_path: Path, flags: list[str]) -> None:
    new = {"rope_type": "linear", "type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    old = {"type": "linear", "factor": 2.0}
    write_checkpoint(tmp_path, rope_parameters=new, rope_scaling=old)
    assert ModelDimensions.from_checkpoint(tmp_path).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    write_checkpoint(tmp_path, max_position_embeddings=128, rope_scaling={"type": "yarn", "factor": 4.0})
    config = load_config(None, [*flags, "--data.max_prompt_tokens", "100", "--rollout.max_new_tokens", "29"])
    (problem,) = length_problems(config, ModelDimensions.from_checkpoint(tmp_path))
    assert "max_position_embeddings: 512 and original_max_position_embeddings: 128" in problem
    write_checkpoint(tmp_path, max_position_embeddings=129, rope_scaling={"type": "yarn", "factor": 1.0})
    assert not list(length_problems(config, ModelDimensions.from_checkpoint(tmp_path)))


# A whole config.json, or changes to a sound one.
UNREADABLE: list[bytes | dict[str, Any]] = [
    b"{",
    b"\xff\xfe",
    b"[]",
    b'{"architectures": ["GPT2LMHeadModel"]}',
    b'{"architectures": ["Qwen3ForCausalLM"]}',
    b"[" * 100_000,
    b'{"vocab_size": ' + b"9" * 5000 + b"}",
    {"num_attention_heads": 0, "head_dim": None},
    {"rope_theta": "x"},
    {"architectures": ["Qwen2VLForConditionalGeneration"]},
    {**EXPERTS, "num_experts_per_tok": 9},
    {"num_attention_heads": 15},
    {"hidden_size": 64.0},
    {"vocab_size": 0},
    {"rope_scaling": "linear"},
    {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
    {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "max_position_embeddings": None},
    {"tie_word_embeddings": "false"},
    {"eos_token_id": [2, None]},
    {"eos_token_id": 300},
    {"architectures": ["NoneForCausalLM"], "eos_token_id": 300},
    {"layer_types": ["full_attention"] * 3},
]


@pytest.mark.parametrize("case", UNREADABLE, ids=lambda case: str(case)[:60])
def test_an_unreadable_config_json_is_named(tmp_path: Path, rejects: Rejects, case: bytes | dict[str, Any]) -> None:
    write_checkpoint(tmp_path, **(case if isinstance(case, dict) else {}))
    if isinstance(case, bytes):
        (tmp_path / "config.json").write_bytes(case)
    with rejects(ConfigError, "config"):
        ModelDimensions.from_checkpoint(tmp_path)


def test_end_tokens_of_a_generation_config_are_checked(tmp_path: Path, rejects: Rejects) -> None:
    """``config.json`` is checked, too, because engines read both. A damaged file is rejected."""
    write_checkpoint(tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [299, 0]}')
    assert ModelDimensions.from_checkpoint(tmp_path).eos_token_ids == (299, 0)
    for text in ('{"eos_token_id": [2, 300]}', "{"):
        generation.write_text(text)
        with rejects(ConfigError, "config"):
            ModelDimensions.from_checkpoint(tmp_path)
    generation.write_text('{"eos_token_id": 2}')
    with rejects(ConfigError, "config"):
        ModelDimensions.from_checkpoint(write_checkpoint(tmp_path, eos_token_id=300))
