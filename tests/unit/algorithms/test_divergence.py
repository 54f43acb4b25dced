"""The exact reverse KL of two heads against autograd of its formula in float64."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime_like.algorithms.divergence import Head, fused_reverse_kl
from tests.support.properties import examples
from tests.unit.algorithms.cases import close
from tests.unit.algorithms.test_head import SHARDED, ThreadGroup, capped

VOCABULARY = 11
WIDTHS = 7, 5


def make_heads(
    count: int, padded: int = VOCABULARY, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float64
) -> list[Head]:
    """Make student and teacher. Padding rows are huge, so counting them would show."""
    generator = torch.Generator().manual_seed(0)
    made = []
    temperatures = torch.rand(count, generator=generator, dtype=torch.float64) + 0.5
    for width in WIDTHS:
        weight = torch.randn(padded, width, generator=generator, dtype=dtype)
        weight[vocabulary:] = 50.0
        made.append(Head(torch.randn(count, width, generator=generator, dtype=dtype), weight, temperatures))
    return made


def logprobs(hidden: Tensor, weight: Tensor, temperatures: Tensor, softcap: float | None = None) -> Tensor:
    return (capped(hidden @ weight.T, softcap) / temperatures[:, None]).log_softmax(1)


@given(count=st.integers(0, 13), **SHARDED)
@examples(30)
def test_any_sharding_equals_autograd_of_the_whole(count, vocab_size, extra, ranks, chunk, dtype, softcap) -> None:  # type: ignore[no-untyped-def]
    """Includes cases without tokens, shards of only padding, and caps, of which the teacher has another."""
    columns = -(-(vocab_size + extra) // ranks)
    student, teacher = make_heads(count, columns * ranks, vocab_size, dtype)
    weights = torch.linspace(-1, 2, count, dtype=torch.float64)
    leaves = [each.double().clone().requires_grad_() for each in (student.hidden, student.weight[:vocab_size])]
    caps = (softcap, softcap and 1.3)
    log_p = logprobs(*leaves, student.temperatures, caps[0])
    log_q = logprobs(teacher.hidden.double(), teacher.weight[:vocab_size].double(), teacher.temperatures, caps[1])
    expected = (log_p.exp() * (log_p - log_q)).sum(1)
    (expected * weights).sum().backward()
    group = ThreadGroup(ranks)

    def body(rank: int) -> tuple[Tensor, ...]:
        held = slice(rank * columns, (rank + 1) * columns)
        own = [each.clone().requires_grad_() for each in (student.hidden, student.weight[held])]
        kl = fused_reverse_kl(
            Head(*own, student.temperatures, caps[0]),
            teacher._replace(weight=teacher.weight[held], softcap=caps[1]),
            vocab_start=rank * columns,
            vocab_size=vocab_size,
            **group.reductions(rank),
            chunk_tokens=chunk,
        )
        with torch.autograd.set_multithreading_enabled(False):
            (kl * weights).sum().backward()
        return kl.detach(), *(leaf.grad for leaf in own)

    tolerance = 5e-6 if dtype == torch.float32 else 1e-12
    by_rank = group.run(body)
    for kl, d_hidden, _ in by_rank:
        assert kl.dtype == dtype
        assert close(kl, expected.detach(), tolerance) and close(d_hidden, leaves[0].grad, tolerance)
    d_weight = torch.cat([found[2] for found in by_rank])
    assert close(d_weight[:vocab_size], leaves[1].grad, tolerance) and not d_weight[vocab_size:].any()


def test_a_student_that_is_its_teacher_has_none() -> None:
    """Neither a divergence nor a gradient, exactly, also for large logits."""
    student = make_heads(9, dtype=torch.float32)[0]
    leaf = (30 * student.hidden).requires_grad_()
    student = student._replace(hidden=leaf)
    kl = fused_reverse_kl(student, student._replace(hidden=leaf.detach()), vocab_size=VOCABULARY, chunk_tokens=4)
    kl.sum().backward()
    assert not kl.any() and leaf.grad is not None and not leaf.grad.any()


def test_bfloat16_gives_float32_and_gradients_in_its_type() -> None:
    student, teacher = (head._replace(hidden=head.hidden.bfloat16()) for head in make_heads(20))
    leaves = [each.bfloat16().requires_grad_() for each in student[:2]]
    teacher = teacher._replace(weight=teacher.weight.bfloat16())
    kl = fused_reverse_kl(Head(*leaves, student.temperatures), teacher, vocab_size=VOCABULARY)
    log_p = logprobs(*(leaf.detach().double() for leaf in leaves), student.temperatures)
    log_q = logprobs(teacher.hidden.double(), teacher.weight.double(), teacher.temperatures)
    assert kl.dtype == torch.float32 and close(kl.detach(), (log_p.exp() * (log_p - log_q)).sum(1), 5e-2)
    kl.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.bfloat16 for leaf in leaves)
