"""A critic's head begins at 0, continues from checkpoints in any layout, and transformers reads its export.

One fork per backend writes a checkpoint and a Hugging Face directory, and continues in the same and in another layout.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement, Scores
from slime_like.models.dimensions import HEADS, VALUE_HEAD
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.parallel.cases import samples_with_loss
from tests.parallel.feature_cases import value_config, valued_sequences
from tests.parallel.layouts import Settings
from tests.parallel.ranks import run_each
from tests.parallel.steps import as_critic, assert_close, exported_from, running, same_bits, take_step
from tests.parallel.tiny import save_checkpoint, scored_sequences

LAYOUTS: dict[str, list[Settings]] = {
    "megatron": [{"tensor": 2, "sequence": True, "distributed": True}, {"pipeline": 2, "distributed": True}],
    "fsdp": [{"backend": "fsdp", "data": 2}, {"backend": "fsdp", "context": 2}],
}


@dataclass
class Record:
    """One rank's scores, if it has some, and weights: at first, at the checkpoint, and after a further step."""

    scores: list[list[Scores] | None]
    weights: list[dict[str, Tensor]]


def _steps(trainer: Any, count: int) -> None:
    pack = pack_sequences(sequences := valued_sequences()[:4])
    for _ in range(count):
        # Replicas of the whole pack: their sum is divided by their number.
        take_step(trainer, [pack], samples_with_loss(sequences) * trainer.coordinates.data_size)


def life_of(placement: RankPlacement, config: RunConfig, root: Path, loads: bool) -> Record:
    record = Record([], [])

    def note(trainer: Any) -> None:
        record.scores.append(trainer.score([pack_sequences(valued_sequences())]))
        record.weights.append(exported_from(trainer))

    with running(as_critic(placement), config) as trainer:
        note(trainer)
        assert not trainer.state.frozen, "the policy's ranks hold the reference"
        if loads:
            _steps(trainer, 1)  # its state must not survive
            trainer.load(root / "checkpoint")
        else:
            _steps(trainer, 3)
            trainer.save(root / "checkpoint")
            trainer.export_hf(root / "exported")
        note(trainer)
        trainer.offload()
        trainer.onload()
        _steps(trainer, 1)
        note(trainer)
        if not loads:
            with pytest.raises(TrainerError) as caught:
                take_step(trainer, [pack_sequences(scored_sequences([(3, 4)]))], 1.0)
            assert caught.value.code == "no-returns"
    return record


def _values(records: list[Record], index: int) -> Tensor:
    return next(scores[0]["values"] for record in records if (scores := record.scores[index]) is not None)


def weights_at(records: list[Record], index: int) -> dict[str, Tensor]:
    return {name: tensor for record in records for name, tensor in record.weights[index].items()}


@pytest.mark.parametrize("backend", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_critic_continues_from_its_checkpoint(family: str, backend: str, tmp_path: Path) -> None:
    model = save_checkpoint(family, tmp_path / "model", layers=2)
    configs = [value_config(model, tmp_path, layout, kl={"coef": 0.1}) for layout in LAYOUTS[backend]]
    tasks = [(configs[0], tmp_path, False), *((config, tmp_path, True) for config in configs)]
    wrote, same, other = (list(records) for records in run_each(life_of, 2, tmp_path / "ranks", tasks))
    assert not _values(wrote, 0).any() and not weights_at(wrote, 0)[VALUE_HEAD].any()
    assert weights_at(wrote, 0).keys() == weights_at(wrote, 1).keys() and not weights_at(wrote, 0).keys() & set(HEADS)
    assert float(_values(wrote, 1).abs().mean()) > 0.01
    for index in (1, 2):
        same_bits(weights_at(same, index), weights_at(wrote, index))
        assert torch.equal(_values(same, index), _values(wrote, index))
    same_bits(weights_at(other, 1), weights_at(wrote, 1))
    assert_close(weights_at(other, 2), weights_at(wrote, 2), 2e-5)
    _read_by_transformers(tmp_path / "exported", _values(wrote, 1), weights_at(wrote, 1))


def _read_by_transformers(exported: Path, values: Tensor, weights: dict[str, Tensor]) -> None:
    model, problems = AutoModelForSequenceClassification.from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert not any(problems[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_labels == 1
    same_bits({name: parameter.detach() for name, parameter in model.named_parameters()}, weights)
    found = [_values_of(model, sequence) for sequence in valued_sequences()]
    torch.testing.assert_close(torch.cat(found), values, rtol=0, atol=1e-5)


def _values_of(model: Any, sequence: ScoredTrajectory) -> Tensor:
    tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens).last_hidden_state[0]
        every: Tensor = model.score(hidden)[sequence.prompt_len - 1 : -1, 0]
    return every


# ------------------------------------------------------------------------------------------------------ a known table
def _tree() -> PackedTrajectory:
    """Return every response of three tokens out of two, as equally likely ones, with the reward as every return."""
    found = []
    for number in range(8):
        response = 40 + torch.tensor([number >> 2 & 1, number >> 1 & 1, number & 1])
        sequence = ScoredTrajectory.unrewarded(f"s{number}", torch.arange(4), response, group_id=0)
        sequence.values, sequence.returns = torch.zeros(3), torch.full((3,), _reward(number))
        found.append(sequence)
    return pack_sequences(found)


def _reward(number: int) -> float:
    return (0.0, 1.0, 1.0, -2.0, 0.5, 0.5, 3.0, 0.0)[number]


def _learned(placement: RankPlacement, config: RunConfig, pack: PackedTrajectory) -> list[Tensor]:
    with running(as_critic(placement), config) as trainer:
        for _ in range(80):
            pack.values = trainer.score([pack], "critic")[0]["values"]
            take_step(trainer, [pack], 24.0)
        return [trainer.score([pack])[0]["values"]]


@pytest.mark.parametrize("backend", LAYOUTS)
def test_values_converge_to_a_known_table(backend: str, tmp_path: Path) -> None:
    """The value of a prefix is the mean reward of the responses that begin with it."""
    model = save_checkpoint("qwen3", tmp_path / "model", layers=1)
    config = value_config(model, tmp_path, {"backend": backend, "lr": 4e-3})
    ((values,),) = run_each(_learned, 1, tmp_path / "ranks", [(config, _tree())])[0]
    rewards = [_reward(number) for number in range(8)]
    wanted = [
        sum(rewards[other] for other in same) / len(same)
        for number in range(8)
        for shift in (3, 2, 1)
        for same in [[other for other in range(8) if other >> shift == number >> shift]]
    ]
    torch.testing.assert_close(values, torch.tensor(wanted), rtol=0, atol=0.02)
