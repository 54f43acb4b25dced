"""Scoring and training on all ranks. Every replica's packs go to its ranks, and answers are combined."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from slime_like.interfaces import ScoredLogprobs
from slime_like.orchestration.trainer.calls import RankCalls
from slime_like.orchestration.trainer.rank_training import FrozenLogprobs, RankTraining, StreamedStep, Weights
from slime_like.trajectory import GRPOStats, PackedTrajectory

ReplicaBatch = list[list[PackedTrajectory]]  # [minibatch][micro-batch]

_ON_A_WINDOW = "training on a window"


class GroupTraining:
    """``RankTraining`` of all ranks.

    Methods that wait raise ``TrainerError`` if a rank died, raised, or was late.
    """

    def __init__(self, calls: RankCalls) -> None:
        self._calls = calls

    @property
    def data_parallel_size(self) -> int:
        return self._calls.num_replicas

    # ------------------------------------------------------------------------------------------------ a whole batch
    def load_batch(self, replicas: Sequence[ReplicaBatch]) -> None:
        """Send every data-parallel replica its packs. Returns immediately; the next call raises a failure."""
        packs = self._calls.per_replica(replicas)
        self._calls.defer(self._calls.start_each("receiving a batch", RankTraining.load_batch, packs))

    def score_batch(self, weights: Weights) -> None:
        """Fill the loaded batch's logprobs with these weights; see ``RankTraining.score_batch``."""
        self._calls.call(f"scoring with the {weights} weights", RankTraining.score_batch, weights)

    def set_advantages(self, advantages: Mapping[str, float]) -> None:
        """Replace the advantages of the loaded batch, by sequence id."""
        self._calls.call("receiving advantages", RankTraining.set_advantages, dict(advantages))

    def train_minibatch(self, index: int, denominator: float) -> GRPOStats:
        """Run one optimizer step on minibatch ``index`` of the loaded batch."""
        answers = self._calls.call("training", RankTraining.train_minibatch, index, denominator)
        return next(stats for stats in answers if stats is not None)

    # ---------------------------------------------------------------------------------------------- streamed windows
    def begin_stream(self) -> None:
        """Start an optimizer step with windows from ``send_window``. Both return immediately."""
        self._calls.defer(self._calls.start(_ON_A_WINDOW, RankTraining.begin_stream))

    def send_window(self, replicas: Sequence[list[PackedTrajectory]], last: bool = False) -> None:
        """Let every rank accumulate its replica's micro-batches after all earlier ones.

        Args:
            replicas: [data-parallel replica][micro-batch], with the same count for all.
            last: whether this is the step's last window.

        Raises:
            TrainerError: a rank has failed in an earlier window.
        """
        self._calls.raise_failures()
        arguments = self._calls.per_replica(replicas, last)
        self._calls.defer(self._calls.start_each(_ON_A_WINDOW, RankTraining.train_window, arguments))

    def is_idle(self) -> bool:
        """Return whether every rank has finished all windows sent to it.

        Raises:
            TrainerError: a rank has failed in a window.
        """
        self._calls.raise_failures()
        return not self._calls.has_deferred

    def finish_stream(self, denominator: float) -> StreamedStep:
        """Wait for all windows, then update. Seconds are means over ranks."""
        steps = self._calls.call("updating", RankTraining.finish_stream, denominator)
        stats = next(step.stats for step in steps if step.stats is not None)
        return StreamedStep(stats, fmean(step.busy_s for step in steps), fmean(step.reference_s for step in steps))

    # --------------------------------------------------------------------------------------------------------- scores
    def score(
        self, replicas: Sequence[list[PackedTrajectory]], weights: Weights = "policy"
    ) -> list[list[ScoredLogprobs]]:
        """Return logprobs and entropies of packs, without keeping them: [replica][pack], in the given order.

        Every replica must get the same number of packs. The step's loaded batch is unchanged.
        """
        arguments = self._calls.per_replica(replicas, weights)
        answers = self._calls.start_each(f"scoring with the {weights} weights", RankTraining.score, arguments)
        return self._calls.by_replica(answers.result())

    def response_logprobs(self, sequence_ids: list[str]) -> dict[str, FrozenLogprobs]:
        """Return frozen logprobs of these sequences of the loaded batch, from whichever rank holds them."""
        answers = self._calls.call("reporting logprobs", RankTraining.response_logprobs, sequence_ids)
        return {name: logprobs for answer in answers for name, logprobs in answer.items()}
