"""``slime-like verify layouts`` with real ranks: sound layouts are the same, and a fault is named."""

from pathlib import Path

import pytest

from slime_like.data.dump import save_trajectories
from slime_like.models.dimensions import ModelDimensions
from slime_like.verification.comparison import synthetic_batch
from tests.conftest import Tiny
from tests.support.processes import run, succeed

REPO = Path(__file__).parents[2]
TIMEOUT_S = 270.0


def test_sound_layouts_are_the_same(tmp_path: Path) -> None:
    """The command creates its model."""
    finished = succeed(["verify", "layouts", "--layouts", "tp2-sp", "--steps", "1"], tmp_path / "log", TIMEOUT_S)
    rows = [line.split() for line in finished.stdout.splitlines() if "same" in line]
    assert [row[1] for row in rows] == ["single", "tp2-sp"]
    assert "tp2-sp: " not in finished.stdout  # nothing differs


def test_a_fault_of_one_layout_is_found_and_named(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient of 32 numbers is not summed, so logprobs and the first loss are right, but this gradient and the
    trained tensor are wrong. Without sequence parallelism, as in the baseline, the trainer is sound.

    The batch comes from saved rollouts, which lack a trainer's logprobs.
    """
    rollouts = tmp_path / "rollouts.pt"
    save_trajectories(rollouts, synthetic_batch(ModelDimensions.from_checkpoint(tiny.model), seed=3))
    installed = tmp_path / "site" / "faulty-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[slime_like.backends]\nfaulty = tests.end_to_end.faulty_backend:FaultyTrainer\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{installed.parent}:{REPO}")
    finished = run(
        ["verify", "layouts", "--model", str(tiny.model), "--layouts", "tp2-sp", "--steps", "1",
         "--trainer.backend", "faulty", "--batch", str(rollouts), "--trainer.target_tokens_per_batch", "192",],
        tmp_path / "log",
        TIMEOUT_S,
    )  # fmt: skip
    assert finished.code == 1, finished.stdout + finished.stderr
    assert finished.left_behind == []
    (table_row,) = [line for line in finished.stdout.splitlines() if "DIFFERS" in line]
    assert " tp2-sp " in table_row
    sentences = [line for line in finished.stdout.splitlines() if line.startswith("tp2-sp: ")]
    (gradient,) = [line for line in sentences if "the gradient of" in line]
    assert gradient.startswith("tp2-sp: the gradient of layer 1, self_attn.q_norm.weight deviates by"), sentences
    assert "gradients differ" not in gradient  # it is the only one
    assert any(line.startswith("tp2-sp: layer 1, self_attn.q_norm.weight deviates by") for line in sentences), sentences
    assert not any("logprob" in line or "loss of" in line for line in sentences), sentences
