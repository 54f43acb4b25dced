"""Play two turns against the environment, in a worker process like a run's."""

import asyncio

from slime_like.config.rollout import EnvironmentConfig
from slime_like.interfaces import Task
from slime_like.sandbox.single_items import EnvironmentPool


async def play() -> None:
    pool = EnvironmentPool(EnvironmentConfig(name="my_environment:HigherLower", options={"penalty": 0.05}))
    await pool.start()
    task = Task("Guess!", "42", {"limit": 50})
    first = await pool.step(task, None, "what?", first=True)
    last = await pool.step(task, first.state, "42", first=False)
    await pool.close()
    assert (first.observation, first.reward) == ("Say a number from 0 to 50.", -0.05)
    assert (last.done, last.success, last.reward) == (True, True, 1.0)


asyncio.run(play())
