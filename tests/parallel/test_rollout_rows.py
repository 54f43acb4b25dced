"""Rollouts cut into rows give the gradients of whole rollouts, at once and streamed, under every layout.

The batcher forms packs and windows from both. Each row's prompt is its whole prefix, computed for each row or once for
all rows of a micro-batch. The parity matrix (``test_parity.py``) covers that steps on whole rollouts are right.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from slime_like.algorithms.packing.pack import real_tokens
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.orchestration.trainer.rank_training import RankTraining
from slime_like.trajectory import ScoredTrajectory
from tests.parallel.cases import parity_config
from tests.parallel.checks import GRADIENT_BOUND, LOSS_BOUND, check_tensors
from tests.parallel.ranks import run_each
from tests.parallel.steps import exported_gradients, optimizer_steps, running
from tests.parallel.test_streaming import train_windows
from tests.parallel.tiny import save_checkpoint, scored_sequences
from tests.support.acceptance import some_in_acceptance
from tests.support.rollout_rows import batcher_of, cut_into_rows, random_cuts

BUDGET, SHARED_BUDGET = 48, 28
ROLLOUTS = 20  # in groups of two
OBJECTIVE: dict[str, Any] = {"kl": {"coef": 0.0}, "importance": {"correction": "truncate", "high": 1.1}}
# backend, layout, reduction
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "tp2-sp": ("megatron", {"tensor": 2, "sequence": True}, "tokens"),
    "pp2": ("megatron", {"pipeline": 2}, "groups"),
    "cp2": ("megatron", {"context": 2}, "constant"),
    "cp2-allgather": ("megatron", {"context": 2, "attention": "allgather"}, "constant"),
    "dp2-distributed": ("megatron", {"data": 2, "distributed": True}, "samples"),
    "fsdp-dp2": ("fsdp", {"data": 2}, "samples"),
    # Without a balancing loss, which counts a token once for each of its rows.
    "experts-dp2-ep2": ("megatron", {"data": 2, "expert": 2}, "tokens"),
    "experts-tp2-sp-ep2": ("megatron", {"tensor": 2, "sequence": True, "expert": 2}, "samples"),
    "experts-fsdp-dp2": ("fsdp", {"data": 2}, "groups"),
}


def _rollouts() -> list[ScoredTrajectory]:
    """Make rollouts with all inputs of a step; the sixth is masked, so that its rows have no loss."""
    lengths = [(3 + i % 5, 1 + (7 * i) % 19) for i in range(ROLLOUTS)]
    rollouts = scored_sequences(lengths, fully_masked=(5,))
    for rollout in rollouts:
        rollout.ref_logprobs = None
    return rollouts


def _rows() -> list[ScoredTrajectory]:
    """Cut each rollout into one to five rows, shuffled within groups."""
    pick = random.Random(0)
    rows = [row for rollout in _rollouts() for row in cut_into_rows(rollout, random_cuts(rollout, pick))]
    assert len(rows) > 2 * ROLLOUTS
    return sorted(pick.sample(rows, len(rows)), key=lambda row: row.group_id)


def _step(
    placement: RankPlacement, config: RunConfig, rows: list[ScoredTrajectory], streams: bool
) -> tuple[dict[str, Tensor], float | None]:
    """Return (this rank's exported gradients, the loss if this rank has it)."""
    with running(placement, config) as trainer:
        place = trainer.coordinates
        rank, batcher = RankTraining(config), batcher_of(config, place.data_size)
        rank.backend, rank.place = trainer, place
        if streams:
            early, denominator = train_windows(rank, batcher, rows, place.data)
            assert early >= 1
        else:
            batch = batcher.batch(rows)
            rank.load_batch(batch.replicas[place.data])
            (denominator,) = batch.denominators
            trainer.begin_step(denominator, real_tokens(batch.replicas[place.data][0]))
            trainer.accumulate(batch.replicas[place.data][0], last=True)
        gradients = exported_gradients(trainer, denominator)
        (stats,) = optimizer_steps(trainer, 1, denominator, lambda: None)
    return gradients, None if stats is None else float(stats.loss)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return models by whether they have experts."""
    families = {False: "qwen3", True: "qwen3_moe"}
    return {has: save_checkpoint(name, tmp_path_factory.mktemp(name), layers=2) for has, name in families.items()}


_IN_ACCEPTANCE = ("tp2-sp", "experts-tp2-sp-ep2", "experts-fsdp-dp2", "cp2-allgather", "dp2-distributed")


@pytest.mark.parametrize("name", some_in_acceptance(CASES, _IN_ACCEPTANCE.__contains__))
def test_rows_train_like_whole_rollouts(name: str, models: dict[bool, Path], tmp_path: Path) -> None:
    backend, layout, reduction = CASES[name]
    model = models[name.startswith("experts")]
    objective = {**OBJECTIVE, "reduction": {"name": reduction, **({"length": 19} if reduction == "constant" else {})}}
    config = parity_config(model, tmp_path, {"backend": backend, **layout}, **objective)
    config = _with_trainer(config, target_tokens_per_batch=BUDGET)
    shared = _with_trainer(config, share_prefixes="tree", target_tokens_per_batch=SHARED_BUDGET)
    tasks = [(config, _rollouts(), False), (config, _rows(), False), (config, _rows(), True)]
    if config.trainer.attention == "allgather" or config.trainer.parallel.context == 1:
        tasks += [(shared, _rows(), False), (shared, _rows(), True)]
    whole, *cut = (_together(ranks) for ranks in run_each(_step, 2, tmp_path / "ranks", tasks))
    for gradients, loss in cut:
        check_tensors(gradients, {name: tensor.double() for name, tensor in whole[0].items()}, GRADIENT_BOUND)
        assert loss == pytest.approx(whole[1], rel=LOSS_BOUND)


def _with_trainer(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})


def _together(ranks: tuple[tuple[dict[str, Tensor], float | None], ...]) -> tuple[dict[str, Tensor], float]:
    gradients = {name: tensor for each, _ in ranks for name, tensor in each.items()}
    return gradients, next(loss for _, loss in ranks if loss is not None)
