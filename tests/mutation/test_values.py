"""Put bugs of a critic into the trainer, one at a time: its parity tests must notice each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.hugging_face.files import ValueModel
from backends.common.step import objective
from backends.fsdp import checkpoint
from backends.megatron import head
from backends.megatron.head import LogprobModel
from backends.megatron.trainer import MegatronTrainer
from slime_like.models.dimensions import VALUE_HEAD
from tests.mutation.planted import Bug, Comparison, Patch, no_bug, require_caught, run_planted
from tests.mutation.test_trainer import logits_are_read_at_the_token_itself, loss_is_scaled_by_the_context_size
from tests.parallel.parity import Case, Settings
from tests.parallel.steps import RankResult, same_bits
from tests.parallel.test_value_checkpoint import life_of, weights_at
from tests.parallel.test_values import check_all_gradients, check_values
from tests.parallel.tiny import save_checkpoint
from tests.parallel.values import train_critic, value_case, value_config

SEQUENCE, FSDP = {"tensor": 2, "sequence": True}, {"backend": "fsdp"}


# ------------------------------------------------------------------------------------------------------------ the bugs
def a_stored_head_is_ignored(patch: Patch) -> None:
    correct = ValueModel.require

    def require(self: ValueModel, *arguments: Any) -> None:
        self._slices.pop(VALUE_HEAD)
        correct(self, *arguments)

    patch.setattr(ValueModel, "require", require)


def tensor_ranks_sum_the_gradients_of_equal_states(patch: Patch) -> None:
    correct = head.gather_from_sequence_parallel_region

    def gather(states: Tensor, tensor_parallel_output_grad: bool, group: Any) -> Tensor:
        return correct(states, tensor_parallel_output_grad=True, group=group)

    patch.setattr(head, "gather_from_sequence_parallel_region", gather)


def tensor_ranks_sum_the_heads_gradient(patch: Patch) -> None:
    """As those of norms, of which every rank has only its tokens' part."""
    correct = MegatronTrainer._prepare_training

    def prepare(self: MegatronTrainer) -> Any:
        for chunk in self.chunks:
            assert chunk.score is not None
            chunk.score.weight.sequence_parallel = True  # type: ignore[assignment]
        return correct(self)

    patch.setattr(MegatronTrainer, "_prepare_training", prepare)


def values_are_not_clipped(patch: Patch) -> None:
    correct = objective.value_loss
    patch.setattr(objective, "value_loss", lambda *arguments: correct(*arguments[:-1], None))


def the_newest_values_are_the_old_ones(patch: Patch) -> None:
    correct = objective.value_loss
    patch.setattr(objective, "value_loss", lambda values, old, *rest: correct(values, values.detach(), *rest))


def the_head_is_rounded(patch: Patch) -> None:
    patch.setattr(
        LogprobModel,
        "outputs",
        lambda self, selected, rows: (self.score.weight.bfloat16() @ selected.T.bfloat16()).float(),
    )


COMPARISONS = (check_values, check_all_gradients)
BUGS: list[tuple[Bug, Settings, Comparison | None]] = [
    (logits_are_read_at_the_token_itself, {}, check_values),
    (a_stored_head_is_ignored, {}, check_values),
    (a_stored_head_is_ignored, FSDP, check_values),
    (the_head_is_rounded, {}, check_values),
    (tensor_ranks_sum_the_gradients_of_equal_states, SEQUENCE, check_all_gradients),
    (tensor_ranks_sum_the_heads_gradient, SEQUENCE, check_all_gradients),
    (values_are_not_clipped, FSDP, check_all_gradients),
    (the_newest_values_are_the_old_ones, {}, check_all_gradients),
    (loss_is_scaled_by_the_context_size, {"context": 2}, check_all_gradients),
    (no_bug, {}, None),
    (no_bug, SEQUENCE, None),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, dict[int, list[RankResult]]]:
    """Return the case, and every rank's results by the place in ``BUGS``."""
    directory, tasks = tmp_path_factory.mktemp("ranks"), {}
    case = value_case("qwen2", directory / "case", steps=0)
    for number, (bug, layout, _) in enumerate(BUGS):
        config = value_config(case.checkpoint, directory, layout)
        tasks[number] = (bug, (config, case.packs(), case.denominator, 0))
    return case, run_planted(train_critic, directory, tasks)


@pytest.mark.parametrize("number", range(len(BUGS)), ids=[bug.__name__ for bug, *_ in BUGS])
def test_parity_catches(number: int, found: Any) -> None:
    case, results = found
    require_caught(COMPARISONS, BUGS[number][-1], case, results[number])


def the_head_is_in_no_checkpoint(patch: Patch) -> None:
    correct = checkpoint.model_state
    patch.setattr(
        checkpoint,
        "model_state",
        lambda model: {name: tensor for name, tensor in correct(model).items() if not name.endswith(VALUE_HEAD)},
    )


def test_a_checkpoint_without_the_head_is_caught(tmp_path: Path) -> None:
    """The other weights are restored, and the first difference is the head's."""
    config = value_config(save_checkpoint("qwen2", tmp_path / "model", layers=1), tmp_path, FSDP)
    tasks = {loads: (the_head_is_in_no_checkpoint, (config, tmp_path, loads)) for loads in (False, True)}
    found = run_planted(life_of, tmp_path / "ranks", tasks)
    wrote, loaded = (weights_at(found[loads], 1) for loads in (False, True))
    assert not torch.equal(loaded.pop(VALUE_HEAD), wrote.pop(VALUE_HEAD))
    same_bits(loaded, wrote)
