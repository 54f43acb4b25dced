"""Rollouts of agents with a scripted engine: rows, failures, bounds and rewards."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from slime_like.config import RunConfig
from slime_like.data.prompts import Prompt
from slime_like.errors import AgentFailure, EngineError
from slime_like.interfaces import Generation, GenerationRequest, PromptInput
from slime_like.orchestration.rollout.agents import AgentRollouts
from slime_like.orchestration.rollout.requests import to_group
from slime_like.system.processes import is_alive
from tests.process import scripted
from tests.process.conftest import wait_until
from tests.process.scripted import EOS, MESSAGES, PROMPT, TOKENIZER, Engine, failure, request, rewarded, talk_of
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
    if word == "own":
        call(task, said, {"role": "user", "content": "on"}, chat_template_kwargs={"b": 1}, stop=["zz"])
    if word == "fork":
        await asyncio.gather(*(asyncio.to_thread(call, task, {"role": "user", "content": str(i)}) for i in range(2)))
    if word == "daemon":
        subprocess.run(f"setsid -f sh -c 'echo $$ > {task.fields['pid']}; exec sleep 1000'", shell=True, check=True)
        while not Path(task.fields["pid"]).exists():
            time.sleep(0.01)
    if word == "title":
        call(task, {"role": "user", "content": "name it"}, model="small")
    if word == "left":  # a thread that still calls when the rollout has ended
        threading.Thread(target=call, args=[task], daemon=True).start()
        time.sleep(0.3)
    return AgentResult(reward, word == "more", {"prompt": task.prompt, "said": word, "messages": list(task.messages)})

async def paid(task):
    said = call(task)
    call(task, {"role": "user", "content": "side"})
    call(task, said, {"role": "user", "content": "more"})
    return AgentResult(3.5, call_rewards=[1.0, 2.0], answer="fourteen words")

async def unpaid(task):
    call(task)
    return AgentResult(1.0, call_rewards=["2"])

async def silent(task):
    return AgentResult(2.0, True)

async def broken(task):
    raise LookupError("never")

def plain(task): ...

if "SERVER" in os.environ:  # a process of the module that starts a child when the first rollout asks it to
    wait = "until [ -e $SERVER ]; do sleep 0.01; done; sleep 1000 & echo $! > $SERVER.pid; wait"
    server = subprocess.Popen(["sh", "-c", wait], start_new_session=True)

async def served(task):
    call(task)
    Path(os.environ["SERVER"]).touch()
    child = Path(os.environ["SERVER"] + ".pid")
    while not (child.exists() and child.read_text()):
        time.sleep(0.01)
    return AgentResult(1.0, metadata={"pids": [server.pid, int(child.read_text())]})
'''


@pytest.fixture(autouse=True)
def _agents(user_module: Callable[[str, str], Path]) -> None:
    user_module("agents_of_test", AGENT)


def config(data: Any = None, **agent: Any) -> RunConfig:
    settings = {"name": "agents_of_test:solve", "timeout_s": 20.0, "workers": 2, **agent}
    functions = ({"name": "length", "options": {"limit": 99}}, {"name": "agent"})
    sections: dict[str, Any] = {"rollout": {"agent": settings}, "reward": {"functions": functions}, "data": data or {}}
    return RunConfig(run_dir="run", model={"path": "model"}, **sections)


def rollouts(
    engine: Engine,
    asked: GenerationRequest | scripted.Scenario,
    logs: tuple[Path, str] | None = None,
    settings: RunConfig | None = None,
    **agent: Any,
) -> list[Generation]:
    found = settings or config(**agent)
    return scripted.run(lambda: AgentRollouts(found, TOKENIZER, engine.generate, engine.version, logs), asked)


def test_rollouts_become_rows_and_a_failure_ends_only_its_sample() -> None:
    """Rollouts run on two workers. One that hangs or dies affects no other. Calls to other models are no rows."""
    words = ["more", "fork", "raise", "die", "odd", "nan", "hang", "left", "ok", "title"]
    engine = Engine(*[[word, "wait"] if word == "left" else [word] for word in words])
    settings = config(timeout_s=4.0, options={"reward": 0.5}, untrained=("other_models",))
    found = dict(zip(words, rollouts(engine, request(len(words)), settings=settings), strict=True))
    reasons = {word: failure(generation) for word, generation in found.items()}
    assert reasons == {
        "more": None, "fork": None, "raise": "error", "die": "crash", "odd": "error", "nan": "error",
        "hang": "timeout", "left": None, "ok": None, "title": None,
    }  # fmt: skip
    more, fork, left, title = (found[word] for word in ("more", "fork", "left", "title"))
    talk = talk_of(more)
    assert more.segments == () and len(talk.turns) == 2
    assert TOKENIZER.decode(more.token_ids) == "more<eos><user>more<assistant>ok<eos>"
    assert (talk.reward, talk.success) == (0.5, True)
    (told,) = talk.metadata
    assert told["endpoint"] == {"calls": 2, "rows": 1, "ignored": {"temperature": "0.1"}}
    assert (told["prompt"], told["said"]) == ("<user>hello<assistant>", "more")
    assert told["messages"] == [*MESSAGES]
    assert len(fork.segments) == 3 and fork.segments[-1].token_ids.tolist() == fork.token_ids.tolist()
    assert all(segment.loss_mask.all() for segment in fork.segments)
    assert TOKENIZER.decode(left.token_ids) == "left<eos>"
    assert title.segments == () and TOKENIZER.decode(title.token_ids) == "title<eos>"
    endpoint = talk_of(title).metadata[0]["endpoint"]
    assert (endpoint["calls"], endpoint["rows"]) == (2, 1)
    assert {(asked.sampling.temperature, asked.sampling.max_new_tokens) for asked in engine.requests} == {(0.7, 50)}
    seeds = {asked.request_id: asked.seed for asked in engine.requests}
    expected = [int(np.random.SeedSequence([5, 0, turn]).generate_state(1)[0]) for turn in (0, 1)]
    assert [seeds["r/0/0"], seeds["r/0/1"]] == expected
    # The agent's rewards are a column that the rows of a rollout share.
    group, scored = rewarded(config(), [more, fork, found["raise"]])
    assert group.rewards[:, 1].tolist() == [0.5, 0.5]
    assert [row.sequence_id for row in scored] == ["7-0", "7-1.0", "7-1.1", "7-1.2"]
    assert [(row.sequence_id, row.reward_metadata["reason"]) for row in group.failed] == [("7-2", "error")]
    advantages = [float(row.advantages.unique()) for row in scored]
    assert advantages[1] == advantages[2] == advantages[3]


def test_fields_of_tokens_are_kept_and_fields_of_the_prompt_rejected(rejects: Rejects) -> None:
    """Prompts of an agent's calls come from its messages, so they would lack fields of the row's prompt."""

    class Recording(Engine):
        async def generate(self, request: GenerationRequest) -> list[Generation]:
            (found,) = await super().generate(request)
            before = len(request.prompt.token_ids)
            return [replace(found, fields={"layers": np.arange(before + len(found.token_ids) - 1)})]

    (generation,) = rollouts(Recording(["more"]), request(1))
    assert generation.segments == ()
    assert generation.fields["layers"].tolist() == [*range(len(PROMPT) + len(generation.token_ids) - 1)]
    asked = replace(request(1), prompt=PromptInput(PROMPT, {"depth": np.arange(len(PROMPT))}))
    with rejects(AgentFailure, "bad-request") as caught:
        rollouts(Engine(["ok"]), asked)
    assert "depth" in str(caught.value)


def test_a_call_may_give_template_variables_and_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer has several chat templates."""
    monkeypatch.setattr(TOKENIZER, "chat_template", {"default": TOKENIZER.chat_template, "tool_use": "{{ tools }}"})
    engine = Engine(["own"])
    (found,) = rollouts(engine, request(1), data={"chat_template_kwargs": {"a": 2}})
    assert talk_of(found).metadata[0]["endpoint"]["ignored"] == {"temperature": "0.1"}
    assert [asked.sampling.stop for asked in engine.requests] == [(), ("zz",)]


def test_calls_have_rewards_in_the_order_of_answers() -> None:
    """The subagent's call comes between two calls of the main row, and its row before it."""
    found = rollouts(Engine(["A"]), request(1), name="agents_of_test:paid")[0]
    trained = [TOKENIZER.decode(segment.token_ids[segment.loss_mask]) for segment in found.segments]
    assert trained == ["ok<eos>", "A<eos>ok<eos>"]
    talk = talk_of(found)
    assert (talk.reward, talk.calls, talk.rewards) == (3.5, (1, 0, 2), (2.0, 1.0, 0.0))
    assert talk.answer == "fourteen words"
    (refused,) = rollouts(Engine(["A"]), request(1), name="agents_of_test:unpaid")
    assert failure(refused) == "error"


def test_an_agent_without_calls_has_a_reward_and_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its routes are unknown, if others have some."""
    monkeypatch.setattr("slime_like.orchestration.rollout.agents.routes_per_token", lambda *_: (2, 4))
    (generation,) = rollouts(Engine([]), request(1), name="agents_of_test:silent")
    assert (talk_of(generation).turns, talk_of(generation).reward) == ((), 2.0)
    assert generation.token_ids.tolist() == [EOS]
    assert generation.weight_versions.tolist() == [7]
    (row,) = to_group(Prompt(PromptInput(PROMPT), "bye", 7, 0, 0), [generation], 1.0).trajectories
    assert not row.loss_mask.any()
    assert row.routes is not None and torch.equal(row.routes, torch.full((len(PROMPT), 2, 4), -1, dtype=torch.int16))


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


def test_a_rollout_leaves_no_daemons(tmp_path: Path) -> None:
    """They are ended before the next rollout of the worker."""
    pid_file = tmp_path / "pid"

    async def scenario(made: AgentRollouts) -> list[Generation]:
        found = await made.run(request(1, pid=str(pid_file)))
        assert not is_alive(int(pid_file.read_text()))
        return found

    (generation,) = rollouts(Engine(["daemon"]), scenario, workers=1)
    assert failure(generation) is None


def test_a_process_of_the_module_stays_until_the_worker_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER", str(tmp_path / "asked"))
    found = rollouts(Engine([], []), request(2), name="agents_of_test:served", workers=1)
    assert [failure(generation) for generation in found] == [None, None]
    first, second = (talk_of(generation).metadata[0]["pids"] for generation in found)
    assert first == second and len(first) == 2 and not any(map(is_alive, first))


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


@pytest.mark.parametrize(("host", "expected"), [(None, "127.0.0.1"), ("node", "127.0.0.2"), ("127.0.0.3", "127.0.0.3")])
def test_the_endpoint_listens_on_one_address(host: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, loopback. A Linux host has all of 127.0.0.0/8."""
    monkeypatch.setattr("slime_like.orchestration.rollout.agents.node_address", lambda: "127.0.0.2")

    def listening() -> set[tuple[str, int]]:
        """Ports of this process; earlier tests may have left some open."""
        return {tuple(c.laddr) for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}

    before, during = listening(), set()

    async def scenario(made: AgentRollouts) -> list[Generation]:
        during.update(listening())
        assert made._server.base_url.startswith(f"http://{expected}:")
        return await made.run(request(1))

    (generation,) = rollouts(Engine(["more"]), scenario, **({"host": host} if host else {}))
    assert failure(generation) is None and {ip for ip, _ in during - before} == {expected}


def test_an_engine_error_ends_the_request() -> None:
    with pytest.raises(EngineError, match="it died"):
        rollouts(Engine(["more", "fail"], ["wait"]), request(2))


@pytest.mark.parametrize(
    ("agent", "code"),
    [
        ({"name": "agents_of_test:absent"}, "code-unusable"),
        ({"name": "agents_of_test:plain"}, "code-unusable"),
        ({"options": {"wings": 2}}, "code-unusable"),
        ({"host": "198.51.100.7"}, "agent-host"),  # for documentation; no host has it
        ({"name": "agents_of_test:broken", "workers": 1}, "agent-fails"),
        ({"name": "agents_of_test:silent"}, "agent-silent"),
    ],
)
def test_an_agent_that_is_unusable_or_always_fails_ends_the_run(
    agent: dict[str, Any], code: str, rejects: Rejects
) -> None:
    with rejects(AgentFailure, code):
        rollouts(Engine(*[[]] * 8), request(8), **agent)
