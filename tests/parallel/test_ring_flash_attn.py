"""The package ring-flash-attn, called through our adapter, agrees with softmax attention written out in float64.

The package is the real one. It calls flash-attn, which exists for CUDA only, so our kernel replaces that. Not covered:
flash-attn itself.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention.ring_flash_attn import Llama3Segments, RingFlashAttention, llama3_module
from slime_like.interfaces import RankPlacement
from tests.parallel.dense import assert_near, boundaries, dense_results
from tests.parallel.ranks import run_each

GROUPS, WIDTH, SCALE = 2, 16, 0.3
# One sequence over all ranks; rank borders inside and between sequences, and a rank with parts of two sequences.
PACKS = {"one": [24], "borders": [5, 9, 2, 8], "between": [12, 6, 6], "short": [1, 1, 1, 20, 1]}


def _problem(tokens: int, heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return a whole pack's queries, keys, values and gradient of the output."""
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, count, WIDTH, generator=generator).to(dtype) for count in (heads, GROUPS, GROUPS, heads)
    ]


def _attend(placement: RankPlacement, problem: list[Tensor], lengths: list[int], stride: int) -> list[Tensor]:
    """Return this rank's part of the output and all gradients; groups take every ``stride``-th rank."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{placement.master_address}:{placement.master_port}",
        rank=placement.rank,
        world_size=placement.world_size,
    )
    groups = [dist.new_group(list(range(first, placement.world_size, 2))) for first in (0, 1)]
    group = groups[placement.rank % 2]
    rank, size = group.rank(), group.size()
    *inputs, grad = (x.chunk(size)[rank].clone() for x in problem)
    leaves = [x.requires_grad_() for x in inputs]
    segments = Llama3Segments.of(boundaries(lengths), rank, size)
    out = RingFlashAttention(segments, group, stride).attend(*leaves, SCALE)
    out.backward(grad)
    dist.destroy_process_group()
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


CASES: list[tuple[str, int, int, int, torch.dtype, float]] = [
    ("one", 4, 1, 2, torch.float32, 2e-6),
    ("borders", 4, 1, 2, torch.float32, 2e-6),
    ("borders", 4, 2, 2, torch.float32, 2e-6),
    ("between", 4, 1, 2, torch.float32, 2e-6),
    ("borders", 4, 1, 2, torch.bfloat16, 3e-2),
    ("borders", 2, 1, 3, torch.float32, 2e-6),  # as many heads as groups
    ("short", 6, 1, 4, torch.float64, 1e-12),
]
"""Pack, heads, stride, ranks, type and bound."""


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_it_is_softmax_attention(ranks: int, tmp_path: Path) -> None:
    """Two groups attend at once: the package's default is the whole world."""
    cases = [case for case in CASES if case[3] == ranks]
    problems = [_problem(sum(PACKS[lengths]), heads, dtype) for lengths, heads, _, _, dtype, _ in cases]
    tasks = [(problem, PACKS[case[0]], case[2]) for problem, case in zip(problems, cases, strict=True)]
    found = run_each(_attend, 2 * ranks, tmp_path, tasks)
    for problem, (lengths, *_, bound), results in zip(problems, cases, found, strict=True):
        out, _, *grads = dense_results(*problem, PACKS[lengths], SCALE)
        for group in (results[0::2], results[1::2]):
            assert_near([torch.cat(parts) for parts in zip(*group, strict=True)], [out, *grads], bound)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_keys_start_at_the_first_sequence(rank: int) -> None:
    """Boundaries were computed by hand, for parts of 8 tokens of [0, 5), [5, 14), [14, 24) and an empty sequence."""
    segments = Llama3Segments.of(torch.tensor([0, 5, 14, 14, 24], dtype=torch.int32), rank, 3)
    expected = [
        ([0, 5, 8], [0, 5, 8], slice(0, 8), 5),
        ([0, 6, 8], [0, 9, 11], slice(5, 16), 9),
        ([0, 8], [0, 10], slice(14, 24), 10),
    ][rank]
    found = (segments.cu_seqlens_q.tolist(), segments.cu_seqlens_k.tolist(), segments.keys, segments.max_seqlen_k)
    assert found == expected
    assert segments.max_seqlen_q == int(segments.cu_seqlens_q.diff().max())


@pytest.mark.parametrize("changed", [{"window_size_left": 4}, {"causal": False}, {"dropout_p": 0.1}, {"softcap": 30.0}])
def test_other_attention_is_rejected_on_the_cpu(changed: dict[str, object]) -> None:
    q, k = torch.zeros(5, 4, WIDTH), torch.zeros(9, GROUPS, WIDTH)
    usual = {"q": q, "k": k, "v": k, "cu_seqlens_q": boundaries([3, 2]), "cu_seqlens_k": boundaries([7, 2])}
    usual |= {"max_seqlen_q": 3, "max_seqlen_k": 7, "dropout_p": 0.0, "softmax_scale": SCALE, "causal": True}
    forward = llama3_module("cpu")._flash_attn_varlen_forward
    assert forward(**usual)[0].shape == (5, 4, WIDTH)
    with pytest.raises(NotImplementedError):
        forward(**usual | changed)


def test_other_code_does_not_see_the_stand_in() -> None:
    module = llama3_module("cpu")
    assert module._flash_attn_varlen_forward.__module__ == "backends.common.attention.ring_flash_attn"
    assert not [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "ring_flash_attn")]
