"""The fused, vocabulary-parallel head and the exact KL of two heads, against whole logits in float64."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime_like.algorithms import fused_logprobs, logprobs_and_entropy
from slime_like.algorithms.head import Head, fused_reverse_kl
from tests.support.properties import examples
from tests.unit.algorithms.cases import close, dense_scores

HIDDEN = 7
# A vocabulary spread over ranks, with padding at its end. Some shards may have only padding.
SHARDED = {
    "vocab_size": st.integers(1, 40),
    "extra": st.integers(0, 12),
    "ranks": st.sampled_from([1, 2, 4]),
    "chunk": st.integers(1, 9),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "softcap": st.sampled_from([None, 0.8]),  # some logits are several times larger
}


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class ThreadGroup:
    """All-reduce between threads."""

    def __init__(self, size: int) -> None:
        self.size, self.parts = size, [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def reduction(self, rank: int, operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
        def reduce(tensor: Tensor) -> None:
            self.parts[rank] = tensor.clone()
            self.barrier.wait()
            tensor.copy_(operation(torch.stack(self.parts)))
            self.barrier.wait()

        return reduce

    def reductions(self, rank: int) -> dict[str, Callable[[Tensor], None]]:
        """Return the arguments of a head that reduce over the vocabulary's shards."""
        return {
            "all_reduce_max": self.reduction(rank, lambda parts: parts.amax(0)),
            "all_reduce_sum": self.reduction(rank, lambda parts: parts.sum(0)),
        }

    def run(self, body: Callable[[int], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        def guarded(rank: int) -> tuple[Tensor, ...]:
            try:
                return body(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(guarded, range(self.size)))


Scores = Callable[..., tuple[Tensor, Tensor]]


def weighted(case: dict[str, Tensor], scores: tuple[Tensor, Tensor]) -> Tensor:
    return (case["w"] * scores[0]).sum() + (case["h"] * scores[1]).sum()


def run_sharded(case: dict[str, Tensor], ranks: int, **options: Any) -> list[tuple[Tensor, ...]]:
    """Return logprobs, entropies and gradients of hidden states and of the rank's weight, by rank."""
    group, columns = ThreadGroup(ranks), len(case["weight"]) // ranks

    def body(rank: int) -> tuple[Tensor, ...]:
        part = case["weight"][rank * columns : (rank + 1) * columns]
        leaves = [each.clone().requires_grad_() for each in (case["hidden"], part)]
        scores = fused_logprobs(
            *leaves,
            case["targets"],
            case["temperatures"],
            vocab_start=rank * columns,
            **group.reductions(rank),
            **options,
        )
        with torch.autograd.set_multithreading_enabled(False):  # ranks of one device would share a thread, and hang
            weighted(case, scores).backward()
        return (*(x.detach() for x in scores), *(leaf.grad for leaf in leaves))

    return group.run(body)


def check_sharded(
    case: dict[str, Tensor], leaves: list[Tensor], expected: tuple[Tensor, ...], ranks: int, **options: Any
) -> None:
    """Compare every rank's results and gradients with ``expected``, which was computed from float64 ``leaves``."""
    vocab_size, tolerance = options["vocab_size"], 3e-6 if case["weight"].dtype == torch.float32 else 1e-12
    weighted(case, expected).backward()
    by_rank = run_sharded(case, ranks, **options)
    for *found, _ in by_rank:
        for ours, theirs in zip(found, (*expected, leaves[0].grad), strict=True):
            assert close(ours, theirs.detach(), tolerance)
    gradient = torch.cat([found[3] for found in by_rank])
    assert close(gradient[:vocab_size], leaves[1].grad, tolerance) and not gradient[vocab_size:].any()


def make_case(count: int, vocab_size: int, padded: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make inputs. Padding rows of the weight are huge, so counting them would show."""
    g = torch.Generator().manual_seed(0)
    weight = 1.5 * torch.randn(padded, HIDDEN, generator=g, dtype=dtype)
    weight[vocab_size:] = 50.0
    return {
        "hidden": torch.randn(count, HIDDEN, generator=g, dtype=dtype),
        "weight": weight,
        "targets": torch.randint(0, vocab_size, (count,), generator=g),
        "temperatures": torch.rand(count, generator=g) + 0.5,
        "w": torch.randn(count, generator=g, dtype=dtype),
        "h": torch.randn(count, generator=g, dtype=dtype),
    }


@pytest.mark.parametrize("truncated", [False, True])
@given(count=st.integers(0, 30), **SHARDED)
@examples(20)
def test_any_sharding_equals_the_whole(truncated, count, vocab_size, extra, ranks, chunk, dtype, softcap) -> None:  # type: ignore[no-untyped-def]
    """Includes cases without tokens, and shards of only padding, which has no gradient.

    If truncated, every third token was sampled from the whole vocabulary, the others from a few tokens with the target.
    """
    case = make_case(count, vocab_size, -(-(vocab_size + extra) // ranks) * ranks, dtype)
    g = torch.Generator().manual_seed(1)
    lists: list[list[int]] = []
    for number, target in enumerate(case["targets"].tolist()):
        others = torch.randint(0, vocab_size, (int(torch.randint(0, 4, (), generator=g)),), generator=g).tolist()
        lists.append(sorted({target, *others}) if truncated and number % 3 else [])
    hidden, weight, temperatures = (case[name].double() for name in ("hidden", "weight", "temperatures"))
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[:vocab_size])]
    logits = capped(leaves[0] @ leaves[1].T, softcap) / temperatures[:, None]
    rows = []  # each over the tokens of its support
    for row, ids, target in zip(logits, lists, case["targets"].tolist(), strict=True):
        tokens = ids or list(range(vocab_size))
        rows.append(dense_scores(row[tokens], torch.tensor(tokens.index(target))))
    expected = tuple(map(torch.stack, zip(*rows, strict=True))) if rows else (logits.sum(1), logits.sum(1))
    padded = torch.tensor([ids + [-1] * (5 - len(ids)) for ids in lists], dtype=torch.int32).reshape(-1, 5)
    options = {"vocab_size": vocab_size, "chunk_tokens": chunk, "softcap": softcap}
    options["supports"] = padded if truncated else None
    check_sharded(case, leaves, expected, ranks, **options)


def test_ignored_targets_and_one_temperature() -> None:
    """A target of -100, as in packs, has logprob 0 and no gradient, but an entropy."""
    case = make_case(6, 9, 9, torch.float64)
    ignored = torch.tensor([False, True, False, False, True, False])
    targets, results = case["targets"].masked_fill(ignored, -100), []
    hidden, weight = (case[name].clone().requires_grad_() for name in ("hidden", "weight"))
    logprobs, entropy = fused_logprobs(hidden, weight, targets, 0.7, vocab_size=9, chunk_tokens=4)
    dense_logprobs, dense_entropy = dense_scores(hidden @ weight.T / 0.7, case["targets"])
    expected = dense_logprobs.masked_fill(ignored, 0.0)
    assert close(logprobs, expected.detach(), 1e-12) and close(entropy, dense_entropy.detach(), 1e-12)
    assert (logprobs[ignored] == 0).all()
    factors = torch.arange(1.0, 7.0, dtype=torch.float64)
    for values, also in ((logprobs, 0.3 * entropy.sum()), (expected, 0.3 * dense_entropy.sum())):
        results.append(torch.autograd.grad((factors * values).sum() + also, [hidden, weight], retain_graph=True))
    for ours, theirs in zip(*results, strict=True):
        assert close(ours, theirs, 1e-12)


# -------------------------------------------------------------------------------------------------------- large logits
def by_head(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Score logits as hidden states, with the identity as head."""
    weight = torch.eye(logits.shape[1])
    return fused_logprobs(logits, weight, targets, torch.ones(len(targets)), vocab_size=logits.shape[1])


@pytest.mark.parametrize("form", [logprobs_and_entropy, by_head])
@pytest.mark.parametrize("use", [(1.0, 0.0), (1.0, 0.3), (0.0, 1.0)], ids=["logprobs", "both", "entropy"])
def test_large_logits_keep_their_gradient(form: Scores, use: tuple[float, float]) -> None:
    """A float32 log-sum-exp of 150 to 160 nats is rounded by up to 8e-6, which would change the gradient by 1e-6.

    A constant added to all logits doesn't change a softmax, so it may not change its gradient's precision either.
    """
    g = torch.Generator().manual_seed(0)
    logits = 150 + 10 * torch.rand(64, 40, generator=g)  # exact in float32: the reference sees the same numbers
    targets = torch.randint(0, 40, (64,), generator=g)
    exact = logits.double().requires_grad_()
    logprobs, entropy = dense_scores(exact, targets)
    (expected,) = torch.autograd.grad(use[0] * logprobs.sum() + use[1] * entropy.sum(), exact)
    leaf = logits.clone().requires_grad_()
    found = form(leaf, targets)
    (gradient,) = torch.autograd.grad(
        sum(factor * x.sum() for factor, x in zip(use, found, strict=True) if factor), leaf
    )
    assert (gradient - expected).abs().max() < 6e-7


def test_a_forbidden_token_has_no_gradient_despite_a_large_one_of_the_entropy() -> None:
    """The lowest float32 times a factor above 1 is -inf, and times 0 it would be nan."""
    logits = torch.tensor([[float("-inf"), 1.0, 2.0]])
    allowed = logits[:, 1:].double().requires_grad_()
    logprobs, entropy = dense_scores(allowed, torch.tensor([0]))
    (expected,) = torch.autograd.grad((logprobs + 100 * entropy).sum(), allowed)
    leaf = logits.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(leaf, torch.tensor([1]))
    (gradient,) = torch.autograd.grad((logprobs + 100 * entropy).sum(), leaf)
    assert gradient[0, 0] == 0 and close(gradient[:, 1:], expected, 1e-6)


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_the_weight_gradient_of_many_tokens_keeps_its_digits_after_a_heavy_one(seed: int) -> None:
    """A response of one token weighs as much as one of hundreds. Float32 sums that begin with it would lose a digit."""
    generator = torch.Generator().manual_seed(seed)
    count, width, vocabulary = 1500, 6, 29
    hidden = torch.randn(count, width, generator=generator, dtype=torch.float64).tanh().float()
    head = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).mul(0.5).float()
    targets = torch.randint(vocabulary, (count,), generator=generator)
    weights = torch.full((count,), 5e-3).index_fill(0, torch.tensor([0]), 1.0)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaf = head.to(dtype).clone().requires_grad_()
        sizes = {"vocab_size": vocabulary, "chunk_tokens": 256}
        logprobs, _ = fused_logprobs(hidden.to(dtype), leaf, targets, torch.ones(count), **sizes)
        (logprobs * weights).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad.double())
    assert (gradients[0] - gradients[1]).norm() < 6e-7 * gradients[1].norm()


class _Traffic(TorchDispatchMode):
    """Result types of all matrix products, in order, and bytes that operators (except views) read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.types.append(result.dtype)
        if not func.is_view:
            read = tree_leaves((args, {name: each for name, each in (kwargs or {}).items() if name != "out"}))
            self.nbytes += sum(each.nbytes for each in [*read, *tree_leaves(result)] if isinstance(each, Tensor))
        return result


def _traffic(tokens: int, vocabulary: int, width: int, entropy: bool) -> _Traffic:
    """Trace forward and backward of the head in bfloat16. Meta tensors represent a device."""
    with torch.device("meta"):
        hidden, weight = (torch.ones(n, width, dtype=torch.bfloat16, requires_grad=True) for n in (tokens, vocabulary))
        targets, temperatures = torch.ones(tokens, dtype=torch.int64), torch.ones(tokens)
    with _Traffic() as traffic:
        scores = fused_logprobs(hidden, weight, targets, temperatures, vocab_size=vocabulary, check_values=False)
        (scores[0].sum() + (scores[1].sum() if entropy else 0)).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    return traffic


def test_products_on_a_device_are_never_rounded_to_bfloat16() -> None:
    """The products are forward, its recomputation, and both gradients."""
    assert _traffic(4, 32, 8, entropy=False).types == [torch.float32] * 4


@pytest.mark.parametrize(("entropy", "per_logit"), [(False, 110), (True, 130)])
def test_bytes_that_the_head_moves_on_a_device(entropy: bool, per_logit: int) -> None:
    """Besides products, there are passes over logits, and a read and a write of the float32 weight gradient."""
    tokens, vocabulary, width = 8192, 2**17, 1024
    chunks = tokens // 2048
    found = _traffic(tokens, vocabulary, width, entropy)
    assert len(found.types) == 4 * chunks
    # Three products of a chunk read the weight (2 bytes), one reads and writes its gradient (4 bytes each). Clearing
    # and rounding the gradient and hidden states take 16 bytes more.
    per_weight = chunks * (3 * 2 + 2 * 4) + 16
    assert found.nbytes < per_logit * tokens * vocabulary + per_weight * vocabulary * width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_of_a_large_vocabulary_equals_the_whole(dtype: torch.dtype) -> None:
    """Sums are computed in blocks, the last one incomplete. Padding rows get no gradient. Scores are float32."""
    case = make_case(90, 9000, 9100, dtype)
    hidden, weight = (case[name].clone().requires_grad_() for name in ("hidden", "weight"))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    given = case["targets"], case["temperatures"]
    logprobs, entropy = fused_logprobs(hidden, weight, *given, vocab_size=9000)
    assert logprobs.dtype == entropy.dtype == torch.float32
    logits = wide[0] @ wide[1][:9000].t() / case["temperatures"].double()[:, None]
    expected = dense_scores(logits, case["targets"])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert close(logprobs, expected[0].detach(), tolerance) and close(entropy, expected[1].detach(), tolerance)
    expected[0].sum().backward()
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None and wide[1].grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == dtype and not weight.grad[9000:].any()
    assert (weight.grad - wide[1].grad).norm() < tolerance * wide[1].grad.norm()


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
