"""A driver that is killed amid agents, and resumed, gives the same result."""

import json
from pathlib import Path

import pytest
import torch

from slime_like.data.dump import dump_path, load_trajectories
from slime_like.data.ledger import audit_run
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.faults.quick import quick
from tests.support.processes import Command, succeed

GROUPS, SAMPLES = 8, 4
AGENT = """
import asyncio, json, urllib.request
from slime_like.interfaces import AgentResult

def ask(task, history):
    body = json.dumps({"messages": history}).encode()
    headers = {"x-api-key": task.key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]

async def solve(task):
    history = [dict(message) for message in task.messages]
    for _ in range(2):
        choice = await asyncio.to_thread(ask, task, history)
        if choice["finish_reason"] == "length":
            break
        history += [choice["message"], {"role": "tool", "content": "go on"}]
    text = choice["message"]["content"] or ""
    return AgentResult(float(sum(map(ord, text)) % 7))
"""


def _flags(tiny: Tiny, run_dir: Path, agent: Path, steps: int, *more: str) -> list[str]:
    return quick(
        tiny, run_dir, "--steps", str(steps), "--checkpoint.every", "2", "--checkpoint.export_hf", "false",
        "--rollout.agent.name", f"{agent}:solve", "--rollout.agent.workers", "2", "--rollout.max_model_len", "96",
        "--reward.functions", "[{name: agent}]", "--rollout.prompts_per_step", str(GROUPS),
        "--rollout.samples_per_prompt", str(SAMPLES), *more,
    )  # fmt: skip


@pytest.mark.acceptance
def test_a_driver_killed_amid_agents_resumes_to_the_same_rollouts(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(AGENT)
    kept, steps = {}, 4
    for name in ("whole", "killed"):
        dump = tmp_path / f"{name}-rollouts"
        flags = _flags(tiny, tmp_path / name, tmp_path / "mine.py", steps, "--debug.save_rollouts", str(dump))
        if name == "killed":
            with Command(flags, tmp_path / "first") as command:
                command.wait_for("checkpoint of step 2", timeout_s=120)
                command.kill()
                finished = command.finish(timeout_s=60)
            assert finished.code == -9 and finished.left_behind == []
        succeed(flags, tmp_path / f"{name}-log", timeout_s=200)
        kept[name] = [row for step in range(1, steps + 1) for row in load_trajectories(dump_path(dump, step))]
        assert audit_run(tmp_path / name).trained == steps * GROUPS
    assert len(kept["whole"]) >= steps * GROUPS * SAMPLES
    for one, other in zip(kept["whole"], kept["killed"], strict=True):
        assert (one.sequence_id, one.rollout_id) == (other.sequence_id, other.rollout_id)
        for field in ("prompt_tokens", "response_tokens", "loss_mask", "rewards", "advantages"):
            assert torch.equal(getattr(one, field), getattr(other, field)), (one.sequence_id, field)
    losses = [[row["train_actor_training/loss"] for row in steps_of(tmp_path / name)] for name in kept]
    assert losses[0] == losses[1] and json.dumps(losses[0]) != "[]"
