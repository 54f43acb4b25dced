"""GPUs, memory and time of reference workers in a plan, and the effect of streaming on a step's time."""

from dataclasses import replace
from typing import Any

import pytest

from slime_like.config import ParallelConfig
from slime_like.config.filling import fill, gpus_needed
from slime_like.interfaces.estimate import RankKind
from slime_like.planning import checks
from slime_like.planning.memory import worker_phase
from slime_like.planning.planned_run import GIB, Hardware
from slime_like.planning.search import trainer_gpus
from slime_like.planning.step_time import critic_seconds, predict_step, worker_seconds
from tests.unit.planning.test_arithmetic import EIGHT_LONG_SAMPLES, ONE_PASS_S, RESERVE, config, estimate, planned_run


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


def test_a_critic_on_its_own_gpus_grows_with_the_policy() -> None:
    critic, rollout = {"placement": "separate"}, {"num_engines": 4}
    sections: dict[str, Any] = {"cluster": {"nodes": 2, "gpus_per_node": 8}, "algorithm": {"advantage": "gae"}}
    run = config(rollout=rollout, trainer={"parallel": {"tensor": 2}}, critic=critic, **sections)
    filled = fill(run, ["trainer.parallel.data"])
    needed = gpus_needed(filled)
    assert (needed.trainers, needed.engines, needed.workers, needed.total) == (6, 4, {"critic": 6}, 16)
    fixed = run.model_copy(update={"critic": run.critic.model_copy(update={"parallel": ParallelConfig(data=2)})})
    assert gpus_needed(fill(fixed, ["trainer.parallel.data"])).trainers == 8  # its tensor ranks stay the policy's
    assert gpus_needed(config(rollout=rollout, **sections)).workers == {}


def test_a_critic_takes_time_before_or_beside_the_policy() -> None:
    """It scores and trains; on its own GPUs, the policy waits only for what takes longer than its own training."""
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
