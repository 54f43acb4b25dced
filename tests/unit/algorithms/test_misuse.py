"""What a newcomer gives by mistake is rejected in a sentence that names what, where and the remedy."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import (
    ESTIMATORS,
    GRPOLoss,
    LossInputs,
    build_loss,
    compute_advantages,
    fused_logprobs,
    gae,
    importance_weights,
    kl_penalty,
    logprobs_and_entropy,
    merge_from_context_parallel,
    off_policy_sequence_mask,
    overlong_penalty,
    pack_sequences,
    padded_length,
    selective_log_softmax,
    split_for_context_parallel,
    sum_of_sample_mean,
    value_loss,
    vocab_parallel_logprobs,
)
from slime_like.algorithms.advantages import Groups
from slime_like.algorithms.losses import PolicyTerms, kl_estimate
from slime_like.algorithms.losses.policy import SFT
from slime_like.config.algorithm import AlgorithmConfig
from tests.support.rejections import Rejects
from tests.unit.algorithms.cases import SHAPES, batch, scored
from tests.unit.algorithms.test_losses import make_inputs

NAN, INF = float("nan"), float("inf")
LIST = [0.0, 0.0]
TWO, MASK, LENGTHS = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([2])
IDS, LOGITS = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 5)
CONFIG = AlgorithmConfig()


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


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
}
FURTHER: dict[Callable[..., Any], dict[str, Any]] = {
    vocab_parallel_logprobs: {"vocab_size": 5},
    fused_logprobs: {"vocab_size": 2},
    kl_penalty: {"coefficient": 0.1},
    overlong_penalty: {"max_len": 5, "buffer": 2},
    importance_weights: {"correction": "truncate", "level": "sequence"},
    off_policy_sequence_mask: {"threshold": 0.1},
    sum_of_sample_mean: {"response_lengths": [2], "loss_masks": [MASK]},
}


@pytest.mark.parametrize(
    ("function", "name"),
    [pytest.param(f, name, id=f"{f.__name__}-{name}") for f, given in GIVEN.items() for name in given],
)
def test_a_list_is_no_tensor(function: Callable[..., Any], name: str) -> None:
    further = FURTHER.get(function, {})
    function(**GIVEN[function], **further)  # as it should be
    refused(lambda: function(**GIVEN[function] | {name: LIST}, **further), rf"^{name} (is|are) a list; give .*tensor")


@pytest.mark.parametrize("name", [f.name for f in fields(LossInputs)])
def test_a_list_is_no_input_of_a_loss(name: str) -> None:
    given = LossInputs(TWO, TWO, TWO, TWO, TWO, TWO, MASK, TWO, LENGTHS)
    loss = build_loss(AlgorithmConfig(loss="gspo"))
    loss(given)
    refused(lambda: loss(replace(given, **{name: LIST})), f"^{name} is a list; give torch.tensor")


@pytest.mark.parametrize(
    "name", ["targets", "ref_logprobs", "advantages", "padding_masks", "old_logprobs", "behaviour_logprobs"]
)
def test_a_list_is_no_input_of_the_direct_loss(name: str) -> None:
    given: dict[str, Any] = {"pi_logits": LOGITS, "targets": IDS, "ref_logprobs": TWO, "advantages": TWO}
    GRPOLoss(CONFIG).forward(**given)
    refused(lambda: GRPOLoss(CONFIG).forward(**given | {name: LIST}), f"^{name} is a list; give torch.tensor")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, rejects: Rejects) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with rejects(ValueError):
        pack_sequences(batch(SHAPES), device="cuda:1")


def test_supervised_loss_needs_no_advantages() -> None:
    loss, *_ = GRPOLoss(AlgorithmConfig(loss="sft")).forward(LOGITS, IDS, None, None)
    assert float(loss) == pytest.approx(float(torch.tensor(5.0).log()))


# ---------------------------------------------------------------------------------------------- entries of a sequence
def with_entry(name: str, value: float) -> Any:
    """Sequence 's1' with ``value`` in its last loss-carrying entry."""
    sequence = replace(scored(1), loss_mask=torch.tensor([True, False, True, False]))
    changed = getattr(sequence, name).clone()
    changed[2 if changed.numel() == 4 else 1] = value
    return replace(sequence, **{name: changed})


IGNORED = {"prompt_tokens": [1, 2, -100], "response_tokens": [1, 2, 3, -100]}
SEQUENCES: list[Callable[[], Any]] = [
    *(
        lambda name=name, x=x: with_entry(name, x)
        for name in ("logprobs", "old_logprobs", "ref_logprobs")
        for x in (NAN, INF, -INF)
    ),
    *(lambda name=name, x=x: with_entry(name, x) for name in ("rewards", "successes") for x in (NAN, INF)),
    lambda: replace(scored(1), successes=torch.zeros(3)),
    lambda: replace(scored(1), token_weight=-0.5),
    lambda: replace(scored(1), prompt_tokens=torch.ones(3) > 0),
    lambda: replace(scored(1), response_tokens=torch.ones(4) > 0),
    lambda: replace(scored(1), weight_versions=torch.ones(4) > 0),
    # An ignore index among the tokens would be scored as 0.
    *(lambda n=n, x=x: replace(scored(1), **{n: torch.tensor(x)}) for n, x in IGNORED.items()),
    lambda: replace(scored(1), sequence_id="s0"),
    lambda: replace(scored(1), sequence_id=["s1"]),
]


@pytest.mark.parametrize("number", range(len(SEQUENCES)))
def test_a_sequence_that_no_pack_may_hold(number: int, rejects: Rejects) -> None:
    pack_sequences([scored(0), scored(2)])
    with rejects(ValueError):
        pack_sequences([scored(0), SEQUENCES[number](), scored(2)])


def test_what_stands_on_masked_tokens_is_packed_as_it_is() -> None:
    sequence = replace(scored(1), loss_mask=torch.tensor([True, True, False, True]))
    for value in (NAN, -INF):
        logprobs = sequence.logprobs.clone()
        logprobs[2] = value
        found = pack_sequences([scored(0), replace(sequence, logprobs=logprobs)]).logprobs
        assert found[4:].equal(logprobs) or bool(found[4:].isnan().equal(logprobs.isnan()))


def test_large_but_finite_values_are_packed() -> None:
    """Whose sum is not finite."""
    huge = torch.full((4,), -3e38)
    found = pack_sequences([replace(scored(0), logprobs=huge, rewards=torch.full((2,), 3e38))])
    assert found.logprobs.equal(huge) and bool(found.rewards.isfinite().all())


def test_a_graph_stays_behind() -> None:
    """Logprobs of a pack are data: what made them is no part of it."""
    sequence = scored(0)
    found = pack_sequences([replace(sequence, logprobs=sequence.logprobs.clone().requires_grad_())])
    assert not found.logprobs.requires_grad and found.logprobs.equal(sequence.logprobs)


# ------------------------------------------------------------------------------------------------ values without effect
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


def test_a_masked_weight_has_no_effect() -> None:
    given, loss = make_inputs(), build_loss(AlgorithmConfig())
    poisoned = replace(given, token_weights=given.token_weights.masked_fill(~given.loss_mask, NAN))
    expected, found = loss(given).loss, loss(poisoned).loss
    assert torch.equal(expected, found)
    (gradient,) = torch.autograd.grad(found, given.logprobs)
    assert bool(torch.isfinite(gradient).all()) and not gradient[~given.loss_mask].any()


@pytest.mark.parametrize("where", range(4))
def test_a_masked_value_has_no_effect(where: int) -> None:
    """Neither on the critic's loss nor on its gradient, whichever of the four tensors holds it."""
    mask = torch.tensor([True, False, True])
    tensors = [
        torch.tensor([0.5, 0.7, -0.3]),
        torch.tensor([0.1, 0.2, 0.3]),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.ones(3),
    ]
    expected = value_loss(tensors[0], tensors[1], tensors[2], mask, tensors[3], clip=0.2)
    tensors[where][1] = NAN
    tensors[0].requires_grad_()
    found = value_loss(tensors[0], tensors[1], tensors[2], mask, tensors[3], clip=0.2)
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.clipped, expected.clipped)
    (gradient,) = torch.autograd.grad(found.loss, tensors[0])
    assert bool(torch.isfinite(gradient).all()) and gradient[1] == 0


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


def test_a_masked_token_has_no_part_in_the_mean() -> None:
    x = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    mean = sum_of_sample_mean(x, [3], [torch.tensor([True, False, True])])
    assert float(mean.detach()) == 2.0
    (gradient,) = torch.autograd.grad(mean, x)
    assert gradient.tolist() == [0.5, 0.0, 0.5]


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


def test_a_padded_length() -> None:
    assert [padded_length(5, 2), padded_length(8, 2)] == [8, 8]
    assert [padded_length(5, 2, "contiguous"), padded_length(5, 1)] == [5, 5]


def test_lengths_of_samples_may_be_a_tensor() -> None:
    assert float(sum_of_sample_mean(torch.ones(3), torch.tensor([1, 2]), [torch.ones(1), torch.ones(2)])) == 2.0


def test_shards_of_one_pack_alone_are_merged(rejects: Rejects) -> None:
    one, other = (pack_sequences(batch(shapes)) for shapes in (SHAPES, SHAPES[:2]))
    alike = pack_sequences(batch([(3, 4), (1, 1), (2, 5), (2, 4), (4, 1)]))  # as many responses, elsewhere
    first = split_for_context_parallel(one, 2, 0)
    for second in (
        split_for_context_parallel(other, 2, 1),
        split_for_context_parallel(one, 2, 1, "contiguous"),
        split_for_context_parallel(one, 3, 1),
        split_for_context_parallel(alike, 2, 1),
    ):
        values = [torch.zeros(shard.response_slot.numel()) for shard in (first, second)]
        with rejects(ValueError):
            merge_from_context_parallel([first, second], values)
    with rejects(ValueError):
        merge_from_context_parallel([first, split_for_context_parallel(one, 2, 1)], [torch.zeros(3)])
    with rejects(ValueError):
        first.scatter(torch.tensor(1.0))
