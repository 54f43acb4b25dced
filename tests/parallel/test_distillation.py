"""Exact distillation agrees with transformers' float64 student and teacher in every layout."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.attention import packed_attention, prefixes, ring
from backends.common.attention.kernels import CpuFlash
from slime_like.config import RunConfig
from slime_like.config.roles import TEACHER
from slime_like.config.sections import DistillationConfig
from slime_like.interfaces import RankPlacement, load_backend
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory
from tests.parallel import taken
from tests.parallel.distilled import distilled_case, distilled_config, save_teacher
from tests.parallel.parity import LOSS_BOUND, MASKED, PACKS, STEPS, Case, Settings, check_everything
from tests.parallel.ranks import run_each, run_ranks
from tests.parallel.shared_prefixes import SharedCase, sharing_sequences
from tests.parallel.steps import RankResult, running, train_rank
from tests.parallel.test_fsdp_parity import check_case
from tests.parallel.test_planned_memory import NEAR
from tests.parallel.tiny import VOCAB, scored_sequences

LAYOUTS: dict[str, Settings] = {
    "tp2-sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "dp2-distributed-overlap": {"data": 2, "distributed": True, "overlap": True},
    "tree-tp2": {"tensor": 2, "share_prefixes": "tree"},
    "fsdp": {"backend": "fsdp"},
    "fsdp-dp2-cp2": {"backend": "fsdp", "data": 2, "context": 2},
    "fsdp-tree": {"backend": "fsdp", "share_prefixes": "tree"},
}


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(shares: bool) -> tuple[Case, Path, float]:
        directory = tmp_path_factory.mktemp("distilled")
        if shares:
            return distilled_case(sharing_sequences(), directory, kind=SharedCase)
        return distilled_case(
            scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED), directory
        )

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_computes_the_reference(layout: str, case_of: Any, tmp_path: Path) -> None:
    settings = LAYOUTS[layout]
    case, teacher, kl = case_of("share_prefixes" in settings)
    config = distilled_config(case, teacher, tmp_path, settings)
    world = config.trainer.parallel.world_size
    results = run_ranks(train_rank, world, tmp_path / "ranks", config, case.packs(), case.denominator, STEPS)
    check_distilled(case, kl, results, config.trainer.backend)


def check_distilled(case: Case, kl: float, results: list[RankResult], backend: str) -> None:
    """Compare everything, and the mean KL, which must be far above the bounds."""
    found = [float(result.stats[0].distillation_kl) for result in results if result.stats[0] is not None]
    assert kl > 0.5 and found == pytest.approx([kl] * len(found), abs=LOSS_BOUND)
    (check_case if backend == "fsdp" else check_everything)(case, results)


def _measure(placement: RankPlacement, config: RunConfig, width: int) -> taken.Taken:
    """Measure a step of worst micro-batches with a teacher's hidden states, which come from elsewhere."""
    plain = taken.worst_packs

    def taught(*arguments: Any) -> list[PackedTrajectory]:
        return [replace(pack, teacher_hidden=torch.zeros(len(pack.targets), width)) for pack in plain(*arguments)]

    taken.worst_packs = taught
    return taken.measure_rank(placement, config)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_ranks_take_the_planned_memory(
    backend: str, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's memory is within a tenth. Gradients are too small to be clipped, which is not planned."""
    path = save_teacher(tmp_path / "teacher")
    section = DistillationConfig(path=path, coef=1e-6, mode="exact", placement="workers")
    model = ModelDimensions.from_checkpoint(path)
    layouts: list[dict[str, Any]] = [{"parallel": {"data": 2}}]
    if backend == "megatron":
        layouts = [
            {"parallel": {"tensor": 2, "sequence": True}, "dtype": "float32"},
            {"parallel": {"pipeline": 2}},
        ]
    configs = [
        taken.planned_config(backend, qwen3, tmp_path, **layout).model_copy(update={"distillation": section})
        for layout in layouts
    ]
    tasks = [(config, model.hidden_size) for config in configs]
    measured = run_each(_measure, 2, tmp_path / "ranks", tasks)
    for module in (packed_attention, prefixes, ring):
        monkeypatch.setattr(module, "kernel_for", lambda device: CpuFlash())
    planner = load_backend(backend).planner()
    for config, ranks in zip(configs, measured, strict=True):
        for rank, real in enumerate(ranks):
            planned = planner.estimate(config, rank).memory
            for kind, (wanted, found) in taken.compared(planned, real).items():
                assert wanted == pytest.approx(found, rel=NEAR), (config.trainer.parallel, rank, kind)
    # Bytes of a column: of rows with padding, on the last stage, in float32 and bfloat16.
    columns = {"megatron": [[4 * 128, 4 * 128], [0, 2 * 256]], "fsdp": [[2 * VOCAB, 2 * VOCAB]]}[backend]
    held = [[planner.estimate(config, rank).memory.teacher_bytes for rank in range(2)] for config in configs]
    assert held == [[nbytes * model.hidden_size for nbytes in ranks] for ranks in columns]


def teach(placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory]) -> list[Tensor] | None:
    """Return a teacher's hidden states of every pack, as one of its workers."""
    with running(replace(placement, role=TEACHER), config, scores=True) as trainer:
        scored = trainer.score(packs)
        return None if scored is None else [each["teacher_hidden"] for each in scored]


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", "cp2", "tree-tp2", "fsdp"])
def test_workers_return_hidden_states(layout: str, case_of: Any, tmp_path: Path) -> None:
    settings = LAYOUTS[layout]
    case, teacher, _ = case_of("share_prefixes" in settings)
    config = distilled_config(case, teacher, tmp_path, settings)
    parallel = config.trainer.parallel
    role = replace(config.roles[TEACHER], parallel=parallel)
    results = run_ranks(teach, parallel.world_size, tmp_path / "ranks", config.for_worker(role), case.packs())
    returned = [result for result in results if result is not None]
    assert returned
    for found in returned:
        for pack, hidden in zip(case.packs(), found, strict=True):
            assert hidden.dtype == torch.float32
            torch.testing.assert_close(hidden, pack.teacher_hidden, rtol=0, atol=2e-5)
