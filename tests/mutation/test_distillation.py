"""Put bugs of exact distillation into the trainer, one at a time: its parity test must notice each.

As in ``test_trainer``: the comparison named for a bug must fail, and the earlier ones must not.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from backends.common.step import packs, teacher
from backends.common.step.teacher import TeacherHead, Teachers
from slime_like.algorithms.divergence import Head
from slime_like.algorithms.vocabulary_shard import no_reduction
from slime_like.trajectory import PackedTrajectory
from tests.mutation.test_trainer import loss_is_scaled_by_the_context_size, no_bug, train_with
from tests.parallel.distilled import distilled_case, distilled_config
from tests.parallel.parity import (
    MASKED,
    PACKS,
    Settings,
    check_exported_gradients,
    check_loss,
    check_scores,
)
from tests.parallel.ranks import run_ranks
from tests.parallel.test_distillation import check_kls
from tests.parallel.tiny import scored_sequences

TENSOR, FSDP = {"tensor": 2, "sequence": True}, {"backend": "fsdp"}


# ------------------------------------------------------------------------------------------------------------ the bugs
def _replaced(change: Callable[..., Tensor]) -> None:
    correct = teacher.fused_reverse_kl
    teacher.fused_reverse_kl = lambda *heads, **options: change(correct, *heads, **options)


def the_kl_is_the_forward_one() -> None:
    """Its gradient is the student's, too, so that only its value and direction differ."""

    def forward(correct: Any, student: Head, other: Head, **options: Any) -> Tensor:
        u, z = ((head.hidden @ head.weight.T / head.temperatures[:, None]).float() for head in (other, student))
        u, z = (logits[:, : options["vocab_size"]].log_softmax(1) for logits in (u, z))
        return (u.exp() * (u - z)).sum(1)

    _replaced(forward)


def the_teacher_is_a_token_late() -> None:
    correct = packs.ResponseRows.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, pack: PackedTrajectory, shard: Any) -> Any:
        rows = correct(cls, pack, shard)
        rows.teacher = None if rows.teacher is None else rows.teacher.roll(1, 0)
        return rows

    packs.ResponseRows.of = classmethod(of)  # type: ignore[assignment]


def every_tensor_rank_sums_its_own_columns() -> None:
    def alone(correct: Any, *heads: Head, **options: Any) -> Tensor:
        options |= {"vocab_start": 0, "vocab_size": len(heads[0].weight)}
        return correct(*heads, **options | {"all_reduce_max": no_reduction, "all_reduce_sum": no_reduction})

    _replaced(alone)


def the_gradient_is_not_summed_over_tensor_ranks() -> None:
    def alone(correct: Any, *heads: Head, all_reduce_sum: Any, **options: Any) -> Tensor:
        once = iter([all_reduce_sum])
        return correct(*heads, all_reduce_sum=lambda tensor: next(once, no_reduction)(tensor), **options)

    _replaced(alone)


def every_rank_reads_the_first_columns() -> None:
    correct = TeacherHead.read.__func__  # type: ignore[attr-defined]
    TeacherHead.read = classmethod(lambda cls, path, own, *rest: correct(cls, path, range(len(own)), *rest))  # type: ignore[assignment]


def the_teacher_is_at_temperature_1() -> None:
    def plain(correct: Any, student: Head, other: Head, **options: Any) -> Tensor:
        return correct(student, other._replace(temperatures=other.temperatures * 0 + 1), **options)

    _replaced(plain)


def teachers_are_swapped() -> None:
    correct = Teachers.get
    Teachers.get = lambda self, source, *rest: correct(self, {"sums": "words", "words": "sums"}.get(source), *rest)  # type: ignore[method-assign]


BUGS: list[tuple[Callable[[], None], Settings, str]] = [
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
]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(second: int | None) -> Any:
        sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
        return distilled_case(sequences, tmp_path_factory.mktemp("case"), steps=0, second=second)

    return cache(make)


@pytest.mark.parametrize(("bug", "layout", "caught_by"), [*BUGS, (no_bug, TENSOR, "nothing")])
def test_parity_catches(
    bug: Callable[[], None], layout: Settings, caught_by: str, case_of: Any, tmp_path: Path
) -> None:
    case, teachers, kls = case_of(48 if bug is teachers_are_swapped else None)
    config = distilled_config(case, teachers, tmp_path, layout)
    world = config.trainer.parallel.world_size
    arguments = config, case.packs(), case.denominator, 1
    results = run_ranks(partial(train_with, bug), world, tmp_path / "ranks", *arguments)
    check_scores(case, results)
    if caught_by == "kl":
        with pytest.raises(AssertionError):
            check_kls(kls, results)
        return
    check_kls(kls, results)
    check_loss(case, results)
    if caught_by == "nothing":
        check_exported_gradients(case, results)
        return
    with pytest.raises(AssertionError):
        check_exported_gradients(case, results)
