"""Pure tensor mathematics of packed RL: no process group, no Ray, no engine. Usable wherever torch is."""

from slime_like.algorithms.advantages import ESTIMATORS, AdvantageEstimator, compute_advantages, find_estimator
from slime_like.algorithms.catalogue import CATALOGUE, describe, find
from slime_like.algorithms.context import (
    ContextShard,
    merge_from_context_parallel,
    padded_length,
    split_for_context_parallel,
)
from slime_like.algorithms.gae import AdvantagesAndReturns, gae
from slime_like.algorithms.head import fused_logprobs
from slime_like.algorithms.importance import importance_weights, off_policy_sequence_mask
from slime_like.algorithms.logprobs import (
    compute_response_logprobs,
    logprobs_and_entropy,
    selective_log_softmax,
    vocab_parallel_logprobs,
)
from slime_like.algorithms.losses import GRPOLoss, Loss, LossInputs, LossOutput, LossSums, build_loss, value_loss
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
from slime_like.algorithms.shaping import kl_penalty, overlong_penalty

__all__ = [
    "CATALOGUE",
    "ESTIMATORS",
    "AdvantageEstimator",
    "AdvantagesAndReturns",
    "ContextShard",
    "GRPOLoss",
    "Loss",
    "LossInputs",
    "LossOutput",
    "LossSums",
    "StreamedPartition",
    "build_loss",
    "compute_advantages",
    "compute_response_logprobs",
    "describe",
    "find",
    "find_estimator",
    "fused_logprobs",
    "gae",
    "importance_weights",
    "kl_penalty",
    "logprobs_and_entropy",
    "merge_from_context_parallel",
    "off_policy_sequence_mask",
    "overlong_penalty",
    "pack_sequences",
    "padded_length",
    "partition_by_tokens",
    "partition_full_batches",
    "real_tokens",
    "response_logit_index",
    "response_tokens",
    "selective_log_softmax",
    "split_for_context_parallel",
    "step_denominator",
    "sum_of_sample_mean",
    "token_weights",
    "training_flops",
    "unpack_response_logprobs",
    "unpack_sequences",
    "value_loss",
    "vocab_parallel_logprobs",
    "zero_weight_pack",
]
