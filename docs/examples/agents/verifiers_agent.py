"""A program that runs an environment of verifiers: its tasks, rollout loop, harness and rewards.

It needs a separate Python, because verifiers 0.4 requires other versions of openai and mcp than the engines::

    python -m venv PYTHON && PYTHON/bin/pip install verifiers==0.4.0
    PYTHON/bin/python docs/examples/agents/verifiers_agent.py ENVIRONMENT > rows.jsonl

Then ``rollout.agent.command: [PYTHON/bin/python, docs/examples/agents/verifiers_agent.py, ENVIRONMENT, "{task_file}",
"{result_file}"]``. A row's answer is the index of the environment's task.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf


def environment(name: str) -> vf.Env:
    """Load an installed environment, or a module next to this file. Its program runs on this machine."""
    runtime = {"agent": {"runtime": {"type": "subprocess"}}}
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": name}, **runtime}))


async def solve(name: str, task: dict[str, Any]) -> dict[str, Any]:
    """Play one episode through the run's endpoint. The result is an ``AgentResult``'s fields."""
    env = environment(name)
    (chosen,) = env.taskset.include(idx=[int(task["answer"])])
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(chosen, vf.ModelContext(task["model"], client))
    if not episode.ok:
        sys.exit("; ".join(error.message for part in (episode, *episode.traces) for error in part.errors))
    trace = episode.traces[0]
    rewards = {key: reward.value for key, reward in trace.rewards.items() if reward is not None}
    return {"reward": trace.reward, "metadata": {"turns": trace.num_turns, "rewards": rewards}}


if __name__ == "__main__":
    if len(sys.argv) == 2:
        for task in environment(sys.argv[1]).taskset:
            print(json.dumps({"prompt": task.data.prompt_text, "answer": str(task.data.idx)}))
    else:
        ENVIRONMENT, task_file, result_file = sys.argv[1:]
        result = asyncio.run(solve(ENVIRONMENT, json.loads(Path(task_file).read_text())))
        Path(result_file).write_text(json.dumps(result))
