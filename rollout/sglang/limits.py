"""Limits of SGLang, which rejects unknown arguments itself. This module doesn't import it."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollout.limits import Guarantee, ServerLimits, by_argument, owned_arguments
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.models.dimensions import ModelDimensions

WEIGHTS_BACKUP = "enable_weights_cpu_backup"
"""Argument that decides whether a sleeping engine keeps its weights. SGLang's ``sleep`` cannot choose."""


@dataclass(frozen=True, kw_only=True)
class SglangLimits(ServerLimits):
    """Limits of SGLang."""

    def argument_problems(self, rollout: RolloutConfig, is_here: bool) -> Iterator[str]:
        yield from ServerLimits.argument_problems(self, rollout, is_here)
        if rollout.pipeline != 1:
            problem = f"SGLang {self.tested} cannot freeze a pipeline's requests"
            yield f"rollout.pipeline={rollout.pipeline}: {problem}; use rollout.tensor, or rollout.engine=vllm"

    def keeps_weights(self, config: RunConfig, dimensions: ModelDimensions) -> bool:
        needed = ServerLimits.keeps_weights(self, config, dimensions)
        return bool(config.rollout.own_engine_args.get(WEIGHTS_BACKUP, needed))

    copies_weights = keeps_weights


LIMITS = SglangLimits(
    name="sglang",
    packages=("sglang",),
    tested="0.5.23",
    share_argument="mem_fraction_static",
    default_share=0.8,  # below its default: a large batch's logits in float32 and float64 need memory outside the share
    owned=owned_arguments(
        "device skip_tokenizer_init sampling_backend weight_version sleep_on_idle custom_sigquit_handler",
        trust_remote_code="model.trust_remote_code",
        context_length="rollout.max_model_len",
        tp_size="rollout.tensor",
        enable_return_routed_experts="algorithm.routing_replay",
        enable_lora="model.lora",
        max_lora_rank="model.lora",
        lora_target_modules="model.lora",
        lora_paths="model.lora",
    )
    | {
        "enable_deterministic_inference": "every request already has a separate seed",
        "rl_on_policy_target": "logprobs already use the scaled logits",
    },
    refused=by_argument(
        {
            Guarantee.TYPE: "dtype quantization quantization_param_path quantize_and_serve modelopt_quant "
            "rl_quant_profile kv_cache_dtype mamba_ssm_dtype enable_tf32_matmul kt_method "
            "enable_mamba_cache_stochastic_rounding",
            Guarantee.MODEL: "model_path load_format json_model_override_args custom_weight_loader forward_hooks "
            "is_embedding enable_hisparse",
            Guarantee.TOKENS: "tokenizer_path",
            Guarantee.DISTRIBUTION: "preferred_sampling_params enable_custom_logit_processor enable_watermark "
            "speculative_accept_threshold_single speculative_accept_threshold_acc",
            Guarantee.SEEDS: "random_seed",
            Guarantee.RANKS: "nnodes node_rank dist_init_addr use_ray pp_size dp_size attn_dp_size attn_cp_size "
            "dcp_size enable_dp_attention tokenizer_worker_num",
            Guarantee.EXPERTS: "enable_eplb ep_num_redundant_experts init_expert_location enable_paged_experts",
            Guarantee.CACHE: "disaggregation_mode hicache_storage_backend enable_lmcache enable_flexkv",
        }
    ),
    drafts=("speculative_algorithm",),
    tried="attention_backend chunked_prefill_size cuda_graph_max_bs_decode disable_cuda_graph disable_overlap_schedule "
    "disable_radix_cache enable_fp32_lm_head enable_memory_saver enable_weights_cpu_backup ep_size log_level "
    "max_running_requests max_total_tokens page_size",
)
