"""Measure what a long call of an agent costs others, and a session's memory: ``python -m benchmarks.agent_load``.

The endpoint runs in a process with a model that answers at once. Its tokenizer has a token for each byte, so a text has
as many tokens as it can have. One session sends calls of 6 MB while another one makes small calls. Then each of 20
sessions makes 40 calls up to 130,000 tokens.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import psutil

from benchmarks.report import heading, met, table
from slime_like.agents.rendering import ChatFormat
from slime_like.agents.responses import response_form
from slime_like.agents.server import AgentServer
from slime_like.agents.session import SampleCall, Session, SessionLimits
from slime_like.interfaces import Generation
from tests.unit.agents.histories import PLAIN, tokenizer

DELAY_GOAL_S, MEMORY_GOAL_MB = 0.2, 3.0
_SESSIONS, _CALLS, _TOKENS, _CONTEXT, _SIZE = 20, 40, 130_000, 131_072, 6_000_000
_USER = {"role": "user", "content": "hi"}
_LONG: dict[str, Callable[[], list[Any]]] = {
    "one letter": lambda: [{**_USER, "content": "x" * _SIZE}],
    "words": lambda: [{**_USER, "content": "hello to world \n" * (_SIZE // 16)}],
    "1,000 messages": lambda: [{**_USER, "content": "x" * (_SIZE // 1000)}] * 1000,
}


async def serve() -> None:
    """Serve sessions until standard input ends, after one line with their address and keys."""
    made = tokenizer(PLAIN)
    reply = [*made.encode("ok so now I will look at it", add_special_tokens=False), made.eos_token_id]

    async def model(_: SampleCall) -> Generation:
        count = len(reply)
        return Generation(np.array(reply), np.full(count, -1.0, np.float32), np.zeros(count, np.int64), "stop")

    server, chat, form = AgentServer(), ChatFormat(made), response_form(made)
    await server.start()
    sessions = [Session(chat, model, form, SessionLimits(10**6, 100, _CONTEXT)) for _ in range(_SESSIONS)]
    for session in sessions:
        server.open_session(session)
    print(json.dumps([server.base_url, [session.key for session in sessions]]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


class Client:
    """Calls of the served sessions."""

    def __init__(self, http: aiohttp.ClientSession, url: str, keys: list[str], process: psutil.Process) -> None:
        self._http, self._url, self._keys, self.process = http, f"{url}/v1/chat/completions", keys, process

    async def call(self, session: int, messages: list[Any]) -> tuple[int, Any]:
        headers = {"x-api-key": self._keys[session]}
        async with self._http.post(self._url, json={"messages": messages}, headers=headers) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def served() -> AsyncIterator[Client]:
    command = [sys.executable, "-m", "benchmarks.agent_load", "serve"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    url, keys = json.loads(await process.stdout.readline())
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as http:
        yield Client(http, url, keys, psutil.Process(process.pid))
    process.stdin.close()
    await process.wait()


async def delay(client: Client, messages: list[Any]) -> tuple[float, float]:
    """Return the longest wait of another session during a long call, and how long that call took, in seconds."""
    start, waits = time.perf_counter(), list[float]()
    long = asyncio.ensure_future(client.call(0, messages))
    await asyncio.sleep(0.01)
    while not long.done():
        before = time.perf_counter()
        await client.call(1, [_USER])
        waits.append(time.perf_counter() - before)
        await asyncio.sleep(0.02)
    status, _ = await long
    assert status == 400
    return max(waits), time.perf_counter() - start


async def memory(client: Client) -> tuple[float, float]:
    """Return a session's memory in MB, and the processor time of a call in seconds."""
    draw, before, began = random.Random(0), client.process.memory_info().rss, sum(client.process.cpu_times()[:2])
    for session in range(_SESSIONS):
        history: list[Any] = [_USER]
        for _ in range(_CALLS):
            _, answer = await client.call(session, history)
            said = "".join(draw.choices("abcdefgh ij\nklmn", k=_TOKENS // _CALLS - 40))
            history += [answer["choices"][0]["message"], {"role": "tool", "content": said}]
    used, took = client.process.memory_info().rss - before, sum(client.process.cpu_times()[:2]) - began
    return used / _SESSIONS / 2**20, took / _SESSIONS / _CALLS


async def main() -> None:
    head = heading()
    async with served() as client:
        for session in range(2):
            await client.call(session, [_USER])
        rows = {name: await delay(client, messages()) for name, messages in _LONG.items()}
    async with served() as client:
        await client.call(0, [_USER])
        grown, took = await memory(client)
    waits = [(name, f"{seconds:.2f}", f"{wait:.3f} s") for name, (wait, seconds) in rows.items()]
    print(f"{head}\n\n{table('call of 6 MB | seconds | longest wait of another session', waits)}")
    longest = max(wait for wait, _ in rows.values())
    print(f"\nLongest wait: {longest:.3f} s (goal below {DELAY_GOAL_S} s: {met(longest < DELAY_GOAL_S)}).")
    per_call = f"{1000 * took:.1f} ms of processor time a call"
    print(f"{_SESSIONS} sessions of {_CALLS} calls up to {_TOKENS:,} tokens: {per_call}, {grown:.2f} MB a session")
    print(f"(goal below {MEMORY_GOAL_MB} MB: {met(grown < MEMORY_GOAL_MB)}).")


if __name__ == "__main__":
    asyncio.run(serve() if sys.argv[1:] == ["serve"] else main())
