"""Experts computed together: one grouped product for all experts of a rank, where Megatron's layers loop over them.

Parameters have the names of Transformer Engine's grouped modules and, in checkpoints, the common names. Each expert's
weights remain one parameter; a product that needs a single tensor stacks them temporarily.
"""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor

from backends.common.step.grouped_product import grouped_linear
from backends.megatron.parallel import new_parameter


class GroupedLinear(torch.nn.Module):
    """The same linear layer of all experts of a rank.

    Attributes:
        axis: axis of a weight, (output size, input size), that expert-tensor-parallel ranks split.
    """

    axis: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self._groups = num_gemms, pg_collection
        shape = [output_size, input_size]
        shape[self.axis] = divide(shape[self.axis], pg_collection.expt_tp.size())
        for number in range(num_gemms):
            weight = new_parameter(config, shape, self.axis)
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, ends: Tensor) -> tuple[Tensor, None]:
        """Multiply (T, input size) rows in the order of experts, given the (E,) int32 ends of their groups; no bias."""
        return grouped_linear(x, ends, list(self.parameters(recurse=False))), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Describe every expert's weight as a part of the one tensor on disk that holds all of them."""
        groups = self._groups
        first, total = groups.ep.rank() * self.num_gemms, groups.ep.size() * self.num_gemms
        state: dict[str, Any] = {}
        for number, weight in enumerate(self.parameters(recurse=False)):
            (sharded,) = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                prefix,
                {"weight": self.axis},
                (*sharded_offsets, (len(sharded_offsets), first + number, total)),
                tp_group=groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            ).values()
            # Data-parallel ranks with the same experts hold the copies.
            sharded.replica_id = (*sharded.replica_id[:2], groups.expt_dp.rank())
            state[f"{prefix}weight{number}"] = sharded
        return state


class ColumnGroupedLinear(GroupedLinear):
    """Layer with outputs split between expert-tensor-parallel ranks."""

    axis = 0


class RowGroupedLinear(GroupedLinear):
    """Layer with inputs split between expert-tensor-parallel ranks; the dispatcher sums the results."""

    axis = 1


class GroupedExperts(TEGroupedMLP):
    """Megatron's grouped experts with torch's product, which reads the experts' token counts on the device."""

    counts_stay = True

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, **unused: Any
    ) -> None:
        parts = MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
        super().__init__(num_local_experts, config, parts, pg_collection)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Map (T, H) rows in the order of experts to (T, H), given (E,) rows per expert and (T,) probabilities."""
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        gate_up, _ = self.linear_fc1(rows, ends)
        activated = weighted_bias_swiglu_impl(gate_up, None, probs.unsqueeze(-1))
        out, _ = self.linear_fc2(activated, ends)
        return out, None
