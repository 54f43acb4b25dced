"""The calculator as an agent that owns its loop: it calls the model through the endpoint, by OpenAI's client."""

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from slime_like.examples.calculator import Calculator
from slime_like.interfaces import AgentResult, AgentTask, Task


async def solve(
    task: AgentTask, *, opening: str = "<calculate>", closing: str = "</calculate>", max_turns: int = 3
) -> AgentResult:
    """Answer the model's expressions until it gives its answer, as the environment ``calculator`` does."""
    calculator = Calculator(opening, closing)
    state = calculator.reset(Task(task.prompt, task.answer))
    history: list[ChatCompletionMessageParam] = [dict(message) for message in task.messages]  # type: ignore[misc]
    async with AsyncOpenAI(base_url=f"{task.base_url}/v1", api_key=task.key) as client:
        for turn in range(max_turns):
            completion = await client.chat.completions.create(model=task.model, messages=history)
            (choice,) = completion.choices
            if choice.finish_reason == "length":
                return AgentResult(0.0, metadata={"cut_off_turn": turn})
            text = choice.message.content or ""
            step = calculator.step(state, text)
            if step.done:
                return AgentResult(step.reward, step.success, step.metadata)
            state = step.state
            history.append({"role": "assistant", "content": text})
            history.append({"role": "tool", "content": step.observation, "tool_call_id": str(turn)})
    return AgentResult(0.0, metadata={"turns": max_turns})
