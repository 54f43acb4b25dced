"""Rollouts of several rows, from an engine's segments to figures. A rollout counts once.

A stand-in for the reward functions rewards each response with its length. Everything else is the product's code.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from slime_like.config import RunConfig
from slime_like.data.prompts import Prompt
from slime_like.errors import EngineError
from slime_like.interfaces import Conversation, Generation, GenerationRequest, PromptInput, SamplingParams, Segment
from slime_like.observability.tables import per_sample_rows, per_token_rows
from slime_like.orchestration.rollout.advantages import Advantages
from slime_like.orchestration.rollout.evaluation import Evaluator
from slime_like.orchestration.rollout.requests import require_routes, to_group
from slime_like.orchestration.rollout.rows import rollouts_of, trained_spans
from slime_like.orchestration.rollout.scoring import Scorer
from slime_like.orchestration.run.recorder import StepRecorder
from slime_like.orchestration.run.sources import Source
from slime_like.sandbox.rewards.pool import RewardItem, RewardOutcome
from slime_like.trajectory import ScoredTrajectory
from tests.support.rejections import Rejects
from tests.unit.observability.records import grpo_stats, phase_times


def ids(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text])


def text_of(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def segment(prompt: str, response: str, version: int = 0) -> Segment:
    """Build a segment. Capitals are sampled tokens that this row trains."""
    mask = np.array([letter.isupper() for letter in response])
    logprobs = np.where(mask, -np.arange(1.0, len(response) + 1), 0).astype(np.float32)
    return Segment(PromptInput(ids(prompt)), ids(response), logprobs, np.full(len(response), version), mask)


def generation(*segments: Segment, reason: Any = "stop", conversation: Conversation | None = None) -> Generation:
    last = segments[-1]
    return Generation(last.token_ids, last.logprobs, last.weight_versions, reason, None, conversation, segments)


def plain(response: str, reason: Any = "stop") -> Generation:
    return Generation(ids(response), np.full(len(response), -0.5, np.float32), np.zeros(len(response)), reason)


def generations(first: int = 0) -> list[Generation]:
    """Return rollouts of 3, 1, 2 and 1 rows."""
    return [
        generation(segment("p", "AB", first), segment("pABx", "CyDE", first + 1), segment("sum", "FGH", first + 1)),
        plain("IJKL", reason="length"),
        generation(segment("p", "aM", first), segment("q", "NOPz", first), reason="length"),
        generation(segment("p", "QxR", first)),
    ]


LENGTHS = [2 + 3 + 3, 4, 1 + 3, 2]
"""Sampled tokens of each rollout."""
REWARDS = [3.0, 4.0, 3.0, 1.0]
"""Lengths of the judged texts "FGH", "IJKL", "NOP" and "R"."""


class Tokenizer:
    chat_template = eos_token_id = pad_token_id = None

    def decode(self, tokens: Sequence[int], **_: bool) -> str:
        return text_of(tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], **_: bool) -> list[str]:
        return [text_of(sequence) for sequence in sequences]


class Pool:
    """Pool that rewards a response with its length, and fails in group 8."""

    def __init__(self) -> None:
        self.items: list[RewardItem] = []
        self.groups: list[int] = []

    def score(self, items: list[RewardItem], groups: list[int]) -> list[RewardOutcome]:
        self.items, self.groups = items, groups
        return [
            RewardOutcome((0.0,), (0.0,), {"reason": "error"})
            if group == 8
            else RewardOutcome((float(len(item.response)),), (float(item.response == "FGH"),), {})
            for item, group in zip(items, groups, strict=True)
        ]


def config(**sections: Any) -> RunConfig:
    raw = {"run_dir": "unused", "model": {"path": "unused"}, "reward": {"functions": [{"name": "math_verify"}]}}
    return RunConfig.model_validate(raw | sections)


def scored(settings: RunConfig, pool: Any = None) -> list[ScoredTrajectory]:
    """Return group 7 of four rollouts, and group 9 of the last three."""
    scorer = Scorer(settings, cast(Any, pool or Pool()), Tokenizer())
    groups = [
        to_group(Prompt(PromptInput(ids("p")), "answer", number, 0, 0, whole_row=f"[{number}]"), answers, 1.0)
        for number, answers in ((7, generations()), (9, generations(first=1)[1:]))
    ]
    rewarded = scorer.rewards(groups)
    rewarded[1] = replace(
        rewarded[1], scores=[{"ref_logprobs": torch.full_like(t.logprobs, -9.0)} for t in groups[1].trajectories]
    )
    rewarded[0] = replace(rewarded[0], scores=[{"ref_logprobs": t.logprobs - 1} for t in groups[0].trajectories])
    return scorer.scored(rewarded, step=3)


def normalised(rewards: list[float]) -> list[float]:
    return [(reward - statistics.mean(rewards)) / statistics.stdev(rewards) for reward in rewards]


# ------------------------------------------------------------------------------------------------------------- rows
def test_a_row_for_each_segment() -> None:
    group = to_group(Prompt(PromptInput(ids("p")), "answer", 7, 0, 0), generations(), 0.5)
    rows = group.trajectories
    assert [row.sequence_id for row in rows] == ["7-0.0", "7-0.1", "7-0.2", "7-1", "7-2.0", "7-2.1", "7-3"]
    assert [row.rollout_id for row in rows] == ["7-0"] * 3 + ["7-1"] + ["7-2"] * 2 + ["7-3"]
    assert [text_of(row.prompt_tokens) for row in rows] == ["p", "pABx", "sum", "p", "p", "q", "p"]
    trained = [text_of(row.response_tokens[row.loss_mask]) for row in rows]
    assert trained == ["AB", "CDE", "FGH", "IJKL", "M", "NOP", "QR"]
    assert rows[1].logprobs is not None and rows[1].logprobs.tolist() == [-1, 0, -3, -4]
    assert rows[1].weight_versions is not None and rows[1].weight_versions.tolist() == [1] * 4
    assert [row.policy_version for row in rows[:2]] == [0, 1]
    assert [row.finish_reason for row in rows] == ["stop"] * 3 + ["length"] * 3 + ["stop"]
    assert all(row.prompt_len == len(row.prompt_tokens) and row.response_len == len(row.loss_mask) for row in rows)
    assert group.total_tokens == sum(map(len, ("pAB", "pABxCyDE", "sumFGH", "pIJKL", "paM", "qNOPz", "pQxR")))
    assert [len(rollout.rows) for rollout in rollouts_of(rows)] == [3, 1, 2, 1]
    assert [rollout.sampled_len for rollout in rollouts_of(rows)] == LENGTHS


@pytest.mark.parametrize(("judged", "answer", "text"), [(-1, None, "CD"), (0, None, "AB"), (0, "So 7.", "So 7.")])
def test_what_reward_functions_get(judged: int, answer: str | None, text: str) -> None:
    talk = Conversation(((0, 2), (3, 5)), judged=judged, answer=answer)
    group = to_group(
        Prompt(PromptInput(ids("p")), "", 7, 0, 0), [generation(segment("p", "ABxCD"), conversation=talk)], 1
    )
    Scorer(config(), cast(Any, pool := Pool()), Tokenizer()).outcomes([group])
    assert [item.response for item in pool.items] == [text]


whole = segment("p", "AB")
MALFORMED = {
    "no prompt": generation(replace(whole, prompt=PromptInput(ids("")))),
    "no token": generation(whole, segment("p", "")),
    "a mask that is short": generation(replace(whole, loss_mask=np.ones(1, bool)), whole),
    "versions that are short": generation(replace(whole, weight_versions=np.zeros(1)), whole),
    "logprobs that are long": generation(replace(whole, logprobs=np.zeros(3)), whole),
    "a last segment that is not the response": replace(generation(whole, segment("p", "CD")), token_ids=ids("CE")),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_segment_is_rejected(name: str, rejects: Rejects) -> None:
    with rejects(EngineError, "bad-response") as caught:
        to_group(Prompt(PromptInput([1]), "", 7, 0, 0), [MALFORMED[name]], 1.0)
    who = "rollout 7-0" if "last" in name else "sequence 7-0"
    assert isinstance(caught.value, EngineError) and caught.value.who.startswith(who)


def test_spans_that_carry_loss() -> None:
    for mask, spans in (("", []), ("aa", []), ("AA", [(0, 2)]), ("aAAaA", [(1, 3), (4, 5)]), ("AaA", [(0, 1), (2, 3)])):
        assert trained_spans(torch.tensor([letter.isupper() for letter in mask], dtype=torch.bool)) == spans


# ------------------------------------------------------------------------------------------- rewards and advantages
def test_a_rollout_has_one_reward_and_one_advantage() -> None:
    pool = Pool()
    rows = scored(config(), pool)
    assert [item.response for item in pool.items] == ["FGH", "IJKL", "NOP", "R", "IJKL", "NOP", "R"]
    assert {item.prompt for item in pool.items} == {"p"} and pool.groups == [7] * 4 + [9] * 3
    assert [item.row for item in pool.items] == ["[7]"] * 4 + ["[9]"] * 3
    expected = dict(zip(("7-0", "7-1", "7-2", "7-3"), normalised(REWARDS), strict=True))
    expected |= dict(zip(("9-0", "9-1", "9-2"), normalised(REWARDS[1:]), strict=True))
    assert [float(row.advantages.unique()) for row in rows] == pytest.approx(
        [expected[row.rollout_id] for row in rows], rel=1e-5
    )
    rewards = dict(zip(expected, REWARDS + REWARDS[1:], strict=True))
    assert [row.rewards.tolist() for row in rows] == [[rewards[row.rollout_id]] for row in rows]
    assert [float(row.successes) for row in rows] == [float(row.rollout_id == "7-0") for row in rows]
    for row in rows:
        assert row.ref_logprobs is not None and row.logprobs is not None
        assert torch.equal(
            row.ref_logprobs, row.logprobs - 1 if row.group_id == 7 else torch.full_like(row.logprobs, -9)
        )


def test_the_overlong_penalty_counts_a_rollouts_tokens() -> None:
    """Sampled tokens of all rows count. In the last rollout, a single row, its observation counts, too."""
    settings = config(algorithm={"overlong": {"buffer": 8}, "advantage": "pass_through"}, rollout={"max_new_tokens": 9})
    rows = scored(settings)
    penalties = {"7-0": 7 / 8, "7-1": 3 / 8, "7-2": 3 / 8, "7-3": 2 / 8}
    for rollout, reward in zip(rollouts_of(rows[:7]), REWARDS, strict=True):
        expected = reward - penalties[rollout.last.rollout_id]
        assert [float(row.advantages.unique()) for row in rollout.rows] == pytest.approx([expected] * len(rollout.rows))


def test_the_greedy_response_is_rewarded_and_not_trained() -> None:
    """Its reward, with its overlong penalty, is the baseline of both groups. Its tokens count nowhere."""
    settings = config(algorithm={"overlong": {"buffer": 8}, "advantage": "remax"}, rollout={"max_new_tokens": 9})
    scorer, answers = Scorer(settings, cast(Any, Pool()), Tokenizer()), generations()
    prompt = Prompt(PromptInput(ids("p")), "answer", 7, 0, 0)
    greedy = [generation(segment("p", "aM"), segment("q", "STUVW")), plain("XY")]
    groups = [to_group(replace(prompt, group_id=g), [*answers, one], 1.0, greedy=True) for g, one in enumerate(greedy)]
    plain_group = to_group(prompt, answers, 1.0)
    assert [len(each.trajectories) for each in groups] == [len(plain_group.trajectories)] * 2
    assert [each.total_tokens for each in groups] == [plain_group.total_tokens] * 2
    rewarded = scorer.rewards(groups)
    assert [each.rewards.flatten().tolist() for each in rewarded] == [REWARDS] * 2
    rows = scorer.scored(rewarded, step=3)
    baselines = [5 - 5 / 8, 2 - 1 / 8]  # rewards, and tokens beyond 9 - 8
    penalties = dict(zip(("7-0", "7-1", "7-2", "7-3"), (7 / 8, 3 / 8, 3 / 8, 2 / 8), strict=True))
    for row in rows:
        sample = row.rollout_id.partition("-")[2]
        expected = REWARDS[int(sample)] - penalties[f"7-{sample}"] - baselines[row.group_id]
        assert float(row.advantages.unique()) == pytest.approx(expected)
        assert row.greedy_reward == pytest.approx(baselines[row.group_id])


@pytest.mark.parametrize("advantage", ["turn_rloo", "optimal_token_baseline"])
def test_rewards_of_calls_are_credited_in_the_order_of_the_calls(advantage: str) -> None:
    """A call of a subagent is in a row of its own. One row with the same calls in their order has the same credit."""

    def timed(prompt: str, response: str) -> Segment:
        made = segment(prompt, response)
        logprobs = np.where(made.loss_mask, -0.1 * (made.token_ids - ord("@")), 0)
        return replace(made, logprobs=logprobs.astype(np.float32))

    turns, failed = ((0, 1), (2, 4)), {"reason": "error", "function": "agent", "fault": "program"}
    other = generation(timed("p", "KxL"), conversation=Conversation(((0, 1), (2, 3)), 1.5, rewards=(0.5, 0.0)))
    failing = generation(timed("p", "M"), conversation=Conversation(((0, 1),), failure=failed, rewards=(7.0,)))
    rows = Conversation(turns, 3.5, rewards=(2.0, 1.0, 0.0), calls=(1, 0, 2))
    line = Conversation(((0, 1), (2, 4), (5, 7)), 3.5, rewards=(1.0, 2.0, 0.0))
    found: list[dict[str, float]] = []
    for one in (
        generation(timed("q", "AB"), timed("p", "CxDE"), conversation=rows),
        generation(timed("p", "CxABxDE"), conversation=line),
    ):
        settings = config(
            reward={"functions": [{"name": "agent"}]},
            rollout={"agent": {"name": "some:agent"}},
            algorithm={"advantage": advantage},
        )
        empty = SimpleNamespace(score=lambda items, groups: [RewardOutcome((), ()) for _ in items])
        scorer = Scorer(settings, cast(Any, empty), Tokenizer())
        group = to_group(Prompt(PromptInput(ids("p")), "answer", 7, 0, 0), [one, other, failing], 1.0)
        trained = scorer.scored(scorer.rewards([group]), step=1)
        again = Advantages(settings).of_rows(  # as after a penalty, from what scored rows keep
            rollouts_of(trained), torch.tensor([[3.5], [1.5], [0.0]]), torch.tensor([3.5, 1.5, 0.0]), step=1
        )
        assert all(torch.equal(row.advantages, again[row.sequence_id]) for row in trained)
        letters = [(text_of([token]), value) for row in trained for token, value in _pairs(row)]
        found.append({letter: value for letter, value in letters if letter.isupper()})
    assert found[0] == pytest.approx(found[1]) and len(found[0]) == 8
    if advantage == "turn_rloo":
        baseline = (1.5 + 0.0) / 2
        expected = {"A": 2.5, "B": 2.5, "C": 3.5, "D": 0.5, "E": 0.5}
        assert {name: found[0][name] for name in "ABCDE"} == pytest.approx(
            {name: value - baseline for name, value in expected.items()}
        )


def _pairs(row: ScoredTrajectory) -> Iterator[tuple[int, float]]:
    return zip(row.response_tokens.tolist(), row.advantages.tolist(), strict=True)


def test_a_conversation_belongs_to_the_last_row() -> None:
    """The environment's reward counts once. A row's metadata has its turns."""
    functions = [{"name": "environment"}]
    talk = Conversation(((0, 1), (2, 3)), reward=0.25, success=True, metadata=({"k": 1}, {}))
    answers = [generation(segment("p", "AxB"), segment("q", "CxD"), conversation=talk), plain("E")]
    group = to_group(Prompt(PromptInput([1]), "", 7, 0, 0), answers, 1.0)
    empty = SimpleNamespace(score=lambda items, groups: [RewardOutcome((), ()) for _ in items])
    scorer = Scorer(
        config(reward={"functions": functions}, rollout={"environment": {"name": "calculator"}}),
        cast(Any, empty),
        Tokenizer(),
    )
    group.trajectories[-1].conversation = Conversation(((0, 1),), reward=0.75)
    (rewarded,) = scorer.rewards([group])
    assert rewarded.rewards.tolist() == [[0.25], [0.75]] and rewarded.successes.tolist() == [[1.0], [0.0]]
    shown = [entry.get("conversation") for entry in rewarded.metadata]
    assert shown == [
        {"turns": [[0, 1], [2, 3]], "steps": []},
        {"turns": [[0, 1], [2, 3]], "steps": [{"k": 1}, {}], "rewards": []},
        {"turns": [[0, 1]], "steps": [], "rewards": []},
    ]


# ---------------------------------------------------------------------------------------------------------- figures
def test_figures_of_a_step_count_rollouts() -> None:
    notes: list[str] = []
    progress = SimpleNamespace(note=notes.append)
    run: Any = SimpleNamespace(config=config(), finished_steps=0, source=Source(), progress=progress)
    rows, recorder = scored(config()), StepRecorder(run)
    for row in rows[4:6]:
        row.reward_metadata |= {"reason": "error", "outcome": "zeroed"}
    metrics = recorder.sampled(3, rollouts_of(rows), phase_times(), [])
    (note,) = notes
    assert "failed for 1 of 7 responses" in note
    assert metrics["ref_actor_rewards/total_reward_mean"] == pytest.approx((sum(REWARDS) + sum(REWARDS[1:])) / 7)
    assert metrics["ref_actor_rewards/failures_zeroed"] == metrics["ref_actor_rewards/scoring_failures"] == 1
    assert metrics["rollout/rows_mean"] == pytest.approx(11 / 7) and metrics["rollout/turns_mean"] == 12 / 5
    assert metrics["rollout/staleness_mean"] == pytest.approx(12 / 7) and metrics["rollout/staleness_max"] == 2
    assert metrics["rollout/truncated_fraction"] == pytest.approx(4 / 7)
    assert metrics["rollout/response_length_mean"] == pytest.approx((sum(LENGTHS) + sum(LENGTHS[1:])) / 7)
    assert metrics["rollout/groups"] == 2 and metrics["rollout/zero_spread_groups"] == 0


def test_tables_show_the_rows_of_a_rollout() -> None:
    rows = [replace(row, old_logprobs=torch.zeros(row.response_len)) for row in scored(config())[1:5]]
    shown = per_sample_rows(3, rows, grpo_stats(), text_of)
    assert [row["Rollout ID"] for row in shown] == ["7-0", "7-0", "7-1", "7-2"]
    assert [row["Response Length"] for row in shown] == [3, 3, 4, 1]
    assert [row["Conversation"] for row in shown] == [
        "1 model: C\n1 environment: y\n2 model: DE", "1 model: FGH", "1 model: IJKL", "1 model: M",
    ]  # fmt: skip
    tokens = per_token_rows(3, rows, text_of)
    assert [row["Generated Logprob"] for row in tokens[:4]] == [-1, None, -3, -4]
    assert "Rollout ID" not in per_sample_rows(3, rows[2:3], grpo_stats(), text_of)[0]


def test_evaluation_counts_rollouts() -> None:
    prompts = [Prompt(PromptInput(ids("p")), "answer", number, 0, 0) for number in (7, 8)]
    engines = SimpleNamespace(generate_all=lambda requests, answered: [generations() for _ in requests])
    settings = config(
        evaluation={"samples_per_prompt": 4, "temperature": 1.0}, rollout={"stop_token_ids": [0], "ignore_eos": True}
    )
    scorer, progress = Scorer(settings, cast(Any, Pool()), Tokenizer()), SimpleNamespace(note=lambda sentence: None)
    progress.waiting = lambda *given: nullcontext(SimpleNamespace(reach=None))
    found = Evaluator(settings, cast(Any, engines), scorer, {"a": prompts}).run(1, cast(Any, progress)).overall
    assert found == {
        "num_responses": 8, "scoring_failures": 4, "accuracy": 1 / 4, "truncated_fraction": 0.5,
        "response_length_mean": sum(LENGTHS) / 4, "pass@2": pytest.approx(0.5), "pass@4": 1.0,  # of the scored group
    }  # fmt: skip


@pytest.mark.parametrize(
    "routes",
    [None, np.zeros((3, 2, 4), np.int32), np.zeros((4, 2, 4), np.int16), np.full((3, 2, 4), -1, np.int16)],
    ids=["none", "dtype", "length", "unknown"],
)
def test_wrong_routes_of_an_engine_are_named(routes: np.ndarray | None, rejects: Rejects) -> None:
    """A response without a token needs none."""
    asked = GenerationRequest("step-3-7", PromptInput(ids("pq")), SamplingParams())
    right = replace(plain("AB"), fields={"routes": np.zeros((3, 2, 4), np.int16)})
    require_routes([right, plain("")], asked, (2, 4), "my_engine")
    wrong = replace(right, fields={} if routes is None else {"routes": routes})
    with rejects(EngineError, "bad-routes") as caught:
        require_routes([wrong], asked, (2, 4), "my_engine")
    assert "my_engine" in str(caught.value) and "step-3-7" in str(caught.value)
