"""Biases that move belong to the policy: roles keep theirs, and a failed step moves none.

The parity matrix compares loads and biases with a reference in every layout, and checkpoint tests save them.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.ranks import run_each
from tests.parallel.steps import Trainer, running, take_step
from tests.parallel.tiny import save_checkpoint, scored_sequences, tiny_config

RATE = 0.3
"""As large as the differences of scores, so that other experts are chosen."""


@dataclass
class History:
    """Biases and logprobs of one rank, by time, in order."""

    biases: dict[str, Tensor]
    policy: dict[str, Tensor]
    reference: dict[str, Tensor]


def history(placement: RankPlacement, config: RunConfig, pack: PackedTrajectory, directory: Path) -> History:
    """Make a step, a step that fails, a refresh of the reference, and another step."""
    found = History({}, {}, {})

    def note(when: str, trainer: Trainer) -> None:
        (policy,), (reference,) = trainer.score([pack], "policy") or [], trainer.score([pack], "reference") or []
        found.policy[when], found.reference[when] = policy["old_logprobs"], reference["ref_logprobs"]
        found.biases[when] = torch.stack(list(trainer._router_biases().values()))

    bad = pack_sequences(scored_sequences([(5, 9), (3, 4)]))
    assert bad.advantages is not None
    bad.advantages[0], bad.loss_mask[0], bad.token_weights[0] = float("nan"), True, 1.0
    with running(placement, config) as trainer:
        note("start", trainer)
        take_step(trainer, [pack], 10.0)
        note("step", trainer)
        with pytest.raises(TrainerError):
            take_step(trainer, [bad], 10.0)
        trainer.save_weights(directory)
        trainer.load_weights(directory, "reference")
        note("refresh", trainer)
        take_step(trainer, [pack], 10.0)
        note("end", trainer)
    return found


def history_task(root: Path, backend: str) -> tuple[RunConfig, PackedTrajectory, Path]:
    """Return the arguments of ``history``; a model is made if ``root`` has none."""
    if not (model := root / "model").exists():
        save_checkpoint("deepseek_v3_direct", model)
    pack = pack_sequences(scored_sequences([(5, 9), (3, 1), (11, 6), (2, 17)]))
    trainer = {"backend": backend, "router_bias_rate": RATE, "optimizer": {"lr": 1e-7}}
    return tiny_config(model, root, trainer=trainer, algorithm={"kl": {"coef": 0.1}}), pack, root / backend


def check_roles(found: History) -> None:
    """The learning rate is tiny, so logprobs differ only because of biases."""
    biases, policy, reference = found.biases, found.policy, found.reference
    moves = (biases["step"] - biases["start"]).abs()
    assert torch.isclose(moves, torch.tensor(RATE)).float().mean() > 0.8
    assert torch.equal(biases["refresh"], biases["step"]) and not torch.equal(biases["end"], biases["step"])
    assert torch.equal(reference["start"], policy["start"]) and torch.equal(reference["step"], reference["start"])
    assert torch.equal(reference["refresh"], policy["step"]) and torch.equal(reference["end"], reference["refresh"])
    for before, after in (("start", "step"), ("refresh", "end")):
        assert float((policy[after] - policy[before]).abs().max()) > 1e-3


def test_a_reference_keeps_its_biases_until_its_refresh_and_a_failed_step_moves_none(tmp_path: Path) -> None:
    tasks = [history_task(tmp_path, backend) for backend in ("megatron", "fsdp")]
    for (found,) in run_each(history, 1, tmp_path / "ranks", tasks):
        check_roles(found)
