"""What a newcomer gives by mistake: lists for tensors, other shapes, other types, and what stands on masked tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import (
    ESTIMATORS,
    GRPOLoss,
    LossInputs,
    LossOutput,
    build_loss,
    compute_advantages,
    fused_logprobs,
    gae,
    importance_weights,
    kl_penalty,
    logprobs_and_entropy,
    off_policy_sequence_mask,
    overlong_penalty,
    selective_log_softmax,
    sum_of_sample_mean,
    value_loss,
    vocab_parallel_logprobs,
)
from slime_like.algorithms.advantages import Groups
from slime_like.algorithms.losses import PolicyTerms, kl_estimate
from slime_like.algorithms.losses.policy import SFT
from slime_like.config.algorithm import AlgorithmConfig
from tests.support.rejections import Rejects
from tests.unit.algorithms.test_losses import make_inputs

LIST = [0.0, 0.0]
TWO, MASK, LENGTHS = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([2])
IDS, LOGITS = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 5)
DIRECT = GRPOLoss(AlgorithmConfig()).forward


def gspo(**given: Any) -> LossOutput:
    return build_loss(AlgorithmConfig(loss="gspo"))(LossInputs(**given))


# A list where a tensor is documented: every function, every argument.
GIVEN: dict[Callable[..., Any], dict[str, Any]] = {
    selective_log_softmax: {"logits": LOGITS, "targets": IDS},
    logprobs_and_entropy: {"logits": LOGITS, "targets": IDS, "temperatures": TWO + 1},
    vocab_parallel_logprobs: {"logits": LOGITS, "targets": IDS, "temperatures": TWO + 1},
    fused_logprobs: {"hidden": LOGITS, "weight": LOGITS, "targets": IDS, "temperatures": TWO + 1},
    gae: {"rewards": TWO[:1], "values": TWO, "loss_mask": MASK, "response_lens": LENGTHS, "token_rewards": TWO},
    value_loss: dict.fromkeys(("values", "old_values", "returns", "token_weights"), TWO) | {"loss_mask": MASK},
    kl_estimate: {"logprobs": TWO, "ref_logprobs": TWO},
    kl_penalty: {"logprobs": TWO, "ref_logprobs": TWO, "loss_mask": MASK, "response_lens": LENGTHS},
    overlong_penalty: {"response_lens": LENGTHS},
    importance_weights: {"old_logprobs": TWO, "behaviour_logprobs": TWO, "loss_mask": MASK, "response_lens": LENGTHS},
    off_policy_sequence_mask: dict.fromkeys(("logprobs", "sampled_logprobs", "advantages"), TWO)
    | {"loss_mask": MASK, "response_lens": LENGTHS},
    sum_of_sample_mean: {"x": TWO},
    gspo: dict.fromkeys(("logprobs", "entropy", "old_logprobs", "behaviour_logprobs", "ref_logprobs"), TWO)
    | {"advantages": TWO, "loss_mask": MASK, "token_weights": TWO, "response_lens": LENGTHS},
    DIRECT: dict.fromkeys(("ref_logprobs", "advantages", "old_logprobs", "behaviour_logprobs"), TWO)
    | {"targets": IDS, "padding_masks": MASK},
}
FURTHER: dict[Callable[..., Any], dict[str, Any]] = {
    vocab_parallel_logprobs: {"vocab_size": 5},
    fused_logprobs: {"vocab_size": 2},
    kl_penalty: {"coefficient": 0.1},
    overlong_penalty: {"max_len": 5, "buffer": 2},
    importance_weights: {"correction": "truncate", "level": "sequence"},
    off_policy_sequence_mask: {"threshold": 0.1},
    sum_of_sample_mean: {"response_lengths": [2], "loss_masks": [MASK]},
    DIRECT: {"pi_logits": LOGITS},
}


@pytest.mark.parametrize(
    ("function", "name"),
    [pytest.param(f, name, id=f"{f.__name__}-{name}") for f, given in GIVEN.items() for name in given],
)
def test_a_list_is_no_tensor(function: Callable[..., Any], name: str) -> None:
    further = FURTHER.get(function, {})
    function(**GIVEN[function], **further)  # as it should be
    with pytest.raises(
        ValueError, match=rf"^{name} (is a list; give torch.tensor\({name}\)|are a list; give a (number or a )?tensor)"
    ):
        function(**GIVEN[function] | {name: LIST}, **further)


@pytest.mark.parametrize(
    "name",
    ["entropy", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages", "loss_mask", "token_weights"],
)
@pytest.mark.parametrize("shape", ["column", "one", "short"])
def test_a_loss_broadcasts_nothing(rejects: Rejects, name: str, shape: str) -> None:
    given = make_inputs()
    value = getattr(given, name)
    changed = {"column": value[:, None], "one": value[:1], "short": value[:3]}[shape]
    with rejects(ValueError):
        build_loss(AlgorithmConfig())(replace(given, **{name: changed}))


def test_a_masked_value_has_no_effect() -> None:
    """Neither on the critic's loss nor on its gradient, in any of the four tensors."""
    mask = torch.tensor([True, False, True])
    clean = torch.tensor([[0.5, 0.7, -0.3], [0.1, 0.2, 0.3], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    dirty = clean.masked_fill(~mask, float("nan")).requires_grad_()
    expected, found = (value_loss(*rows[:3], mask, rows[3], clip=0.2) for rows in (clean, dirty))
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.clipped, expected.clipped)
    (gradient,) = torch.autograd.grad(found.loss, dirty)
    assert bool(torch.isfinite(gradient[0]).all()) and gradient[0, 1] == 0


@pytest.mark.parametrize(
    "made",
    [
        lambda logprobs: PolicyTerms(logprobs.mean()),
        lambda logprobs: PolicyTerms(logprobs, ratio=logprobs[:1]),
        lambda logprobs: logprobs,
    ],
)
def test_a_custom_loss_gives_a_value_per_token(
    made: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch, rejects: Rejects
) -> None:
    monkeypatch.setattr(SFT, "__call__", lambda self, inputs: made(inputs.logprobs))
    with rejects(ValueError):
        build_loss(AlgorithmConfig(loss="sft"))(make_inputs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up(dtype: torch.dtype) -> None:
    """4,096 equal values: sums in the values' own type would stand still."""
    values = torch.full((4096,), 0.1, dtype=dtype)
    mean = sum_of_sample_mean(values, [4096], [torch.ones(4096)])
    assert float(mean) == pytest.approx(float(values[0]), rel=1e-6)
    mask = torch.ones(4096, dtype=torch.bool)
    per_token, total = kl_penalty(values, torch.zeros_like(values), mask, torch.tensor([4096]), coefficient=1.0)
    assert float(total) == pytest.approx(float(per_token.double().sum()), rel=1e-6)


def test_no_rewards_have_float_advantages() -> None:
    assert compute_advantages(torch.zeros(0, dtype=torch.int64), []).dtype == torch.float32
    assert compute_advantages(torch.zeros(0, dtype=torch.float64), []).dtype == torch.float64


def test_groups_live_where_the_values_do() -> None:
    """The meta device stands in for a GPU. It cannot count distinct ids; that it was asked to is what is seen here."""
    rewards = torch.zeros(2, device="meta", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="_unique2"):
        compute_advantages(rewards, [0, 0])
    with pytest.raises(NotImplementedError, match="_unique2"):  # the whole batch as a group
        ESTIMATORS["reinforce_pp"](rewards, Groups([0, 0]))
