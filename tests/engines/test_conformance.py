"""The claims of ``slime-like verify engine`` and more, on every engine, compared with transformers' forward pass.

One engine per kind is started for the module, so tests leave it idle and not paused. Only the last test kills it.
"""

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

from slime_like.errors import EngineError
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.interfaces import ConversationTask, EngineHealth, Generation, GenerationRequest
from slime_like.orchestration.rollout import engine_actor
from slime_like.verification.engine.claims import CLAIMS, Claim, truncated_sampling
from slime_like.verification.engine.subject import ReferenceModel, Subject
from slime_like.weights.transport import TransportSettings
from tests.engines.conftest import ENGINES, EOS_IDS
from tests.engines.harness import PRECISION, EngineUnderTest, check_gaps, check_logprobs, run_config, same_ids
from tests.support.acceptance import some_in_acceptance
from tests.support.rejections import Rejects

TOKENIZER = byte_tokenizer()
COLD = 0.05
"""Without EOS and at this temperature, responses end at their length limit."""


# -------------------------------------------------------------------------------------------------------------- claims
@pytest.fixture(scope="module")
def subject(engine: EngineUnderTest, models: list[Path], prompts: list[list[int]]) -> Subject:
    return Subject(engine, ReferenceModel(models[0], PRECISION), {}, prompts[:4])


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_claim(claim: Claim, engine: EngineUnderTest, subject: Subject) -> None:
    """Check every claim. The claims about supports hold for each of these engines."""
    subject.reference.use(engine.reference.weights)
    subject.others = engine.references[1 - engine.current].weights
    try:
        gap = claim(subject)
    finally:
        engine.run(engine.load(engine.current))
    assert claim is not truncated_sampling or gap is not None


# ------------------------------------------------------------------------------------------------------------ sampling
def test_samples_follow_the_distribution(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    """Pearson's chi-square over the 20 likeliest tokens and the rest. 45.3 is its 99.9 % quantile at 20 degrees."""
    count, prompt, temperature = 1500, prompts[1], 0.7
    generations = engine.generate(prompt, temperature=temperature, max_new_tokens=1, num_samples=count, seed=5)
    expected = (engine.reference.logits(prompt)[0] / temperature).softmax(-1).double()
    top = expected.topk(20).indices
    observed = torch.bincount(torch.tensor([int(g.token_ids[0]) for g in generations]), minlength=len(expected))
    cells = torch.cat((expected[top], 1 - expected[top].sum()[None])) * count
    seen = torch.cat((observed[top], (count - observed[top].sum())[None])).double()
    assert ((seen - cells) ** 2 / cells).sum() < 45.3


def test_stop_ids_add_to_eos_unless_it_is_ignored(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    stop = tuple(range(100, 130))
    options: dict[str, Any] = {"max_new_tokens": 300, "num_samples": 16, "seed": 1, "stop_token_ids": stop}
    generations = engine.generate(prompts[2], **options)
    for generation in generations:
        assert generation.finish_reason == "stop"
        check_logprobs(engine.reference, prompts[2], generation)
    found = [generation.token_ids.tolist() for generation in generations]
    only = [g.token_ids.tolist() for g in engine.generate(prompts[2], ignore_eos=True, **options)]
    assert all(ids[-1] in {*stop, *EOS_IDS} and not {*ids[:-1]} & {*stop, *EOS_IDS} for ids in found)
    assert all(ids[-1] in stop for ids in only) and any(set(ids) & set(EOS_IDS) for ids in only)
    assert {ids[-1] in stop for ids in found} == {True, False}


@pytest.mark.parametrize("characters", [1, 3])
def test_a_response_ends_with_the_token_that_completes_a_stop_string(
    engine: EngineUnderTest, prompts: list[list[int]], characters: int
) -> None:
    """Next to requests without one. The string and its ids stay."""
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
    for seed in range(4):
        (free,) = engine.generate(prompts[2], seed=seed, **options)
        texts = [TOKENIZER.decode(free.token_ids[:end]) for end in range(61)]
        stop = next(text[-characters:] for text in texts[20:] if text[-characters:].isascii())
        end = next(end for end, text in enumerate(texts) if stop in text)
        requests = [engine.request(prompts[2], seed=seed, stop=given, **options) for given in (("never so", stop), ())]
        (ended,), (other,) = engine.generate_all(requests)
        assert same_ids(engine.reference, [ended], [replace(free, token_ids=free.token_ids[:end])])
        assert (ended.finish_reason, other.finish_reason) == ("stop", "length")
        check_logprobs(engine.reference, prompts[2], ended)


def test_the_longest_sequence(engine: EngineUnderTest) -> None:
    """A prompt of 100 and a response of 700 tokens fill the engine to its last position."""
    prompt = [7 + i % 90 for i in range(100)]
    (generation,) = engine.generate(prompt, max_new_tokens=700, ignore_eos=True, temperature=COLD)
    assert (generation.finish_reason, len(generation.token_ids)) == ("length", 700)
    check_logprobs(engine.reference, prompt, generation, COLD)


def test_supports_in_one_batch(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    """Requests without truncation, and with few and many tokens, in one batch."""
    cuts: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_k": 60}, {"top_p": 0.5, "top_k": 512}]
    options: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True, "seed": 2}
    together = engine.generate_all([engine.request(prompts[2], **options, **cut) for cut in cuts])
    apart = [engine.generate(prompts[2], **options, **cut)[0] for cut in cuts]
    for cut, (found,), alone in zip(cuts, together, apart, strict=True):
        assert (found.supports is None) == (alone.supports is None) == (not cut)
    for found, alone in same_ids(engine.reference, [found for (found,) in together], apart):
        check_gaps(engine.reference, found.logprobs, alone.logprobs)
        if found.supports is not None and alone.supports is not None and engine.reference.dtype == "float32":
            pairs = zip(found.supports, alone.supports, strict=True)
            assert all(set(one.tolist()) == set(other.tolist()) for one, other in pairs)


def test_many_requests_at_once(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    chosen = [prompts[i % len(prompts)] for i in range(200)]
    limits = [1 + i % 33 for i in range(200)]
    requests = [
        engine.request(prompt, max_new_tokens=limit, num_samples=1 + i % 3, ignore_eos=True, temperature=COLD)
        for i, (prompt, limit) in enumerate(zip(chosen, limits, strict=True))
    ]
    results = engine.generate_all(requests)
    for index, generations in enumerate(results):
        assert len(generations) == 1 + index % 3
        assert all(g.finish_reason == "length" and len(g.token_ids) == limits[index] for g in generations)
    for index in range(0, 200, 9):
        check_logprobs(engine.reference, chosen[index], results[index][-1], COLD)


REJECTED: list[dict[str, Any]] = [
    {"prompt": []}, {"prompt": [5, 264]}, {"prompt": [-1]}, {"stop_token_ids": (264,)}, {"max_new_tokens": 0},
    {"num_samples": 0}, {"max_new_tokens": 798}, {"temperature": -1.0}, {"temperature": 0.001}, {"min_p": 1.1},
    {"top_p": 0.0}, {"top_p": 0.9}, {"top_k": 513},
]  # fmt: skip


def test_rejected_requests(engine: EngineUnderTest, rejects: Rejects) -> None:
    """Each at its boundary: the model has 264 token ids, and the engine's longest sequence has 800 tokens."""
    for fields in REJECTED:
        with rejects(EngineError, "bad-request"):
            engine.generate(**{"prompt": [3, 4, 5], "max_new_tokens": 4, **fields})


# ----------------------------------------------------------------------------------------------------- abort and pause
HALFWAY_S = 0.1
"""Time after which a ``long`` response is interrupted."""
ENDS_S = 30
"""Bound on what ends immediately."""
LONG = 700
"""Tokens of a response that is long enough to be interrupted on a busy machine."""


def long_request(engine: EngineUnderTest, prompt: list[int], **fields: Any) -> GenerationRequest:
    return engine.request(prompt, max_new_tokens=LONG, ignore_eos=True, temperature=COLD, **fields)


def test_requests_wait_while_paused(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    async def scenario(mode: Any) -> tuple[bool, int]:
        await engine.engine.pause(mode)
        task = asyncio.create_task(engine.engine.generate(engine.request(prompts[0], max_new_tokens=3)))
        await asyncio.sleep(0.3)
        waited = not task.done() and (await engine.engine.health()).running_requests == 1
        await engine.engine.resume()
        return waited, len((await task)[0].token_ids)

    for mode in ("abort", "keep"):
        waited, tokens = engine.run(scenario(mode))
        assert waited and 1 <= tokens <= 3


def test_frozen_requests_keep_their_tokens(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    async def scenario(delay_s: float) -> list[Generation]:
        request = engine.request(prompts[6], max_new_tokens=40, num_samples=4, temperature=COLD, ignore_eos=True)
        task = asyncio.create_task(engine.engine.generate(request))
        await asyncio.sleep(delay_s)
        await engine.engine.pause("keep")
        await engine.engine.pause("abort")
        generations = await asyncio.wait_for(task, ENDS_S)
        await engine.engine.resume()
        return generations

    for delay_s in (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28) * 3:
        generations = engine.run(scenario(delay_s))
        if all(0 < len(generation.token_ids) < 40 for generation in generations):
            break
    for generation in generations:
        assert generation.finish_reason == "abort"
        assert 0 < len(generation.token_ids) < 40
        check_logprobs(engine.reference, prompts[6], generation, COLD)


def test_sleep_ends_requests_and_wakes_in_parts(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    """As with a shared device: asleep, updated with only the weights awake, then serving."""

    async def scenario() -> tuple[Generation, Generation]:
        running = asyncio.create_task(engine.engine.generate(long_request(engine, prompts[6])))
        await asyncio.sleep(HALFWAY_S)
        await engine.engine.sleep()
        ended = (await asyncio.wait_for(running, ENDS_S))[0]
        with pytest.raises(EngineError, match="is asleep"):
            await engine.engine.generate(engine.request(prompts[0], max_new_tokens=3))
        with pytest.raises(EngineError, match=r"is asleep \(weights\)"):
            await engine.engine.begin_update(engine.version + 1, engine.manifest)
        await engine.engine.wake(("weights",))
        await engine.engine.begin_update(engine.version + 1, engine.manifest)  # fails, as if another engine had died
        await engine.engine.sleep()
        await engine.engine.sleep()
        await engine.engine.wake(("weights",))
        await engine.load(1 - engine.current)
        with pytest.raises(EngineError, match=r"is asleep \(kv_cache\)"):
            await engine.engine.generate(engine.request(prompts[0], max_new_tokens=3))
        await engine.engine.wake(("kv_cache",))
        await engine.engine.wake(("weights", "kv_cache"))
        after = (await engine.engine.generate(engine.request(prompts[0], max_new_tokens=3)))[0]
        await engine.engine.sleep()
        await engine.engine.wake(("weights", "kv_cache"))
        return ended, after

    ended, after = engine.run(scenario())
    assert ended.finish_reason == "abort"
    check_logprobs(engine.reference, prompts[0], after)
    assert set(after.weight_versions.tolist()) == {engine.version}
    check_logprobs(engine.reference, prompts[0], engine.generate(prompts[0], max_new_tokens=3)[0])


def test_dropped_weights_come_with_the_next_update(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    async def scenario() -> Generation:
        request = engine.request(prompts[0], max_new_tokens=3)
        await engine.engine.sleep(keep_weights=False)
        await engine.engine.sleep(keep_weights=True)  # too late
        with pytest.raises(EngineError, match="dropped its weights"):
            await engine.engine.wake(("weights", "kv_cache"))
        with pytest.raises(EngineError, match="dropped its weights"):
            await engine.engine.generate(request)
        await engine.load(1 - engine.current)
        await engine.engine.resume()
        return (await engine.engine.generate(request))[0]

    generation = engine.run(scenario())
    check_logprobs(engine.reference, prompts[0], generation)
    assert set(generation.weight_versions.tolist()) == {engine.version}


# ------------------------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("transport", ["gloo", "directory"])
def test_delta_update_over_a_network_or_a_directory(
    engine: EngineUnderTest, prompts: list[list[int]], transport: str, tmp_path: Path
) -> None:
    """The first update sends another model, the second one nothing."""
    settings = TransportSettings(directory=tmp_path / "buckets", timeout_s=30.0, delta=True)
    with engine.over(transport, settings):
        for which in (1 - engine.current, 1 - engine.current):
            receipt, sent = engine.run(engine.load(which))
            assert receipt.checksums == sent
            (after,) = engine.generate(prompts[0], max_new_tokens=8)
            check_logprobs(engine.reference, prompts[0], after)
            assert set(after.weight_versions.tolist()) == {engine.version}


# -------------------------------------------------------------------------------------------------------------- health
def test_health_counts_running_requests(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    async def scenario() -> tuple[EngineHealth, EngineHealth, list[list[Generation]]]:
        tasks = [asyncio.create_task(engine.engine.generate(long_request(engine, p, num_samples=2))) for p in prompts]
        await asyncio.sleep(HALFWAY_S)
        busy = await engine.engine.health()
        await engine.engine.pause("abort")
        ended = await asyncio.gather(*tasks)
        await engine.engine.resume()
        return busy, await engine.engine.health(), ended

    busy, idle, ended = engine.run(scenario())
    assert all(generation.finish_reason == "abort" for generations in ended for generation in generations)
    assert busy.alive and idle.alive
    assert busy.running_requests == len(prompts)
    assert 0 < busy.outstanding_tokens <= 2 * LONG * len(prompts)
    assert (idle.running_requests, idle.outstanding_tokens) == (0, 0)


# ------------------------------------------------------------------------------------------------------- conversations
ECHO = """
import asyncio, json, urllib.request
from slime_like.interfaces import AgentResult, Step

class Echo:
    def reset(self, task):
        return 0

    def step(self, state, response):
        return Step(state + 1, f"heard {len(response)} <eos>")

def ask(task, history):
    body = json.dumps({"messages": history}).encode()
    headers = {"x-api-key": task.key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]

async def solve(task):
    history = [{"role": "user", "content": task.answer}]
    for _ in range(4):
        choice = await asyncio.to_thread(ask, task, history)
        if choice["finish_reason"] == "length":
            break
        history += [choice["message"], {"role": "tool", "content": f"heard {len(choice['message']['content'])} <eos>"}]
    return AgentResult(1.0)
"""
TALKS: dict[str, dict[str, Any]] = {
    "environment": {"name": "echoes:Echo", "max_turns": 4, "template": "|{observation}>", "timeout_s": 30},
    "agent": {"name": "echoes:solve", "workers": 4, "timeout_s": 60},
}
FEW = (20, 60, 100, 140)
"""Ids that end a turn. With 264 about equally likely ids, a turn has about 66 tokens."""


class _Counting:
    """The engine, with a count of requests for second turns."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.second_turns = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        """Do nothing: the engine is running."""

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        self.second_turns += request.request_id.endswith("/1")
        return await self._engine.generate(request)


@pytest.fixture
def actor_of(
    engine: EngineUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[engine_actor.EngineActor, "_Counting"]]:
    """Return a factory of actors around the engine, without a cluster."""
    (tmp_path / "echoes.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(engine_actor, "require_own_devices", lambda: None)
    monkeypatch.setattr(engine_actor, "use_cluster_interface", lambda gloo: None)
    monkeypatch.setattr(engine_actor, "use_session_directory", lambda: None)
    monkeypatch.setattr(engine_actor, "use_log", lambda role: tmp_path)
    model = engine.engine._config.model.path  # type: ignore[attr-defined]

    def make(**rollout: Any) -> tuple[engine_actor.EngineActor, _Counting]:
        actor = engine_actor.EngineActor(run_config(model, tmp_path / "run", **rollout), 0)
        counting = _Counting(engine.engine)
        actor._engine = counting  # type: ignore[assignment]
        return actor, counting

    return make


@pytest.mark.parametrize("kind", some_in_acceptance(TALKS, lambda kind: kind == "environment"))
def test_conversations_during_a_weight_update(
    engine: EngineUnderTest, prompts: list[list[int]], actor_of: Callable[..., Any], kind: str
) -> None:
    """Every sampled token has Hugging Face's logprob under the weights of its version.

    A request that arrives during the update waits for its end.
    """
    actor, counting = actor_of(**{kind: TALKS[kind]})
    old, new = engine.version, engine.version + 1
    before, after = engine.reference, engine.references[1 - engine.current]

    def request(prompt: list[int]) -> GenerationRequest:
        request = engine.request(prompt, max_new_tokens=300, num_samples=2, seed=3, stop_token_ids=FEW, ignore_eos=True)
        return replace(request, task=ConversationTask("go", {}))

    async def scenario() -> tuple[list[list[Generation]], list[Generation]]:
        await actor.start()
        try:
            talks = [asyncio.create_task(actor.generate(request(prompt))) for prompt in prompts[:4]]
            while counting.second_turns < 4:
                await asyncio.sleep(0.005)
            await actor.begin_update(new, engine.manifest)
            late = asyncio.create_task(actor.generate(engine.request(prompts[0], max_new_tokens=5)))
            await engine.send(list(after.weights.items()))
            await actor.finish_update(new)
            return list(await asyncio.gather(*talks)), await late
        finally:
            assert actor._conversations is not None
            await actor._conversations.close()

    talks, late = engine.run(scenario())
    engine.version, engine.current = new, 1 - engine.current
    assert late[0].weight_versions.tolist() == [new] * len(late[0].token_ids)
    spanning = observed = 0
    for prompt, generations in zip(prompts[:4], talks, strict=True):
        for generation in generations:
            assert generation.conversation is not None and generation.conversation.failure is None
            ids, versions = generation.token_ids, generation.weight_versions
            for (segment,) in [generation.segments] if kind == "agent" else ():  # after the agent's own prompt
                prompt = list(segment.prompt.token_ids)
            sampled = np.zeros(len(ids), bool)
            for start, end in generation.conversation.turns:
                sampled[start:end] = True
            known = {old: before.logprobs(prompt, ids, 1.0), new: after.logprobs(prompt, ids, 1.0)}
            expected = np.where(versions == old, known[old], known[new])
            check_gaps(engine.reference, generation.logprobs[sampled], expected[sampled])
            assert (generation.logprobs[~sampled] == 0).all()
            assert (np.diff(versions) >= 0).all() and set(versions.tolist()) <= {old, new}
            spanning += len(set(versions.tolist())) > 1
            observed += int((~sampled).sum())
    assert spanning > 0 and observed > 100


@pytest.mark.parametrize("engine", some_in_acceptance(ENGINES, lambda name: name != "transformers"), indirect=True)
def test_agents_sample_the_same_as_environments(
    engine: EngineUnderTest, actor_of: Callable[..., tuple[engine_actor.EngineActor, Any]]
) -> None:
    """Turns through the endpoint and turns led by the actor have the same ids and logprobs."""
    environment = {**TALKS["environment"], "template": "<eos><tool>{observation}<assistant>", "max_turn_tokens": 120}
    prompt = TOKENIZER.encode("<user>go<assistant>", add_special_tokens=False)

    async def sampled(actor: engine_actor.EngineActor, limit: int) -> list[Generation]:
        # With seed 4, a number lies so close to a token's boundary that rounding decides.
        request = engine.request(
            prompt, max_new_tokens=limit, num_samples=6, seed=5, stop_token_ids=FEW, ignore_eos=True
        )
        await actor.start()
        try:
            return await actor.generate(replace(request, task=ConversationTask("go")))
        finally:
            assert actor._conversations is not None
            await actor._conversations.close()

    expected = engine.run(sampled(actor_of(environment=environment)[0], 700))
    found = engine.run(sampled(actor_of(agent=TALKS["agent"])[0], 120))
    for one, other in zip(expected, found, strict=True):
        assert one.conversation is not None and other.conversation is not None
        assert other.segments == () and other.conversation.failure is None
    for one, other in same_ids(engine.reference, expected, found):
        assert one.conversation is not None and other.conversation is not None
        assert one.conversation.turns == other.conversation.turns
        check_gaps(engine.reference, one.logprobs, other.logprobs)
    assert sum(len(one.conversation.turns) > 1 for one in expected if one.conversation is not None) > 1


def test_death_is_reported(engine: EngineUnderTest) -> None:
    """The last test, because it kills the engine."""
    processes = engine.run(engine.engine.health()).process_ids
    if not processes:
        pytest.skip("the engine runs in this process")

    name = {"VllmEngine": "vLLM", "SglangEngine": "SGLang"}[type(engine.engine).__name__]

    async def scenario() -> None:
        doomed = engine.request([3, 4, 5], max_new_tokens=700, temperature=0.05, ignore_eos=True, num_samples=4)
        task = asyncio.create_task(engine.engine.generate(doomed))
        await asyncio.sleep(0.1)
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=f"{name} engine 0 died while it ran request {doomed.request_id}"):
            await asyncio.wait_for(task, 30)
        assert not (await engine.engine.health()).alive
        with pytest.raises(EngineError, match="has died"):
            await engine.engine.generate(engine.request([3, 4, 5], max_new_tokens=2))
        await engine.engine.stop()
        assert not any(psutil.pid_exists(pid) for pid in processes)

    engine.run(scenario())
