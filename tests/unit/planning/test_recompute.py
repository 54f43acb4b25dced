"""The fewest recomputed layers that fit are found in a few tries."""

from typing import Any

import pytest

from slime_like.config import RunConfig, TrainerConfig
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.planning.planned_run import GIB
from slime_like.planning.search import ERROR, fewest_recomputed
from tests.unit.planning.test_arithmetic import RESERVE, estimate, planned_run

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
