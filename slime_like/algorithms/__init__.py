"""Pure tensor mathematics of packed RL: no process group, no Ray, no engine. Usable wherever torch is."""

from slime_like.algorithms.advantages import ESTIMATORS, AdvantageEstimator, Groups, compute_advantages, find_estimator
from slime_like.algorithms.bounds import LOG_RATIO_BOUND, LOGPROB_BOUND, bounded_exp, bounded_logprobs, log_ratio
from slime_like.algorithms.context import (
    ContextShard,
    merge_from_context_parallel,
    padded_length,
    split_for_context_parallel,
)
from slime_like.algorithms.gae import AdvantagesAndReturns, gae
from slime_like.algorithms.head import fused_logprobs
from slime_like.algorithms.importance import (
    ImportanceWeights,
    importance_weights,
    mean_weight,
    off_policy_sequence_mask,
)
from slime_like.algorithms.logprobs import (
    compute_response_logprobs,
    logprobs_and_entropy,
    selective_log_softmax,
)
from slime_like.algorithms.losses import (
    BatchLoss,
    GRPOLoss,
    Loss,
    LossInputs,
    LossOutput,
    LossSums,
    PolicyTerms,
    build_loss,
    kl_estimate,
    value_loss,
)
from slime_like.algorithms.losses.policy import PolicyLoss, required, token_ratio
from slime_like.algorithms.packing.pack import (
    pack_sequences,
    real_tokens,
    response_logit_index,
    response_tokens,
    unpack_response_logprobs,
    unpack_sequences,
    zero_weight_pack,
)
from slime_like.algorithms.packing.partition import (
    StreamedPartition,
    partition_by_tokens,
    partition_full_batches,
    training_flops,
)
from slime_like.algorithms.reduction import step_denominator, sum_of_sample_mean, token_weights
from slime_like.algorithms.segments import masked_segment_mean, masked_segment_sum, spread_over_tokens
from slime_like.algorithms.shaping import kl_penalty, overlong_penalty

__all__ = [
    "ESTIMATORS",
    "LOGPROB_BOUND",
    "LOG_RATIO_BOUND",
    "AdvantageEstimator",
    "AdvantagesAndReturns",
    "BatchLoss",
    "ContextShard",
    "GRPOLoss",
    "Groups",
    "ImportanceWeights",
    "Loss",
    "LossInputs",
    "LossOutput",
    "LossSums",
    "PolicyLoss",
    "PolicyTerms",
    "StreamedPartition",
    "bounded_exp",
    "bounded_logprobs",
    "build_loss",
    "compute_advantages",
    "compute_response_logprobs",
    "find_estimator",
    "fused_logprobs",
    "gae",
    "importance_weights",
    "kl_estimate",
    "kl_penalty",
    "log_ratio",
    "logprobs_and_entropy",
    "masked_segment_mean",
    "masked_segment_sum",
    "mean_weight",
    "merge_from_context_parallel",
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
