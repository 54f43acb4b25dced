"""An environment of verifiers: products, and a calculator that the model may use before it answers."""

import re
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Calculator", "Chat", "Products"]


class ProductData(vf.TaskData):
    answer: str


class Product(vf.Task[ProductData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Products(vf.Taskset[Product]):
    def load(self) -> Iterator[Product]:
        for a in range(10, 50):
            for b in range(10, 50):
                yield Product(ProductData(prompt=f"{a}*{b}=", answer=str(a * b)), self.config.task)


class Chat(vf.Harness[vf.HarnessConfig]):
    """One call of the model per turn, without tools and in this process."""

    SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str,
        mcp_urls: dict[str, str], data: vf.TaskData,
    ) -> vf.ProgramResult:  # fmt: skip
        said = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt or []
        history: Any = [{"role": message.role, "content": message.content} for message in said]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=history)
        return vf.ProgramResult(0, "", "")


class CalculatorConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class Calculator(vf.Env[CalculatorConfig]):
    """The user answers each call such as ``[12*34]`` with its value. A turn without one is the answer."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and (call := re.search(r"\[(\d+)\*(\d+)\]", said.last_reply)):
                said = await talk.turn(str(int(call[1]) * int(call[2])))
