"""The plan of a critic's ranks compared with real ones: held weights exactly, a step's memory within a tenth."""

from pathlib import Path
from typing import Any

import pytest

from backends.common.attention import packed_attention, prefixes
from backends.common.attention.kernels import CpuFlash
from slime_like.config import AlgorithmConfig, RunConfig
from slime_like.config.roles import CRITIC
from slime_like.interfaces import RankPlacement, load_backend
from slime_like.models.dimensions import ModelDimensions
from tests.parallel.ranks import run_each
from tests.parallel.taken import Taken, compared, measure_rank, planned_config
from tests.parallel.test_planned_memory import NEAR
from tests.parallel.tiny import save_checkpoint
from tests.parallel.values import as_critic

LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "megatron": [
        {"parallel": {"tensor": 2, "sequence": True}, "dtype": "float32"},
        {"parallel": {"context": 2}, "optimizer": {"distributed": True}},
    ],
    "fsdp": [{"parallel": {"data": 2}}],
}


def _measure(placement: RankPlacement, config: RunConfig) -> Taken:
    return measure_rank(as_critic(placement), config)


@pytest.mark.parametrize("backend", LAYOUTS)
def test_a_critics_ranks_take_the_planned_memory(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_checkpoint("qwen2", tmp_path / "model", layers=2)
    policies = [planned_config(backend, model, tmp_path, **layout) for layout in LAYOUTS[backend]]
    gae = {"algorithm": AlgorithmConfig(advantage="gae"), "reference": policies[0].reference}
    configs = [policy.model_copy(update=gae).for_critic() for policy in policies]
    configs = [
        config.model_copy(update={"trainer": config.trainer.model_copy(update={"optimizer": policy.trainer.optimizer})})
        for config, policy in zip(configs, policies, strict=True)
    ]
    taken = run_each(_measure, 2, tmp_path / "ranks", [(config,) for config in configs])
    for module in (packed_attention, prefixes):
        monkeypatch.setattr(module, "kernel_for", lambda device: CpuFlash())
    planner = load_backend(backend).planner()
    for config, policy, ranks in zip(configs, policies, taken, strict=True):
        for rank, real in enumerate(ranks):
            planned = planner.estimate(config, rank, CRITIC)
            assert planned.memory.head_bytes == 0 and planned.training.head_flops == 0
            assert planned.training.matmul_flops < planner.estimate(policy, rank).training.matmul_flops
            for kind, (wanted, found) in compared(planned.memory, real).items():
                near = 0 if kind in ("parameters", "optimizer state") else NEAR
                assert wanted == pytest.approx(found, rel=near), (config.trainer.parallel, kind)


def test_a_critic_has_a_parameter_per_hidden_unit_instead_of_logits(tmp_path: Path) -> None:
    for family in ("qwen2", "qwen3_moe", "deepseek_v3"):
        model = save_checkpoint(family, tmp_path / family, layers=2)
        policy, critic = (ModelDimensions.from_checkpoint(model, values=values) for values in (False, True))
        logits = 0 if policy.tied_embeddings else policy.vocab_size * policy.hidden_size
        assert critic.num_parameters == policy.num_parameters - logits + policy.hidden_size
        assert critic.active_parameters == policy.active_parameters - (policy.vocab_size - 1) * policy.hidden_size
