"""Environment and arguments of engines, on a CPU and on a GPU."""

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollout.vllm import arguments
from slime_like.checks.engine_arguments import engine_problems
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.config.rollout import RolloutConfig

RECIPES = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def _config(tensor: int = 1, **engine_args: Any) -> RunConfig:
    rollout = {"tensor": tensor, "engine_args": engine_args}
    return RunConfig(run_dir=Path("run"), model={"path": "model"}, rollout=rollout)


def test_environment_on_a_gpu() -> None:
    found = arguments.environment(_config(2).rollout, cpu=False)
    assert found["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    assert not {"TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"} & found.keys()


@pytest.mark.parametrize(("tensor", "in_process"), [(1, True), (2, False)])
def test_environment_on_a_cpu(tensor: int, in_process: bool) -> None:
    found = arguments.environment(_config(tensor).rollout, cpu=True)
    assert ("VLLM_ENABLE_V1_MULTIPROCESSING" in found) == in_process
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in found


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
        ({"hf_overrides": {"rope_theta": 5.0}}, {"head_dtype": "float32", "rope_theta": 5.0}),
        ({"hf_overrides": {"head_dtype": "model"}}, {"head_dtype": "model"}),
        ({"hf_overrides": "own"}, "own"),  # vLLM rejects it
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


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_with_every_engine(recipe: Path, engine: str) -> None:
    config = load_config(recipe, ["--rollout.engine", engine, "--rollout.tensor", "1"])
    assert list(engine_problems(config.rollout)) == []
