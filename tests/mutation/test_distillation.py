"""Put bugs of exact distillation into the trainer, one at a time: its parity test must notice each."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from backends.common.step import packs, teacher
from backends.common.step.teacher import TeacherHead, Teachers
from slime_like.algorithms.divergence import Head
from slime_like.algorithms.softmax import no_reduction
from slime_like.trajectory import PackedTrajectory
from tests.mutation.planted import Bug, Comparison, Patch, no_bug, require_caught, run_planted
from tests.mutation.test_trainer import loss_is_scaled_by_the_context_size
from tests.parallel.distilled import distilled_case, distilled_config
from tests.parallel.parity import (
    MASKED,
    PACKS,
    Settings,
    check_exported_gradients,
    check_loss,
    check_scores,
)
from tests.parallel.steps import RankResult, train_rank
from tests.parallel.test_distillation import check_kls
from tests.parallel.tiny import scored_sequences

TENSOR, FSDP = {"tensor": 2, "sequence": True}, {"backend": "fsdp"}


# ------------------------------------------------------------------------------------------------------------ the bugs
def _replaced(patch: Patch, change: Callable[..., Tensor]) -> None:
    correct = teacher.fused_reverse_kl
    patch.setattr(teacher, "fused_reverse_kl", lambda *heads, **options: change(correct, *heads, **options))


def the_kl_is_the_forward_one(patch: Patch) -> None:
    """Its gradient is the student's, too, so that only its value and direction differ."""

    def forward(correct: Any, student: Head, other: Head, **options: Any) -> Tensor:
        u, z = ((head.hidden @ head.weight.T / head.temperatures[:, None]).float() for head in (other, student))
        u, z = (logits[:, : options["vocab_size"]].log_softmax(1) for logits in (u, z))
        return (u.exp() * (u - z)).sum(1)

    _replaced(patch, forward)


def the_teacher_is_a_token_late(patch: Patch) -> None:
    correct = packs.ResponseRows.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, pack: PackedTrajectory, shard: Any) -> Any:
        rows = correct(cls, pack, shard)
        rows.teacher = None if rows.teacher is None else rows.teacher.roll(1, 0)
        return rows

    patch.setattr(packs.ResponseRows, "of", classmethod(of))


def every_tensor_rank_sums_its_own_columns(patch: Patch) -> None:
    def alone(correct: Any, *heads: Head, **options: Any) -> Tensor:
        options |= {"vocab_start": 0, "vocab_size": len(heads[0].weight)}
        return correct(*heads, **options | {"all_reduce_max": no_reduction, "all_reduce_sum": no_reduction})

    _replaced(patch, alone)


def the_gradient_is_not_summed_over_tensor_ranks(patch: Patch) -> None:
    def alone(correct: Any, *heads: Head, all_reduce_sum: Any, **options: Any) -> Tensor:
        once = iter([all_reduce_sum])
        return correct(*heads, all_reduce_sum=lambda tensor: next(once, no_reduction)(tensor), **options)

    _replaced(patch, alone)


def every_rank_reads_the_first_columns(patch: Patch) -> None:
    correct = TeacherHead.read.__func__  # type: ignore[attr-defined]
    patch.setattr(
        TeacherHead, "read", classmethod(lambda cls, path, own, *rest: correct(cls, path, range(len(own)), *rest))
    )


def the_teacher_is_at_temperature_1(patch: Patch) -> None:
    def plain(correct: Any, student: Head, other: Head, **options: Any) -> Tensor:
        return correct(student, other._replace(temperatures=other.temperatures * 0 + 1), **options)

    _replaced(patch, plain)


def teachers_are_swapped(patch: Patch) -> None:
    correct = Teachers.get
    patch.setattr(
        Teachers,
        "get",
        lambda self, source, *rest: correct(self, {"sums": "words", "words": "sums"}.get(source), *rest),
    )


BUGS: list[tuple[Bug, Settings, str | None]] = [
    (the_kl_is_the_forward_one, {}, "kl"),
    (the_kl_is_the_forward_one, FSDP, "kl"),
    (the_teacher_is_a_token_late, {}, "kl"),
    (the_teacher_is_a_token_late, FSDP, "kl"),
    (the_teacher_is_at_temperature_1, FSDP, "kl"),
    (every_tensor_rank_sums_its_own_columns, TENSOR, "kl"),
    (every_rank_reads_the_first_columns, TENSOR, "kl"),
    (the_gradient_is_not_summed_over_tensor_ranks, TENSOR, "gradients"),
    (loss_is_scaled_by_the_context_size, {"context": 2}, "gradients"),
    (teachers_are_swapped, FSDP, "kl"),
    (no_bug, FSDP, None),
    (no_bug, TENSOR, None),
]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(second: int | None) -> Any:
        sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
        return distilled_case(sequences, tmp_path_factory.mktemp("case"), steps=0, second=second)

    cached = cache(make)
    return lambda bug: cached(48 if bug is teachers_are_swapped else None)


@pytest.fixture(scope="module")
def found(case_of: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[RankResult]]:
    directory, tasks = tmp_path_factory.mktemp("ranks"), {}
    for number, (bug, layout, _) in enumerate(BUGS):
        case, teachers, _ = case_of(bug)
        config = distilled_config(case, teachers, directory, layout)
        tasks[number] = (bug, (config, case.packs(), case.denominator, 1))
    return run_planted(train_rank, directory, tasks)


@pytest.mark.parametrize("number", range(len(BUGS)), ids=[bug.__name__ for bug, *_ in BUGS])
def test_parity_catches(number: int, case_of: Any, found: dict[int, list[RankResult]]) -> None:
    bug, _, caught_by = BUGS[number]
    case, _, kls = case_of(bug)
    comparisons: dict[str | None, Comparison] = {
        "scores": check_scores,
        "kl": lambda _, results: check_kls(kls, results),
        "loss": check_loss,
        "gradients": check_exported_gradients,
    }
    require_caught([*comparisons.values()], comparisons.get(caught_by), case, found[number])
