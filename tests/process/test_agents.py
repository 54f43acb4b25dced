"""Rollouts of agents with a scripted engine: rows, failures, bounds and rewards."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from slime_like.config import RunConfig
from slime_like.data.prompts import Prompt
from slime_like.errors import AgentFailure, EngineError
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.interfaces import ConversationTask, Generation, GenerationRequest, SamplingParams
from slime_like.orchestration.rollout.agents import AgentRollouts
from slime_like.orchestration.rollout.requests import to_group
from slime_like.orchestration.rollout.scoring import Scorer
from slime_like.sandbox.rewards.pool import RewardPool
from slime_like.system.processes import is_alive
from tests.process.conftest import wait_until
from tests.support.rejections import Rejects

AGENT = '''
import asyncio, json, os, subprocess, sys, threading, time, urllib.request
from pathlib import Path
from slime_like.interfaces import AgentResult

def call(task, *history, **settings):
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}, *history], **settings}).encode()
    request = urllib.request.Request(f"{task.base_url}/v1/chat/completions", body, {"x-api-key": task.key})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

async def solve(task, reward=1.0):
    """Obeys the model."""
    said = call(task, temperature=0.1)
    word = said["content"]
    if word == "hang":
        time.sleep(1000)
    if word == "die":
        os._exit(3)
    if word == "raise":
        raise LookupError("no such thing")
    if word == "odd":
        return "odd"
    if word == "nan":
        return AgentResult(float("nan"))
    if word == "child":
        Path(task.fields["pid"]).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        time.sleep(1000)
    if word == "more":
        call(task, said, {"role": "user", "content": "more"})
    if word == "fork":
        await asyncio.gather(*(asyncio.to_thread(call, task, {"role": "user", "content": str(i)}) for i in range(2)))
    if word == "left":  # a thread that still calls when the rollout has ended
        threading.Thread(target=call, args=[task], daemon=True).start()
        time.sleep(0.3)
    return AgentResult(reward, word == "more", {"prompt": task.prompt, "said": word, "messages": list(task.messages)})

async def silent(task):
    return AgentResult(2.0, True)

async def broken(task):
    raise LookupError("never")

def plain(task): ...
'''

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPT = TOKENIZER.encode("<user>hello<assistant>", add_special_tokens=False)
MESSAGES = ({"role": "user", "content": "hello"},)


def made(text: str, version: int = 0) -> Generation:
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
    count = len(tokens)
    return Generation(np.array(tokens), np.full(count, -1.0, np.float32), np.full(count, version, np.int64), "stop")


class Engine:
    """Engine that answers sample i with its script, call by call. "wait" never ends, and "fail" raises."""

    def __init__(self, *scripts: list[str]) -> None:
        self.scripts = [list(script) for script in scripts]
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        self.requests.append(request)
        script = self.scripts[int(request.request_id.split("/")[1])]
        said = script.pop(0) if script else "ok"
        if said == "wait":
            await asyncio.Event().wait()
        if said == "fail":
            raise EngineError("it died")
        return [made(said, version=len(self.requests))]

    async def version(self) -> int:
        return 7


@pytest.fixture
def agents(user_module: Callable[[str, str], Path]) -> Iterator[None]:
    user_module("agents_of_test", AGENT)
    yield


def config(**agent: Any) -> RunConfig:
    settings = {"name": "agents_of_test:solve", "timeout_s": 20.0, "workers": 2, **agent}
    functions = ({"name": "length", "options": {"limit": 99}}, {"name": "agent"})
    sections: dict[str, Any] = {"rollout": {"agent": settings}, "reward": {"functions": functions}}
    return RunConfig(run_dir="run", model={"path": "model"}, **sections)


def request(samples: int, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.7, max_new_tokens=50, stop_token_ids=(EOS,))
    return GenerationRequest("r", PROMPT, sampling, samples, seed=5, task=ConversationTask("bye", fields, MESSAGES))


Scenario = Callable[[AgentRollouts], Awaitable[list[Generation]]]


def rollouts(
    engine: Engine, asked: GenerationRequest | Scenario, logs: tuple[Path, str] | None = None, **agent: Any
) -> list[Generation]:
    async def run() -> list[Generation]:
        made = AgentRollouts(config(**agent), TOKENIZER, engine.generate, engine.version, logs)
        pids: tuple[int, ...] = ()
        try:
            await made.start()
            pids = made._pool.process_ids
            return await (made.run(asked) if isinstance(asked, GenerationRequest) else asked(made))
        finally:
            await made.close()
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    return asyncio.run(asyncio.wait_for(run(), 60))


def failure(generation: Generation) -> str | None:
    assert generation.conversation is not None
    return None if generation.conversation.failure is None else generation.conversation.failure["reason"]


@pytest.mark.usefixtures("agents")
def test_rollouts_become_rows_and_a_failure_ends_only_its_sample() -> None:
    """Rollouts run on two workers. One that hangs or dies affects no other."""
    words = ["more", "fork", "raise", "die", "odd", "nan", "hang", "left", "ok"]
    engine = Engine(*[[word, "wait"] if word == "left" else [word] for word in words])
    found = dict(zip(words, rollouts(engine, request(len(words)), timeout_s=4.0, options={"reward": 0.5}), strict=True))
    reasons = {word: failure(generation) for word, generation in found.items()}
    assert reasons == {
        "more": None, "fork": None, "raise": "error", "die": "crash", "odd": "error", "nan": "error",
        "hang": "timeout", "left": None, "ok": None,
    }  # fmt: skip
    more, fork, left = found["more"], found["fork"], found["left"]
    assert more.conversation is not None and fork.conversation is not None
    assert more.segments == () and len(more.conversation.turns) == 2
    assert TOKENIZER.decode(more.token_ids) == "more<eos><user>more<assistant>ok<eos>"
    assert (more.conversation.reward, more.conversation.success) == (0.5, True)
    (told,) = more.conversation.metadata
    assert told["endpoint"] == {"calls": 2, "rows": 1, "ignored": {"temperature": "0.1"}}
    assert (told["prompt"], told["said"]) == ("<user>hello<assistant>", "more")
    assert told["messages"] == [*MESSAGES]
    assert len(fork.segments) == 3 and fork.segments[-1].token_ids.tolist() == fork.token_ids.tolist()
    assert all(segment.loss_mask.all() for segment in fork.segments)
    assert TOKENIZER.decode(left.token_ids) == "left<eos>"
    assert {(asked.sampling.temperature, asked.sampling.max_new_tokens) for asked in engine.requests} == {(0.7, 50)}
    seeds = {asked.request_id: asked.seed for asked in engine.requests}
    expected = [int(np.random.SeedSequence([5, 0, turn]).generate_state(1)[0]) for turn in (0, 1)]
    assert [seeds["r/0/0"], seeds["r/0/1"]] == expected


@pytest.mark.usefixtures("agents")
def test_agents_rewards_are_a_column_that_rows_of_a_rollout_share() -> None:
    engine = Engine(["more"], ["fork"], ["raise"])
    generations = rollouts(engine, request(3))
    group = to_group(Prompt(tuple(PROMPT), "bye", 7, 0, 0), generations, 1.0)
    settings = config()
    with RewardPool(settings.reward) as pool:
        scorer = Scorer(settings, pool, TOKENIZER)
        (rewarded,) = scorer.rewards([group])
        scored = scorer.scored([rewarded], step=1)
    assert rewarded.rewards[:, 1].tolist() == [1.0, 1.0, 0.0]
    assert [row.sequence_id for row in scored] == ["7-0", "7-1.0", "7-1.1", "7-1.2", "7-2"]
    advantages = [float(row.advantages.unique()) for row in scored]
    assert advantages[1] == advantages[2] == advantages[3] > advantages[4]


@pytest.mark.usefixtures("agents")
def test_an_agent_without_calls_has_a_reward_and_no_loss(rejects: Rejects) -> None:
    (generation,) = rollouts(Engine([]), request(1), name="agents_of_test:silent")
    assert generation.conversation is not None and generation.conversation.turns == ()
    assert (generation.conversation.reward, generation.token_ids.tolist()) == (2.0, [EOS])
    assert generation.weight_versions.tolist() == [7]
    (row,) = to_group(Prompt(tuple(PROMPT), "bye", 7, 0, 0), [generation], 1.0).trajectories
    assert not row.loss_mask.any()
    with rejects(AgentFailure, "agent-silent"):
        rollouts(Engine([]), request(8), name="agents_of_test:silent")


@pytest.mark.usefixtures("agents")
def test_a_killed_worker_ends_only_its_rollout_and_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    async def scenario(made: AgentRollouts) -> list[Generation]:
        running = asyncio.ensure_future(made.run(request(2, pid=str(pid_file))))
        await asyncio.to_thread(wait_until, lambda: pid_file.exists() and pid_file.read_text() != "")
        child = psutil.Process(int(pid_file.read_text()))
        os.kill(child.ppid(), signal.SIGKILL)
        found = await running
        await asyncio.to_thread(wait_until, lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        return found

    killed, other = rollouts(Engine(["child"], ["more"]), scenario)
    assert (failure(killed), failure(other)) == ("crash", None)


@pytest.mark.usefixtures("agents")
def test_a_canceled_request_ends_its_agents_and_their_calls() -> None:
    engine = Engine(["more", "wait"], ["wait"])

    async def scenario(made: AgentRollouts) -> list[Generation]:
        running = asyncio.ensure_future(made.run(request(2)))
        while len(engine.requests) < 3:
            await asyncio.sleep(0.01)
        busy = made._pool.process_ids
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.to_thread(wait_until, lambda: not any(map(is_alive, busy)))
        return []

    rollouts(engine, scenario)


@pytest.mark.usefixtures("agents")
def test_an_engine_error_ends_the_request() -> None:
    with pytest.raises(EngineError, match="it died"):
        rollouts(Engine(["more", "fail"], ["wait"]), request(2))


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize(
    "agent", [{"name": "agents_of_test:absent"}, {"name": "agents_of_test:plain"}, {"options": {"wings": 2}}]
)
def test_an_unusable_agent_is_rejected_at_the_start(agent: dict[str, Any], rejects: Rejects) -> None:
    with rejects(AgentFailure, "code-unusable"):
        rollouts(Engine([]), request(1), **agent)


@pytest.mark.usefixtures("agents")
def test_an_agent_that_always_fails_ends_the_run(rejects: Rejects) -> None:
    with rejects(AgentFailure, "agent-fails"):
        rollouts(Engine(), request(8), name="agents_of_test:broken", workers=1)


COMMAND = """
import json, os, subprocess, sys, urllib.request
url, key, task_file, result_file = sys.argv[1:]
task = json.load(open(task_file))
assert os.environ["OPENAI_BASE_URL"] == url + "/v1" and os.environ["ANTHROPIC_API_KEY"] == key == task["key"]
body = json.dumps({"messages": task["messages"], "max_tokens": 5}).encode()
answer = json.load(urllib.request.urlopen(urllib.request.Request(url + "/v1/messages", body, {"x-api-key": key})))
word = answer["content"][0]["text"]
print("the program heard", word, flush=True)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open(sys.argv[0] + ".pids", "a") as pids:
    pids.write(f"{child.pid}\\n")
if word == "fail":
    sys.exit("went wrong")
if word != "nothing":
    result = {"reward": 0.5, "success": True, "metadata": {"said": word}}
    json.dump(result if word == "ok" else [], open(result_file, "w"))
"""


def test_a_command_is_an_agent(tmp_path: Path) -> None:
    """A program gets its task in a file and writes its result to another. The worker's log has its output."""
    (tmp_path / "agent.py").write_text(COMMAND)
    command = ["python", str(tmp_path / "agent.py"), "{base_url}", "{key}", "{task_file}", "{result_file}"]

    class Saying(Engine):
        async def generate(self, request: GenerationRequest) -> list[Generation]:
            return [made(("ok", "fail", "nothing", "odd")[int(request.request_id.split("/")[1])])]

    (tmp_path / "logs").mkdir()
    good, *bad = rollouts(Saying(), request(4), (tmp_path / "logs", "agent"), name=None, command=command)
    assert good.conversation is not None and good.conversation.failure is None
    assert (good.conversation.reward, good.conversation.success) == (0.5, True)
    assert [failure(generation) for generation in bad] == ["error"] * 3
    details = [g.conversation.failure["detail"] for g in bad if g.conversation and g.conversation.failure]
    assert details[0] == "CommandFailed: exit code 1: went wrong"
    assert details[1] == "CommandFailed: it wrote no result file"
    printed = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert all(f"the program heard {word}" in printed for word in ("ok", "fail", "nothing", "odd"))
    left = list(map(int, (tmp_path / "agent.py.pids").read_text().split()))
    assert len(left) == 4 and not any(map(is_alive, left))


def test_the_example_program_solves_a_task() -> None:
    program = Path(__file__).parents[2] / "docs" / "examples" / "agents" / "calculator_program.py"
    command = [sys.executable, str(program), "{task_file}", "{result_file}"]
    asked = GenerationRequest(
        "r", PROMPT, SamplingParams(max_new_tokens=50), 1, task=ConversationTask("408", {}, MESSAGES)
    )
    engine = Engine(["[12*34]", "408"])
    (generation,) = rollouts(engine, asked, name=None, command=command, workers=1)
    assert generation.conversation is not None and generation.conversation.failure is None
    assert (generation.conversation.reward, generation.conversation.success) == (1.0, True)
    assert TOKENIZER.decode(generation.token_ids) == "[12*34]<eos><user>408<assistant>408<eos>"
