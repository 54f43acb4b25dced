"""Sentences of a plan follow from its figures."""

from dataclasses import replace
from typing import Any

import pytest

from slime_like.interfaces.estimate import RankKind
from slime_like.planning.memory import NodeMemory, plan_engine, trainer_phases
from slime_like.planning.plan import KindPlan, Plan
from slime_like.planning.step_time import predict_generation, predict_step
from slime_like.planning.table import host_verdict, step_lines, verdict
from tests.unit.planning.test_arithmetic import GIB, RESERVE, estimate, planned_run

# 1,024 sequences of 17,408 tokens on 32 shared GPUs of 79.1 GiB, as in configs/qwen3_32b.yaml.
ROLLOUT: dict[str, Any] = {"prompts_per_step": 128, "samples_per_prompt": 8, "max_new_tokens": 16384}
ENGINES: dict[str, Any] = {"num_engines": 8, "tensor": 4, "engine_args": {"gpu_memory_utilization": 0.8}}
RUN = planned_run(
    data={"max_prompt_tokens": 1024},
    trainer={"parallel": {"tensor": 8, "data": 4}, "target_tokens_per_batch": 34816},
    cluster={"placement": "colocated", "nodes": 4},
    rollout=ROLLOUT | ENGINES,
)


@pytest.fixture
def plan() -> Plan:
    kind, one, engine = RankKind("stage 1 of 1", tuple(range(32))), estimate(), plan_engine(RUN)
    step = predict_step(RUN, [one], engine, "gloo")
    return Plan(
        RUN,
        nodes=4,
        gpus_in_use=32,
        kinds=[KindPlan(kind, one, tuple(trainer_phases(RUN, engine, kind, one)))],
        engine=engine,
        generation=predict_generation(RUN, engine),
        host=NodeMemory({"reference weights": 916 * GIB}, None),
        step=step,
    )


def test_first_lines(plan: Plan) -> None:
    """The least free memory is next to the engine: a fifth of a GPU, minus the trainer's process."""
    assert verdict(plan) == f"fits. Least free GPU memory: {0.2 * 79.1 - RESERVE:.1f} GiB (generation)."
    assert "NOT checked: 916 GiB per node" in host_verdict(plan)
    plan.host = NodeMemory({"reference weights": 900 * GIB}, 1000 * GIB)
    assert "900 GiB per node; 100 GiB are left" in host_verdict(plan)
    plan.problems = ["one", "two"]
    assert verdict(plan).startswith("cannot start: 2 problems. GPU memory suffices")


def test_waves_follow_from_the_cache_and_are_explained(plan: Plan) -> None:
    """0.8 x 79.1 - 15.26 - 3.8 GiB hold 41 sequences at 64 KiB a token; each engine has 128."""
    found = plan.generation
    assert found is not None
    kv_tokens = (0.8 * 79.1 - 32_762_123_264 * 2 / 4 / GIB - 3.8) * GIB / (64 * 1024)
    assert (found.sequences, found.at_once, found.waves) == (128, int(kv_tokens / 17_408), 4)
    # A wave has 32 sequences on average, each with a prompt and half of a response in the cache.
    assert found.cache == pytest.approx(32 * (1024 + 8192) * 64 * 1024 / (3350e9 * 0.6))
    assert found.seconds == pytest.approx(found.prefill + 4 * 16_384 * (found.weights + found.cache + found.messages))
    *_, cause = step_lines(plan)
    assert "41 of its 128 sequences at the same time (more do not fit its KV cache)" in cause and "4 waves" in cause


def test_throughput_counts_prompts_and_every_gpu(plan: Plan) -> None:
    assert plan.step is not None
    first, second, _ = step_lines(plan)
    assert f"{1024 * (1024 + 16_384) / plan.step.total / 32:,.0f} tokens/s per GPU" in first
    assert f"Limited by generation: {plan.step.generation / plan.step.total:.0%} of the step" in second
    plan.step = replace(plan.step, generation=1e-4, training=2e-4, scoring=0, sync=0, moving=0, after_last=2e-4)
    assert "tokens/s" not in next(step_lines(plan))
