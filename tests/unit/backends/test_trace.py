"""Counts of a trace, and of a pipeline's passes in flight, against values worked out by hand."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backends.common.process.rendezvous import fake_world
from backends.common.step.shapes import META
from backends.common.step.trace import HEAD, Trace
from backends.megatron.planning.passes import WINDOWS_OF_STAGES, PassMemory, schedule, window_peak


def test_storages_count_while_they_live_and_once() -> None:
    before = torch.empty(1000, device=META)
    with Trace() as trace:
        before.add_(1).view(10, 100)
        assert trace.peak == 0
        a = torch.empty(100, dtype=torch.float32, device=META)
        view = a.view(10, 10)[2:]
        b = a + 1
        assert trace.live == 800
        del a
        assert trace.live == 800  # the view holds it
        del view, b
        assert (trace.live, trace.peak) == (0, 800)


def test_autograd_keeps_what_backward_needs() -> None:
    x = torch.empty(8, 16, device=META, requires_grad=True)
    with Trace() as trace:
        y = x.exp()  # keeps its result
        z = y.sum()
        del y
        assert trace.live == 8 * 16 * 4 + 4
        z.backward()
        assert x.grad is not None
        x.grad = None
        del z
        assert trace.live == 0


def test_labels_apply_to_storages_created_inside() -> None:
    with Trace() as trace:
        kept = torch.empty(10, device=META)
        with trace.label("head"):
            torch.empty(1000, device=META)
        assert trace.peak_labelled == {"": 40, "head": 4000}
        assert kept.numel() == 10


def test_repeated_operations_give_what_torch_gives() -> None:
    """Results on shapes are remembered; equal numbers of another class, strides and options are other operations."""
    whole = torch.empty(4, 6, dtype=torch.int32, device=META)
    norm = torch.nn.functional.layer_norm
    operations: list[Callable[[], Any]] = [
        lambda: whole + 1,
        lambda: whole + 1.0,
        lambda: whole + True,
        lambda: whole.T + whole.T,
        lambda: whole[:, :2].clone(),
        lambda: whole.T.clone(memory_format=torch.contiguous_format),
        lambda: whole.to(torch.float64),
        lambda: whole.float().topk(2).indices,
        lambda: torch.cat([whole, whole[:1]]),
        lambda: norm(whole.float(), (6,)),
        lambda: torch.autograd.grad(norm(x := whole.float().requires_grad_(), (6,)).sum(), x)[0],
        lambda: whole.reshape(24),
    ]
    expected = [operation() for operation in operations]
    with Trace():
        for operation, wanted in zip(operations * 2, expected * 2, strict=True):
            found = operation()
            assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert whole.reshape(24).untyped_storage()._cdata == whole.untyped_storage()._cdata


def test_indices_and_matrix_products() -> None:
    x = torch.empty(10, 4, device=META, requires_grad=True)
    rows, mask = torch.tensor([3, 1, 3]), torch.tensor([True] * 4 + [False] * 6)
    with Trace() as trace:
        taken = x.index_select(0, rows)
        assert taken.shape == (3, 4) and taken.is_meta
        taken.sum().backward()
        assert x.detach()[:, 0].masked_select(mask).shape == (4,)
    assert trace.peak > 0
    a, b = torch.empty(3, 5, device=META, requires_grad=True), torch.empty(5, 7, device=META, requires_grad=True)
    with Trace() as trace:
        (a @ b).sum().backward()
        torch.bmm(torch.empty(2, 3, 5, device=META), torch.empty(2, 5, 7, device=META))
        total = torch.empty(3, 7, device=META)
        torch.addmm(total, a.detach().bfloat16(), b.detach().bfloat16(), out_dtype=torch.float32, out=total)
    assert trace.counted.matmul_flops == 2 * 3 * 5 * 7 * (3 + 2 + 1)


def test_bytes_of_other_kernels() -> None:
    """Products and views count 0; an addition reads two and writes one, a lookup reads as much as it returns."""
    x, table = torch.empty(10, 4, device=META), torch.empty(1000, 4, device=META)
    with Trace() as trace:
        (x + x.view(10, 4)) @ torch.empty(4, 4, device=META)
        torch.nn.functional.embedding(torch.empty(10, dtype=torch.int64, device=META), table)
        with trace.label(HEAD):
            x.mul_(2.0)
            x @ torch.empty(4, 4, device=META)
    assert trace.counted.kernel_bytes == (3 + 2 + 2) * 160
    assert trace.counted.head_flops == 2 * 10 * 4 * 4
    assert trace.counted.kernels == 5  # three of these, and two products


@pytest.mark.parametrize(
    ("causal", "window", "pairs"),
    [(False, None, 6 * 6 + 4 * 4), (True, None, (6 * 6 + 4 * 4) / 2), (True, 2, 3 * (6 - 1.5) + 3 * (4 - 1.5))],
)
def test_attention_of_segments(causal: bool, window: int | None, pairs: float) -> None:
    """Forward has two products; a causal mask halves them, and a window of three keys leaves a band."""
    q = torch.empty(10, 4, 16, device=META, dtype=torch.bfloat16)
    boundaries = torch.tensor([0, 6, 10], dtype=torch.int32)
    with Trace() as trace:
        torch.ops.aten._flash_attention_forward(
            q, q, q, boundaries, boundaries, 6, 6, 0.0, causal, False, window_size_left=window
        )
    assert trace.counted.attention_flops == 2 * 2 * pairs * 4 * 16


def test_messages_by_group() -> None:
    """In ring algorithms, all-reducing n bytes over k ranks sends 2 n (k - 1) / k, and gathering sends k - 1 parts."""
    with fake_world(1, 8, dist.destroy_process_group):
        group = dist.new_group([0, 1, 2, 3])
        x, whole = torch.empty(32, device=META), torch.empty(128, device=META)
        with Trace() as trace:
            dist.all_reduce(x, group=group)
            dist.all_gather_into_tensor(whole, x, group=group)
            dist.reduce_scatter_tensor(x, whole, group=group)
            parts = list(whole.chunk(4))  # used for experts that tensor-parallel ranks share
            dist.all_gather(parts, x, group=group)
            dist.reduce_scatter(x, parts, group=group)
            dist.all_gather_into_tensor(whole, x, group=group, async_op=True).wait()
            dist.reduce_scatter_tensor(x, whole, group=group, async_op=True).wait()
            operations = [dist.P2POp(dist.isend, x, 2, group), dist.P2POp(dist.irecv, x, 0, group)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            dist.all_to_all_single(whole, torch.empty(128, device=META), group=group)
    ranks, hidden = (0, 1, 2, 3), 2 * 3 * 128
    assert trace.counted.sent == {
        (ranks, "all_reduce"): (128 * 2 * 3 // 4, 1, 0),
        (ranks, "gather"): (4 * 3 * 128 + hidden, 6, hidden),
        (ranks, "message"): (128, 1, 0),
        (ranks, "all_to_all"): (512 * 3 // 4, 1, 0),
    }


def test_resized_and_relabeled_storages_count_with_their_current_size() -> None:
    with Trace() as trace, trace.follow_resizes():
        kept = torch.empty(100, dtype=torch.uint8, device=META)
        storage = kept.untyped_storage()
        storage.resize_(0)
        assert trace.live == 0 and trace.peak == 100
        storage.resize_(300)
        trace.relabel(kept, "kept")
        assert trace.peak == 300 and trace.labelled == {"": 0, "kept": 300}
        del storage, kept
    assert trace.live == 0 and trace.labelled["kept"] == 0


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_1f1b_keeps_one_micro_batch_per_stage_that_follows(stages: int) -> None:
    """The first stage keeps as many as there are stages (Narayanan et al., arXiv:2104.04473, section 2.2.1)."""
    for stage in range(stages):
        peak = window_peak(stage, stages, [PassMemory(saved=10, forward=12, backward=15, head_backward=3)])
        assert peak.in_flight == stages - stage
        assert (peak.nbytes, peak.head) == (10 * (stages - stage - 1) + 15, 3)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 4)])
def test_every_chunk_runs_every_micro_batch_once_forward_then_once_backward(stages: int, chunks: int) -> None:
    for stage in range(stages):
        passes = list(schedule(stage, stages, chunks))
        runs = Counter(passes)
        assert len(runs) == 2 * chunks and set(runs.values()) == {WINDOWS_OF_STAGES * stages}
        live = Counter()
        for direction, chunk in passes:
            live[chunk] += 1 if direction == "forward" else -1
            assert live[chunk] >= 0


def test_interleaving_keeps_more_on_the_first_stage() -> None:
    """Warm-up is (p - 1) * 2 + (v - 1) * p chunk passes, then one more before the first backward."""
    chunk = PassMemory(saved=1, forward=1, backward=1)
    assert window_peak(0, 4, [chunk, chunk]).in_flight == (4 - 1) * 2 + 4 + 1
    assert window_peak(3, 4, [chunk, chunk]).in_flight == 4 + 1
