"""Runs that train low-rank factors: after every sync, engines and trainer agree about logprobs."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slime_like.config.reading.load import load_config
from slime_like.verification.rehearsal import _export
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.support.processes import succeed
from tests.support.shared_cluster import train_together

RANK, SHOWN = 6, 4
LORA = ["--model.lora.rank", str(RANK), "--model.lora.alpha", "9", "--trainer.optimizer.lr", "1e-2"]
FSDP = ["--trainer.backend", "fsdp"]
TWO = ["--trainer.parallel.tensor", "2", "--trainer.parallel.sequence", "true"]
AHEAD = ["--rollout.max_staleness", "1", "--algorithm.importance.correction", "truncate", "--rollout.stream", "true"]
CASES: dict[str, list[str]] = {
    "transformers-adapter-ahead": [*AHEAD, *TWO],
    "transformers-merged": FSDP,
    "sglang-adapter": FSDP,
    "vllm-adapter": TWO,
    "vllm-adapter-tp2-ahead": [*AHEAD, *FSDP, "--rollout.tensor", "2"],
    "sglang-adapter-tp2-ahead": [*AHEAD, "--rollout.tensor", "2"],
    "vllm-merged": [*TWO, "--sync.delta", "always", "--sync.transport", "gloo"],
    "sglang-merged": TWO,
    "transformers-adapter-stages": ["--trainer.parallel.pipeline", "2"],
}
QUICK, EVALUATED = list(CASES)[:2], "evaluated"


def flags_of(tiny: Tiny, root: Path, case: str) -> list[str]:
    engine, form = case.split("-")[:2]
    flags = ["--rollout.engine", engine, "--model.lora.sync", form, "--steps", "3", "--evaluation.files", "[]"]
    flags += ["--algorithm.kl.coef", "0.01", "--algorithm.minibatches", "1"]
    return tiny.rl_flags(root / case, *flags, *LORA, *CASES[case])


@pytest.fixture(scope="module")
def together(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the quick runs, and of one that is evaluated."""
    root = tmp_path_factory.mktemp("together")
    engine = ["--rollout.engine", "transformers", "--model.lora.sync", "adapter"]
    runs = [flags_of(tiny, root, case) for case in QUICK]
    train_together([*runs, tiny.rl_flags(root / EVALUATED, *engine, *LORA)], root)
    return root


@pytest.mark.parametrize("case", QUICK)
def test_engines_and_trainer_agree(tiny: Tiny, together: Path, case: str) -> None:
    """Factors change at a high rate, so an engine with old ones would be found."""
    check_agreement(tiny, together / case, case)


@pytest.mark.acceptance
@pytest.mark.parametrize("case", list(CASES)[2:])
def test_other_engines_and_trainers_agree(tiny: Tiny, tmp_path: Path, case: str) -> None:
    succeed(flags_of(tiny, tmp_path, case), tmp_path / "log")
    check_agreement(tiny, tmp_path / case, case)


def check_agreement(tiny: Tiny, run_dir: Path, case: str) -> None:
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["weights/probe_gap"] < 1e-4
        assert 0 < row["train_actor_training/engine_gap_max"] < 1e-4 or "ahead" in case
    losses = [row["train_actor_training/kl_loss"] for row in rows]
    assert losses[0] == pytest.approx(0.0, abs=1e-6) and losses[-1] > 1e-3  # the reference is the base
    base = load_file(tiny.model / "model.safetensors")
    targets = [weight.shape for name, weight in base.items() if name.endswith("_proj.weight")]
    whole = sum(weight.numel() for weight in base.values()) if "merged" in case else RANK * sum(map(sum, targets))
    assert {row["weights/sync_bytes"] for row in rows} == {4 * whole}


def test_an_evaluation_of_an_adapter(tiny: Tiny, together: Path, tmp_path: Path) -> None:
    """It samples what the run sampled after its last step, and not what it sampled from the base before the first.

    Rehearsals accept the exported adapter, but not with other targets.
    """
    run_dir = together / EVALUATED
    trained = load_config(run_dir / "config.yaml", []).model
    other = trained.model_copy(update={"lora": trained.lora.model_copy(update={"targets": ("q_proj",)})})
    assert [_export(run_dir / "hf", model).is_sound for model in (trained, other)] == [True, False]
    sampled = _responses(run_dir / "tables" / "held_out_debug_table.jsonl")
    flags = tiny.rl_flags(tmp_path, "--rollout.engine", "transformers", "--model.lora.path", str(run_dir / "hf"))
    succeed(["eval", *flags[1:], "--output", str(tmp_path / "eval.jsonl")], tmp_path / "log")
    found = _responses(tmp_path / "eval.jsonl")
    assert found[:SHOWN] == sampled[SHOWN:] != sampled[:SHOWN]
    assert len(found) == 16


def _responses(file: Path) -> list[str]:
    return [json.loads(line)["Response"] for line in file.read_text().splitlines()]
