"""Optional parts of a run by name. A part is imported when a setting or a model chooses it, so no other run reads it.

Every name here is text: this table imports nothing, and may name parts of any layer.
"""

import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_ROLLOUT = "slime_like.orchestration.rollout"

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        # trainer.recompute: auto, trainer.fsdp.accumulate: auto
        "memory-planner": "slime_like.planning.search:fill_memory",
        # debug.capsule: recorded steps
        "capsules": "slime_like.orchestration.run.capsules:Capsules",
        # logging.timeline
        "timeline": "slime_like.observability.timeline:Timeline",
        # rollout.agent, rollout.environment
        "agent": f"{_ROLLOUT}.agents:AgentRollouts",
        "environment": f"{_ROLLOUT}.conversations:Conversations",
        # algorithm.loss: sft and others of demonstrations, debug.load_rollouts, debug.save_rollouts
        "demonstrations": "slime_like.orchestration.run.stored_sources:Demonstrations",
        "saved-rollouts": "slime_like.orchestration.run.stored_sources:SavedRollouts",
        "save-rollouts": "slime_like.data.dump:save_step",
        # models with placement: workers
        "role-queue": f"{_ROLLOUT}.roles:RoleQueue",
        # algorithm.advantage: gae
        "gae": "slime_like.algorithms.critic:gae",
        "value-loss": "slime_like.algorithms.critic:value_loss",
        # data.messages_key
        "conversation-encoder": "slime_like.data.spans:ConversationEncoder",
        # model.lora
        "lora-start": "backends.common.trainer.lora:Initial",
        "lora-trial": "backends.common.trainer.lora:Trial",
        "megatron-lora": "backends.megatron.lora:add_lora",
        "megatron-lora-checkpoint": "backends.megatron.lora:lora_entries",
        # distillation
        "teacher-heads": "backends.common.step.teacher:hold_teachers",
        # trainer.attention, trainer.share_prefixes, windows and sinks
        "gathered-attention": "backends.common.attention.prefixes:PrefixAttention",
        "ring-flash-attention": "backends.common.attention.ring_flash_attn:RingFlashAttention",
        # layers with linear attention, and with experts
        "recurrence": "backends.common.linear_attention:Recurrence",
        "megatron-experts": "backends.megatron.router:balance_experts",
        # trainer.activation_offload
        "activation-offload": "backends.megatron.activations:ActivationOffload",
        # trainer ranks without a GPU
        "megatron-on-cpu": "backends.megatron.cpu_runtime:megatron_runtime",
        # sync.delta, sync.quantization
        "delta-sender": "slime_like.weights.delta:DeltaSender",
        "delta-receiver": "slime_like.weights.delta:DeltaReceiver",
        "is-quantized": "slime_like.weights.quantization:is_quantized",
        "quantized-export": "slime_like.weights.quantization:quantize_export",
        "quantized-shapes": "slime_like.weights.quantization:with_scales",
        "quantized-settings": "slime_like.weights.quantization:checkpoint_settings",
        # logging.wandb, logging.prometheus_port, health.webhook
        "wandb": "slime_like.observability.wandb:WandbTracker",
        "webhook": "slime_like.observability.webhook:Webhook",
        "prometheus": "slime_like.observability.prometheus:PrometheusTracker",
        # engines on several nodes
        "engine-store": "slime_like.weights.transports.collective:serve_store",
    }
)
"""Import paths, ``module:attribute``, by the name of the part."""


def load_option(name: str) -> Any:
    """Import and return the part registered as ``name``."""
    return pkgutil.resolve_name(OPTIONS[name])
