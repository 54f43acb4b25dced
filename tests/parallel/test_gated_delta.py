"""Megatron's gated delta net computes transformers' layer, on a pack as on every sequence alone.

``test_parity`` compares whole models in every layout; here sequences also end around the ends of chunks. fla exists for
GPUs only: stand-ins with its arguments compute the recurrence token by token.
"""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from backends.common import linear_attention
from backends.common.linear_attention import Boundaries, Recurrence, causal_conv
from backends.megatron.attention import PackedLayout
from backends.megatron.families.gated_delta import GatedDeltaNet
from backends.megatron.parallel import alone_as
from slime_like.config import TrainerConfig

LENGTHS = (3, 64, 1, 130, 65, 2, 63)
SIZES: dict[str, int] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}


def _ours(hidden: int) -> GatedDeltaNet:
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=2, layernorm_epsilon=1e-6, use_cpu_initialization=True,
        perform_initialization=False, layernorm_zero_centered_gamma=True, **SIZES,
    )  # fmt: skip
    return GatedDeltaNet(config, layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups())


def _weights(theirs: Any) -> dict[str, Tensor]:
    """Return the layer's tensors with the rows of each of the two key heads together."""
    given = {name: value.float() for name, value in theirs.state_dict().items()}
    q, k, v = (x.chunk(2) for x in given["conv1d.weight"].split([16, 16, 24]))
    fused = {"conv_weight": torch.cat([q[0], k[0], v[0], q[1], k[1], v[1]]), "norm_weight": given.pop("norm.weight")}
    if "in_proj_qkvz.weight" in given:
        both = [given.pop(f"in_proj_{name}.weight").chunk(2) for name in ("qkvz", "ba")]
    else:
        q, k, v = (x.chunk(2) for x in given.pop("in_proj_qkv.weight").split([16, 16, 24]))
        both = [q, k, v, *(given.pop(f"in_proj_{name}.weight").chunk(2) for name in "zba")]
    fused["in_proj.weight"] = torch.cat([part[head] for head in (0, 1) for part in both])
    return {name: value for name, value in given.items() if name != "conv1d.weight"} | fused


def _sequences(cu_seqlens: Tensor, chunk_indices: Tensor) -> list[range]:
    """Check fla's description of sequences, in the type that it needs no copy of."""
    assert cu_seqlens.dtype == chunk_indices.dtype == torch.int64
    found = [range(*ends) for ends in pairwise(cu_seqlens.tolist())]
    expected = [[number, chunk] for number, tokens in enumerate(found) for chunk in range(-(-len(tokens) // 64))]
    assert chunk_indices.tolist() == expected
    return found


def _rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, use_qk_l2norm_in_kernel: bool, **places: Tensor
) -> tuple[Tensor, None]:
    """Have the arguments of fla's ``chunk_gated_delta_rule``, in which value heads may share a key head."""
    assert use_qk_l2norm_in_kernel and q.shape[2] == k.shape[2] == 2 and v.shape[2] == 4
    q, k = (F.normalize(x[0], dim=-1).repeat_interleave(2, dim=1) for x in (q, k))
    out = []
    for sequence in _sequences(**places):
        state = v.new_zeros(4, q.shape[2], v.shape[3])
        for token in sequence:
            state = g[0, token, :, None, None].exp() * state
            change = beta[0, token, :, None] * (v[0, token] - torch.einsum("hkv,hk->hv", state, k[token]))
            state = state + k[token, :, :, None] * change[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, q[token] * q.shape[2] ** -0.5))
    return torch.stack(out)[None], None


def _conv(x: Tensor, weight: Tensor, *, activation: str, **places: Tensor) -> tuple[Tensor, None]:
    """Have the arguments of fla's ``causal_conv1d``."""
    assert activation == "silu" and len(x) == 1
    return _convolved(x[0], weight, [len(tokens) for tokens in _sequences(**places)])[None], None


def _convolved(x: Tensor, weight: Tensor, lengths: Any) -> Tensor:
    padded = (F.pad(part.t(), (weight.shape[1] - 1, 0)) for part in x.split(lengths))
    return torch.cat([F.silu(F.conv1d(part[None], weight[:, None], groups=len(weight)))[0].t() for part in padded])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_the_convolution_rounds_only_its_result(dtype: torch.dtype, bound: float) -> None:
    """Bounds are relative by norm. Sums rounded to bfloat16 would be further away."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(size, generator=generator).to(dtype) for size in ((sum(LENGTHS), 48), (48, 4), (sum(LENGTHS), 48))
    )
    results = []
    for kind, convolve in ((dtype, _packed_conv), (torch.float64, _convolved)):
        leaves = [each.to(kind).detach().requires_grad_() for each in (x, weight)]
        out = convolve(*leaves, LENGTHS)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(kind))])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == dtype and float((ours.double() - exact).norm() / exact.norm()) < bound


def _packed_conv(x: Tensor, weight: Tensor, lengths: Any) -> Tensor:
    return causal_conv(x, weight, Boundaries.of(torch.tensor([0, *accumulate(lengths)])))


@pytest.mark.parametrize("with_fla", [False, True])
@pytest.mark.parametrize("kind", [Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet])
def test_the_layer_is_transformers(kind: Any, with_fla: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_fla:
        monkeypatch.setattr(linear_attention, "_fla_for", lambda x: linear_attention._Fla(_rule, _conv))
    settings = Qwen3NextConfig if kind is Qwen3NextGatedDeltaNet else Qwen3_5TextConfig
    torch.manual_seed(0)
    theirs = kind(settings(hidden_size=16, num_hidden_layers=2, **SIZES), 0).double()
    torch.nn.init.normal_(theirs.norm.weight, 1.0, 0.2)
    hidden = torch.randn(sum(LENGTHS), 1, 16, dtype=torch.float64)
    expected = torch.cat([theirs(part.transpose(0, 1)) for part in hidden.split(LENGTHS)], dim=1).transpose(0, 1)
    same = torch.arange(sum(LENGTHS))
    bounds = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
    layout = PackedLayout(recurrence=Recurrence(Boundaries.of(bounds), same, same, None))
    with alone_as(TrainerConfig(), 0):
        assert parallel_state.get_tensor_model_parallel_world_size() == 1
        ours = _ours(16)
        ours.load_state_dict(_weights(theirs))
        found, _ = ours(hidden.float(), packed_seq_params=layout)
        grad = torch.randn(found.shape, dtype=torch.float64)
        found.backward(grad.float())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    expected.backward(grad)
    gradients = {name: value.grad for name, value in theirs.named_parameters()}
    theirs.load_state_dict(gradients)
    wanted = _weights(theirs)
    for name, value in ours.named_parameters():
        assert value.grad is not None
        error = float((value.grad - wanted[name]).norm() / wanted[name].norm())
        assert error < 5e-5, f"{name}: {error:.2e}"
