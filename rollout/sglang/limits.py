"""Limits of SGLang, which rejects unknown arguments itself. This module doesn't import it."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollout.limits import ServerLimits, owned_arguments
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
        model_path="model.path",
        dtype="model.dtype",
        trust_remote_code="model.trust_remote_code",
        context_length="rollout.max_model_len",
        tp_size="rollout.tensor",
        random_seed="seed",
        enable_return_routed_experts="algorithm.routing_replay",
    )
    | {
        "enable_deterministic_inference": "every request already has a separate seed",
        "rl_on_policy_target": "logprobs already use the scaled logits",
    },
)
