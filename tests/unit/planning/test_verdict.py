"""Sentences of a plan: what they say follows from its figures."""

from dataclasses import replace

import pytest

from slime_like.interfaces.estimate import RankKind
from slime_like.planning import verdict
from slime_like.planning.engine_search import faster_engines
from slime_like.planning.engines import plan_engine
from slime_like.planning.generation import predict_generation
from slime_like.planning.memory import HostMemory, Item, trainer_phases
from slime_like.planning.result import KindPlan, Plan
from slime_like.planning.settings import flags
from slime_like.planning.step_time import predict
from tests.unit.planning.test_arithmetic import GIB, RESERVE, estimate
from tests.unit.planning.test_engine_search import shared

RUN = shared(8, 4, 0.8)


@pytest.fixture
def plan() -> Plan:
    kind, one, engine = RankKind("stage 1 of 1", tuple(range(32))), estimate(), plan_engine(RUN)
    step = predict(RUN, [one], engine, "gloo")
    return Plan(
        RUN.hardware,
        nodes=4,
        gpus_in_use=32,
        kinds=[KindPlan(kind, one, tuple(trainer_phases(RUN, engine, kind, one)), ())],
        engine=engine,
        generation=predict_generation(RUN, engine),
        faster_engines=faster_engines(RUN, [(kind, one)], "gloo", step),
        host=HostMemory((Item("reference weights", 916 * GIB),), None),
        workload=RUN.workload,
        step=step,
    )


def test_first_lines(plan: Plan) -> None:
    """Least is left beside the engine: a GPU's fifth, without the trainer's process."""
    assert verdict.verdict(plan) == f"fits. Least free GPU memory: {0.2 * 79.1 - RESERVE:.1f} GiB (generation)."
    assert "NOT checked: 916 GiB per node" in verdict.host_verdict(plan)
    plan.host = HostMemory((Item("reference weights", 900 * GIB),), 1000 * GIB)
    assert "900 GiB per node; 100 GiB are left" in verdict.host_verdict(plan)
    plan.problems = ["one", "two"]
    assert verdict.verdict(plan).startswith("does not fit: 2 problems")


def test_waves_have_a_cause_and_a_remedy(plan: Plan) -> None:
    cause, flagged, effect = verdict.waves(RUN.config, plan)
    assert "41 of its 128 sequences at once (more do not fit its KV cache)" in cause and "4 waves" in cause
    assert plan.faster_engines is not None and " ".join(flags(plan.faster_engines.changes)) in flagged
    assert (
        plan.step is not None
        and f"{plan.faster_engines.step.total:,.0f} s instead of {plan.step.total:,.0f} s" in effect
    )


def test_throughput_counts_prompts_and_every_gpu(plan: Plan) -> None:
    assert plan.step is not None
    first, second = verdict.step_lines(plan)
    assert f"{1024 * (1024 + 16_384) / plan.step.total / 32:,.0f} tokens/s per GPU" in first
    assert f"Limited by generation: {plan.step.generation / plan.step.total:.0%} of the step" in second
    plan.step = replace(plan.step, generation=1e-4, training=2e-4, scoring=0, sync=0, moving=0, after_last=2e-4)
    assert "tokens/s" not in next(verdict.step_lines(plan))
