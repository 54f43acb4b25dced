"""Outputs and all gradients of our experts implementation against transformers' loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.integrations.moe import ExpertsInterface
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

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
