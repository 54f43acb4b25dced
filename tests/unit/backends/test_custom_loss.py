"""Errors of a custom loss name the loss, its file and its line. Errors of built-in losses stay unchanged."""

import math
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.common.step.objective import LOSSES_OF_HEADS, configured_loss
from slime_like.algorithms import LossInputs
from slime_like.config import AlgorithmConfig, ModelConfig, RunConfig
from slime_like.errors import DataError, TrainerError
from slime_like.orchestration.cluster.ray_calls import locate_error
from tests.support.rejections import Rejects

SOURCE = """
from slime_like.algorithms.losses.policy import PolicyTerms
from slime_like.errors import DataError

class Fine:
    name, needs_old, needs_advantages = "own", False, False
    def __init__(self, scale=1.0):
        self.scale = scale
    def __call__(self, inputs):
        return PolicyTerms(-self.scale * inputs.logprobs)

class Boom(Fine):
    def __call__(self, inputs):
        raise ValueError("loss boom\\nand more")

class Shapes(Fine):
    def __call__(self, inputs):
        return PolicyTerms(inputs.logprobs.reshape(3, 5))

class Mean(Fine):
    def __call__(self, inputs):
        return PolicyTerms(-inputs.logprobs.mean())

class Unbuilt(Fine):
    def __init__(self):
        {}["missing thing"]

class NeedsOption(Fine):
    def __init__(self, bound):
        pass

class NoLoss:
    def __call__(self, inputs):
        pass

def boom(*given):
    raise ValueError("part boom")

def mean(*given):
    return given[0].mean()

class Ours(Fine):
    def __call__(self, inputs):
        raise DataError("row 3 is bad; correct it")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a directory with modules of custom losses."""
    (tmp_path / "own_losses.py").write_text(SOURCE)
    (tmp_path / "own_broken.py").write_text("\n\n1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_losses", None)


def inputs() -> LossInputs:
    logprobs = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.5])).requires_grad_()
    return LossInputs(logprobs, torch.ones(4, dtype=torch.bool), torch.ones(4))


def test_a_custom_loss_is_computed_with_its_options(own: Path) -> None:
    for options, expected in (({}, 7), ({"scale": 3.0}, 21)):
        output = configured_loss(AlgorithmConfig(loss={"name": "own_losses:Fine", **options}))(inputs())
        assert float(output.loss.detach() / math.log(2)) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "cause"), [("Boom", ValueError), ("Shapes", RuntimeError), ("Mean", ValueError)])
def test_a_failing_call_names_its_line(own: Path, name: str, cause: type[Exception], rejects: Rejects) -> None:
    loss = configured_loss(AlgorithmConfig(loss=f"own_losses:{name}"))
    with rejects(TrainerError, "custom-loss-failed") as caught:
        loss(inputs())
    assert type(caught.value.__cause__) is cause


@pytest.mark.parametrize(
    "name", [*(f"own_losses:{name}" for name in ("Unbuilt", "NeedsOption", "NoLoss", "Nothing")), "own_broken:Boom"]
)
def test_a_failing_construction_names_its_line(own: Path, name: str, rejects: Rejects) -> None:
    config = RunConfig(run_dir=own / "run", model=ModelConfig(path=own), algorithm=AlgorithmConfig(loss=name))
    with rejects(TrainerError, "custom-loss-failed"):
        LOSSES_OF_HEADS["logprob"](config)


PARTS: dict[str, dict[str, Any]] = {"kl.estimator": {"coef": 0.1}, "importance.correction": {}}


@pytest.mark.parametrize("setting", PARTS)
@pytest.mark.parametrize("name", ["boom", "mean", "nothing"])
def test_a_failing_estimator_or_correction_names_its_line(own: Path, setting: str, name: str, rejects: Rejects) -> None:
    """The function is missing, raises, or returns a scalar that would be broadcast."""
    zeros = torch.zeros(4)
    given = replace(inputs(), old_logprobs=zeros, behaviour_logprobs=zeros, ref_logprobs=zeros, advantages=zeros)
    section, field = setting.split(".")
    config = AlgorithmConfig(loss="policy_gradient", **{section: {**PARTS[setting], field: f"own_losses:{name}"}})
    with rejects(TrainerError, "custom-loss-failed") as caught:
        configured_loss(config)(given)
    assert str(caught.value).startswith(f"algorithm.{setting}=own_losses:{name} failed with ")


def test_its_traceback_reaches_the_caller_of_the_rank(own: Path) -> None:
    """The error is pickled between processes, and gets the rank's name."""
    with pytest.raises(TrainerError) as caught:
        configured_loss(AlgorithmConfig(loss="own_losses:Boom"))(inputs())
    received = locate_error(pickle.loads(pickle.dumps(caught.value)), "trainer rank 0", "training")
    assert str(received).startswith("trainer rank 0, training: algorithm.loss=own_losses:Boom failed with ")
    assert 'raise ValueError("loss boom' in (received.users_traceback or "")


@pytest.mark.parametrize(("loss", "error"), [("own_losses:Ours", DataError), ("policy_gradient", ValueError)])
def test_our_own_errors_and_built_in_losses_fail_unchanged(own: Path, loss: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"row 3 is bad|needs advantages") as caught:
        configured_loss(AlgorithmConfig(loss=loss))(inputs())
    assert type(caught.value) is error
