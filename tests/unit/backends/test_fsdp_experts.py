"""Outputs and all gradients of our experts implementation against transformers' loop."""

from collections.abc import Callable
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

from backends.fsdp import experts

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
