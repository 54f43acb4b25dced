"""``slime-like explain-gap``: for each of several faults, it names this cause and no other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.transformers.engine import TransformersEngine
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config, save_config
from slime_like.data.dump import dump_path, save_trajectories
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.data.tokenizer import load_tokenizer
from slime_like.interfaces import PromptInput, SamplingParams
from slime_like.orchestration.rollout.requests import build_requests, to_group, training_sampling
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.engine.driven import DrivenEngine, started
from slime_like.verification.engine.reference import Reference
from tests.conftest import Tiny
from tests.end_to_end import gap_faults
from tests.support.processes import succeed

REPO = Path(__file__).parents[2]
BOS = 1


@dataclass
class Case:
    """A run with a fault.

    Attributes:
        flags: its settings.
        engine: class of the engine that sampled.
        sampling: what it sampled with instead of the settings.
        seen: prompt that it saw instead of the row's.
        recorded: the row that was saved instead of what it returned.
        step: step of the batch.
        says: beginning of the last line.
        finding: part of the cause's line.
    """

    says: str
    finding: str
    flags: Sequence[str] = ()
    engine: Callable[[RunConfig, int], TransformersEngine] = TransformersEngine
    updates: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seen: Callable[[list[int]], list[int]] = lambda ids: ids
    recorded: Callable[[ScoredTrajectory], ScoredTrajectory] = lambda row: row
    step: int = 1


CASES = {
    "staleness": Case("staleness", "100% of the tokens are of version 0, the trainer's is 1", step=2),
    "temperature": Case(
        "temperature",
        "the trainer's logprobs are at temperature 0.7, the engine's at 1",
        ["--rollout.temperature", "0.7"],
        sampling={"temperature": 1.0},
    ),
    "truncation": Case(
        "truncation",
        "the rows have no supports",
        ["--rollout.top_k", "4"],
        recorded=lambda row: replace(row, support_ids=None, support_sizes=None),
    ),
    "ids": Case("ids", "the engine saw another BOS", seen=lambda ids: [BOS, *ids]),
    "weights": Case(
        "weights",
        "it does not serve the weights it received",
        ["--rollout.engine", "reversing"],
        gap_faults.ReversingEngine,
        updates=True,
    ),
    "layout": Case(
        "layout",
        "one rank gives other logprobs than 2",
        ["--trainer.backend", "shifted", "--trainer.parallel.context", "2"],
    ),
    "precision": Case(
        "precision (bfloat16)",
        "both in float32 instead of bfloat16",
        ["--trainer.backend", "exact", "--model.dtype", "bfloat16"],
    ),
}
QUICK = ("temperature", "weights")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.acceptance]) for name in CASES]
)
def test_the_cause_is_named(
    name: str, tiny: Tiny, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    installed = tmp_path / "site" / "faulty-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(gap_faults.ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", f"{installed.parent}:{REPO}")
    run_dir = tmp_path / "run"
    _make_run(case, tiny, run_dir)
    (run_dir / "checkpoints").symlink_to(trained / "checkpoints")
    finished = succeed(["explain-gap", str(run_dir), "--step", str(case.step)], tmp_path / "log")
    lines = finished.stdout.splitlines()
    share, said = lines[-1].split(" % of the gap is ")
    assert said == case.says, finished.stdout
    assert float(share) > 95
    shares = {line.split()[0]: line for line in lines[2:-2] if "%  " in line[30:39]}
    assert list(shares) == [name], finished.stdout
    assert case.finding in shares[name], finished.stdout


def _make_run(case: Case, tiny: Tiny, run_dir: Path) -> None:
    """Write what is left of a run: its configuration, and rows that a real engine sampled."""
    _, file, *flags = tiny.rl_flags(run_dir, "--rollout.engine", "transformers", "--trainer.backend", "fsdp")
    rollouts = run_dir / "rollouts"
    run_dir.mkdir()
    config = load_config(Path(file), [*flags, "--debug.save_rollouts", str(rollouts), *case.flags])
    save_config(config, run_dir / "config.yaml")
    prompts = PromptSource(config.data.train, load_tokenizer(tiny.model), config.data, config.seed).next(3)
    rows = _sampled(case, config, prompts)
    assert all(row.logprobs is not None and row.logprobs.isfinite().all() for row in rows)
    save_trajectories(dump_path(rollouts, case.step), [case.recorded(row) for row in rows])


def _sampled(case: Case, config: RunConfig, prompts: Sequence[Prompt]) -> list[ScoredTrajectory]:
    sampling: SamplingParams = replace(training_sampling(config.rollout, config.model), **case.sampling)
    requests = [
        replace(request, prompt=PromptInput(case.seen(list(request.prompt.token_ids))))
        for request in build_requests(prompts, sampling, num_samples=3, seed=0, label="train")
    ]
    engine = case.engine(config, 0)
    with started(engine) as loop:
        driven = DrivenEngine(engine, loop)
        if case.updates:
            driven.version = -1
            driven.run(driven.update(Reference(config.model.path).weights))
        answers = driven.generate_all(requests)
        driven.close()
    groups = [to_group(*each, config.rollout.temperature) for each in zip(prompts, answers, strict=True)]
    scores: dict[str, Any] = {"rewards": torch.zeros(0), "successes": torch.zeros(0)}
    scores |= {"advantages": torch.tensor(0.0), "reward_metadata": {"func_names": []}}
    return [ScoredTrajectory.of(row, **scores) for group in groups for row in group.trajectories]
