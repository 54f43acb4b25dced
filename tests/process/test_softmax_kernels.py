"""Triton's kernels of the head: interpreted on a CPU against whole logits in float64, and compiled for a GPU."""

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slime_like.algorithms import head
from tests.unit.algorithms.cases import dense_scores
from tests.unit.algorithms.test_head import make_case, weighted

triton = pytest.importorskip("triton")

TOKENS, BLOCK = 7, 16
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    """A process in which Triton interprets its kernels: the switch must be set before Triton is imported."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(_use_kernels).result(timeout=120)
        yield pool


def _use_kernels() -> None:
    """Let CPU tensors take the path of CUDA, in small blocks so that a row has several."""
    from slime_like.algorithms import softmax_kernels

    head.row_kernels = lambda device: "triton"
    for function in (softmax_kernels.row_sums, softmax_kernels.logit_gradient):
        function.__defaults__ = (*(function.__defaults__ or ())[:-1], BLOCK)


def _case(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    case = make_case(TOKENS, columns, columns + 3, torch.float32)
    case |= {name: case[name].to(dtype) for name in ("hidden", "weight")}
    return {**case, "targets": case["targets"].masked_fill(torch.arange(TOKENS) % 5 == 4, -100)}


def _head(case: dict[str, Tensor], with_entropy: bool, **options: Any) -> Arrays:
    """Logprobs, entropies and gradients of hidden states and weight, in chunks of 5 tokens."""
    leaves = [case[name].clone().requires_grad_() for name in ("hidden", "weight")]
    scores = head.fused_logprobs(*leaves, case["targets"], case["temperatures"], chunk_tokens=5, **options)
    weighted(case, scores if with_entropy else (scores[0], scores[1].detach())).backward()
    return _arrays(*scores, *(leaf.grad for leaf in leaves))


def _dense(case: dict[str, Tensor], columns: int, with_entropy: bool, softcap: float | None, supports: Any) -> Arrays:
    """The same of whole logits in float64."""
    leaves = [case[name].double().requires_grad_() for name in ("hidden", "weight")]
    logits = leaves[0] @ leaves[1][:columns].t()
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits / case["temperatures"].double()[:, None]
    targets, rows = case["targets"], []
    for number, row in enumerate(logits):
        ids = [] if supports is None else [token for token in supports[number].tolist() if token >= 0]
        tokens, target = ids or list(range(columns)), int(targets[number])
        rows.append(dense_scores(row[tokens], torch.tensor(tokens.index(target) if target >= 0 else 0)))
    logprobs, entropy = map(torch.stack, zip(*rows, strict=True))
    logprobs = logprobs.masked_fill(targets < 0, 0.0)
    weighted(case, (logprobs, entropy if with_entropy else entropy.detach())).backward()
    return _arrays(logprobs, entropy, *(leaf.grad for leaf in leaves))


def _arrays(*found: Any) -> Arrays:
    names = ("logprobs", "entropy", "hidden", "weight")
    return {name: value.detach().double().numpy() for name, value in zip(names, found, strict=True)}


def _gap(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize(
    ("columns", "dtype", "bound"),
    [(37, torch.float32, 2e-6), (32, torch.float64, 1e-12), (5, torch.float32, 2e-6), (37, torch.bfloat16, 2e-2)],
)
def test_interpreted_kernels_give_the_head_of_whole_logits(
    interpreter: Executor,
    columns: int,
    dtype: torch.dtype,
    bound: float,
    supported: bool,
    softcap: float | None,
    with_entropy: bool,
) -> None:
    """Rows are longer and shorter than a block; some targets are negative; temperatures differ by token."""
    case, supports = _case(columns, dtype), None
    if supported:  # every third token was drawn from the whole vocabulary
        supports = torch.stack([case["targets"].clamp_min(0), (case["targets"].clamp_min(0) + 2) % columns], 1).int()
        supports[::3] = -1
    options = {"vocab_size": columns, "softcap": softcap, "supports": supports}
    found = interpreter.submit(_head, case, with_entropy, **options).result(timeout=60)
    expected = _dense(case, columns, with_entropy, softcap, supports)
    gaps = {name: _gap(found[name], expected[name]) for name in expected}
    assert {name: gap for name, gap in gaps.items() if not gap <= bound} == {}  # nan, too, is a gap
    assert not found["weight"][columns:].any()


def _rows(x: Tensor, column: Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> Arrays:
    from slime_like.algorithms import softmax_kernels

    ones, x = torch.ones(len(x)), torch.nn.functional.pad(x, (0, 3))[:, : x.shape[1]]  # rows of a wider tensor
    maximum, (total, weighted_sum, target) = softmax_kernels.row_sums(x, ones, column)
    softmax = maximum, total.log(), total.log() - weighted_sum / total
    dx = softmax_kernels.logit_gradient(x, ones, column, softmax, grads, dtype)
    return {"scores": torch.stack([target - maximum - total.log(), softmax[2]]).numpy(), "dx": dx.float().numpy()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 150.0])
def test_rows_of_any_type_and_size_of_logits(interpreter: Executor, dtype: torch.dtype, shift: float) -> None:
    """Large logits lose no digit, forbidden tokens have no part, and the gradient is written in the type asked for."""
    g = torch.Generator().manual_seed(0)
    x = (shift + 10 * torch.rand(6, 40, generator=g)).to(dtype)
    x[2, 7] = x[3, :20] = float("-inf")
    column, grads = torch.randint(20, 40, (6,), generator=g), (torch.ones(6), torch.ones(6), torch.full((6,), 0.3))
    exact = x.double().requires_grad_()
    weights = exact.softmax(1)
    logs = exact.log_softmax(1)
    entropy = -torch.where(weights > 0, weights * logs, 0.0).sum(1)
    logprobs = logs.gather(1, column[:, None]).squeeze(1)
    finite = torch.where(weights.detach() > 0, logs.detach(), 0.0)
    p, onehot = weights.detach(), torch.nn.functional.one_hot(column, 40)
    expected = onehot - p - 0.3 * p * (finite + entropy.detach()[:, None])
    found = interpreter.submit(_rows, x.clone(), column, grads, dtype).result(timeout=60)
    assert np.abs(found["scores"] - torch.stack([logprobs, entropy]).detach().numpy()).max() < 2e-5
    assert np.abs(found["dx"] - expected.numpy()).max() < (6e-7 if dtype == torch.float32 else 4e-3)
    assert not found["dx"][2, 7] and not found["dx"][3, :20].any()


def test_shards_of_the_vocabulary_add_up(interpreter: Executor) -> None:
    """Sums of two shards, one of which holds no permitted token of a row, combined as ranks combine them."""
    x, column = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0)), torch.zeros(4, dtype=torch.int64)
    x[1, :30] = float("-inf")
    parts = [interpreter.submit(_sums, part.clone(), column).result(timeout=60) for part in x.split([30, 20], 1)]
    maximum = np.maximum(parts[0][0], parts[1][0])
    total = sum(part[1] * np.exp(part[0] - maximum) for part in parts)
    whole = interpreter.submit(_sums, x, column).result(timeout=60)
    np.testing.assert_allclose(maximum, whole[0])
    np.testing.assert_allclose(total, whole[1], rtol=1e-6)
    assert parts[0][1][1] == 0 and parts[0][2][1] == 0 and np.isfinite(parts[0][0][1])


def _sums(x: Tensor, column: Tensor) -> tuple[np.ndarray, ...]:
    from slime_like.algorithms import softmax_kernels

    maximum, sums = softmax_kernels.row_sums(x, torch.ones(len(x)), column)
    return tuple(each.numpy() for each in (maximum, *sums))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("result", ["*bf16", "*fp32"])
@pytest.mark.parametrize("capped", [True, False])
def test_kernels_compile_for_hopper(
    result: str, capped: bool, aligned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton brings its compiler along: no GPU is needed for that. No register is spilled. Logits are read 16 bytes at
    a time if 16 divides their number and the strides of rows, as in every family of Megatron's."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from slime_like.algorithms import softmax_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = ["*fp32", "*fp32", "*i64", "*fp32", "i32", "i32", "i32"]
    elements = ["*fp32", result, "*i64", "*fp32", "i32", "i32", "i32", "i32", "fp32"]
    options = {"HAS_SLOPE": capped, "HAS_CAP": capped}
    for kernel, types, constants in (
        (softmax_kernels._row_sums, rows, {}),
        (softmax_kernels._logit_gradient, elements, options),
    ):
        constants = {**constants, "BLOCK": softmax_kernels._BLOCK}
        signature = dict.fromkeys(constants, "constexpr") | dict(zip(kernel.arg_names, types, strict=False))
        known = ("x", "dx", "columns", "stride", "x_stride", "dx_stride") if aligned else ()
        hints = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in known}
        source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants, hints)
        compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": softmax_kernels._WARPS})
        assert ".local" not in compiled.asm["ptx"] and compiled.asm["cubin"]
        assert (re.search(r"ld\.global\S*\.v4", compiled.asm["ptx"]) is not None) == aligned
        assert _stack_bytes(compiled.asm["cubin"], tmp_path) == 0


def _stack_bytes(cubin: bytes, directory: Path) -> int:
    """Return a thread's bytes on its stack, where spilled registers are, as Triton's own tool counts them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (directory / "kernel.cubin").write_bytes(cubin)
    command = [tool, "-res-usage", directory / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:\d+ STACK:(\d+) ", report)[0])
