"""Put bugs of a critic into the trainer, one at a time: its parity tests must notice each.

As in ``test_trainer``: the comparison named for a bug must fail, and the earlier one must not.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.hugging_face.files import ValueModel
from backends.common.step import value_objective
from backends.fsdp import checkpoint
from backends.megatron import head
from backends.megatron.head import LogprobModel
from backends.megatron.trainer import MegatronTrainer
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import VALUE_HEAD
from tests.mutation.test_trainer import logits_are_read_at_the_token_itself, loss_is_scaled_by_the_context_size, no_bug
from tests.parallel.parity import Settings
from tests.parallel.ranks import run_each, run_ranks
from tests.parallel.steps import RankResult, same_bits
from tests.parallel.test_value_checkpoint import Record, life_of, weights_at
from tests.parallel.test_values import check_all_gradients, check_values
from tests.parallel.tiny import save_checkpoint
from tests.parallel.values import train_critic, value_case, value_config

SEQUENCE = {"tensor": 2, "sequence": True}


# ------------------------------------------------------------------------------------------------------------ the bugs
def a_stored_head_is_ignored() -> None:
    correct = ValueModel.require

    def require(self: ValueModel, *arguments: Any) -> None:
        self._slices.pop(VALUE_HEAD)
        correct(self, *arguments)

    ValueModel.require = require  # type: ignore[method-assign]


def tensor_ranks_sum_the_gradients_of_equal_states() -> None:
    correct = head.gather_from_sequence_parallel_region

    def gather(states: Tensor, tensor_parallel_output_grad: bool, group: Any) -> Tensor:
        return correct(states, tensor_parallel_output_grad=True, group=group)

    head.gather_from_sequence_parallel_region = gather


def tensor_ranks_sum_the_heads_gradient() -> None:
    """As those of norms, of which every rank has only its tokens' part."""
    correct = MegatronTrainer._prepare_training

    def prepare(self: MegatronTrainer) -> Any:
        for chunk in self.chunks:
            assert chunk.score is not None
            chunk.score.weight.sequence_parallel = True  # type: ignore[assignment]
        return correct(self)

    MegatronTrainer._prepare_training = prepare  # type: ignore[method-assign]


def values_are_not_clipped() -> None:
    correct = value_objective.value_loss
    value_objective.value_loss = lambda *arguments: correct(*arguments[:-1], None)


def the_newest_values_are_the_old_ones() -> None:
    correct = value_objective.value_loss
    value_objective.value_loss = lambda values, old, *rest: correct(values, values.detach(), *rest)


def the_head_is_rounded() -> None:
    LogprobModel.outputs = lambda self, selected, rows: (  # type: ignore[method-assign]
        (self.score.weight.bfloat16() @ selected.T.bfloat16()).float()
    )


BUGS: list[tuple[Callable[[], None], Settings, str]] = [
    (logits_are_read_at_the_token_itself, {}, "values"),
    (a_stored_head_is_ignored, {}, "values"),
    (a_stored_head_is_ignored, {"backend": "fsdp"}, "values"),
    (the_head_is_rounded, {}, "values"),
    (tensor_ranks_sum_the_gradients_of_equal_states, SEQUENCE, "gradients"),
    (tensor_ranks_sum_the_heads_gradient, SEQUENCE, "gradients"),
    (values_are_not_clipped, {"backend": "fsdp"}, "gradients"),
    (the_newest_values_are_the_old_ones, {}, "gradients"),
    (loss_is_scaled_by_the_context_size, {"context": 2}, "gradients"),
]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda: value_case("qwen2", tmp_path_factory.mktemp("case"), steps=0))


@pytest.mark.parametrize(("bug", "layout", "caught_by"), [*BUGS, (no_bug, SEQUENCE, "nothing")])
def test_parity_catches(
    bug: Callable[[], None], layout: Settings, caught_by: str, case_of: Any, tmp_path: Path
) -> None:
    case = case_of()
    config = value_config(case.checkpoint, tmp_path, layout)
    world, train = config.trainer.parallel.world_size, partial(_train_with, bug)
    results = run_ranks(train, world, tmp_path / "ranks", config, case.packs(), case.denominator, 0)
    if caught_by == "values":
        with pytest.raises(AssertionError):
            check_values(case, results)
        return
    check_values(case, results)
    if caught_by == "nothing":
        check_all_gradients(case, results, config.trainer.backend)
        return
    with pytest.raises(AssertionError):
        check_all_gradients(case, results, config.trainer.backend)


def _train_with(bug: Callable[[], None], placement: RankPlacement, *arguments: Any) -> RankResult:
    bug()
    return train_critic(placement, *arguments)


def the_head_is_in_no_checkpoint() -> None:
    correct = checkpoint.model_state
    checkpoint.model_state = lambda model: {
        name: tensor for name, tensor in correct(model).items() if not name.endswith(VALUE_HEAD)
    }


def test_a_checkpoint_without_the_head_is_caught(tmp_path: Path) -> None:
    """The other weights are restored, and the first difference is the head's."""
    config = value_config(save_checkpoint("qwen2", tmp_path / "model", layers=1), tmp_path, {"backend": "fsdp"})
    tasks = [(config, tmp_path, loads) for loads in (False, True)]
    life = partial(_life_with, the_head_is_in_no_checkpoint)
    wrote, loaded = (weights_at(list(records), 1) for records in run_each(life, 1, tmp_path / "ranks", tasks))
    assert not torch.equal(loaded.pop(VALUE_HEAD), wrote.pop(VALUE_HEAD))
    same_bits(loaded, wrote)


def _life_with(bug: Callable[[], None], placement: RankPlacement, *arguments: Any) -> Record:
    bug()
    return life_of(placement, *arguments)
