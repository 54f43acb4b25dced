"""Environment and arguments of engines, on a CPU and on a GPU."""

import ast
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rollout.limits import ServerLimits
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


REFUSED = [
    *_cases("""quantization: fp8 | kv_cache_dtype: fp8_e5m2 | enable_mamba_cache_stochastic_rounding: true
        dtype: float16 | nnodes: 2 | node_rank: 0 | load_format: dummy | enable_eplb: true"""),
    *_cases(
        """quantization_config: {linear: fp8} | mamba_ssm_cache_dtype: float16 | model: other | model_weights: other
        hf_overrides: {rope_theta: 5} | hf_overrides: {head_dtype: float32, rope_theta: 5} | tokenizer: other
        hf_config_path: other | model_class_overrides: {A: "b:C"} | disable_sliding_window: true | seed: 0
        override_generation_config: {top_k: 1} | logits_processors: ["a:B"] | watermark_config: {key: 1}
        data_parallel_size: 2 | decode_context_parallel_size: 2 | enable_elastic_ep: true
        kv_transfer_config: {kv_role: kv_both} | kv_offloading_size: 4""",
        "vllm",
    ),
    *_cases(
        """quantization_param_path: a.json | enable_tf32_matmul: true | modelopt_quant: fp8 | rl_quant_profile: a
        kt_method: AMXINT4 | model_path: other | json_model_override_args: '{"rope_theta": 5}' | random_seed: 3
        custom_weight_loader: [a.b] | forward_hooks: [{a: 1}] | tokenizer_path: other | enable_watermark: true
        preferred_sampling_params: {top_k: 1} | enable_custom_logit_processor: true | pp_size: 2 | dp_size: 2
        speculative_accept_threshold_acc: 0.5 | ep_num_redundant_experts: 2 | init_expert_location: a.json
        disaggregation_mode: prefill | hicache_storage_backend: file""",
        "sglang",
    ),
]
"""Values that break a guarantee, unless ``rollout.allow_engine_args`` names the argument."""

UNCHANGED = [
    *_cases("quantization: null | kv_cache_dtype: auto | nnodes: 1 | load_format: safetensors"),
    *_cases("hf_overrides: {head_dtype: float32}", "vllm"),
    *_cases("json_model_override_args: '{}' | pp_size: 1 | disaggregation_mode: 'null'", "sglang"),
]

PUBLISHED = [
    *_cases(
        """gpu_memory_utilization: 0.6 | enforce_eager: false | enable_chunked_prefill: true | max_num_seqs: 1024
        max_num_batched_tokens: 8192 | enable_prefix_caching: true | disable_log_stats: true | async_scheduling: true
        enable_expert_parallel: true | disable_custom_all_reduce: true | compilation_config: {mode: 3}
        speculative_config: {method: ngram, num_speculative_tokens: 2} | limit_mm_per_prompt: {image: 1}""",
        "vllm",
    ),
    *_cases(
        """mem_fraction_static: 0.7 | ep_size: 8 | cuda_graph_max_bs_decode: 256 | max_running_requests: 512
        attention_backend: fa3 | moe_a2a_backend: deepep | deepep_mode: auto | enable_dp_lm_head: true
        moe_dense_tp_size: 1 | speculative_algorithm: EAGLE | speculative_num_steps: 3 | speculative_eagle_topk: 1
        speculative_num_draft_tokens: 4 | watchdog_timeout: 3600 | disable_radix_cache: true
        chunked_prefill_size: 4096 | mamba_radix_cache_strategy: extra_buffer""",
        "sglang",
    ),
]
"""Arguments in recipes of slime (its flags --sglang-*), verl (rollout.engine_kwargs) and NeMo-RL (vllm_kwargs)."""


def _problems(engine: str, given: dict[str, Any], *allowed: str) -> list[str]:
    rollout = RolloutConfig(engine=engine, engine_args=given, allow_engine_args=allowed)
    return list(engine_limits(engine).argument_problems(rollout, is_here=True))


@pytest.mark.parametrize(("engine", "argument"), REFUSED)
def test_arguments_that_break_a_guarantee(engine: str, argument: str) -> None:
    (name,) = given = yaml.safe_load(argument)
    (problem,) = _problems(engine, given)
    limits = engine_limits(engine)
    assert isinstance(limits, ServerLimits)
    assert problem.startswith(f"rollout.engine_args.{name}={given[name]} is refused: {limits.refused[name]}; ")
    assert _problems(engine, given, name) == []
    rollout = RolloutConfig(engine=engine, engine_args=given, allow_engine_args=(name, "other"))
    assert limits.lifted_arguments(rollout) == given
    (note,) = limits.argument_notes(rollout)
    assert name in note and limits.refused[name] in note


@pytest.mark.parametrize(("engine", "argument"), UNCHANGED + PUBLISHED)
def test_other_arguments_are_taken(engine: str, argument: str) -> None:
    assert _problems(engine, yaml.safe_load(argument)) == []


def test_untried_arguments_are_noted_once() -> None:
    given = {"gpu_memory_utilization": 0.7, "enable_dbo": True, "performance_mode": "throughput", "max_num_seqs": 4}
    (note,) = engine_limits("vllm").argument_notes(RolloutConfig(engine_args=given))
    assert note.startswith("rollout.engine_args: enable_dbo, performance_mode has not been tried")


@pytest.mark.parametrize(
    ("engine", "drafts", "is_model"),
    [
        ("vllm", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, False),
        ("vllm", {"speculative_config": {"method": "eagle3", "model": "head"}}, True),
        ("vllm", {"speculative_config": {"model": "small"}}, True),
        ("sglang", {"speculative_algorithm": "NGRAM"}, False),
        ("sglang", {"speculative_algorithm": "EAGLE"}, True),
    ],
)
def test_drafted_tokens(engine: str, drafts: dict[str, Any], is_model: bool) -> None:
    """Their supports are unknown, and a sync does not reach a draft model."""
    rollout = RolloutConfig(engine=engine, engine_args=drafts)
    limits = engine_limits(engine)
    assert list(limits.argument_problems(rollout, is_here=True)) == []
    assert any("does not reach the draft" in note for note in limits.argument_notes(rollout)) is is_model
    truncated = rollout.model_copy(update={"top_p": 0.9})
    (problem,) = limits.argument_problems(truncated, is_here=True)
    assert problem.startswith(f"rollout.engine_args.{next(iter(drafts))} with truncated sampling: ")
    allowed = truncated.model_copy(update={"allow_engine_args": tuple(drafts)})
    assert list(limits.argument_problems(allowed, is_here=True)) == []


def test_lifted_arguments_reach_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They replace what the adapter itself would set."""
    monkeypatch.setattr(sglang, "on_cpu", lambda: True)
    model, given = write_checkpoint(tmp_path / "m"), {"dtype": "float16", "random_seed": 7}
    found = []
    for allowed in ((), ("dtype", "random_seed")):
        rollout = {"engine": "sglang", "engine_args": given, "allow_engine_args": allowed}
        config = RunConfig(run_dir=tmp_path, model={"path": model, "dtype": "float32"}, rollout=rollout)
        reached = sglang.engine_arguments(config, 1, known=given)
        found.append([reached["dtype"], reached["random_seed"]])
    assert found == [["float32", 1], ["float16", 7]]


def test_named_arguments_are_those_of_the_installed_engines() -> None:
    names = {"vllm": VLLM.known_arguments() or (), "sglang": _sglang_arguments()}
    if not all(names.values()):
        pytest.skip("needs vLLM and SGLang")
    for engine, known in names.items():
        limits = engine_limits(engine)
        assert isinstance(limits, ServerLimits)
        assert {*limits.owned, *limits.refused, *limits.tried.split()} - set(known) == set()


def _sglang_arguments() -> set[str]:
    """Read SGLang's arguments from its source, because its import takes seconds."""
    if (spec := find_spec("sglang")) is None or spec.origin is None:
        return set()
    files = Path(spec.origin).parent.joinpath("srt/arg_groups/fields").glob("*.py")
    classes = [part for file in files for part in ast.parse(file.read_text()).body if isinstance(part, ast.ClassDef)]
    return {ast.unparse(part.target) for each in classes for part in each.body if isinstance(part, ast.AnnAssign)}
