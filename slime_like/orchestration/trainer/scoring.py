"""Scores of given sequences by a trainer group, for `slime-like score` and for the workers of a role."""

from collections.abc import Sequence

import torch

from slime_like.algorithms.packing.pack import pack_sequences, unpack_response_logprobs
from slime_like.config import TrainerConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import Scores
from slime_like.orchestration.trainer.batcher import bundles_of, fill_to_equal_counts, partition_over_replicas
from slime_like.orchestration.trainer.calls import RankCalls
from slime_like.orchestration.trainer.rank import TrainerRank
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


def score_sequences(ranks: RankCalls, sequences: Sequence[Trajectory], trainer: TrainerConfig) -> list[Scores]:
    """Return the ranks' scores of every response token, at each sequence's own temperature.

    Args:
        sequences: all scored or all unscored. Memory holds them and one packed copy, so pass windows.

    Returns:
        (response_len, ...) float32 each, on the CPU, in the order of ``sequences``.

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
    answers = ranks.by_replica(ranks.scatter("scoring", TrainerRank.score, fill_to_equal_counts(packs)).result())
    scores: dict[int, Scores] = {}
    for replica, replica_packs, scored in zip(partition, packs, answers, strict=True):
        for members, pack, values in zip(replica, replica_packs, scored[: len(replica_packs)], strict=True):
            columns = [unpack_response_logprobs(pack, column) for column in values.values()]
            for index, *row in zip(members, *columns, strict=True):
                scores[index] = _finite(dict(zip(values, row, strict=True)), sequences[index].sequence_id)
    return [scores[index] for index in range(len(sequences))]


def frozen_scores(ranks: RankCalls, rows: Sequence[Trajectory], *fields: str) -> dict[str, Scores]:
    """Return frozen scores of these rows of the loaded batch by sequence id, from whichever rank holds them."""
    answers = ranks.call("reporting scores", TrainerRank.frozen, [row.sequence_id for row in rows], *fields)
    return {name: scores for answer in answers for name, scores in answer.items()}


def _finite(scores: Scores, sequence_id: str) -> Scores:
    if not all(bool(torch.isfinite(values).all()) for values in scores.values()):
        raise TrainerError(
            "a score is not finite; the weights hold NaN or infinity, or overflow in this model.dtype",
            code="not-finite",
            who=f"sequence {sequence_id}",
        )
    return scores
