"""Other engines on the same GPUs: only those that fit and are faster are proposed."""

from typing import Any

import pytest

from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.planning.engine_search import EngineChoice, faster_engines
from slime_like.planning.engines import plan_engine
from slime_like.planning.generation import predict_generation
from slime_like.planning.hardware import GIB
from slime_like.planning.planned_run import PlannedRun
from slime_like.planning.settings import changed
from slime_like.planning.step_time import predict
from tests.unit.planning.test_arithmetic import estimate, planned_run

# 1,024 sequences of 17,408 tokens on 32 shared GPUs of 79.1 GiB, as in configs/qwen3_32b.yaml.
LONG: dict[str, Any] = {
    "data": {"max_prompt_tokens": 1024},
    "trainer": {"parallel": {"tensor": 8, "data": 4}, "target_tokens_per_batch": 34816},
    "cluster": {"placement": "colocated", "nodes": 4},
}
ROLLOUT: dict[str, Any] = {"prompts_per_step": 128, "samples_per_prompt": 8, "max_new_tokens": 16384}


def shared(engines: int, tensor: int, share: float) -> PlannedRun:
    args = {"gpu_memory_utilization": share}
    return planned_run(**LONG, rollout=ROLLOUT | {"num_engines": engines, "tensor": tensor, "engine_args": args})


def choice(run: PlannedRun, one: RankEstimate) -> EngineChoice | None:
    step = predict(run, [one], plan_engine(run), "gloo")
    return faster_engines(run, [(RankKind("all ranks", tuple(range(32))), one)], "gloo", step)


def test_waves_follow_from_the_cache() -> None:
    """0.8 x 79.1 - 15.26 - 3.8 GiB hold 41 sequences at 64 KiB a token; each engine has 128."""
    run = shared(8, 4, 0.8)
    found = predict_generation(run, plan_engine(run))
    kv_tokens = (0.8 * 79.1 - 32_762_123_264 * 2 / 4 / GIB - 3.8) * GIB / (64 * 1024)
    assert (found.sequences, found.at_once, found.waves) == (128, int(kv_tokens / 17_408), 4)
    # A wave has 32 on average, each with a prompt and half of a response in the cache.
    assert found.cache == pytest.approx(32 * (1024 + 8192) * 64 * 1024 / (3350e9 * 0.6))
    assert found.seconds == pytest.approx(found.prefill + 4 * 16_384 * (found.weights + found.cache + found.messages))


def test_faster_engines_are_planned_before_they_are_proposed() -> None:
    run, one = shared(8, 4, 0.8), estimate()
    found = choice(run, one)
    assert found is not None and found.changes
    other = changed(run, found.changes)
    engine = plan_engine(other)
    assert other.config.rollout.num_engines * other.config.rollout.tensor <= 32
    assert (engine, predict_generation(other, engine)) == (found.engine, found.generation)
    assert predict(other, [one], engine, "gloo") == found.step
    assert found.step.total < 0.9 * predict(run, [one], plan_engine(run), "gloo").total
    assert found.tightest.fits and choice(other, one) is None  # nothing is left to gain


@pytest.mark.parametrize("held", [{"parameter_bytes": 75 * GIB}, {"activation_bytes": 75 * GIB}])
def test_nothing_is_proposed_that_does_not_fit(held: dict[str, int]) -> None:
    """A weight sync needs room for both copies of the weights, training for its activations."""
    assert choice(shared(8, 4, 0.8), estimate(**held)) is None
