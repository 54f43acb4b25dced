"""Debug tables against rows computed by hand."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_like.observability.tables import Row, per_sample_rows, per_token_rows
from slime_like.orchestration.run.recorder import debug_tables
from slime_like.trajectory import ScoredTrajectory
from tests.unit.observability.records import grpo_stats

WORDS = {1: "2", 2: "+", 3: "=", 4: "5", 5: "<eos>"}
STATS = grpo_stats(loss=0.5, policy_loss=0.25, kl_loss=0.125, ratios=1.5, clipfrac=0.75, approx_policy_kls=2.0)
PI = [torch.tensor([-0.5, -1.0, -4.0]), torch.tensor([-2.0])]


def decode(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def cells(rows: Sequence[Row]) -> list[list[Any]]:
    return [list(row.values()) for row in rows]


def samples() -> list[ScoredTrajectory]:
    """The last token of the first carries no loss. The second has neither reference nor engine logprobs."""
    first = ScoredTrajectory(
        prompt_tokens=torch.tensor([1, 2, 1, 3]), response_tokens=torch.tensor([4, 5, 4]), prompt_len=4, response_len=3,
        logprobs=torch.tensor([-0.25, -1.0, -1.0]), ref_logprobs=torch.tensor([-0.75, -1.5, -4.0]), old_logprobs=PI[0],
        rewards=torch.tensor([1.0, 0.5]), advantages=torch.tensor(0.75), successes=torch.tensor([1.0, 0.0]),
        answer="4", sequence_id="7-0", group_id=7, reward_metadata={"func_names": ["math", "format"]}, policy_version=3,
        loss_mask=torch.tensor([True, True, False]), weight_versions=torch.tensor([3, 3, 4]), finish_reason="length",
    )  # fmt: skip
    second = ScoredTrajectory(
        prompt_tokens=torch.tensor([2]), response_tokens=torch.tensor([5]), prompt_len=1, response_len=1,
        logprobs=None, ref_logprobs=None, old_logprobs=PI[1], rewards=torch.tensor([0.0, 0.25]),
        advantages=torch.tensor(-0.75),
        successes=torch.tensor([0.0, 1.0]), answer="", sequence_id="8-0", group_id=8,
        reward_metadata={"func_names": ["math", "format"]}, policy_version=0, loss_mask=torch.tensor([True]),
    )  # fmt: skip
    return [first, second]


def test_per_sample_rows() -> None:
    rows = per_sample_rows(12, samples(), STATS, decode)
    assert list(rows[0]) == [
        "Sequence ID", "Prompt", "Response", "Advantages", "Response Length", "Step",
        "Reward_math", "Success_math", "Reward_format", "Success_format",
        "loss", "policy_loss", "kl_loss", "ratios", "clipfrac", "approx_policy_kls",
        "Mean Abs Diff Pi-Ref", "Mean Abs Diff Pi-Generated", "Answer", "Group ID", "Weight Version", "Finish Reason",
        "Reward Metadata",
    ]  # fmt: skip
    step_figures = [0.5, 0.25, 0.125, 1.5, 0.75, 2.0]
    assert cells(rows) == [
        ["7-0", "2+2=", "5<eos>5", 0.75, 2, 12, 1.0, 1.0, 0.5, 0.0, *step_figures, 0.375, 0.125, "4", 7, 3, "length",
         None],
        ["8-0", "+", "<eos>", -0.75, 1, 12, 0.0, 0.0, 0.25, 1.0, *step_figures, None, None, "", 8, None, "stop", None],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "shown"),
    [
        ({"math": {"found": "5 \u20ac", "near": [1, None]}}, '{"math": {"found": "5 \u20ac", "near": [1, null]}}'),
        ({"reason": "timeout", "function": "math"}, '{"reason": "timeout", "function": "math"}'),
        ({"conversation": {"turns": [[0, 1]], "steps": [{}, {"tool": 1}]}}, '{"environment": [{}, {"tool": 1}]}'),
        ({"conversation": {"turns": [[0, 1]], "steps": [{}]}}, None),
    ],
)
def test_reward_metadata_is_text(metadata: dict[str, Any], shown: str | None) -> None:
    """Metadata may have any type, but a tracker's column has one."""
    sample = replace(samples()[1], reward_metadata={"func_names": ["math", "format"], **metadata})
    (row,) = per_sample_rows(1, [sample], STATS, decode)
    assert row["Reward Metadata"] == shown


def test_per_token_rows() -> None:
    rows = per_token_rows(12, samples(), decode)
    assert list(rows[0]) == [
        "Sequence ID", "Token Position", "Token ID", "Decoded Token", "Generated Logprob", "Ref Logprob", "Pi Logprob",
        "Abs Diff Pi-Ref", "Abs Diff Pi-Generated", "Step", "Loss Mask", "Weight Version",
    ]  # fmt: skip
    assert cells(rows) == [
        ["7-0", 0, 4, "5", -0.25, -0.75, -0.5, 0.25, 0.25, 12, True, 3],
        ["7-0", 1, 5, "<eos>", -1.0, -1.5, -1.0, 0.5, 0.0, 12, True, 3],
        ["7-0", 2, 4, "5", -1.0, -4.0, -4.0, 0.0, 3.0, 12, False, 4],
        ["8-0", 0, 5, "<eos>", None, None, -2.0, None, None, 12, True, None],
    ]


def test_turns() -> None:
    """The model says "5<eos>", the environment "+", the model "5"; the second sample has no conversation."""
    first, second = samples()
    talk = replace(
        first, response_tokens=torch.tensor([4, 5, 2, 4]), response_len=4, logprobs=torch.tensor([-0.25, -1, 0, -2]),
        ref_logprobs=None, old_logprobs=torch.tensor([-0.5, -1.0, -9.0, -2.5]),
        loss_mask=torch.tensor([True, True, False, True]),
        weight_versions=torch.tensor([3, 3, 3, 4]),
        reward_metadata={**first.reward_metadata, "conversation": {"turns": [[0, 2], [3, 4]], "steps": [{}]}},
    )  # fmt: skip
    rows = per_sample_rows(12, [talk, second], STATS, decode)
    assert list(rows[0])[-2:] == ["Turns", "Conversation"]
    assert [row[-2:] for row in cells(rows)] == [
        [2, "1 model: 5<eos>\n1 environment: +\n2 model: 5"],
        [1, "1 model: <eos>"],
    ]  # fmt: skip
    assert rows[0]["Response Length"] == 3  # without the observation
    assert rows[0]["Mean Abs Diff Pi-Generated"] == pytest.approx(0.25)  # without the observation
    tokens = per_token_rows(12, [talk, second], decode)
    assert [row["Turn"] for row in tokens] == [1, 1, 1, 2, 1]
    shown = ("Generated Logprob", "Abs Diff Pi-Generated", "Loss Mask")
    assert [tuple(row[name] for name in shown) for row in tokens[:4]] == [
        (-0.25, 0.25, True), (-1.0, 0.0, True), (None, None, False), (-2.0, 0.5, True),
    ]  # fmt: skip


@pytest.mark.parametrize(("limit", "rows"), [(0, []), (1, [1, 3]), (2, [2, 4]), (9, [2, 4])])
def test_limit_counts_samples(limit: int, rows: list[int]) -> None:
    frozen = {
        sample.sequence_id: {"old_logprobs": sample.old_logprobs, "ref_logprobs": sample.ref_logprobs}
        for sample in samples()
    }
    policy: Any = SimpleNamespace(stored_scores=lambda rows, *fields: frozen)
    tables = debug_tables(1, samples(), policy, STATS, decode, limit)
    assert [len(table) for table in tables.values()] == rows


def test_samples_come_from_different_prompts() -> None:
    names = ("7-0", "7-1", "7-2", "8-0", "8-1", "9-0")
    batch = [replace(samples()[1], sequence_id=name, rollout_id=name, group_id=int(name[0])) for name in names]
    frozen = {"old_logprobs": torch.tensor([-2.0])}
    policy: Any = SimpleNamespace(stored_scores=lambda rows, *fields: {row.sequence_id: frozen for row in rows})
    rows, _ = debug_tables(1, batch, policy, STATS, decode, limit=5).values()
    assert [row["Sequence ID"] for row in rows] == ["7-0", "8-0", "9-0", "7-1", "8-1"]


def test_a_sample_without_loss_has_no_mean_gap() -> None:
    masked = replace(samples()[0], loss_mask=torch.zeros(3, dtype=torch.bool))
    (row,) = per_sample_rows(1, [masked], STATS, decode)
    assert row["Mean Abs Diff Pi-Ref"] is None and row["Mean Abs Diff Pi-Generated"] is None


def test_a_demonstration_has_no_rewards() -> None:
    none = torch.zeros(0)
    demonstration = replace(samples()[1], rewards=none, successes=none, reward_metadata={"func_names": []})
    (row,) = per_sample_rows(1, [demonstration], STATS, decode)
    assert list(row)[5:7] == ["Step", "loss"]
