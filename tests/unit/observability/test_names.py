"""Metrics of a step, compared with a literal list of names and with values computed by hand."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_like.config import RunConfig
from slime_like.observability.names import IDLE_TIME, scoring_metrics, source_kls, update_metrics
from slime_like.orchestration.run.recorder import StepRecorder
from slime_like.orchestration.run.sources import Source, SourceFigures
from slime_like.orchestration.run.step import TrainedStep
from slime_like.orchestration.trainer.batcher import PackTokens
from slime_like.orchestration.weight_sync import SyncReport
from slime_like.statistics import GRPOStats
from slime_like.trajectory import ScoredTrajectory
from tests.unit.observability.records import RL_METRICS, SFT_METRICS, grpo_stats, phase_times, value_stats

MODEL = Path(__file__).parents[3] / "configs" / "models" / "Qwen2.5-0.5B"


def row(name: str, length: int, rewards: tuple[float, ...], version: int = 3, **others: Any) -> ScoredTrajectory:
    """One row of the rollout GROUP-SAMPLE, with a prompt of 15 tokens, in step 4."""
    return ScoredTrajectory(
        prompt_tokens=torch.zeros(15, dtype=torch.int64), prompt_len=15, response_len=length,
        response_tokens=torch.zeros(length, dtype=torch.int64), loss_mask=torch.ones(length, dtype=torch.bool),
        logprobs=None, weight_versions=torch.full((length,), version), policy_version=version, answer="",
        rewards=torch.tensor(rewards), successes=(torch.tensor(rewards) > 0).float(), advantages=torch.tensor(1.0),
        sequence_id=name, rollout_id=name.partition(".")[0], group_id=int(name.partition("-")[0]),
        **{"reward_metadata": {}} | others,
    )  # fmt: skip


def rl_rows() -> list[ScoredTrajectory]:
    """Weighted rewards differ in group 7, but not in group 8 (1 + 0, 0 + 2/2). Group 9 has one sample."""
    two = {"conversation": {"turns": [[0, 15], [15, 30]]}}
    sums, words = {"source": "sums"}, {"source": "words"}
    cut: dict[str, Any] = {"finish_reason": "length"}
    return [
        row("7-0", 10, (1.0, 0.0), **sums, reward_metadata={"conversation": {"turns": [[0, 10]]}}),
        row("7-1.0", 10, (0.0, 0.0), 1, **sums, **cut),
        row("7-1.1", 5, (0.0, 0.0), 2, **sums, **cut),
        row("7-1.2", 5, (0.0, 0.0), **sums, **cut),
        row("8-0", 30, (1.0, 0.0), **words, **cut, reward_metadata=two),
        row("8-1.0", 2, (0.0, 2.0), 2, **words),
        row("8-1.1", 2, (0.0, 2.0), **words),
        row("9-0", 16, (1.0, 4.0), **words, reward_metadata={"conversation": {"turns": [[0, 16]]}}),
    ]


def rl_updates(*kls: dict[str, float]) -> list[GRPOStats]:
    updates = [
        grpo_stats(loss=1.0, old_gap_max=1e-7, engine_gap_max=0.5, learning_rate=1e-3, num_tokens=30, ratios=1.0),
        grpo_stats(loss=3.0, old_gap_max=0.2, engine_gap_max=0.25, learning_rate=2e-3, num_tokens=10, ratios=1.5),
    ]
    for update, each in zip(updates, kls, strict=False):
        update.source_kls = each
    return updates


def logged(
    rows: list[ScoredTrajectory],
    updates: list[GRPOStats],
    tokens: PackTokens,
    times: dict[str, float] | None = None,
    busy_s: float | None = None,
    figures: SourceFigures | None = None,
    **sections: dict[str, Any],
) -> dict[str, float]:
    """Return what the recorder logs for step 4."""
    functions = [{"name": "math_verify"}, {"name": "length", "weight": 0.5}]
    sync = SyncReport(
        total_s=1.0, verification_s=0.1, nbytes=8, wire_nbytes=4, changed_fraction=0.5, transport="shared_memory",
        gather_s=0.2, probe_gap=1e-6,
    )  # fmt: skip
    work = scoring_metrics("reference", 2.0, 0.5, response_tokens=80, total_tokens=150)
    times = times or phase_times()
    queues = {"queues/train_replay_buffer_size": 64.0, "queues/rollout_queue_size": 3.0, "rollout/dropped_prompts": 2.0}
    figures = figures or SourceFigures(queues | work | sync.metrics(sum(times.values())))
    found: dict[str, float] = {}
    run: Any = SimpleNamespace(
        config=RunConfig.model_validate(
            {
                "run_dir": "run",
                "model": {"path": MODEL},
                "reward": {"functions": functions},
                **sections,
            }
        ),
        finished_steps=0,
        source=SimpleNamespace(
            figures=lambda step_s: figures, has_rewards=sections.get("algorithm", {}).get("loss") != "sft"
        ),
        metrics=SimpleNamespace(log=lambda step, metrics: found.update(metrics)),
        progress=SimpleNamespace(update=lambda step, metrics: None),
    )
    recorder = StepRecorder(run)
    recorder._memory = {"peak_rss (GiB)": 1.5, "peak_gpu (GiB)": 3.5}
    recorder.record(4, TrainedStep(rows, updates, {}, tokens, busy_s), times)
    return found


DEBUG = {"samples_per_step": 0}


def test_metrics_of_an_rl_step() -> None:
    metrics = logged(rl_rows(), rl_updates(), PackTokens(200, 50), debug=DEBUG)
    assert metrics == pytest.approx(RL_METRICS)
    assert all(type(value) is float for value in metrics.values())


def test_a_sources_kl_is_the_mean_of_the_updates_with_its_tokens() -> None:
    updates = rl_updates({"sums": 1.0, "words": 4.0}, {"sums": 2.0})
    metrics = logged(rl_rows(), updates, PackTokens(200, 50), debug=DEBUG)
    assert metrics["sources/sums/distillation_kl"] == 1.5 and metrics["sources/words/distillation_kl"] == 4.0


def test_metrics_of_a_supervised_step() -> None:
    rows = [row("1-0", 3, (), source="a"), row("2-0", 5, (), source="b")]
    metrics = logged(
        rows, [grpo_stats(loss=2.0)], PackTokens(40, 0), figures=Source().figures(0), algorithm={"loss": "sft"}
    )
    sources = {f"sources/{name}/share": 0.5 for name in "ab"}
    sources |= {"sources/a/response_length_mean": 3.0, "sources/b/response_length_mean": 5.0}
    assert metrics == pytest.approx(SFT_METRICS | sources)


def test_metrics_of_a_critics_steps() -> None:
    """Means over two optimizer steps, the first one's gap, the last one's rate, and all tokens."""
    steps = [value_stats(loss=1.0, old_gap_max=0.1, learning_rate=0.3, num_tokens=5.0, explained_variance=0.5),
             value_stats(loss=4.0, old_gap_max=0.7, learning_rate=0.2, num_tokens=6.0)]  # fmt: skip
    expected = {"loss": 2.5, "old_gap_max": 0.1, "learning_rate": 0.2, "num_tokens": 11.0, "explained_variance": 0.25}
    found = update_metrics(steps, "train_critic")
    assert {name: value for name, value in found.items() if value} == pytest.approx(
        {f"train_critic/{name}": value for name, value in expected.items()}
    )


def test_documentation_names_all_metrics() -> None:
    """``docs/metrics.md`` has a section per prefix. NAME and K are placeholders."""
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    described = []
    for prefix, section in re.findall(r"^## `(\w+/)`\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE):
        items = re.findall(r"^- (`.*?`): ", section, re.MULTILINE)
        names = [name for item in items for name in re.findall(r"`([^`]+)`", item)]
        described += [prefix + re.sub("NAME|K$", ".+", re.escape(name)) for name in names]
    evaluation = "accuracy num_responses response_length_mean truncated_fraction scoring_failures pass@2"
    penalties = {f"train_actor_training/{name}" for name in ("kl_reward", "kl_reward_coef", "distillation_kl")}
    critic = update_metrics([value_stats()], "train_critic")
    held_out = {f"evaluation/{name}" for name in evaluation.split()} | {"rollout/pct_time_idle (%)"}
    logged = {*RL_METRICS, *critic, *penalties, *source_kls([{"sums": 1.0}]), *held_out}
    logged |= {"rollout/lifted_guarantees", "rollout/accepted_length"}  # with certain engine_args
    assert sorted(name for name in logged if not any(re.fullmatch(each, name) for each in described)) == []
    assert sorted(each for each in described if not any(re.fullmatch(each, name) for name in logged)) == []


def test_a_step_of_zero_seconds() -> None:
    times = dict.fromkeys(phase_times(), 0.0)
    metrics = logged(rl_rows(), rl_updates(), PackTokens(150, 50), times, debug=DEBUG)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train_actor_performance/pct_time_grpo_steps (%)"] == 0.0
    assert metrics["rollout/response_length_mean"] == 16.0
    assert "rollout/tokens_per_second" not in metrics  # rollouts from disk have no speed


def test_idle_time_and_speed_of_overlapping_phases() -> None:
    metrics = logged(
        rl_rows(), rl_updates(), PackTokens(200, 50), busy_s=6.0, debug=DEBUG, rollout={"max_staleness": 1},
        cluster={"placement": "separate"}, algorithm={"importance": {"correction": "none"}},
    )  # fmt: skip
    assert metrics[IDLE_TIME] == pytest.approx(1.0)  # 5 s of waiting and 2 s of training, 6 s of work in them
    assert metrics["rollout/tokens_per_second"] == pytest.approx(10.0)  # 80 tokens in the whole 8 s
