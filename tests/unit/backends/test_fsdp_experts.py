"""Experts: outputs and gradients against transformers' loop and float64, dispatch of rows, and routes."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig, NemotronHConfig, Qwen3_5MoeTextConfig, Qwen3MoeConfig
from transformers.integrations.moe import ExpertsInterface
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from backends.common.process.rendezvous import fake_world
from backends.common.step import grouped_product
from backends.common.step.grouped_product import add_biases, grouped_linear
from backends.common.step.routes import Replay, require_routes, rows_of_tokens
from backends.common.step.trace import Trace
from backends.fsdp import experts
from backends.megatron.router import FromExperts, Routes, ToExperts
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.errors import TrainerError
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory
from tests.parallel.tiny import save_checkpoint, scored_sequences
from tests.support.prefixes import row
from tests.support.rejections import Rejects

HIDDEN, WIDTH, EXPERTS = 32, 48, 4
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS}


GPT_OSS = GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS)
NEMOTRON = NemotronHConfig(hidden_size=HIDDEN, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS)
KINDS: dict[str, Callable[[], Any]] = {
    "gated": lambda: Qwen3MoeExperts(Qwen3MoeConfig(**SIZES)),
    "transposed, with biases": lambda: GptOssExperts(GPT_OSS),
    "without gate": lambda: NemotronHExperts(NEMOTRON),
}


def _result(module: Any, name: str, *inputs: Tensor) -> list[Tensor]:
    """Return the output, and gradients of hidden states, shares and parameters."""
    hidden, chosen, shares = inputs
    module.config._experts_implementation = name
    out = module(hidden, chosen, shares)
    return [out, *torch.autograd.grad(out.square().sum(), [hidden, shares, *module.parameters()])]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("idle", [None, 0, 3])
def test_experts_compute_the_same_as_transformers_loop(make: Callable[[], Any], idle: int | None) -> None:
    ExpertsInterface.register(experts.NAME, experts.forward)
    generator = torch.Generator().manual_seed(0)
    module = make()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    busy = torch.tensor([number for number in range(EXPERTS) if number != idle])
    chosen = torch.stack([busy[torch.randperm(len(busy), generator=generator)[:2]] for _ in range(11)])
    hidden = torch.randn(11, HIDDEN, generator=generator).requires_grad_()
    shares = torch.rand(11, 2, generator=generator).requires_grad_()
    expected = _result(module, "eager", hidden, chosen, shares)
    for found, wanted in zip(_result(module, experts.NAME, hidden, chosen, shares), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


CHOICES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts": 8, "num_experts_per_tok": 3}
ROUTERS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(**CHOICES, norm_topk_prob=True)),
    "qwen3_moe, not normalized": lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(**CHOICES, norm_topk_prob=False)),
    "qwen3_5_moe": lambda: Qwen3_5MoeTopKRouter(Qwen3_5MoeTextConfig(**CHOICES)),
    "gpt_oss": lambda: GptOssTopKRouter(GptOssConfig(**CHOICES)),
    "deepseek_v3": lambda: DeepseekV3TopkRouter(DeepseekV3Config(**CHOICES, n_group=2, topk_group=1)),
}


@pytest.mark.parametrize("make", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_routes_have_the_routers_weights_to_the_bit(make: Callable[[], Any], dtype: torch.dtype) -> None:
    generator, router = torch.Generator().manual_seed(0), make()
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    logits, weights, chosen = router.to(dtype)(torch.randn(19, HIDDEN, generator=generator).to(dtype))
    assert torch.equal(experts._weights(router, logits, chosen), weights)


K, N = 16, 24
ROWS = [[3, 1, 7], [0, 4, 5], [2, 0, 6], [5, 3, 0], [0, 0, 0]]
"""Of three experts: all are busy, the first, second or last one is idle, or all are."""
BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def _inputs(rows: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(sum(rows))
    x = torch.randn(sum(rows), K, generator=generator).to(dtype).requires_grad_()
    weights = [torch.randn(N, K, generator=generator).to(dtype).requires_grad_() for _ in rows]
    return x, torch.tensor(rows).cumsum(0, dtype=torch.int32), weights, torch.randn(sum(rows), N, generator=generator)


def _dense(x: Tensor, ends: Tensor, weights: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return output, gradient of x and gradients of the weights."""
    x, weights = x.detach().double().requires_grad_(), [w.detach().double().requires_grad_() for w in weights]
    parts = [x[first:end] @ w.T for (first, end), w in zip(pairwise([0, *ends.tolist()]), weights, strict=True)]
    out = torch.cat(parts)
    return [out, *torch.autograd.grad(out, [x, *weights], grad.double())]


def _poisoned(grouped_mm: Any) -> Any:
    """Make a kernel that leaves NaN for experts without rows."""

    def call(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out: Tensor = grouped_mm(a, b, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    return call


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_every_experts_product(
    rows: list[int], dtype: torch.dtype, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_product.F, "grouped_mm", _poisoned(torch.nn.functional.grouped_mm))
    x, ends, weights, grad = _inputs(rows, dtype)
    out = grouped_linear(x, ends, torch.stack(weights) if stacked else weights)
    found = [out, *torch.autograd.grad(out, [x, *weights], grad.to(dtype))]
    for mine, exact in zip(found, _dense(x, ends, weights, grad.to(dtype)), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), exact, rtol=BOUND[dtype], atol=BOUND[dtype])


@pytest.mark.parametrize("dtype", BOUND)
def test_gradients_of_biases_round_only_their_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, 256 + 1 is 256."""
    monkeypatch.setattr(grouped_product.F, "grouped_mm", _poisoned(torch.nn.functional.grouped_mm))
    rows = [257, 0, 3, 0]
    experts = torch.arange(4).repeat_interleave(torch.tensor(rows))
    x, biases = (torch.ones(count, N, dtype=dtype).requires_grad_() for count in (sum(rows), len(rows)))
    grad = torch.ones(sum(rows), N, dtype=dtype)
    grad[0] = 256
    out = add_biases(x, torch.tensor(rows).cumsum(0, dtype=torch.int32), experts, biases)
    of_x, of_biases = torch.autograd.grad(out, [x, biases], grad)
    assert torch.equal(out, torch.full_like(out, 2)) and torch.equal(of_x, grad)
    assert torch.equal(of_biases, torch.tensor([512.0, 0, 3, 0], dtype=dtype)[:, None].expand(4, N))


def test_weights_are_kept_for_the_backward_pass_without_a_copy() -> None:
    x, ends, weights, _ = _inputs([3, 1, 7], torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_linear(x, ends, weights)
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, ends, *weights)}
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} == own


@pytest.mark.parametrize("dtype", BOUND)
def test_shapes_are_traced_with_equal_operations_in_every_type(dtype: torch.dtype) -> None:
    trace = Trace()
    with torch.device("meta"):
        x, weights = torch.empty(11, K, dtype=dtype), [torch.empty(N, K, dtype=dtype) for _ in range(3)]
        ends = torch.empty(3, dtype=torch.int32)
    with trace:
        out = grouped_linear(x.requires_grad_(), ends, [weight.requires_grad_() for weight in weights])
        grads = torch.autograd.grad(out, [x, *weights], torch.empty_like(out))
    assert [grad.shape for grad in grads] == [x.shape, *(weight.shape for weight in weights)]
    assert {out.dtype, *(grad.dtype for grad in grads)} == {dtype}
    # In bfloat16, an expert's rows fill a tile of the grouped product; in float32, each has products of its own.
    flops = (0, 3 * 2 * (3 * 128) * K * N) if dtype == torch.bfloat16 else (3 * 2 * 11 * K * N, 0)
    assert (trace.counted.matmul_flops, trace.counted.grouped_flops) == flops


ROUTES = Routes.of(torch.tensor([1, 0, 2, 2, 1, 0, 0, 1, 2]), 3)  # rows in the order of experts
PARTS = torch.tensor([256.0, 256.0, 256.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16).unsqueeze(1)
"""Each token has the parts 256, 1 and 1. In bfloat16, 256 + 1 is 256."""
SUMS = torch.full((3, 1), 258.0, dtype=torch.bfloat16)


def test_rows_and_their_gradients_are_summed_in_float32() -> None:
    rows = PARTS.clone().requires_grad_()
    combined = FromExperts.apply(rows, ROUTES)
    assert torch.equal(combined, SUMS)
    combined.backward(torch.tensor([[3.0], [5.0], [7.0]], dtype=torch.bfloat16))
    assert rows.grad is not None and rows.grad.flatten().tolist() == [5, 3, 7, 7, 5, 3, 3, 5, 7]
    tokens = torch.tensor([[10.0], [20.0], [30.0]], dtype=torch.bfloat16, requires_grad=True)
    rows = ToExperts.apply(tokens, ROUTES)
    assert rows.flatten().tolist() == [20, 10, 30, 30, 20, 10, 10, 20, 30]
    rows.backward(PARTS)
    assert tokens.grad is not None and torch.equal(tokens.grad, SUMS)


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    checkpoint: Path = save_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model"))
    return Replay("rollout", ModelDimensions.from_checkpoint(checkpoint))


def _pack(route: list[int], layers: int = 4) -> PackedTrajectory:
    """Return a pack of two sequences; the second token of the second one has ``route`` in the last layer."""
    sequences = scored_sequences([(3, 2), (2, 3)])
    for sequence in sequences:
        sequence.routes = torch.tensor([3, 0], dtype=torch.int16).repeat(4, layers, 1)
    routes = sequences[1].routes
    assert routes is not None
    routes[1, -1] = torch.tensor(route)
    return pack_sequences(sequences)


def test_a_shared_token_follows_the_first_sequence_that_reads_it() -> None:
    """The last token of the first sequence has no row, but a longer one reads it."""
    rows = [row(0, 0, [1, 2], [3]), row(1, 0, [1, 2], [3, 4]), row(2, 1, [5], [6])]
    pack = pack_sequences(rows, target_tokens_per_batch=11, sharing="tree")
    assert pack.shared_tokens == 3
    assert rows_of_tokens(pack).tolist() == [0, 1, 4, 0, 1, 4, -1, 5, -1, -1, -1, -1]


@pytest.mark.parametrize("route", [[1, 4], [2, 2], [-1, 1], [1, -1], [-2, -2]])
def test_a_route_without_different_experts_of_the_model_is_rejected(route: list[int], replay: Replay) -> None:
    for accepted in ([1, 2], [2, 0], [-1, -1]):
        require_routes(_pack(accepted), replay)
    with fake_world(0, 1, torch.distributed.destroy_process_group), pytest.raises(TrainerError) as caught:
        require_routes(_pack(route), replay)
    assert caught.value.code == "routes-of-another-model"
    assert f"sequence 's1' has the route {route}" in str(caught.value)


def test_routes_of_other_layers_and_no_routes_are_rejected(replay: Replay, rejects: Rejects) -> None:
    pack = _pack([1, 2])
    with fake_world(0, 1, torch.distributed.destroy_process_group):
        with rejects(TrainerError, "routes-of-another-model"):
            require_routes(_pack([1, 2], layers=3), replay)
        pack.routes = None
        with rejects(TrainerError, "routes-missing"):
            require_routes(pack, replay)
