"""An agent of Hugging Face's smolagents, unchanged: it writes Python, reads what that prints, and answers."""

import asyncio

from smolagents import CodeAgent, LogLevel, OpenAIModel

from slime_like.interfaces import AgentResult, AgentTask


async def solve(task: AgentTask, *, max_steps: int = 4, system_prompt: str | None = None) -> AgentResult:
    """Have a ``CodeAgent`` without tools answer the task's last message; the row's answer, as written, has reward 1.

    Args:
        max_steps: turns before the harness asks for a final answer.
        system_prompt: instead of the harness's, which has 2,500 tokens.
    """
    return await asyncio.to_thread(_solve, task, max_steps, system_prompt)


def _solve(task: AgentTask, max_steps: int, system_prompt: str | None) -> AgentResult:
    model = OpenAIModel(task.model, api_base=f"{task.base_url}/v1", api_key=task.key)
    agent = CodeAgent(tools=[], model=model, max_steps=max_steps, verbosity_level=LogLevel.OFF)
    if system_prompt is not None:
        agent.prompt_templates["system_prompt"] = system_prompt
    answer = str(agent.run(task.messages[-1]["content"]))
    is_right = answer.strip() == task.answer.strip()
    return AgentResult(float(is_right), is_right, {"answer": answer, "steps": agent.step_number})
