"""gpt-oss: experts with biases and a clamped activation. Parameters are stacks in the order of the published models."""

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from backends.common.step.grouped_product import add_biases, grouped_linear
from backends.megatron.families import MegatronFamily
from backends.megatron.parallel import new_parameter
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.families.gpt_oss import ALPHA, LIMIT


class StackedLinear(torch.nn.Module):
    """One linear layer of all experts of a rank: (E, input size, output size) weights, (E, output size) biases."""

    weight: Tensor
    bias: Tensor

    def __init__(
        self, experts: int, input_size: int, output_size: int, config: TransformerConfig, pg_collection: Any
    ) -> None:
        super().__init__()
        self._groups = pg_collection
        for name, shape in {"weight": (experts, input_size, output_size), "bias": (experts, output_size)}.items():
            parameter = new_parameter(config, shape)
            parameter.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """Map (T, input size) rows in the order of experts, given the ends of their groups and each row's expert."""
        return add_biases(grouped_linear(x, ends, self.weight.mT), ends, experts, self.bias)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Describe the rank's experts as a part of the tensor on disk that holds all of them."""
        own, groups = dict(self.named_parameters()), self._groups
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets,
            tp_group=groups.ep, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
        for sharded in state.values():  # data-parallel ranks with the same experts hold the copies
            sharded.replica_id = (*sharded.replica_id[:2], groups.expt_dp.rank())
        return state


class StackedExperts(MegatronModule):
    """All experts of a rank. They are not split by tensor parallelism."""

    counts_stay = True

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, **unused: Any
    ) -> None:
        super().__init__(config)
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        assert width is not None
        self.linear_fc1 = StackedLinear(num_local_experts, hidden, 2 * width, config, pg_collection)
        self.linear_fc2 = StackedLinear(num_local_experts, width, hidden, config, pg_collection)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Map (T, H) rows in the order of experts to (T, H), given (E,) rows per expert and (T,) probabilities."""
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        experts = torch.searchsorted(ends, torch.arange(len(rows), dtype=torch.int32, device=rows.device), right=True)
        gate, up = self.linear_fc1(rows, ends, experts).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        out = self.linear_fc2((up + 1) * gate * torch.sigmoid(ALPHA * gate), ends, experts)
        return (out * probs.unsqueeze(-1)).to(rows.dtype), None


class GptOssFamily(MegatronFamily):
    """Layers with biases everywhere, and stacks of experts."""

    experts = StackedExperts

    def settings(self, dimensions: ModelDimensions) -> dict[str, Any]:
        return super().settings(dimensions) | {"add_bias_linear": True}
