"""Environment and arguments of engines, on a CPU and on a GPU."""

import ast
import json
import os
import re
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rollout.limits import CHANGES
from rollout.sglang import arguments as sglang
from rollout.sglang.engine import SglangEngine
from rollout.vllm import arguments
from rollout.vllm.limits import LIMITS as VLLM
from rollout.weight_update import StoreQueue, results
from slime_like.config import RunConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces.engine import WHOLE, EngineNode
from slime_like.interfaces.engine_limits import engine_limits
from slime_like.models.dimensions import ModelDimensions
from slime_like.weights.transports.collective import serve_store
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import LINEAR, write_checkpoint

RECIPES = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def _config(tensor: int = 1, **engine_args: Any) -> RunConfig:
    rollout = {"tensor": tensor, "engine_args": engine_args}
    return RunConfig(run_dir=Path("run"), model={"path": "model"}, rollout=rollout)


@pytest.mark.parametrize(("tensor", "cpu", "in_process"), [(2, False, False), (1, True, True), (2, True, False)])
def test_environment(tensor: int, cpu: bool, in_process: bool) -> None:
    found = arguments.environment(_config(tensor).rollout, cpu)
    assert found.get("VLLM_WORKER_MULTIPROC_METHOD") == (None if cpu else "spawn")
    assert ("VLLM_ENABLE_V1_MULTIPROCESSING" in found) == in_process
    assert cpu or "TORCHDYNAMO_DISABLE" not in found


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_only_engines_that_span_nodes_listen_beyond_loopback(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "10.9.9.9"})  # of another program, as in a Slurm job
    monkeypatch.setattr("slime_like.interfaces.engine.interface_of", {"10.0.0.2": "eth7"}.get)

    def environment(part: EngineNode) -> dict[str, str]:
        rollout = _config(2).rollout
        if engine == "vllm":
            return arguments.environment(rollout, True, part)
        return sglang.environment(rollout, tmp_path, part)

    address = {"vllm": "VLLM_HOST_IP", "sglang": "SGLANG_HOST_IP"}[engine]
    alone, half = environment(WHOLE), environment(EngineNode(1, 2, "10.0.0.2", "10.0.0.1", 4321))
    assert alone["GLOO_SOCKET_IFNAME"] == "lo" and alone.get(address, "127.0.0.1") == "127.0.0.1"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in alone
    assert half["GLOO_SOCKET_IFNAME"] == "eth7" and half[address] == "10.0.0.2"
    assert (half["MASTER_ADDR"], half["MASTER_PORT"]) == ("10.0.0.1", "4321")
    assert half["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_answers_through_the_store_of_an_engine_that_spans_nodes() -> None:
    """In the order of arrival, and like those of a queue; an error of a start can be read by every node."""
    served, port = serve_store("127.0.0.1", "", 10.0)
    rank, host = StoreQueue("127.0.0.1", port), StoreQueue("127.0.0.1", port)
    assert host.empty()
    with pytest.raises(WeightSyncError) as caught:
        for answer in (({"a": 2**63}, None, ""), (None, "no room", "out-of-memory")):
            rank.put(answer)
        assert not host.empty()
        results([host.get(), host.get()])
    assert caught.value.code == "out-of-memory" and host.empty()
    rank.put(([{"a": 1}, 0.5], None, ""))
    assert results([host.get()]) == [[{"a": 1}, 0.5]]
    assert served.num_keys() > 0


def test_cuda_is_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process could not use CUDA."""
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "eth0"})
    seen: list[str | None] = []
    monkeypatch.setattr(arguments, "on_cpu", lambda: not seen.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")))
    arguments.prepare_environment(_config().rollout)
    assert seen == ["1"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"  # set by the user


@pytest.mark.parametrize(
    ("rollout", "temperature", "runner", "masks"),
    [
        ({"top_p": 0.9}, 0.0, None, True),
        ({"top_k": 50}, 0.0, "1", True),
        ({"top_k": 50}, 0.0, "0", False),  # only model runner V2 has masks
        ({"top_k": 50}, 1.0, None, False),  # evaluation samples the whole vocabulary
        ({"top_k": 50, "engine_args": {"return_sampling_mask": False}}, 0.0, None, False),
        ({}, 0.0, None, False),
    ],
)
def test_masks(
    monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any], temperature: float, runner: str | None, masks: bool
) -> None:
    config = RunConfig(
        run_dir=Path("run"), model={"path": "model"}, rollout=rollout, evaluation={"temperature": temperature}
    )
    monkeypatch.setattr(os, "environ", {} if runner is None else {"VLLM_USE_V2_MODEL_RUNNER": runner})
    for cpu in (True, False):
        monkeypatch.setattr(arguments, "on_cpu", lambda cpu=cpu: cpu)
        assert arguments.returns_masks(config) is (masks and not cpu)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"head_dtype": "float32"}),
        ({"hf_overrides": {}}, {"head_dtype": "float32"}),
        ({"hf_overrides": {"head_dtype": "model"}}, {"head_dtype": "model"}),
    ],
)
def test_head_type(given: dict[str, Any], expected: object) -> None:
    """Logits are float32 by default on a GPU, and if truncated."""
    config = _config(**given)
    truncated = config.model_copy(update={"rollout": config.rollout.model_copy(update={"top_p": 0.9})})
    assert arguments.given_arguments(config, cpu=False)["hf_overrides"] == expected
    assert arguments.given_arguments(truncated, cpu=True)["hf_overrides"] == expected
    assert arguments.given_arguments(config, cpu=True).get("hf_overrides") == given.get("hf_overrides")


@pytest.mark.parametrize(
    ("tensor", "placement", "cpu", "suspends"),
    [
        (2, "colocated", False, True),
        (1, "colocated", False, False),
        (2, "separate", False, False),
        (2, "colocated", True, False),
    ],
)
def test_sleeping_ranks_free_nccl_buffers(tensor: int, placement: str, cpu: bool, suspends: bool) -> None:
    config = RunConfig.model_validate(_config(tensor).model_dump() | {"cluster": {"placement": placement}})
    assert arguments.given_arguments(config, cpu).get("enable_nccl_comm_suspend", False) is suspends


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("vllm", {"gpu_memory_utilization": 0.7, "max_num_seqs": 4}),
        ("sglang", {"gpu_memory_utilization": 0.7}),
        ("mine", {"gpu_memory_utilization": 0.7}),
    ],
)
def test_arguments_for_one_engine(engine: str, expected: dict[str, Any]) -> None:
    given = {"vllm": {"gpu_memory_utilization": 0.88, "max_num_seqs": 4}, "gpu_memory_utilization": 0.7}
    assert RolloutConfig(engine=engine, engine_args=given).own_engine_args == expected
    with pytest.raises(ValidationError):
        RolloutConfig(engine_args={"vllm": 3})


def test_recurrent_layers_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejects: Rejects) -> None:
    monkeypatch.setattr(arguments, "on_cpu", lambda: True)
    models = [write_checkpoint(tmp_path / name, **changes) for name, changes in (("m", {}), ("n", LINEAR))]
    configs = [
        RunConfig(run_dir=tmp_path, model={"path": model, "dtype": dtype})
        for model, dtype in zip((*models, models[1]), ("float32", "bfloat16", "float32"), strict=True)
    ]
    cached = [arguments._owned(config, 0).get("enable_prefix_caching", True) for config in configs[:2]]
    assert cached == [True, False]
    with rejects(EngineError, "model-not-servable"):
        arguments._owned(configs[2], 0)
    dimensions = [ModelDimensions.from_checkpoint(model) for model in models]
    assert [SglangEngine.refusal(each, on_cuda=False) is None for each in dimensions] == [True, False]
    assert SglangEngine.refusal(dimensions[1], on_cuda=True) is None


def test_engines_serve_only_text_of_a_model_with_a_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would otherwise load the processor of images."""
    monkeypatch.setattr(sglang, "on_cpu", lambda: True)
    text = json.loads((write_checkpoint(tmp_path / "text") / "config.json").read_text())
    write_checkpoint(tmp_path / "whole", model_type="qwen3_vl", text_config=text)
    found = []
    for name in ("text", "whole"):
        config = RunConfig(run_dir=tmp_path, model={"path": tmp_path / name})
        ours = {**arguments._defaults(config, cpu=True), **sglang._defaults(config.model, config.rollout, 99)}
        found.append([ours.get(key) for key in ("language_model_only", "enable_multimodal")])
    assert found == [[None, None], [True, False]]


def _cases(text: str, engines: str = "vllm sglang") -> list[tuple[str, str]]:
    return [(engine, case.strip()) for case in text.replace("\n", " | ").split(" | ") for engine in engines.split()]


CHANGING = [
    *_cases("""quantization: fp8 | kv_cache_dtype: fp8_e5m2 | enable_mamba_cache_stochastic_rounding: true
        enable_lora: true | max_lora_rank: 16 | nnodes: 2 | node_rank: 1 | load_format: dummy | revision: main
        model_impl: transformers | tokenizer_mode: slow | watermark_config: {key: 1} | enable_eplb: true"""),
    *_cases(
        """quantization_config: {linear: fp8} | kv_cache_dtype_skip_layers: ["0"] | mamba_ssm_cache_dtype: float32
        attention_config: {indexer_kv_dtype: fp8} | mamba_config: {enable_stochastic_rounding: true}
        speculative_config: {method: ngram, num_speculative_tokens: 2} | spec_method: ngram | diffusion_config: {a: 1}
        runner: pooling | convert: embed | pooler_config: {a: 1} | model_class_overrides: {A: "b:C"} | tokenizer: other
        hf_overrides: {rope_theta: 5} | hf_overrides: {head_dtype: float32, rope_theta: 5} | hf_config_path: other
        config_format: mistral | disable_sliding_window: true | kv_sharing_fast_prefill: true | model_weights: other
        generation_config: auto | override_generation_config: {top_k: 1} | logits_processors: ["a:B"]
        weight_transfer_config: {backend: nccl} | logprobs_mode: raw_logprobs | pipeline_parallel_size: 2
        data_parallel_size: 2 | prefill_context_parallel_size: 2 | decode_context_parallel_size: 2
        eplb_config: {num_redundant_experts: 2} | enable_elastic_ep: true | kv_offloading_size: 4
        kv_transfer_config: {kv_role: kv_both} | master_addr: 10.0.0.1 | lora_target_modules: [q_proj]""",
        "vllm",
    ),
    *_cases(
        """quantization_param_path: a.json | enable_tf32_matmul: true | modelopt_quant: fp8 | rl_quant_profile: a
        moe_a2a_backend: deepep | kt_method: AMXINT4 | speculative_algorithm: EAGLE | speculative_num_steps: 2
        enable_multi_layer_eagle: true | decoupled_spec_role: draft | dllm_algorithm: a | lora_paths: [a]
        json_model_override_args: '{"rope_theta": 5}' | is_embedding: true | custom_weight_loader: [a.b]
        forward_hooks: [{a: 1}] | enable_hisparse: true | preferred_sampling_params: {top_k: 1}
        enable_custom_logit_processor: true | enable_watermark: true | tokenizer_worker_num: 2 | dist_init_addr: "h:1"
        pp_size: 2 | dp_size: 2 | dcp_size: 2 | attn_cp_size: 2 | enable_dp_attention: true | use_ray: true
        ep_num_redundant_experts: 2 | init_expert_location: a.json | disaggregation_mode: prefill
        hicache_storage_backend: file | rl_on_policy_target: fsdp""",
        "sglang",
    ),
]
UNCHANGED = [
    *_cases("quantization: null | kv_cache_dtype: auto | enable_lora: false | nnodes: 1 | load_format: safetensors"),
    *_cases(
        """hf_overrides: {head_dtype: float32} | speculative_config: null | watermark: 0.1
        attention_backend: FLASH_ATTN | compilation_config: {mode: 3}""",
        "vllm",
    ),
    *_cases(
        """json_model_override_args: '{}' | pp_size: 1 | disaggregation_mode: 'null' | attention_backend: fa3
        moe_a2a_backend: none | enable_fp32_lm_head: true | ep_size: 2""",
        "sglang",
    ),
]


@pytest.mark.parametrize(("engine", "argument"), CHANGING)
def test_arguments_that_change_the_model(engine: str, argument: str) -> None:
    given = yaml.safe_load(argument)
    rollout = RolloutConfig(engine=engine, engine_args=given)
    (problem,) = engine_limits(engine).argument_problems(rollout, is_here=True)
    assert problem.startswith(f"rollout.engine_args.{next(iter(given))}") and " is not supported: " in problem


@pytest.mark.parametrize(("engine", "argument"), UNCHANGED)
def test_arguments_that_leave_the_model_the_same(engine: str, argument: str) -> None:
    rollout = RolloutConfig(engine=engine, engine_args=yaml.safe_load(argument))
    assert list(engine_limits(engine).argument_problems(rollout, is_here=True)) == []


NAMED_LIKE_CHANGES = re.compile(
    "quant|dtype|fp[48]|int8|spec|lora|nodes|override|revision|load_format|eplb|redundant|[dcp]p_size"
    "|(data|pipeline|context)_parallel_size|tokenizer_(mode|path|worker)|logits?_proc|sampling_p|generation_config"
)
HARMLESS = {
    "num_gpu_blocks_override",
    "numa_bind_nodes",
    "per_request_spec_decode_metrics",
    "enable_linear_replayssm_spec",  # of drafted tokens
}
"""Arguments that are named like others that change the model."""


def test_installed_arguments_are_covered() -> None:
    """Every pattern matches an argument of an installed engine. Every argument named like one that changes the model
    is rejected."""
    names = {"vllm": VLLM.known_arguments() or (), "sglang": _sglang_arguments()}
    if not all(names.values()):
        pytest.skip("needs vLLM and SGLang")
    patterns = [pattern for group in CHANGES.values() for pattern in group.split()]
    everything = {name for each in names.values() for name in each}
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in everything)] == []
    assert [name for engine, known in names.items() for name in engine_limits(engine).owned if name not in known] == []
    for engine, known in names.items():
        alike = {name for name in known if NAMED_LIKE_CHANGES.search(name) and not name.startswith(("_", "mm_"))}
        rollout = RolloutConfig(engine=engine, engine_args=dict.fromkeys(alike, "other"))
        problems = engine_limits(engine).argument_problems(rollout, is_here=True)
        rejected = {problem.split("=")[0].split(" ")[0].rpartition(".")[2] for problem in problems}
        assert alike - rejected - HARMLESS == set()


def _sglang_arguments() -> set[str]:
    """Read SGLang's arguments from its source, because its import takes seconds."""
    if (spec := find_spec("sglang")) is None or spec.origin is None:
        return set()
    files = Path(spec.origin).parent.joinpath("srt/arg_groups/fields").glob("*.py")
    classes = [part for file in files for part in ast.parse(file.read_text()).body if isinstance(part, ast.ClassDef)]
    return {ast.unparse(part.target) for each in classes for part in each.body if isinstance(part, ast.AnnAssign)}
