"""Answers of an engine that wait to be taken, several of them by one call."""

import asyncio
from dataclasses import dataclass, field

from slime_like.errors import SlimeLikeError
from slime_like.interfaces import Generation

_TOGETHER_S = 0.001
"""Requests that end with the same token do so one after the other, within less."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request: its responses, or the error."""

    request_id: str
    generations: list[Generation] = field(default_factory=list)
    error: SlimeLikeError | None = None


class Mailbox:
    """Answers for one asker. Belongs to one event loop.

    Attributes:
        expected: answers that have not been taken, those included that are not ready.
    """

    def __init__(self) -> None:
        self.expected = 0
        self._answers: list[Answer] = []
        self._filled = asyncio.Event()

    def put(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._filled.set()

    async def take(self) -> list[Answer]:
        """Wait for an answer; return all that are ready."""
        await self._filled.wait()
        await asyncio.sleep(_TOGETHER_S)
        answers, self._answers = self._answers, []
        self._filled.clear()
        self.expected -= len(answers)
        return answers
