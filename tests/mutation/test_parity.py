"""Put known bugs into the trainers, one at a time: the comparison with the float64 reference must notice each.

A bug is a changed place of the source, and the rows of the parity tests that it must fail: of each, the comparisons
before the named one still succeed. Without a bug, all of them do. Not covered: CUDA kernels, several hosts.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.fsdp.trainer import FsdpTrainer
from slime_like.config import RunConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import VALUE_HEAD
from tests.mutation.bugs import BY_NAME, EVERY
from tests.parallel import checks
from tests.parallel.feature_cases import value_config
from tests.parallel.harness import Row, case_of, parameters
from tests.parallel.layouts import layout_of
from tests.parallel.ranks import run_by_size, run_each
from tests.parallel.steps import assert_close, same_bits
from tests.parallel.test_router_biases import check_roles, history, history_task
from tests.parallel.test_transformer_engine import resume_configs, train_and_save
from tests.parallel.test_value_checkpoint import life_of, weights_at
from tests.parallel.tiny import save_checkpoint
from tests.support.planted import Bug, Edit, plant

pytestmark = pytest.mark.timeout(900)  # one fork runs many rows

USUAL = ("scores", "gradients", "norm")
COMPARISONS: dict[str, tuple[str, ...]] = {
    "biases": ("scores", "biases"),
    "lora": ("scores", "reference", "factor_gradients", "norm", "merged", "base"),
    "values": ("values", "exported_gradients", "gradients"),
    "distilled": ("scores", "kls", "loss", "exported_gradients"),
}
"""In order, by feature."""


@parameters(EVERY)
def test_the_comparison_catches(row: Row, cases: Any, results: Any) -> None:
    kind = "biases" if row.caught_by is checks.check_biases else row.feature
    comparisons: list[Any] = [getattr(checks, f"check_{name}") for name in COMPARISONS.get(kind, USUAL)]
    for comparison in comparisons[: comparisons.index(row.caught_by)]:
        if comparison is not checks.check_norm or row.steps:
            comparison(case_of(row, cases), results[row])
    with nullcontext() if row.bug is None else pytest.raises(AssertionError):
        comparisons[comparisons.index(row.caught_by)](case_of(row, cases), results[row])


# ----------------------------------------------------------------------------------------- other tests than the rows'
def _start(placement: RankPlacement, config: RunConfig, bug: Bug) -> str:
    trainer = FsdpTrainer(config, placement)
    try:
        with plant(bug):
            trainer.setup()
    except ConfigError as error:
        return str(error)
    finally:
        trainer.shutdown()
    return "nothing"


def test_a_wrong_forward_pass_is_noticed_at_the_start(cases: Any, tmp_path: Path) -> None:
    config = cases("plain", "qwen3", 0).config(tmp_path, layout_of("fsdp-cp2"))
    names = ("sequences begin where the rank begins", "positions begin anew on every rank")
    found = run_by_size(_start, tmp_path, {name: (config, BY_NAME[name]) for name in names})
    for message, _ in found.values():
        assert "differ from those of transformers' own forward pass" in message


UNTRAINED = Edit(
    "biases are not weights",
    "backends.megatron.state",
    "for _, weight in named_weights(chunk)]",
    "for _, weight in chunk.named_parameters()]",
)


def _history(placement: RankPlacement, *arguments: Any) -> Any:
    with plant(UNTRAINED):
        return history(placement, *arguments)


def test_roles_that_share_biases_are_caught(tmp_path: Path) -> None:
    ((found,),) = run_by_size(_history, tmp_path, {"": history_task(tmp_path, "megatron")}).values()
    with pytest.raises(AssertionError):
        check_roles(found)


HEADLESS = Edit(
    "the head is in no checkpoint",
    "backends.fsdp.checkpoint",
    "for name, tensor in model.stored_by_name().items()]",
    'for name, tensor in model.stored_by_name().items() if not name.endswith("score.weight")]',
)


def _life_of(placement: RankPlacement, *arguments: Any) -> Any:
    with plant(HEADLESS):
        return life_of(placement, *arguments)


def test_a_checkpoint_without_the_head_is_caught(tmp_path: Path) -> None:
    """The other weights are restored, and the first difference is the head's."""
    model = save_checkpoint("qwen2", tmp_path / "model", layers=1)
    config = value_config(model, tmp_path, layout_of("fsdp"))
    found = run_by_size(_life_of, tmp_path / "ranks", {loads: (config, tmp_path, loads) for loads in (False, True)})
    wrote, loaded = (weights_at(found[loads], 1) for loads in (False, True))
    assert not torch.equal(loaded.pop(VALUE_HEAD), wrote.pop(VALUE_HEAD))
    same_bits(loaded, wrote)


CHECKPOINT = "backends.megatron.checkpoint"
UNCOUNTED = Edit(
    "the counter of a fused optimizer is not restored",
    CHECKPOINT,
    'if _counts_by_group(part.optimizer) or "step" in group:',
    'if "step" in group:',
)
MISTAKEN = Edit(
    "a fused optimizer is filled like torch's",
    CHECKPOINT,
    "not isinstance(optimizer, torch.optim.AdamW | HybridDeviceOptimizer)",
    "not isinstance(optimizer, torch.optim.Optimizer)",
)


def _resumed(placement: RankPlacement, config: RunConfig, bug: Edit | None, *paths: Path | None) -> Any:
    with nullcontext() if bug is None else plant(bug):
        try:
            return train_and_save(placement, config, *paths)
        except KeyError as error:
            return error.args


def test_a_fused_optimizer_that_begins_anew_is_caught(tmp_path: Path) -> None:
    """As on a machine with Transformer Engine, whose optimizer counts its updates elsewhere than torch's."""
    ring, fused = resume_configs("qwen3", "transformer_engine", tmp_path, {})
    saved = tmp_path / "saved"
    loads = [(fused, bug, None, saved) for bug in (None, UNCOUNTED, MISTAKEN)]
    found = run_each(_resumed, 1, tmp_path / "ranks", [(ring, None, saved, None), *loads])
    (expected,), (continued,), (uncounted,), (mistaken,) = found
    assert_close(continued, expected, 1e-6)
    with pytest.raises(AssertionError):
        assert_close(uncounted, expected, 1e-6)
    assert mistaken == ("step",)


@pytest.mark.parametrize(
    "bug",
    [*dict.fromkeys(row.bug for row in EVERY if isinstance(row.bug, Edit)), UNCOUNTED, MISTAKEN],
    ids=lambda e: e.name,
)
def test_no_row_is_stale(bug: Edit) -> None:
    """Each names one place of the source, and changes a function."""
    with plant(bug):
        pass
