"""Construction of this rank's Megatron model chunks.

A layer's tensors have the same names in checkpoints, whether its modules are Transformer Engine's or ours.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from backends.megatron.attention import Attention, PackedCoreAttention, attention_of, uses_transformer_engine
from backends.megatron.families import MegatronFamily, family_of
from backends.megatron.head import LogprobModel, ScoredLayer
from backends.megatron.norm import RMSNorm
from backends.megatron.parallel import expert_tensor_size
from slime_like.checks.layout import layers_per_stage
from slime_like.checks.packages import has_transformer_engine, is_installed
from slime_like.config import ModelConfig, ParallelConfig, RunConfig, TrainerConfig
from slime_like.models.dimensions import VALUE_HEAD, ModelDimensions
from slime_like.plugins.options import load_option

Layers = Literal["transformer_engine", "local"]
"""Modules of the layers: Transformer Engine's, or ours, built from torch's operators."""

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this times the tensor-parallel size, like in Megatron's tools."""


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Return the rows of the whole embedding, including padding."""
    multiple = VOCAB_MULTIPLE * tensor_size
    return -(-vocab_size // multiple) * multiple


def transformer_config(model: ModelConfig, trainer: TrainerConfig, dimensions: ModelDimensions) -> TransformerConfig:
    """Build Megatron's configuration of this model under the run's parallel layout."""
    dtype, layers = getattr(torch, model.dtype), trainer.recomputed_layers(dimensions.num_layers)
    family = family_of(dimensions)
    return family.config(
        **(_architecture(dimensions) | family.settings(dimensions)),
        **_experts(trainer.parallel, dtype, dimensions, model.lora.rank or 0),
        **_fusions(trainer, dimensions, torch.cuda.is_available()),
        **_parallelism(trainer.parallel, dtype),
        **_stages(trainer.parallel, dimensions),
        **_fp8(trainer),
        # ``block`` recomputes the first layers of every chunk, or all if it has fewer.
        recompute_granularity="full" if layers else None,
        recompute_method="block" if layers else None,
        recompute_num_layers=layers or None,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights come from the checkpoint; the rest (vocabulary padding) is zeroed after construction. Megatron marks
        # tensor-parallel weights only when it initializes them, and clipping relies on these marks.
        perform_initialization=True,
        init_method=_unset,
        output_layer_init_method=_unset,
        embedding_init_method=_unset,
        use_cpu_initialization=not torch.cuda.is_available(),
        # The loss is a weighted sum, so its gradient is averaged over neither micro-batches nor ranks.
        calculate_per_token_loss=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # The fused kernels take angles. Ours takes cosines rounded to the model's type, like the tables of engines.
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _fp8(trainer: TrainerConfig) -> dict[str, Any]:
    """Return the recipe of FP8 products. Weights and gradients keep their types, and so do attention and the head."""
    if trainer.fp8 == "none":
        return {}
    kept, is_blockwise = trainer.fp8_bf16_layers, trainer.fp8 == "blockwise"
    return {
        # With one scale per tensor, gradients need one more bit of exponent (hybrid).
        "fp8": "e4m3" if is_blockwise else "hybrid",
        "fp8_recipe": "blockwise" if is_blockwise else "tensorwise",
        "first_last_layers_bf16": kept > 0,
        **dict.fromkeys(("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), kept),
        # Round weights in every micro-batch. Layers that keep rounded weights overwrite the sums of gradients in a
        # schedule's first micro-batch, and a step has several schedules.
        "disable_parameter_transpose_cache": True,
    }


def _unset(weight: Tensor) -> Tensor:
    return weight


def _architecture(dimensions: ModelDimensions) -> dict[str, Any]:
    return {
        "num_layers": dimensions.num_layers,
        "hidden_size": dimensions.hidden_size,
        "num_attention_heads": dimensions.num_heads,
        "num_query_groups": dimensions.num_kv_heads,
        "kv_channels": dimensions.head_dim,
        "ffn_hidden_size": dimensions.ffn_hidden_size,
        "layernorm_epsilon": dimensions.norm_eps,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": dimensions.zero_centered_norms,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        # SwiGLU in one pass, compiled by torch on a GPU. It also keeps less for the backward pass.
        "bias_activation_fusion": True,
        "softmax_scale": dimensions.attention.scale,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _experts(parallel: ParallelConfig, dtype: torch.dtype, dimensions: ModelDimensions, rank: int) -> dict[str, Any]:
    if dimensions.num_experts == 0:
        return {}
    pattern = [int(layer in dimensions.expert_layers) for layer in range(dimensions.num_layers)]
    grouped = dimensions.moe_groups > 1
    sigmoid = {  # the bias is not a setting: ``BalancedRouter`` holds it
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": dimensions.moe_groups if grouped else None,
        "moe_router_group_topk": dimensions.moe_top_groups if grouped else None,
        "moe_router_topk_scaling_factor": dimensions.moe_scaling,
        # Like the published model and engines: choices by groups are too close for lower precision.
        "moe_router_dtype": "fp32",
    }
    return {
        "num_moe_experts": dimensions.num_experts,
        "moe_router_topk": dimensions.moe_top_k,
        "moe_ffn_hidden_size": dimensions.moe_ffn_hidden_size,
        # Normalized top-k probabilities are a softmax over only the chosen experts.
        "moe_router_pre_softmax": not dimensions.moe_norm_topk_prob,
        # Ours is in router.py: Megatron's loss depends on how tokens are spread over micro-batches.
        "moe_router_load_balancing_type": "none",
        # One product for all experts.
        "moe_grouped_gemm": can_be_grouped(parallel, dtype, dimensions, rank),
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": expert_tensor_size(parallel),
        "moe_shared_expert_intermediate_size": dimensions.moe_shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": dimensions.moe_shared_gate,
        # A list, even of equal layers, would store every layer under a separate name.
        **({"moe_layer_freq": pattern} if dimensions.dense_layers else {}),
        **({} if not dimensions.moe_sigmoid else sigmoid),
    }


def _fusions(trainer: TrainerConfig, dimensions: ModelDimensions, on_cuda: bool) -> dict[str, Any]:
    """Return the fused kernels that are installed, and not switched off."""

    def use(name: str, installed: bool) -> bool:
        return on_cuda and installed and getattr(trainer.fusion, name) == "auto"

    exchanges = dimensions.num_experts > 0 and trainer.parallel.expert * expert_tensor_size(trainer.parallel) > 1
    by_deep_ep = exchanges and use("moe_dispatch", is_installed("deep_ep"))
    return {
        # Pipelines with variable lengths require a dispatcher of these two even for dense models.
        "moe_token_dispatcher_type": "flex" if by_deep_ep else "alltoall",
        # Orders what other ranks sent; ``Dispatcher`` permutes what they get.
        "moe_permute_fusion": use("moe_permute", has_transformer_engine()),
        # For Megatron's layers; Transformer Engine's get it in ``_build``.
        "gradient_accumulation_fusion": use("weight_gradients", is_installed("fused_weight_gradient_mlp_cuda")),
    }


def can_be_grouped(parallel: ParallelConfig, dtype: torch.dtype, dimensions: ModelDimensions, rank: int) -> bool:
    """Return whether torch has a grouped product for experts of these sizes, with factors of ``rank`` (0: none)."""
    from backends.common.step.grouped_product import ALIGNMENT  # only models with experts ask

    width = dimensions.moe_ffn_hidden_size // expert_tensor_size(parallel)
    return all(size * dtype.itemsize % ALIGNMENT == 0 for size in (dimensions.hidden_size, width, rank))


def _parallelism(parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    interleaved = parallel.virtual_pipeline > 1
    # Two stages are each other's next and previous: batched NCCL messages of both directions would be confused (on the
    # CPU they have tags). Shapes are sent the same way, so micro-batches are padded to one length.
    overlapped = interleaved and torch.cuda.is_available()
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if interleaved else None,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
        "pipeline_dtype": dtype,
        # Only the next stage needs what was sent to it, but an overlapped schedule may still be sending it.
        "deallocate_pipeline_outputs": parallel.pipeline > 1 and not overlapped,
        "variable_seq_lengths": not interleaved,
        "overlap_p2p_comm": overlapped,
        "batch_p2p_comm": not overlapped,
        # Only old torch versions need a device synchronization after batched messages.
        "batch_p2p_sync": False,
    }


def _stages(parallel: ParallelConfig, dimensions: ModelDimensions) -> dict[str, Any]:
    """Return the layers of each stage if they do not divide evenly; Megatron assumes that they do."""
    layers = layers_per_stage(dimensions, parallel.pipeline * parallel.virtual_pipeline)
    if len(set(layers)) == 1:
        return {}
    stages = [["decoder"] * count for count in layers]
    return {"pipeline_model_parallel_layout": [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]}


def build_chunks(config: RunConfig, dimensions: ModelDimensions) -> list[LogprobModel]:
    """Build this rank's model chunks, one per virtual pipeline stage, without weights (vocabulary padding is zero)."""
    transformer = transformer_config(config.model, config.trainer, dimensions)
    has_engine = uses_transformer_engine(config.trainer, dimensions, torch.cuda.is_available())
    layers: Layers = "transformer_engine" if has_engine else "local"
    chunks = _build(config.model, config.trainer, dimensions, transformer, layers, config.algorithm.entropy_coef > 0)
    if torch.cuda.is_available():
        for chunk in chunks:
            chunk.cuda(torch.cuda.current_device())
    return chunks


def build_meta_chunks(
    model: ModelConfig, trainer: TrainerConfig, dimensions: ModelDimensions, entropy_gradient: bool = False
) -> list[LogprobModel]:
    """Build the same chunks with torch's operators and shapes only, without using memory or a device."""
    transformer = transformer_config(model, trainer.model_copy(update={"fp8": "none"}), dimensions)
    on_host = replace(transformer, use_cpu_initialization=True, perform_initialization=False)
    with torch.device("meta"):
        return _build(model, trainer, dimensions, on_host, "local", entropy_gradient)


def _build(
    settings: ModelConfig,
    trainer: TrainerConfig,
    dimensions: ModelDimensions,
    transformer: TransformerConfig,
    layers: Layers,
    entropy_gradient: bool,
) -> list[LogprobModel]:
    virtual = trainer.parallel.virtual_pipeline
    attention = attention_of(trainer, dimensions, torch.cuda.is_available())
    chunks = []
    for stage in [None] if virtual == 1 else range(virtual):
        place: dict[str, Any] = {"vp_stage": stage, "ignore_virtual": stage is None}
        model = LogprobModel(
            config=transformer,
            transformer_layer_spec=block_spec(family_of(dimensions), transformer, attention, layers, stage),
            vocab_size=padded_vocab_size(dimensions.vocab_size, trainer.parallel.tensor),
            max_sequence_length=dimensions.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            parallel_output=True,
            share_embeddings_and_output_weights=dimensions.tied_embeddings,
            # Attention rotates by the micro-batch's positions; the model keeps no table.
            position_embedding_type="none",
            vp_stage=stage,
        )
        if layers == "transformer_engine":
            from backends.megatron.transformer_engine import add_weight_gradients_in_float32

            add_weight_gradients_in_float32(model)
        model.score = None
        if dimensions.values and model.post_process:
            model.output_layer = None
            model.score = torch.nn.Linear(dimensions.hidden_size, 1, bias=False, dtype=transformer.params_dtype)
        if family_of(dimensions).scales_embeddings and model.pre_process:
            scale = float(torch.tensor(dimensions.hidden_size**0.5, dtype=transformer.params_dtype, device="cpu"))
            model.embedding.register_forward_hook(lambda _module, _inputs, out, scale=scale: out * scale)
        model.true_vocab_size = dimensions.vocab_size
        model.chunk_tokens = trainer.head_chunk_tokens
        model.entropy_gradient = entropy_gradient
        model.model_type = ModelType.encoder_or_decoder
        if settings.lora.is_set:
            load_option("megatron-lora")(settings, model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "word_embeddings" in name or "output_layer" in name or name == VALUE_HEAD:
                    parameter.zero_()
        chunks.append(model)
    return chunks


def block_spec(
    family: MegatronFamily, config: TransformerConfig, attention: Attention, layers: Layers, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of all layers of this rank's (virtual) pipeline stage, including the final norm."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    pattern = config.moe_layer_freq  # layers with experts; the others are dense
    has_experts = {number: isinstance(pattern, int) or bool(pattern[number]) for number in numbers}
    experts = {number: config.num_moe_experts if has_experts[number] else None for number in numbers}
    norm: Any = RMSNorm
    if layers == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        specs = [transformer_engine_layer_spec(config, count, attention) for count in experts.values()]
    else:
        specs = [local_layer_spec(family, config, number, count) for number, count in experts.items()]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def local_layer_spec(
    family: MegatronFamily, config: TransformerConfig, layer: int, num_experts: int | None
) -> ModuleSpec:
    """Return one transformer layer: the family's attention, and a norm that supports sequence parallelism."""
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    spec.module = ScoredLayer
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    # A norm before experts does not feed a single matrix. It is a separate module in both specs.
    mlp = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"} if num_experts is None else {}
    spec.submodules.sharded_state_dict_keys_map = family.fused_norms | mlp
    spec.submodules.self_attention = family.attention(config, layer, spec.submodules.self_attention)
    spec.submodules.mlp = family.mlp(spec.submodules.mlp)
    if num_experts is not None:
        load_option("megatron-experts")(spec, family.experts, config.moe_grouped_gemm)
    return spec


def transformer_engine_layer_spec(
    config: TransformerConfig, num_experts: int | None, attention: Attention
) -> ModuleSpec:
    """Return one transformer layer of Transformer Engine's modules: norms fused into the matrices they feed, and its
    attention unless ``attention`` is another. Grouped products of experts are ours: the host would wait for its own.

    Not for layers that ``Attention.special`` names. Raises ImportError, with the package's name, if Transformer Engine
    is not installed.
    """
    # Imports Transformer Engine, which only some machines have.
    from backends.megatron.transformer_engine import RotatedDotProductAttention

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
    )
    core_attention = RotatedDotProductAttention if attention == "transformer_engine" else PackedCoreAttention
    spec.submodules.self_attention.submodules.core_attention = core_attention
    if num_experts is not None:
        load_option("megatron-experts")(spec, None, config.moe_grouped_gemm)
    return spec
