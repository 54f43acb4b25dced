"""Logprobs of given sequences with a trainer group's weights, for `slime-like score` and for reference workers."""

from collections.abc import Sequence

import torch

from slime_like.algorithms.packing.pack import pack_sequences, unpack_response_logprobs
from slime_like.config import TrainerConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import ScoredLogprobs
from slime_like.orchestration.trainer.batcher import bundles_of, fill_to_equal_counts, partition_over_replicas
from slime_like.orchestration.trainer.calls import RankCalls
from slime_like.orchestration.trainer.rank_training import FrozenLogprobs, RankTraining
from slime_like.trajectory import Trajectory

# Windows this long keep a pipeline's bubble small and average out pack lengths over replicas.
_PACKS_PER_STAGE, _FEWEST_PACKS = 4, 8


def window_tokens(trainer: TrainerConfig) -> int:
    """Return the best number of tokens per ``score_sequences`` call: several full packs for every replica."""
    packs = max(_FEWEST_PACKS, _PACKS_PER_STAGE * trainer.parallel.pipeline)
    return trainer.target_tokens_per_batch * trainer.parallel.data * packs


def request_tokens(trainer: TrainerConfig) -> int:
    """Return the fewest tokens that keep all ranks busy: one full pack per replica, several with a pipeline."""
    return trainer.target_tokens_per_batch * trainer.parallel.data * packs_per_request(trainer)


def packs_per_request(trainer: TrainerConfig) -> int:
    """Return the number of full packs per replica in ``request_tokens``."""
    return _PACKS_PER_STAGE * trainer.parallel.pipeline if trainer.parallel.pipeline > 1 else 1


def score_sequences(ranks: RankCalls, sequences: Sequence[Trajectory], trainer: TrainerConfig) -> list[ScoredLogprobs]:
    """Return logprob and entropy of every response token, at each sequence's own temperature.

    Args:
        sequences: all scored or all unscored. Memory holds them and one packed copy, so pass windows.

    Returns:
        (response_len,) float32 each, on the CPU, in the order of ``sequences``.

    Raises:
        DataError: a sequence is over the token budget.
        TrainerError: a rank failed, or a value is not finite; the message names the sequence.
    """
    if not sequences:
        return []
    budget, sharing = trainer.target_tokens_per_batch, trainer.share_prefixes or None
    partition = partition_over_replicas(bundles_of(sequences, trainer), budget, ranks.num_replicas, list)
    packs = [
        [pack_sequences([sequences[i] for i in members], sharing=sharing) for members in replica]
        for replica in partition
    ]
    answers = ranks.by_replica(ranks.scatter("scoring", RankTraining.score, fill_to_equal_counts(packs)).result())
    scores: dict[int, ScoredLogprobs] = {}
    for replica, replica_packs, scored in zip(partition, packs, answers, strict=True):
        for members, pack, values in zip(replica, replica_packs, scored[: len(replica_packs)], strict=True):
            logprobs = unpack_response_logprobs(pack, values.logprobs)
            entropy = unpack_response_logprobs(pack, values.entropy)
            for index, *pair in zip(members, logprobs, entropy, strict=True):
                scores[index] = _finite(ScoredLogprobs(*pair), sequences[index].sequence_id)
    return [scores[index] for index in range(len(sequences))]


def frozen_logprobs(ranks: RankCalls, sequence_ids: list[str]) -> dict[str, FrozenLogprobs]:
    """Return frozen logprobs of these sequences of the loaded batch, from whichever rank holds them."""
    answers = ranks.call("reporting logprobs", RankTraining.response_logprobs, sequence_ids)
    return {name: logprobs for answer in answers for name, logprobs in answer.items()}


def _finite(score: ScoredLogprobs, sequence_id: str) -> ScoredLogprobs:
    if not bool(torch.isfinite(score.logprobs).all() and torch.isfinite(score.entropy).all()):
        raise TrainerError(
            "a logprob or entropy is not finite; the weights hold NaN or infinity, or overflow in this model.dtype",
            code="not-finite",
            who=f"sequence {sequence_id}",
        )
    return score
