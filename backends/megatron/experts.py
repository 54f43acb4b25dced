"""Experts computed together: one grouped product for all of a rank's, where Megatron's own layers loop over them.

Parameters have the names of Transformer Engine's grouped modules and, in checkpoints, those of all the others. Each
expert's weights stay a parameter; what a product takes as one tensor is put together for its length.
"""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor

from backends.common.step.grouped_product import ALIGNMENT, grouped_linear
from backends.megatron.parallel import expert_tensor_size
from slime_like.config import RunConfig
from slime_like.models.dimensions import ModelDimensions


def can_be_grouped(config: RunConfig, dimensions: ModelDimensions) -> bool:
    """Return whether torch has a grouped product for experts of these sizes."""
    width = dimensions.moe_ffn_hidden_size // expert_tensor_size(config.trainer.parallel)
    nbytes = getattr(torch, config.model.dtype).itemsize
    return all(size * nbytes % ALIGNMENT == 0 for size in (dimensions.hidden_size, width))


class GroupedLinear(torch.nn.Module):
    """The same linear layer of all of a rank's experts.

    Attributes:
        axis: of a weight, (output size, input size), that expert-tensor-parallel ranks split.
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
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        for number in range(num_gemms):
            weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
            # What Megatron's optimizer and DDP ask of a parameter.
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=self.axis, stride=1)
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, ends: Tensor) -> tuple[Tensor, None]:
        """(T, input size) rows in the order of experts and the (E,) int32 ends of their groups; no bias."""
        return grouped_linear(x, ends, list(self.parameters())), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Every expert's weight as a part of the one tensor on disk that holds those of all."""
        groups = self._groups
        first, total = groups.ep.rank() * self.num_gemms, groups.ep.size() * self.num_gemms
        state: dict[str, Any] = {}
        for number, weight in enumerate(self.parameters()):
            (sharded,) = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                prefix,
                {"weight": self.axis},
                (*sharded_offsets, (len(sharded_offsets), first + number, total)),
                tp_group=groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            ).values()
            # Copies are with the data-parallel ranks that hold the same experts.
            sharded.replica_id = (*sharded.replica_id[:2], groups.expt_dp.rank())
            state[f"{prefix}weight{number}"] = sharded
        return state


class ColumnGroupedLinear(GroupedLinear):
    """Expert-tensor-parallel ranks have other outputs."""

    axis = 0


class RowGroupedLinear(GroupedLinear):
    """Expert-tensor-parallel ranks have other inputs; their sum is the dispatcher's."""

    axis = 1


class GroupedExperts(TEGroupedMLP):
    """Megatron's grouped experts with torch's product: it reads how many tokens an expert has on the device."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, **unused: Any
    ) -> None:
        parts = MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
        super().__init__(num_local_experts, config, parts, pg_collection)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """(T, H) rows in the order of experts, (E,) numbers of each one's, (T,) their probabilities; returns (T, H)."""
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        gate_up, _ = self.linear_fc1(rows, ends)
        activated = weighted_bias_swiglu_impl(gate_up, None, probs.unsqueeze(-1))
        out, _ = self.linear_fc2(activated, ends)
        return out, None
