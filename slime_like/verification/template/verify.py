"""Tries every property of a chat template on random histories."""

from collections.abc import Sequence
from typing import Any

from slime_like.data.spans import ConversationEncoder, SpanFault
from slime_like.verification.template.histories import History, HistoryGenerator, shrink
from slime_like.verification.template.properties import PROPERTIES
from slime_like.verification.template.subject import Property, Subject, Verdict


def verify_template(encoder: ConversationEncoder, tokenizer: Any, seed: int = 0, histories: int = 100) -> list[Verdict]:
    """Try every property on ``histories`` random histories; ``encoder`` is of this ``tokenizer``."""
    subject = Subject(tokenizer, encoder)
    drawn: dict[tuple[tuple[str, bool], ...], list[History]] = {}
    verdicts = []
    for each in PROPERTIES:
        kinds = tuple(each.histories.items())
        if kinds not in drawn:
            generator = HistoryGenerator(seed, **each.histories)
            drawn[kinds] = [generator.draw() for _ in range(histories)]
        verdicts.append(_judge(subject, each, drawn[kinds]))
    return verdicts


def _judge(subject: Subject, each: Property, histories: Sequence[History]) -> Verdict:
    found = [(history, _outcomes(subject, each, history)) for history in histories]
    tried = sum(len(outcomes) for _, outcomes in found)
    failing = [history for history, outcomes in found if any(outcomes)]
    if not failing:
        return Verdict(each, tried)
    smallest = min(failing, key=lambda history: history.size)
    smallest = shrink(smallest, lambda history: any(_outcomes(subject, each, history)))
    problem = next(filter(None, _outcomes(subject, each, smallest)))
    return Verdict(each, tried, problem, smallest)


def _outcomes(subject: Subject, each: Property, history: History) -> list[str]:
    outcomes: list[str] = []
    try:
        outcomes.extend(each.find(subject, history))
    except SpanFault as fault:
        if fault.code != "template-failed":
            raise
    return outcomes
