"""Memory of exact distillation, and teachers' scores; ``test_features`` compares the students."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.config.roles import TEACHER
from slime_like.config.sections import DistillationConfig
from slime_like.interfaces import RankPlacement, load_backend
from slime_like.models.dimensions import ModelDimensions
from slime_like.orchestration.trainer.rank_training import RankTraining
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.parallel import taken
from tests.parallel.cases import parity_config
from tests.parallel.checks import LOSS_BOUND
from tests.parallel.feature_cases import save_teacher
from tests.parallel.layouts import layout_of
from tests.parallel.ranks import run_by_size, run_each
from tests.parallel.references import DistillingReference
from tests.parallel.steps import running
from tests.parallel.tiny import VOCAB, save_checkpoint, scored_sequences
from tests.support.acceptance import some_in_acceptance
from tests.support.rollout_rows import batcher_of


def _measure(placement: RankPlacement, config: RunConfig, width: int) -> taken.Taken:
    """Measure a step of worst micro-batches with a teacher's hidden states, which come from elsewhere."""
    plain = taken.worst_packs

    def taught(*arguments: Any) -> list[PackedTrajectory]:
        return [replace(pack, teacher_hidden=torch.zeros(len(pack.targets), width)) for pack in plain(*arguments)]

    taken.worst_packs = taught
    return taken.measure_rank(placement, config)


@pytest.mark.parametrize("backend", some_in_acceptance(["megatron", "fsdp"], lambda backend: backend == "fsdp"))
def test_ranks_take_the_planned_memory(backend: str, qwen3: Path, tmp_path: Path) -> None:
    """A step's memory is within a tenth. Gradients are too small to be clipped, which is not planned."""
    path = save_teacher(tmp_path / "teacher")
    section = DistillationConfig(path=path, coef=1e-6, mode="exact", placement="workers")
    model = ModelDimensions.from_checkpoint(path)
    layouts: list[dict[str, Any]] = [{"parallel": {"data": 2}}]
    if backend == "megatron":
        layouts = [{"parallel": {"tensor": 2, "sequence": True}, "dtype": "float32"}, {"parallel": {"pipeline": 2}}]
    configs = [
        taken.planned_config(backend, qwen3, tmp_path, **layout).model_copy(update={"distillation": section})
        for layout in layouts
    ]
    tasks = [(config, model.hidden_size) for config in configs]
    measured = run_each(_measure, 2, tmp_path / "ranks", tasks)
    taken.check_taken(backend, {str(config.trainer.parallel): config for config in configs}, measured)
    planner = load_backend(backend).planner()
    # Bytes of a column: of rows with padding, on the last stage, in float32 and bfloat16.
    columns = {"megatron": [[4 * 128, 4 * 128], [0, 2 * 256]], "fsdp": [[2 * VOCAB, 2 * VOCAB]]}[backend]
    held = [[planner.estimate(config, rank).memory.teacher_bytes for rank in range(2)] for config in configs]
    assert held == [[nbytes * model.hidden_size for nbytes in ranks] for ranks in columns]


def teach(placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory]) -> list[Tensor] | None:
    """Return a teacher's hidden states of every pack, as one of its workers."""
    with running(replace(placement, role=TEACHER), config, scores=True) as trainer:
        scored = trainer.score(packs)
        return None if scored is None else [each["teacher_hidden"] for each in scored]


def take(placement: RankPlacement, config: RunConfig, rows: list[ScoredTrajectory]) -> tuple[dict[str, Any], Any]:
    """Score a batch with the teachers that the ranks hold, and do its step. Return the scores by sequence id."""
    with running(placement, config) as trainer:
        place = trainer.coordinates
        rank = RankTraining(config)
        rank.backend, rank.place = trainer, place
        batch = batcher_of(config, place.data_size).batch(rows, by_source=True)
        rank.load_batch(batch.replicas[place.data])
        for role in config.roles.scoring:
            rank.score_batch(role.name)
        field = config.distillation.roles[0].fields[0]
        scores = rank.stored_scores([row.sequence_id for row in rows], field)
        stats = rank.train_minibatch(0, batch.denominators[0])
        return {name: each[field] for name, each in scores.items()}, stats


def test_trainer_ranks_score_each_source_with_its_teacher(tmp_path: Path) -> None:
    """Sampled and exact, by two replicas. One of them has no row of the second source."""
    paths = {
        name: save_checkpoint("qwen3", tmp_path / name, seed, 2) for seed, name in enumerate(("x", "sums", "words"))
    }
    config = parity_config(paths.pop("x"), tmp_path, {"backend": "fsdp", "data": 2})
    reference = DistillingReference(config.model.path, config.algorithm, cast(Any, paths))
    rows = scored_sequences([(5, 9), (3, 1), (11, 6), (8, 21), (7, 3)])
    wanted: dict[str, dict[str, Tensor]] = {"sampled": {}, "exact": {}}
    for index, row in enumerate(rows):
        row.source = "words" if index == 2 else "sums"
        hidden = reference.taught(row)
        logits = reference.teachers[row.source].lm_head(hidden) / row.temperature
        wanted["exact"][row.sequence_id] = hidden
        wanted["sampled"][row.sequence_id] = logits.log_softmax(-1).gather(1, row.response_tokens[:, None])[:, 0]
        reference.score(row)
    kls = {}
    for source in paths:
        own = [kl[row.loss_mask] for kl, row in zip(reference.kls, rows, strict=True) if row.source == source]
        kls[source] = float(torch.cat(own).detach().mean())
    tasks = []
    for mode in wanted:
        section = DistillationConfig.model_validate({"teachers": paths, "coef": 1.0, "mode": mode})
        tasks.append((config.model_copy(update={"distillation": section}), rows))
    for mode, ranks in zip(wanted, run_each(take, 2, tmp_path / "ranks", tasks), strict=True):
        found = {name: values for scores, _ in ranks for name, values in scores.items()}
        assert found.keys() == wanted[mode].keys()
        for name, values in wanted[mode].items():
            torch.testing.assert_close(found[name].double(), values.detach(), rtol=0, atol=2e-5)
        for _, stats in ranks:
            assert stats.source_kls == pytest.approx(kls if mode == "exact" else {}, abs=LOSS_BOUND)


def test_workers_return_hidden_states(cases: Any, tmp_path: Path) -> None:
    tasks = {}
    for name in ("tp2-sp", "pp2", "cp2", "tp2-tree", "fsdp"):
        options = (("shares", True),) if "tree" in name else ()
        case = cases("distilled", "qwen3", options=options)
        config = case.config(tmp_path, layout_of(name))
        role = replace(config.roles[TEACHER], parallel=config.trainer.parallel)
        tasks[name] = (config.for_worker(role), case.packs())
    for name, results in run_by_size(teach, tmp_path, tasks).items():
        returned = [result for result in results if result is not None]
        assert returned, name
        for found in returned:
            for pack, hidden in zip(tasks[name][1], found, strict=True):
                assert hidden.dtype == torch.float32
                torch.testing.assert_close(hidden, pack.teacher_hidden, rtol=0, atol=2e-5)
