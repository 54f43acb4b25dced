"""Plans: reference workers, streaming, recomputation, and sentences that follow from the figures."""

from dataclasses import replace
from typing import Any

import pytest

from slime_like.config import ParallelConfig, RunConfig, TrainerConfig
from slime_like.config.filling import fill, gpus_needed
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.planning import checks, search
from slime_like.planning.generation import predict_generation
from slime_like.planning.hardware import GIB, Hardware
from slime_like.planning.memory import NodeMemory, plan_engine, trainer_phases, worker_phase
from slime_like.planning.plan import KindPlan, Plan
from slime_like.planning.search import ERROR, fewest_recomputed, trainer_gpus
from slime_like.planning.step_time import critic_seconds, predict_step, worker_seconds
from slime_like.planning.table import host_verdict, step_lines, verdict
from tests.unit.planning.test_arithmetic import (
    EIGHT_LONG_SAMPLES,
    MODELS,
    ONE_PASS_S,
    RESERVE,
    config,
    estimate,
    planned_run,
)


def test_their_gpus_are_counted() -> None:
    workers = {"placement": "workers", "workers": 2, "parallel": {"tensor": 4}}
    sections: dict[str, Any] = {"rollout": {"num_engines": 4}, "cluster": {"nodes": 2}, "reference": workers}
    run = config(trainer={"parallel": {"data": 8}}, algorithm={"kl": {"coef": 0.01}}, **sections)
    needed = gpus_needed(run)
    assert (needed.trainers, needed.engines, needed.workers, needed.total) == (8, 4, {"reference": 8}, 20)
    (problem,) = checks.placement_problems(run)
    assert "20 GPUs (8 for trainer ranks + 4 for engines + 8 for reference workers), has 16; use 3 nodes" in problem
    assert trainer_gpus(needed, run.cluster) == 16 - 4 - 8
    unused = run.model_copy(update={"algorithm": config().algorithm})  # no KL term, so no scoring
    assert gpus_needed(unused).workers == {}


def test_a_critic_grows_with_the_policy_and_takes_time() -> None:
    critic, rollout = {"placement": "separate"}, {"num_engines": 4}
    sections: dict[str, Any] = {"cluster": {"nodes": 2, "gpus_per_node": 8}, "algorithm": {"advantage": "gae"}}
    run = config(rollout=rollout, trainer={"parallel": {"tensor": 2}}, critic=critic, **sections)
    filled = fill(run, ["trainer.parallel.data"])
    needed = gpus_needed(filled)
    assert (needed.trainers, needed.engines, needed.workers, needed.total) == (6, 4, {"critic": 6}, 16)
    fixed = run.model_copy(update={"critic": run.critic.model_copy(update={"parallel": ParallelConfig(data=2)})})
    assert gpus_needed(fill(fixed, ["trainer.parallel.data"])).trainers == 8  # its tensor ranks stay the policy's
    assert gpus_needed(config(rollout=rollout, **sections)).workers == {}
    # It scores and trains; on its own GPUs, the policy waits only for what takes longer than its own training.
    for placement in ("shared", "separate"):
        sections = EIGHT_LONG_SAMPLES | {"algorithm": {"advantage": "gae"}, "critic": {"placement": placement}}
        run = planned_run(**sections)
        step = predict_step(run, [estimate()], None, None, critic=50.0)
        waits = 50.0 if placement == "shared" else 50.0 - step.training
        assert step.critic == pytest.approx(waits) and step.total == pytest.approx(step.training + waits)
    alone = critic_seconds(run, [estimate()])
    assert alone == pytest.approx(step.training + run.workload.micro_batches * ONE_PASS_S)


def test_they_hold_weights_and_a_pass_without_gradients() -> None:
    figures = estimate(forward_bytes=10 * GIB, communication_bytes=GIB)
    phase = worker_phase(Hardware.of(config().cluster), "reference", RankKind("reference", (0,)), figures)
    assert phase.total / GIB == pytest.approx(4 + 10 * 1.05 + 1 + RESERVE)
    assert not phase.items.keys() & {"gradients", "optimizer state"}


def test_a_step_waits_for_whichever_is_slower() -> None:
    """Each of the workers' four replicas scores one of a step's four micro-batches."""
    parallel = {"data": 2}
    for pipeline, slots in ((1, 1), (2, 9 / 8)):  # requests of 8 packs, and an idle slot for the second stage
        reference = {"placement": "workers", "workers": 2, "parallel": parallel | {"pipeline": pipeline}}
        run = planned_run(reference=reference, algorithm={"kl": {"coef": 0.01}}, **EIGHT_LONG_SAMPLES)
        assert worker_seconds(run, run.config.roles["reference"], [estimate()]) == pytest.approx(ONE_PASS_S * slots)
    step = predict_step(run, [estimate()], None, None, references=30.0)
    assert step.scoring == 0.0
    assert step.total == pytest.approx(30.0 + step.training)
    assert replace(step, generation=40.0).total == pytest.approx(40.0 + step.training)


def test_streaming_leaves_one_micro_batch_and_the_update_for_the_end() -> None:
    sections = EIGHT_LONG_SAMPLES | {"trainer": {"parallel": {"pipeline": 2}}}
    streamed = sections | {"rollout": EIGHT_LONG_SAMPLES["rollout"] | {"stream": True}}
    step = predict_step(planned_run(**streamed), [estimate()], None, None)
    update = step.training - 5 * ONE_PASS_S  # four micro-batches and one idle slot
    assert step.after_last == pytest.approx(2 * ONE_PASS_S + update)
    assert replace(step, generation=100.0).total == pytest.approx(100.0 + 2 * ONE_PASS_S + update)
    assert replace(step, generation=0.0).total == pytest.approx(step.training)
    whole = predict_step(planned_run(**sections), [estimate()], None, None)
    assert replace(whole, generation=100.0).total == pytest.approx(100.0 + whole.training)


STATE_GIB = 4 + 8 + 6 + RESERVE
LAYERS = 17  # the largest of four stages of Qwen3-32B


class Planner:
    """Planner for which a kept layer takes slightly more than 2 GiB, increasing with the number of kept layers."""

    def __init__(self) -> None:
        self.tried: list[int] = []

    def rank_kinds(self, trainer: TrainerConfig) -> list[RankKind]:
        return [RankKind("stage 1 of 1", (0,))]

    def estimate(self, config: RunConfig, rank: int, role: str) -> RankEstimate:
        recomputed = config.trainer.recomputed_layers(LAYERS)
        self.tried.append(recomputed)
        return estimate(activation_bytes=int(needed_gib(recomputed) * GIB))


def needed_gib(recomputed: int) -> float:
    return 1 + 2 * (LAYERS - recomputed) + 0.02 * (LAYERS - recomputed) ** 2


@pytest.mark.parametrize("memory_gib", [22, 24, 25, 30, 41.5, 50, 60, 63, 70])
def test_no_fewer_would_fit(memory_gib: float) -> None:
    planner = Planner()
    backend: Any = type("Backend", (), {"planner": lambda: planner})
    cluster = {"gpu_memory_gib": memory_gib, "gpus_per_node": 4}
    run = planned_run(trainer={"parallel": {"pipeline": 4}}, cluster=cluster, debug={"load_rollouts": "/tmp/rollouts"})
    fitting = [
        layers
        for layers in range(LAYERS + 1)
        if STATE_GIB + needed_gib(layers) * (1 + 0.05 + ERROR) <= memory_gib  # the allocator loses 5 %
    ]
    found = fewest_recomputed(run, backend)
    assert (found is not None) is bool(fitting)
    assert found is None or found.run.config.trainer.recomputed_layers(LAYERS) == fitting[0]
    assert len(planner.tried) <= 6


class FsdpPlanner(Planner):
    """Planner for which whole gradients take 20 GiB, and sharded ones 1 GiB."""

    def estimate(self, config: RunConfig, rank: int, role: str) -> RankEstimate:
        self.tried.append(0)
        return estimate(window_gradient_bytes=(20 if config.trainer.fsdp.accumulate == "whole" else 1) * GIB)


@pytest.mark.parametrize(
    ("model", "memory_gib", "chosen", "traced"),
    [
        ("Qwen3-32B", 80, "whole", 1),
        ("Qwen3-32B", STATE_GIB + 21, "whole", 1),
        ("Qwen3-32B", STATE_GIB + 19, "sharded", 2),
        ("Qwen2.5-0.5B", 80, "whole", 0),  # two of 80 GiB need no plan
        ("Qwen3-1.7B", STATE_GIB + 2, "sharded", 2),
    ],
)
def test_fsdp_keeps_whole_gradients_if_they_fit(
    model: str, memory_gib: float, chosen: str, traced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = FsdpPlanner()
    monkeypatch.setattr(search, "plannable_backend", lambda _: type("Backend", (), {"planner": lambda: planner}))
    trainer, debug = {"backend": "fsdp", "parallel": {"data": 8}}, {"load_rollouts": "/tmp/rollouts"}
    memory = {"gpu_memory_gib": memory_gib}
    run = config(model={"path": MODELS / model}, trainer=trainer, debug=debug, cluster=memory)
    assert search.fill_memory(run).trainer.fsdp.accumulate == chosen and len(planner.tried) == traced
    # A given value stays, and what does not fit names the setting.
    given = config(trainer=trainer | {"fsdp": {"accumulate": "whole"}}, debug=debug, cluster=memory)
    assert search.fill_memory(given) is given
    kind, one = RankKind("all ranks", (0,)), estimate(window_gradient_bytes=20 * GIB)
    planned = replace(RUN, config=given, hardware=Hardware.of(given.cluster))
    plan = Plan(planned, 1, 8, [KindPlan(kind, one, tuple(trainer_phases(planned, None, kind, one)))])
    assert plan.fits or all("trainer.fsdp.accumulate=sharded" in problem for problem in plan.misfits())


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


def test_verdicts_and_throughput_follow_from_the_figures(plan: Plan) -> None:
    """The least free memory is next to the engine: a fifth of a GPU, minus the trainer's process."""
    assert verdict(plan) == f"fits. Least free GPU memory: {0.2 * 79.1 - RESERVE:.1f} GiB (generation)."
    assert "NOT checked: 916 GiB per node" in host_verdict(plan)
    plan.host = NodeMemory({"reference weights": 900 * GIB}, 1000 * GIB)
    assert "900 GiB per node; 100 GiB are left" in host_verdict(plan)
    plan.problems = ["one", "two"]
    assert verdict(plan).startswith("cannot start: 2 problems. GPU memory suffices")
    assert plan.step is not None
    first, second, *_ = step_lines(plan)
    assert f"{1024 * (1024 + 16_384) / plan.step.total / 32:,.0f} tokens/s per GPU" in first
    assert f"Limited by generation: {plan.step.generation / plan.step.total:.0%} of the step" in second
    plan.step = replace(plan.step, generation=1e-4, training=2e-4, scoring=0, sync=0, moving=0, after_last=2e-4)
    assert "tokens/s" not in next(step_lines(plan))


def test_batches_follow_from_the_cache_and_are_explained(plan: Plan) -> None:
    """0.8 x 79.1 - 15.26 - 3.8 GiB hold 41 sequences at 64 KiB a token; each engine has 128."""
    found = plan.generation
    assert found is not None
    kv_tokens = (0.8 * 79.1 - 32_762_123_264 * 2 / 4 / GIB - 3.8) * GIB / (64 * 1024)
    assert (found.sequences, found.at_once) == (128, int(kv_tokens / 17_408))
    # Each sequence of a batch has a prompt and half of a response in the cache.
    assert found.token.cache == pytest.approx(41 * (1024 + 8192) * 64 * 1024 / (3350e9 * 0.6))
    # Three full batches, and one of five sequences.
    rest = found.seconds - found.prefill - 3 * 16_384 * found.token.seconds
    assert rest == pytest.approx(found.tail) and 16_384 * 0.013 < rest < 16_384 * found.token.seconds
    *_, cause, tail = step_lines(plan)
    assert "41 of its 128 sequences at the same time (more do not fit its KV cache)" in cause
    assert f"longest response has 16,384 tokens: for {found.tail / found.seconds:.0%} of generation" in tail
