"""Construction of this rank's Megatron model chunks."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from backends.megatron.attention import attention_of, uses_transformer_engine
from backends.megatron.experts import can_be_grouped
from backends.megatron.head import LogprobModel
from backends.megatron.parallel import expert_tensor_size
from backends.megatron.specs import Layers, block_spec, is_fused
from slime_like.checks.layout import layers_per_stage
from slime_like.config import RunConfig
from slime_like.models.dimensions import ModelDimensions

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this times the tensor-parallel size, as Megatron's own tools do."""


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Rows of the whole embedding, padding included."""
    multiple = VOCAB_MULTIPLE * tensor_size
    return -(-vocab_size // multiple) * multiple


def transformer_config(config: RunConfig, dimensions: ModelDimensions, as_gpu: bool) -> TransformerConfig:
    """Megatron's configuration of this model under the run's parallel layout.

    Args:
        as_gpu: operators are those that a GPU has.
    """
    dtype = getattr(torch, config.model.dtype)
    kind = TransformerConfig if dimensions.latent is None else MLATransformerConfig
    return kind(
        **_architecture(dimensions),
        **_latent_attention(dimensions),
        **_experts(config, dimensions, as_gpu and can_be_grouped(config, dimensions)),
        **_parallelism(config, dtype),
        **_stages(config, dimensions),
        **_recompute(config.trainer.recomputed_layers(dimensions.num_layers)),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights come from the checkpoint; what it does not fill (vocabulary padding) is zeroed after construction.
        # Megatron marks tensor-parallel weights only where it initialises them, and clipping relies on those marks.
        perform_initialization=True,
        init_method=_unset,
        output_layer_init_method=_unset,
        embedding_init_method=_unset,
        use_cpu_initialization=not torch.cuda.is_available(),
        # The loss is a weighted sum; its gradient is neither averaged over micro-batches nor over ranks.
        calculate_per_token_loss=True,
        # SwiGLU in one pass, compiled by torch. It also keeps less for the backward pass.
        bias_activation_fusion=as_gpu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # Megatron's own layers need APEX for it; Transformer Engine's get it in ``_build``.
        gradient_accumulation_fusion=False,
        # Its kernels take angles. Ours takes cosines rounded to the model's type, like the tables of engines.
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


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
        **({} if dimensions.latent else {"qk_layernorm": dimensions.qk_norm}),
        "add_qkv_bias": dimensions.qkv_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _latent_attention(dimensions: ModelDimensions) -> dict[str, Any]:
    latent, scaling = dimensions.latent, dimensions.rope_scaling or {}
    if latent is None:
        return {}
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "qk_layernorm": True,
        # Of Megatron's own rotary embedding only the softmax's scale is used, which YaRN changes.
        "rope_type": "rope",
        "rotary_scaling_factor": scaling.get("factor", 1.0),
        "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
    }


def _experts(config: RunConfig, dimensions: ModelDimensions, grouped: bool) -> dict[str, Any]:
    if dimensions.num_experts == 0:
        # Pipelines of variable lengths ask for this dispatcher even of dense models.
        return {"moe_token_dispatcher_type": "alltoall"}
    return {
        "num_moe_experts": dimensions.num_experts,
        "moe_router_topk": dimensions.moe_top_k,
        "moe_ffn_hidden_size": dimensions.moe_ffn_hidden_size,
        # Normalised top-k probabilities are a softmax over the chosen experts only.
        "moe_router_pre_softmax": not dimensions.moe_norm_topk_prob,
        # Our own (router.py): Megatron's depends on how tokens are spread over micro-batches.
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        # One product for all experts. On a CPU a loop over them is faster, which copies no weights.
        "moe_grouped_gemm": grouped,
        "moe_permute_fusion": False,  # ``Dispatcher`` permutes
        "expert_model_parallel_size": config.trainer.parallel.expert,
        "expert_tensor_parallel_size": expert_tensor_size(config.trainer.parallel),
        "moe_shared_expert_intermediate_size": dimensions.moe_shared_ffn_hidden_size or None,
        # A list alone, even of equal layers, would store every layer under a name of its number.
        **({"moe_layer_freq": _expert_pattern(dimensions)} if dimensions.dense_layers else {}),
        **_sigmoid_router(dimensions),
    }


def _expert_pattern(dimensions: ModelDimensions) -> list[int]:
    return [int(layer in dimensions.expert_layers) for layer in range(dimensions.num_layers)]


def _sigmoid_router(dimensions: ModelDimensions) -> dict[str, Any]:
    """The bias is no setting: ``BalancedRouter`` holds it, and nothing updates it."""
    if not dimensions.moe_sigmoid:
        return {}
    grouped = dimensions.moe_groups > 1
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": dimensions.moe_groups if grouped else None,
        "moe_router_group_topk": dimensions.moe_top_groups if grouped else None,
        "moe_router_topk_scaling_factor": dimensions.moe_scaling,
        # As the published model, and engines: choices by groups are too close for less.
        "moe_router_dtype": "fp32",
    }


def _parallelism(config: RunConfig, dtype: torch.dtype) -> dict[str, Any]:
    parallel = config.trainer.parallel
    interleaved = parallel.virtual_pipeline > 1
    # Two stages are each other's next and previous at once: batched NCCL messages of both directions would be confused
    # (on the CPU they carry tags). Micro-batches are padded to one length, for shapes are sent the same way.
    overlapped = interleaved and torch.cuda.is_available()
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if interleaved else None,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
        "pipeline_dtype": dtype,
        # What has been sent to the next stage is needed there only; an overlapped schedule may still be sending it.
        "deallocate_pipeline_outputs": parallel.pipeline > 1 and not overlapped,
        "variable_seq_lengths": not interleaved,
        "overlap_p2p_comm": overlapped,
        "batch_p2p_comm": not overlapped,
        # Only old versions of torch need the device synchronized after batched messages.
        "batch_p2p_sync": False,
    }


def _stages(config: RunConfig, dimensions: ModelDimensions) -> dict[str, Any]:
    """Layers of each stage, given only if they do not divide evenly: Megatron assumes that they do."""
    parallel = config.trainer.parallel
    layers = layers_per_stage(dimensions, parallel.pipeline * parallel.virtual_pipeline)
    if len(set(layers)) == 1:
        return {}
    stages = [["decoder"] * count for count in layers]
    return {"pipeline_model_parallel_layout": [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]}


def _recompute(layers: int) -> dict[str, Any]:
    """The first ``layers`` of every model chunk, or all that it has."""
    if layers == 0:
        return {}
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}


def build_chunks(config: RunConfig, dimensions: ModelDimensions) -> list[LogprobModel]:
    """This rank's model chunks, one per virtual pipeline stage, weights still unset (vocabulary padding is zero)."""
    as_gpu = torch.cuda.is_available() or config.trainer.cpu_kernels == "off"
    transformer = transformer_config(config, dimensions, as_gpu)
    layers: Layers = "kernels" if is_fused(config.trainer, transformer.params_dtype) else "local"
    if uses_transformer_engine(config.trainer, dimensions, torch.cuda.is_available()):
        layers = "transformer_engine"
    chunks = _build(config, dimensions, transformer, layers)
    if torch.cuda.is_available():
        for chunk in chunks:
            chunk.cuda(torch.cuda.current_device())
    return chunks


def build_meta_chunks(config: RunConfig, dimensions: ModelDimensions) -> list[LogprobModel]:
    """The same chunks with shapes only, of torch's operators: neither memory nor a device is touched."""
    transformer = transformer_config(config, dimensions, as_gpu=True)
    on_host = replace(transformer, use_cpu_initialization=True, perform_initialization=False)
    with torch.device("meta"):
        return _build(config, dimensions, on_host, "local")


def _build(
    config: RunConfig, dimensions: ModelDimensions, transformer: TransformerConfig, layers: Layers
) -> list[LogprobModel]:
    virtual = config.trainer.parallel.virtual_pipeline
    attention = attention_of(config.trainer, dimensions, torch.cuda.is_available())
    rows = None
    if layers == "kernels":
        from slime_like.cpu.kernels.operators import FusedLogitRows  # needs Numba

        rows = FusedLogitRows()
    chunks = []
    for stage in [None] if virtual == 1 else range(virtual):
        place: dict[str, Any] = {"vp_stage": stage, "ignore_virtual": stage is None}
        model = LogprobModel(
            config=transformer,
            transformer_layer_spec=block_spec(transformer, attention, layers, stage),
            vocab_size=padded_vocab_size(dimensions.vocab_size, config.trainer.parallel.tensor),
            max_sequence_length=dimensions.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            parallel_output=True,
            share_embeddings_and_output_weights=dimensions.tied_embeddings,
            # Attention rotates by the positions that come with the micro-batch; the model keeps no table.
            position_embedding_type="none",
            vp_stage=stage,
        )
        if layers == "transformer_engine":
            from backends.megatron.transformer_engine import add_weight_gradients_in_float32

            add_weight_gradients_in_float32(model)
        model.true_vocab_size = dimensions.vocab_size
        model.chunk_tokens = config.trainer.head_chunk_tokens
        model.entropy_gradient = config.algorithm.entropy_coef > 0
        model.rows = rows
        model.model_type = ModelType.encoder_or_decoder
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "word_embeddings" in name or "output_layer" in name:
                    parameter.zero_()
        chunks.append(model)
    return chunks
