"""Pure tensor mathematics of packed RL: no process group, no Ray, no engine. Usable wherever torch is.

Names are imported on first use, so a module of this package costs no more than itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_like.algorithms.advantages import (
        AdvantageEstimator,
        Groups,
        compute_advantages,
        estimator,
        find_estimator,
        kl_penalty,
        overlong_penalty,
    )
    from slime_like.algorithms.context import ContextShard, padded_length, split_for_context_parallel
    from slime_like.algorithms.critic import gae, value_loss
    from slime_like.algorithms.head import fused_logprobs
    from slime_like.algorithms.importance import importance_weights, off_policy_sequence_mask
    from slime_like.algorithms.logprobs import compute_response_logprobs, logprobs_and_entropy, selective_log_softmax
    from slime_like.algorithms.losses.grpo import BatchLoss, GRPOLoss
    from slime_like.algorithms.losses.kl import kl_estimate
    from slime_like.algorithms.losses.loss import Loss, build_loss
    from slime_like.algorithms.losses.policy import LossInputs, PolicyLoss, PolicyTerms, required, token_ratio
    from slime_like.algorithms.losses.sums import LossOutput, LossSums
    from slime_like.algorithms.packing.pack import (
        pack_sequences,
        real_tokens,
        response_logit_index,
        response_tokens,
        unpack_response_logprobs,
        unpack_sequences,
        zero_weight_pack,
    )
    from slime_like.algorithms.packing.partition import partition_by_tokens, partition_full_batches, training_flops
    from slime_like.algorithms.promise import Promise
    from slime_like.algorithms.reduction import step_denominator, sum_of_sample_mean, token_weights
    from slime_like.algorithms.segments import spread_over_tokens

__all__ = [
    "AdvantageEstimator",
    "BatchLoss",
    "ContextShard",
    "GRPOLoss",
    "Groups",
    "Loss",
    "LossInputs",
    "LossOutput",
    "LossSums",
    "PolicyLoss",
    "PolicyTerms",
    "Promise",
    "build_loss",
    "compute_advantages",
    "compute_response_logprobs",
    "estimator",
    "find_estimator",
    "fused_logprobs",
    "gae",
    "importance_weights",
    "kl_estimate",
    "kl_penalty",
    "logprobs_and_entropy",
    "off_policy_sequence_mask",
    "overlong_penalty",
    "pack_sequences",
    "padded_length",
    "partition_by_tokens",
    "partition_full_batches",
    "real_tokens",
    "required",
    "response_logit_index",
    "response_tokens",
    "selective_log_softmax",
    "split_for_context_parallel",
    "spread_over_tokens",
    "step_denominator",
    "sum_of_sample_mean",
    "token_ratio",
    "token_weights",
    "training_flops",
    "unpack_response_logprobs",
    "unpack_sequences",
    "value_loss",
    "zero_weight_pack",
]

_MODULES = (
    "advantages", "context", "critic", "head", "importance", "losses.kl", "losses.loss", "losses.policy",
    "losses.sums", "packing.pack", "packing.partition", "promise", "reduction", "segments",
    "logprobs", "losses.grpo",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        if hasattr(found := import_module(f"{__name__}.{module}"), name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
