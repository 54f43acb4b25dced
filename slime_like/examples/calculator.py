"""A pocket calculator that a model may use before it answers."""

from typing import Any

from slime_like.examples.arithmetic import ArithmeticFault, evaluate, to_text
from slime_like.interfaces import Step, Task


class Calculator:
    """Calculates the expression between ``opening`` and ``closing``; a turn without one is the answer.

    Of several expressions in one turn the last counts. One that has no value gets the reason, so that the model may try
    again. The environment's reward is 1 where the answer is a number equal to the row's, else 0.

    Raises ``ValueError`` where a mark is empty.
    """

    def __init__(self, opening: str = "<calculate>", closing: str = "</calculate>") -> None:
        if not opening or not closing:
            raise ValueError(f"opening={opening!r} and closing={closing!r} must not be empty")
        self._opening = opening
        self._closing = closing

    def reset(self, task: Task) -> Any:
        return {"answer": task.answer, "calls": 0}

    def step(self, state: Any, response: str) -> Step:
        expression = self._expression(response)
        calls = state["calls"]
        if expression is None:
            right = _equal(response, state["answer"])
            return Step(done=True, reward=float(right), success=right, metadata={"calls": calls})
        try:
            observation = to_text(evaluate(expression))
        except ArithmeticFault as fault:
            observation = f"error: {fault}"
        return Step(
            {**state, "calls": calls + 1},
            observation,
            metadata={"expression": expression[:80], "observation": observation[:80]},
        )

    def _expression(self, response: str) -> str | None:
        _, opened, after = response.rpartition(self._opening)
        inside, closed, _ = after.partition(self._closing)
        return inside if opened and closed else None


def _equal(response: str, answer: str) -> bool:
    try:
        return evaluate(response.strip()) == evaluate(answer.strip())
    except ArithmeticFault:
        return False
