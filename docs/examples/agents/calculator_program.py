"""The calculator as a program that is an agent: any language would do. It calls the model by Anthropic's client.

``rollout.agent.command: [python, docs/examples/agents/calculator_program.py, "{task_file}", "{result_file}"]``; address
and key are in the variables ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``, where the client looks for them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from anthropic import Anthropic
from anthropic.types import MessageParam, TextBlock

from slime_like.examples.calculator import Calculator
from slime_like.interfaces import Task

_TURNS = 3


def solve(task: dict[str, Any]) -> dict[str, Any]:
    """Answer the model's expressions until it gives its answer; the result is an ``AgentResult``'s fields."""
    calculator, client = Calculator("[", "]"), Anthropic()
    state = calculator.reset(Task(task["prompt"], task["answer"]))
    history: list[MessageParam] = list(task["messages"])
    for _ in range(_TURNS):
        message = client.messages.create(model=task["model"], max_tokens=1024, messages=history)
        if message.stop_reason == "max_tokens":
            break
        text = "".join(block.text for block in message.content if isinstance(block, TextBlock))
        step = calculator.step(state, text)
        if step.done:
            return {"reward": step.reward, "success": step.success, "metadata": dict(step.metadata)}
        state = step.state
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": step.observation}]
    return {"reward": 0.0}


if __name__ == "__main__":
    task_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(solve(json.loads(task_file.read_text()))))
