"""Memory in ``slime-like plan`` compared with the CPU allocations of real ranks in a step.

The planner traces shapes through the same code, with a CPU's attention operator. Each kind of memory and the sum are
compared. Not covered: CUDA's kernels and allocator, and activations in host memory, which do not move on a CPU. Not
counted: gloo's copies of messages. Not planned: inputs of a window's other micro-batches, and float32 workspaces of the
CPU's bfloat16 attention. With full recomputation, tensor ranks keep little in comparison, so that layout uses float32.
"""

from pathlib import Path
from typing import Any

import pytest

from slime_like.config import AlgorithmConfig, RunConfig
from slime_like.config.roles import CRITIC
from slime_like.config.trainer import ParallelConfig
from slime_like.interfaces import RankPlacement, load_backend
from slime_like.models.dimensions import ModelDimensions
from slime_like.planning.hardware import Hardware
from tests.parallel.layouts import layout_of
from tests.parallel.ranks import run_each
from tests.parallel.steps import as_critic
from tests.parallel.taken import Taken, check_taken, measure_rank, planned_config
from tests.parallel.tiny import save_checkpoint
from tests.support.acceptance import some_in_acceptance

QUICK = {
    "megatron": ("recompute-bfloat16", "recompute1", "prompts", "factors", "tp2-sp", "cp2", "pp2-vpp2-recompute1"),
    "fsdp": ("truncated", "recompute1", "cp2", "factors-dp2-recompute1"),
}
MEGATRON = (
    *QUICK["megatron"],
    *("single", "truncated", "tp2-sp-recompute", "cp2-allgather", "pp2-bfloat16", "pp2-recompute1-bfloat16"),
    *("cp2-prompts", "factors-recompute", "factors-tp2-sp", "factors-pp2-bfloat16"),
)
FSDP = (
    *QUICK["fsdp"],
    *("single", "recompute", "dp2-recompute-sharded", "dp2-kept", "dp2-host", "prompts", "cp2-prompts", "factors"),
)
CRITICS = {"megatron": ("tp2-sp", "cp2-distributed-bfloat16"), "fsdp": ("dp2",)}


def _settings(backend: str, name: str) -> dict[str, Any]:
    """Return the settings of a layout by name, for ``planned_config``. Megatron's are in float32 unless they say so."""
    special = {"factors": {"lora": {"rank": 16}}, "truncated": {"top_k": 512}}
    kind, _, rest = name.partition("-")
    settings = layout_of((rest or "single") if kind in special else name)
    found: dict[str, Any] = {"dtype": "float32"} if backend == "megatron" else {}
    found |= {"parallel": {axis: settings.pop(axis) for axis in ParallelConfig.model_fields if axis in settings}}
    found |= {
        "optimizer": {option: settings.pop(option) for option in ("distributed", "offload") if option in settings}
    }
    return {**found, **settings, **special.get(kind, {})}


@pytest.mark.parametrize("quick", some_in_acceptance([True, False], lambda quick: not quick))
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_ranks_take_the_planned_memory(backend: str, world_size: int, quick: bool, qwen3: Path, tmp_path: Path) -> None:
    every = {"megatron": MEGATRON, "fsdp": FSDP}[backend]
    small, configs = save_checkpoint("qwen3", tmp_path / "small", layers=2), {}
    for name in (name for name in every if (name in QUICK[backend]) == quick):
        model = qwen3 if "pp" in name else small
        configs[name] = planned_config(backend, model, tmp_path, **_settings(backend, name))
    selected = {name: config for name, config in configs.items() if config.trainer.parallel.world_size == world_size}
    tasks = [(config,) for config in selected.values()]
    taken = run_each(measure_rank, world_size, tmp_path / "ranks", tasks, timeout_s=480.0)  # many layouts in one fork
    check_taken(backend, selected, taken)


@pytest.mark.parametrize("backend", CRITICS)
def test_a_critics_ranks_take_the_planned_memory(backend: str, tmp_path: Path) -> None:
    model = save_checkpoint("qwen2", tmp_path / "model", layers=2)
    policies = {name: planned_config(backend, model, tmp_path, **_settings(backend, name)) for name in CRITICS[backend]}
    configs, planner = {}, load_backend(backend).planner()
    for name, policy in policies.items():
        gae = {"algorithm": AlgorithmConfig(advantage="gae"), "reference": policy.reference}
        critic = policy.model_copy(update=gae).for_critic()
        trainer = critic.trainer.model_copy(update={"optimizer": policy.trainer.optimizer})
        configs[name] = critic.model_copy(update={"trainer": trainer})
        for rank in (0, 1):
            planned = planner.estimate(configs[name], rank, CRITIC)
            assert planned.memory.head_bytes == 0 and planned.training.head_flops == 0
            assert planned.training.matmul_flops < planner.estimate(policy, rank).training.matmul_flops
    taken = run_each(_measure_critic, 2, tmp_path / "ranks", [(config,) for config in configs.values()])
    check_taken(backend, configs, taken, CRITIC, exact=("parameters", "optimizer state"))


def _measure_critic(placement: RankPlacement, config: RunConfig) -> Taken:
    return measure_rank(as_critic(placement), config)


def test_a_critic_has_a_parameter_per_hidden_unit_instead_of_logits(tmp_path: Path) -> None:
    for family in ("qwen2", "qwen3_moe", "deepseek_v3"):
        model = save_checkpoint(family, tmp_path / family, layers=2)
        policy, critic = (ModelDimensions.from_checkpoint(model, values=values) for values in (False, True))
        logits = 0 if policy.tied_embeddings else policy.vocab_size * policy.hidden_size
        assert critic.num_parameters == policy.num_parameters - logits + policy.hidden_size
        assert critic.active_parameters == policy.active_parameters - (policy.vocab_size - 1) * policy.hidden_size


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_supports_are_planned(backend: str, qwen3: Path, tmp_path: Path) -> None:
    """Every response token has 512 ids of four bytes."""
    planner = load_backend(backend).planner()
    configs = [planned_config(backend, qwen3, tmp_path, top_k=top_k) for top_k in (-1, 512)]
    whole, cut = (planner.estimate(config, 0).memory for config in configs)
    tokens = configs[0].rollout.max_new_tokens
    assert cut.activation_bytes - whole.activation_bytes >= 512 * 4 * tokens


def test_nccl_takes_more_memory_in_more_groups(qwen3: Path, tmp_path: Path) -> None:
    """With tensor, pipeline and data ranks on eight GPUs, it takes the reported 7 to 10 GB."""
    planner = load_backend("megatron").planner()
    layouts: list[dict[str, Any]] = [{}, {"data": 2}, {"tensor": 2, "sequence": True, "pipeline": 2, "data": 2}]
    configs = [planned_config("megatron", qwen3, tmp_path, parallel=layout) for layout in layouts]
    alone, pair, eight = (planner.estimate(config, 0).communicators for config in configs)
    assert alone == 0 < pair < eight
    assert 7e9 < Hardware.process_bytes(eight) < 10e9
