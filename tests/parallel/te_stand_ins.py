"""Modules made of torch operations, with the parameter names and arguments of Transformer Engine's.

Transformer Engine exists for CUDA only. With these stand-ins Megatron builds its layer spec for it on a CPU, so that
our use of that spec can be tested: names, checkpoints, conversion, and the arguments of attention. Names and arguments
are those that ``megatron.core.extensions.transformer_engine`` uses. Transformer Engine itself is not tested.

Megatron takes the optimizer as soon as the package can be imported, whatever computes attention. It takes functions on
many tensors, too. On a CPU it has its own, with the same arguments, so they need no stand-ins.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.extensions import transformer_engine as extension
from megatron.core.extensions import transformer_engine_spec_provider as provider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from tests.parallel.dense import dense_attention


class _ExtraState:
    """Adds the extra state that Transformer Engine's modules have. We never write it, and so never read it."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None, "Megatron's linear layers fill in None; our checkpoints hold no extra states"


class _AddsToSums(torch.nn.Module):
    """Adds its weights' gradients to Megatron's sums if asked to, as Transformer Engine's linear layers do, and then
    gives autograd NaNs instead."""

    def __init__(self, *arguments: Any, config: Any, **options: Any) -> None:
        super().__init__(*arguments, config=config, **options)
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion
        for weight in self.parameters():
            weight.register_hook(partial(self._added, weight))

    def _added(self, weight: Any, gradient: Tensor) -> Tensor:
        if not self.fuse_wgrad_accumulation:
            return gradient
        assert weight.main_grad.dtype == torch.float32
        weight.main_grad.add_(gradient)
        weight.grad_added_to_main_grad = True
        return torch.full_like(gradient, torch.nan)


class Norm(_ExtraState, torch.nn.Module):
    """Root mean square norm. Megatron-core 0.19 passes ``has_residual``."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return _normed(x, self.weight, self.eps)


class Column(_AddsToSums, ColumnParallelLinear):
    """Has the parameter names of Megatron's layer, as Transformer Engine's has."""


class Row(_AddsToSums, RowParallelLinear):
    """Has the parameter names of Megatron's layer, as Transformer Engine's has."""


class LayerNormColumnParallelLinear(_ExtraState, Column):
    """A linear layer with a norm before it, whose weight is its own parameter."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = _norm_weight(config, input_size)
        self.eps = config.layernorm_epsilon

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(_normed(x, self.layer_norm_weight, self.eps))


class DotProductAttention(_ExtraState, torch.nn.Module):
    """Causal attention inside each sequence of the micro-batch, on one context rank."""

    def __init__(self, config: Any, *, pg_collection: Any, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        assert pg_collection.cp.size() == 1
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        packed = packed_seq_params
        assert packed.qkv_format == "thd" and attn_mask_type == AttnMaskType.causal and attention_mask is None
        for boundaries in (packed.cu_seqlens_kv, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded):
            # The same object: newer versions take only that as proof that there are no gaps.
            assert boundaries is packed.cu_seqlens_q and boundaries.dtype == torch.int32
        lengths = [end - start for start, end in pairwise(packed.cu_seqlens_q.tolist())]
        assert packed.max_seqlen_q == packed.max_seqlen_kv == max(lengths)
        out, _ = dense_attention(query, key, value, lengths, lengths, True, self.scale)
        return out.flatten(1)

    def sharded_state_dict(self, *unused: Any, **options: Any) -> dict[str, Any]:
        """Return nothing, like Megatron's wrapper: attention has no state."""
        return {}


class FusedAdam(torch.optim.Optimizer):
    """AdamW that counts updates in its groups, and only from its first update on. A parameter's state has moments."""

    def __init__(self, params: Any, *, adam_w_mode: bool, **settings: Any) -> None:
        assert adam_w_mode and settings.keys() == {"lr", "betas", "eps", "weight_decay"}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in filter(lambda group: group["params"], self.param_groups):
            group["step"] = group.get("step", 0) + 1
            first, second = (1 - beta ** group["step"] for beta in group["betas"])
            for parameter in (each for each in group["params"] if each.grad is not None):
                state, gradient = self.state[parameter], parameter.grad
                for name, beta, power in zip(("exp_avg", "exp_avg_sq"), group["betas"], (1, 2), strict=True):
                    state.setdefault(name, torch.zeros_like(parameter)).lerp_(gradient**power, 1 - beta)
                update = state["exp_avg"] / first / ((state["exp_avg_sq"] / second).sqrt() + group["eps"])
                parameter.sub_(group["lr"] * (update + group["weight_decay"] * parameter))

    def state_dict(self) -> dict[str, Any]:
        """Reject other entries of a state than the moments. Transformer Engine knows only their types."""
        for name in {name for state in self.state.values() for name in state} - {"exp_avg", "exp_avg_sq"}:
            raise KeyError(name)
        return super().state_dict()


def install() -> None:
    """Replace Transformer Engine for the rest of this process, which should be a forked rank."""
    extension.TEDotProductAttention = provider.TEDotProductAttention = DotProductAttention
    extension.TENorm = provider.TENorm = Norm
    provider.TELayerNormColumnParallelLinear = LayerNormColumnParallelLinear
    provider.TEColumnParallelLinear, provider.TERowParallelLinear = Column, Row
    provider.is_te_min_version = lambda *version: True
    gpt_layer_specs.TESpecProvider = provider.TESpecProvider
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.USING_TE_OPTIMIZER = False, True


def _norm_weight(config: Any, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
