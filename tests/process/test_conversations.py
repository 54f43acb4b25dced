"""Conversations with a scripted engine: ids stay as sampled, observations carry no loss, and limits hold."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.config import RunConfig
from slime_like.config.rollout import RewardConfig
from slime_like.errors import EngineError, EnvironmentFailure
from slime_like.interfaces import Generation, GenerationRequest, PromptInput
from slime_like.orchestration.rollout.conversations import Conversations
from slime_like.orchestration.rollout.requests import turn_form
from tests.process import scripted
from tests.process.scripted import EOS, PROMPT, TOKENIZER, Engine, failure, ids, made, request, rewarded, talk_of, turn
from tests.support.rejections import Rejects

ENVIRONMENT = '''
import os, resource, signal, time
from slime_like.interfaces import Step

class Parrot:
    """Repeats the model in capitals until it says "bye". Misbehaves on demand."""

    def __init__(self, reward=0.0):
        self.reward = reward

    def reset(self, task):
        return {"said": [], "answer": task.answer, "prompt": task.prompt, **task.fields}

    def step(self, state, response):
        if response == "hang":
            time.sleep(1000)
        if response == "die":
            os._exit(3)
        if response == "burn":
            os.kill(os.getpid(), signal.SIGXCPU)  # like the kernel at the limit, which one thread cannot reach
        if response == "fill":
            bytearray(10 ** 12)
        if response == "raise":
            raise LookupError("no such thing")
        if response == "odd":
            return "odd"
        said = state["said"] + [response]
        done = response == "bye"
        return Step({**state, "said": said}, observation=f"{response.upper()} {state.get('extra', '')}", done=done,
                    reward=self.reward, success=done, metadata={"said": said, "state": state,
                    "cpu_left": resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time()})

class Judge(Parrot):
    """Subtracts half a point for a turn that is cut off."""

    def step(self, state, response, truncated=False):
        if truncated:
            return Step(state, "go on", reward=-0.5, metadata={"said": ["cut " + response]})
        return super().step(state, response)
'''


@pytest.fixture(autouse=True)
def _parrots(user_module: Callable[[str, str], Path]) -> None:
    user_module("parrots", ENVIRONMENT)


def config(**environment: Any) -> RunConfig:
    settings = {"name": "parrots:Parrot", "timeout_s": 5.0, "max_turns": 4, **environment}
    return RunConfig(run_dir="run", model={"path": "model"}, rollout={"environment": settings})


def talk(engine: Engine, asked: GenerationRequest | scripted.Scenario, **environment: Any) -> list[Generation]:
    run = config(**environment)
    form = turn_form(run.data, run.rollout.agent, TOKENIZER)
    return scripted.run(lambda: Conversations(run.rollout.environment, form, engine.generate), asked)


def test_ids_are_kept_and_observations_carry_no_loss() -> None:
    """The model samples half a character and a special token, which text cannot restore. The tool sends an EOS."""
    odd = [*ids("h"), ids("\u00e9")[0], TOKENIZER.convert_tokens_to_ids("<user>"), EOS]
    assert ids(TOKENIZER.decode(odd, skip_special_tokens=False)) != odd
    engine = Engine([made(odd, version=3), turn("on", version=3), turn("bye", version=4)])
    fields = {"depth": np.arange(len(PROMPT))}
    (generation,) = talk(engine, replace(request(extra="<eos>"), prompt=PromptInput(PROMPT, fields)))
    tokens = generation.token_ids.tolist()
    first, second = ids("<tool>"), ids("<assistant>")
    assert tokens[: len(odd)] == odd
    assert [r.prompt.token_ids for r in engine.requests] == [PROMPT, PROMPT + tokens[:22], PROMPT + tokens[:35]]
    assert all(r.prompt.fields == fields for r in engine.requests)
    assert tokens[4:22] == [*first, *ids("H\ufffd<USER> "), *tokens[16:21], *second]  # the mark is text for the tool
    assert tokens.count(EOS) == 3  # only sampled ones: the tool's "<eos>" is five letters
    assert TOKENIZER.decode(tokens[25:35]) == "<tool>ON <eos><assistant>"
    said = talk_of(generation)
    assert said.turns == ((0, 4), (22, 25), (35, 39))
    observed = np.ones(len(tokens), bool)
    for start, end in said.turns:
        observed[start:end] = False
    assert (generation.logprobs[observed] == 0).all() and (generation.logprobs[~observed] < 0).all()
    assert generation.weight_versions.tolist() == [3] * 35 + [4] * 4
    assert (generation.finish_reason, said.success) == ("stop", True)
    assert [step["said"][-1] for step in said.metadata] == ["h\ufffd<user>", "on", "bye"]
    state = said.metadata[-1]["state"]
    assert (state["prompt"], state["answer"], state["extra"]) == ("<user>hello<assistant>", "bye", "<eos>")


def test_every_turn_of_every_sample_has_a_different_seed() -> None:
    def seeds(samples: int) -> dict[str, int | None]:
        engine = Engine(*[[turn("a"), turn("b"), turn("bye")] for _ in range(samples)])
        talk(engine, request(samples))
        return {r.request_id: r.seed for r in engine.requests}

    four = seeds(4)
    assert len(set(four.values())) == 12
    again = seeds(2)
    assert again == {name: four[name] for name in again}


@pytest.mark.parametrize(
    ("limit", "environment", "script", "limits", "reason"),
    [
        (200, {"max_turns": 2}, [turn("a"), turn("b")], [200, 194], "turns"),
        (200, {"max_turns": 1}, [turn("a")], [200], "turns"),
        (200, {"max_turn_tokens": 7}, [turn("a"), turn("bye")], [7, 7], "stop"),
        (12, {"max_turn_tokens": 7}, [turn("a"), turn("b", "length")], [7, 6], "length"),
        (6, {}, [turn("a")], [6], "length"),  # no room for the observation and another token
        (7, {}, [turn("a"), made(ids("b"), "length")], [7, 1], "length"),
        (200, {"max_turns": 1}, [turn("ab", "length")], [200], "length"),
    ],
)
def test_budgets(
    limit: int,
    environment: dict[str, Any],
    script: list[Generation],
    limits: list[int],
    reason: str,
) -> None:
    engine = Engine(script)
    (generation,) = talk(engine, request(limit=limit), **environment)
    assert [r.sampling.max_new_tokens for r in engine.requests] == limits
    turns = talk_of(generation).turns
    assert len(turns) == len(limits) and len(generation.token_ids) <= limit
    assert turns[-1][1] == len(generation.token_ids)  # it ends with a turn, not an observation
    assert generation.finish_reason == reason


def test_a_turn_that_is_cut_off_is_judged_if_the_environment_supports_it() -> None:
    """Either way, it ends the conversation, and its tokens carry loss."""
    script = [turn("a"), turn("bc", "length")]
    for name, reward, said in (("Parrot", 1.0, ["a"]), ("Judge", 0.5, ["cut bc"])):
        options = {"name": f"parrots:{name}", "options": {"reward": 1.0}}
        (generation,) = talk(Engine(script), request(), **options)
        found = talk_of(generation)
        assert (generation.finish_reason, found.reward, found.success) == ("length", reward, False)
        assert found.metadata[-1]["said"] == said
        assert generation.token_ids.tolist()[-2:] == ids("bc")


def test_an_observation_is_cut_to_its_limit() -> None:
    (generation,) = talk(Engine([turn("abcdef"), turn("bye")]), request(), max_observation_tokens=3)
    tokens = generation.token_ids.tolist()
    assert TOKENIZER.decode(tokens[7:12]) == "<tool>ABC<assistant>"
    assert talk_of(generation).metadata[0]["cut_tokens"] == 4


BAD_STEPS = {
    "hang": ("timeout", ""),
    "die": ("crash", ""),
    "fill": ("memory", ""),
    "burn": ("cpu", ""),
    "raise": ("error", "LookupError: no such thing (FILE:24)"),
    "odd": ("error", "TypeError: step returned a str; return a Step (FILE:14)"),
}


def test_a_bad_step_ends_only_its_conversation(tmp_path: Path) -> None:
    """Other conversations continue, even if they began on a worker that ended. A worker keeps no state."""
    good = ["a", "b", "bye"]
    engine = Engine(good, *(["a", word] for word in BAD_STEPS), good)
    first, *bad, last = talk(engine, request(8), timeout_s=1.5, options={"reward": 0.5}, workers=2)
    for generation in (first, last):
        assert (failure(generation), talk_of(generation).reward, generation.finish_reason) == (None, 1.5, "stop")
        assert all(1.5 <= step["cpu_left"] <= 3.5 for step in talk_of(generation).metadata)
    for generation, (word, (reason, detail)) in zip(bad, BAD_STEPS.items(), strict=True):
        assert failure(generation) == reason
        told = (talk_of(generation).failure or {}).get("detail", "")
        assert told == detail.replace("FILE", str(tmp_path / "parrots.py"))
        assert talk_of(generation).turns == ((0, 2), (6, 6 + len(word) + 1))


@pytest.mark.parametrize(
    ("environment", "code"),
    [
        ({}, "environment-fails"),
        ({"name": "parrots:Absent"}, "code-unusable"),
        ({"options": {"wings": 2}}, "code-unusable"),
        ({"name": "calculator", "options": {"opening": ""}}, "code-unusable"),
    ],
)
def test_an_environment_that_is_unusable_or_always_fails_ends_the_run(
    rejects: Rejects, environment: dict[str, Any], code: str
) -> None:
    with rejects(EnvironmentFailure, code):
        talk(Engine(*[["raise"]] * 9), request(9), **environment)


def test_aborted_turns_and_engine_errors_end_the_conversation() -> None:
    """One has sampled a token of its second turn, the other has not."""
    engine = Engine([turn("a"), made(ids("x"), "abort")], [turn("ab"), made([], "abort")])
    first, second = talk(engine, request(2))
    assert first.finish_reason == second.finish_reason == "abort"
    assert (talk_of(first).turns, talk_of(second).turns) == (((0, 2), (6, 7)), ((0, 3),))
    assert second.token_ids.tolist() == [*ids("ab"), EOS]
    with pytest.raises(EngineError, match="it died"):
        talk(Engine(["a", "wait"], ["a", "fail"]), request(2))


def test_rewards_see_the_last_turn_and_the_environment_has_a_column() -> None:
    engine = Engine([turn("bye now"), turn("bye")], [turn("b"), turn("raise")], [turn("bye")])
    generations = talk(engine, request(3), options={"reward": 0.25})
    functions = ({"name": "format", "options": {"pattern": "bye"}}, {"name": "environment", "weight": 2.0})
    reward = RewardConfig.model_validate({"functions": functions})
    found, scored = rewarded(config().model_copy(update={"reward": reward}), generations)
    first = found.group.trajectories[0]
    assert first.sampled_len == len(ids("bye now")) + 1 + len(ids("bye")) + 1 < first.response_len
    assert first.loss_mask.tolist() == [value != 0 for value in first.logprobs.tolist()]
    assert found.rewards.tolist() == [[1.0, 0.5], [1.0, 0.25]]
    assert found.totals.tolist() == [2.0, 1.5]
    (failed,) = found.failed
    assert failed.reward_metadata["reason"] == "error" and "no such thing" in failed.reward_metadata["detail"]
    assert scored[0].reward_metadata["conversation"]["turns"] == [[0, 8], [18, 22]]
    assert scored[0].loss_mask.tolist() == first.loss_mask.tolist()


def test_a_canceled_request_frees_its_worker() -> None:
    engine = Engine([turn("hang")], [turn("bye")])

    async def scenario(conversations: Conversations) -> list[Generation]:
        hanging = asyncio.ensure_future(conversations.run(request(1)))
        await asyncio.sleep(0.3)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        engine.scripts.pop(0)
        return await conversations.run(request(1))

    (generation,) = talk(engine, scenario, timeout_s=50.0)
    assert generation.finish_reason == "stop"
