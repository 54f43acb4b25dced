"""Rows' own answers as responses: as the data has them, and as a response may have to write them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from slime_like.sandbox.rewards.pool import RewardItem, RewardOutcome, RewardPool

_FORMS = (("", ""), ("\\boxed{", "}"), ("$", "$"))
"""What stands around the answer. Bare LaTeX is text to a function that reads the mathematics of a response."""


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A row with its answer as the response: in the first form that is a success, else bare."""

    item: RewardItem
    outcome: RewardOutcome

    @property
    def is_success(self) -> bool:
        return self.outcome.successes[0] > 0

    @property
    def has_failed(self) -> bool:
        """Whether there is no result."""
        return has_failed(self.outcome)


def has_failed(outcome: RewardOutcome) -> bool:
    """Whether scoring gave no result."""
    return "reason" in outcome.metadata


def own_answers_by_source(
    pool: RewardPool, samples: Sequence[tuple[str, Sequence[RewardItem]]]
) -> list[tuple[str, list[OwnAnswer]]]:
    """``score_own_answers`` of all sources' rows in one call, by source.

    Raises:
        RewardError: as ``RewardPool.score``.
    """
    answers = iter(score_own_answers(pool, [sample for _, of_source in samples for sample in of_source]))
    return [(source, list(islice(answers, len(of_source)))) for source, of_source in samples]


def score_own_answers(pool: RewardPool, items: Sequence[RewardItem]) -> list[OwnAnswer]:
    """Score each row's answer bare; where the first reward function gives no success, in each form, in a second call.

    The bare ones are in that call too: a function that raises on the other forms is not taken for a broken one.

    Raises:
        RewardError: as ``RewardPool.score``.
    """
    found = [OwnAnswer(item, outcome) for item, outcome in zip(items, pool.score(items), strict=True)]
    unsolved = [index for index, own in enumerate(found) if not (own.is_success or own.has_failed)]
    tried = [(index, form) for index in unsolved for form in _FORMS]
    written = [replace(items[index], response=items[index].answer.join(form)) for index, form in tried]
    for (index, _), item, outcome in zip(tried, written, pool.score(written), strict=True):
        other = OwnAnswer(item, outcome)
        if other.is_success and not found[index].is_success:
            found[index] = other
    return found
