"""Qwen3-Next, Qwen3.5 and their mixtures of experts: gated delta nets between layers of gated attention.

Both projections of a gated delta net (https://arxiv.org/abs/2412.06464) are Megatron's. Its heads are divided among
tensor-parallel ranks. The fused projection has the rows of each key head together, so that a checkpoint fits any
number of ranks.
"""

from typing import Any, ClassVar

import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from backends.megatron.attention import PackedLayout
from backends.megatron.families import MegatronFamily
from backends.megatron.families.rules import (
    NORMS,
    OUTER,
    PROJECTION,
    QK_NORM,
    HfTensor,
    Rule,
    feed_forward,
    in_layers,
    layer_rule,
    qkv,
)
from backends.megatron.families.transforms import ByHead, Replicated, Split, Transform
from backends.megatron.norm import rms_norm
from backends.megatron.parallel import new_parameter
from slime_like.models.dimensions import ModelDimensions


class GatedDeltaNet(MegatronModule):
    """A gated delta net on packed sequences."""

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: Any, **unused: Any) -> None:
        super().__init__(config)
        heads, per_head = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
        key, value = config.linear_key_head_dim, per_head * config.linear_value_head_dim
        self.tp_group = pg_collection.tp
        self._heads = heads // self.tp_group.size()
        self._parts = [2 * key + value, value, per_head, per_head]  # convolved, gate, steps, decays
        options = {"config": config, "bias": False, "tp_group": self.tp_group}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, heads * sum(self._parts), init_method=config.init_method, **options
        )
        self.out_proj = RowParallelLinear(
            heads * value, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True,
            skip_bias_add=True, **options,
        )  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {
            "conv_weight": (self._heads * self._parts[0], 1, config.linear_conv_kernel_dim),
            "A_log": (self._heads * per_head,),
            "dt_bias": (self._heads * per_head,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, new_parameter(config, shape))
        self.norm_weight = new_parameter(config, (config.linear_value_head_dim,), axis=None)

    def forward(
        self, hidden_states: Tensor, *unused: Any, packed_seq_params: PackedLayout | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Map (T, 1, hidden) to the same shape, or this rank's tokens under sequence parallelism."""
        layout = PackedLayout.require(packed_seq_params)
        assert layout.recurrence is not None
        projected, _ = self.in_proj(hidden_states)
        mixed, gate, steps, decays = projected.view(len(projected), self._heads, -1).split(self._parts, dim=2)
        weights = (self.conv_weight.squeeze(1), self.A_log, self.dt_bias)
        conv, a_log, dt_bias = (each.unflatten(0, (self._heads, -1)) for each in weights)
        key_size = self.config.linear_key_head_dim
        out = layout.recurrence.mix_by_head(mixed, decays, steps, conv, a_log, dt_bias, key_size)
        # Ranks share the norm's weight, but not the heads.
        norm_weight = copy_to_tensor_model_parallel_region(self.norm_weight)
        normed = rms_norm(out, norm_weight, self.config.layernorm_epsilon)
        gated = (normed * F.silu(gate.reshape(out.shape).float())).to(out.dtype)
        result, _ = self.out_proj(gated.flatten(1).unsqueeze(1))
        return result, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the parameters, all split by heads except the norm's weight, as parts of the tensors on disk."""
        assert metadata is not None
        own = dict(self.named_parameters(recurse=False))
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        axes = {name: 0 for name in own if name != "norm_weight"}
        state = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state


class GatedAttention(SelfAttention):
    """Megatron's attention with a gate for every output. Its projection keeps the published models' order: query and
    gate of one head after the other. Ranks may share a query group, which Megatron doesn't support for gates."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *unused: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (T, 1, heads, head_dim) queries, keys, values and gates of this rank's heads."""
        group, groups = self.pg_collection.tp, self.config.num_query_groups
        sharing = max(1, group.size() // groups)
        projected, _ = self.linear_qkv(hidden_states)
        if sharing > 1:
            whole = all_gather_last_dim_from_tensor_parallel_region(projected)
            projected = whole.chunk(groups, dim=-1)[group.rank() // sharing]
        heads = projected.unflatten(-1, (max(1, groups // group.size()), -1, self.hidden_size_per_attention_head))
        queries, key, value = heads.split([heads.shape[3] - 2, 1, 1], dim=3)
        pairs = queries.unflatten(3, (-1, 2)).flatten(2, 3).chunk(sharing, dim=2)[group.rank() % sharing]
        query, gate = pairs.unbind(3)
        key, value = key.flatten(2, 3), value.flatten(2, 3)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply by the gate. Megatron compiles its version, even on a CPU."""
        return x * gate.reshape(x.shape).sigmoid()


def _linear(megatron: str, transform: Transform, *hugging_face: tuple[str, *tuple[str | int, ...]]) -> Rule:
    sources = (HfTensor(f"linear_attn.{name}", tuple(sizes)) for name, *sizes in hugging_face)
    return layer_rule(f"self_attention.{megatron}", transform, *sources)


_MIXED = ((0, "linear_key"), (0, "linear_key"), (0, "linear_value"))
_LINEAR = (
    _linear("conv_weight", ByHead(*_MIXED), ("conv1d.weight", "linear_mixed", 1, "linear_width")),
    _linear("A_log", Split(axis=0), ("A_log", "linear_heads")),
    _linear("dt_bias", Split(axis=0), ("dt_bias", "linear_heads")),
    _linear("norm_weight", Replicated(), ("norm.weight", "linear_head")),
    _linear("out_proj.weight", Split(axis=1), ("out_proj.weight", "hidden", "linear_value")),
)
_IN_PROJ = _linear(
    "in_proj.weight",
    ByHead(*_MIXED, (1, "linear_value"), (2, "linear_heads"), (3, "linear_heads")),
    ("in_proj_qkv.weight", "linear_mixed", "hidden"),
    ("in_proj_z.weight", "linear_value", "hidden"),
    ("in_proj_b.weight", "linear_heads", "hidden"),
    ("in_proj_a.weight", "linear_heads", "hidden"),
)
_IN_PROJ_BY_HEAD = _linear(
    "in_proj.weight",
    ByHead((0, "linear_qkvz"), (1, "linear_ba")),
    ("in_proj_qkvz.weight", "linear_qkvz", "hidden"),
    ("in_proj_ba.weight", "linear_ba", "hidden"),
)


class GatedDeltaFamily(MegatronFamily):
    """Layers with gated delta nets, and with gated attention.

    Attributes:
        in_proj: the rule of a gated delta net's fused projection.
    """

    fused_norms: ClassVar = {}
    in_proj: ClassVar[Rule] = _IN_PROJ

    def settings(self, dimensions: ModelDimensions) -> dict[str, Any]:
        linear = dimensions.attention.linear
        assert linear is not None
        return super().settings(dimensions) | {
            "attention_output_gate": True,
            # Megatron reads it only to store layers under separate names.
            "linear_attention_freq": [int(layer in linear.layers) for layer in range(dimensions.num_layers)],
            "linear_conv_kernel_dim": linear.conv_width,
            "linear_key_head_dim": linear.key_dim,
            "linear_value_head_dim": linear.value_dim,
            "linear_num_key_heads": linear.num_key_heads,
            "linear_num_value_heads": linear.num_value_heads,
        }

    def attention(self, config: TransformerConfig, layer: int, attention: ModuleSpec) -> ModuleSpec:
        if config.linear_attention_freq[layer]:
            return ModuleSpec(module=GatedDeltaNet)
        attention.module = GatedAttention
        return super().attention(config, layer, attention)

    def rules(self, dimensions: ModelDimensions) -> tuple[Rule, ...]:
        linear = dimensions.attention.linear
        assert linear is not None
        others = [layer for layer in range(dimensions.num_layers) if layer not in linear.layers]
        recurrent = in_layers((self.in_proj, *_LINEAR), linear.layers)
        attention = in_layers((qkv("weight", "hidden", query="gated_query"), PROJECTION, *QK_NORM), others)
        return (*OUTER, *NORMS, *recurrent, *attention, *feed_forward(dimensions))


class Qwen3NextFamily(GatedDeltaFamily):
    """The same layers from checkpoints that fuse projections."""

    in_proj = _IN_PROJ_BY_HEAD
