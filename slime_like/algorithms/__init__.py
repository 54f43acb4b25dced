"""Pure tensor mathematics of packed RL: no process group, no Ray, no engine. Usable wherever torch is.

Names are imported on first use, so a module of this package costs no more than itself.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "advantages": "AdvantageEstimator SampleGroups compute_advantages estimator find_estimator kl_penalty"
    " overlong_penalty",
    "context": "ContextShard padded_length split_for_context_parallel",
    "critic": "gae value_loss",
    "head": "fused_logprobs",
    "importance": "importance_weights off_policy_sequence_mask",
    "logprobs": "compute_response_logprobs logprobs_and_entropy selective_log_softmax",
    "losses.grpo": "BatchLoss GRPOLoss",
    "losses.kl": "kl_estimate",
    "losses.loss": "Loss build_loss",
    "losses.policy": "LossInputs PolicyLoss PolicyTerms required token_ratio",
    "losses.sums": "LossOutput LossSums",
    "packing.pack": "pack_sequences real_tokens response_logit_index response_tokens"
    " unpack_response_logprobs unpack_sequences zero_weight_pack",
    "packing.partition": "partition_by_tokens partition_full_batches training_flops",
    "promise": "Promise",
    "reduction": "step_denominator sum_of_sample_mean token_weights",
    "segments": "spread_over_tokens",
}
"""Public names by the module that defines them."""

__all__ = [name for names in _NAMES.values() for name in names.split()]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
