"""What would be broadcast, read as an index, or rounded away is rejected or done in higher precision."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import (
    ESTIMATORS,
    compute_advantages,
    fused_logprobs,
    importance_weights,
    logprobs_and_entropy,
    merge_from_context_parallel,
    off_policy_sequence_mask,
    overlong_penalty,
    pack_sequences,
    padded_length,
    split_for_context_parallel,
    step_denominator,
    sum_of_sample_mean,
    vocab_parallel_logprobs,
)
from slime_like.algorithms.advantages import AdvantageEstimator, Groups
from slime_like.algorithms.gae import gae
from slime_like.algorithms.losses import GRPOLoss, LossInputs, PolicyTerms, build_loss, kl_estimate
from slime_like.algorithms.losses.policy import SFT
from slime_like.algorithms.losses.value import value_loss
from slime_like.algorithms.pass_at_k import mean_pass_at_k
from slime_like.algorithms.shaping import kl_penalty
from slime_like.config.algorithm import AlgorithmConfig
from tests.unit.algorithms.cases import SHAPES, batch

NAN = float("nan")


def inputs() -> LossInputs:
    generator = torch.Generator().manual_seed(0)

    def values() -> Tensor:
        return -torch.rand(4, generator=generator)

    return LossInputs(
        logprobs=values().requires_grad_(), entropy=values(), old_logprobs=values(), behaviour_logprobs=values(),
        ref_logprobs=values(), advantages=values(), loss_mask=torch.tensor([True, True, False, True]),
        token_weights=torch.ones(4), response_lens=torch.tensor([3, 1]),
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["entropy", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages", "loss_mask", "token_weights"],
)
@pytest.mark.parametrize("shape", ["column", "one", "short"])
def test_a_loss_broadcasts_nothing(name: str, shape: str) -> None:
    given = inputs()
    value = getattr(given, name)
    changed = {"column": value[:, None], "one": value[:1], "short": value[:3]}[shape]
    with pytest.raises(ValueError, match=rf"{name} has shape .*, logprobs \(4,\)"):
        build_loss(AlgorithmConfig())(replace(given, **{name: changed}))


def test_a_mask_of_numbers_is_no_mask() -> None:
    with pytest.raises(ValueError, match=r"loss_mask is torch.int64; give a bool"):
        build_loss(AlgorithmConfig())(replace(inputs(), loss_mask=torch.tensor([1, 1, 0, 1])))
    ones = torch.ones(3)
    with pytest.raises(ValueError, match=r"loss_mask is torch.int64; give a bool"):
        gae(torch.ones(1), ones, torch.tensor([1, 0, 1]), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"loss_mask is torch.float32; give a bool"):
        value_loss(ones, ones, ones, ones, ones)


def test_a_masked_weight_has_no_effect() -> None:
    given = inputs()
    loss = build_loss(AlgorithmConfig())
    poisoned = replace(given, token_weights=torch.tensor([1.0, 1.0, NAN, 1.0]))
    expected, found = loss(given).loss, loss(poisoned).loss
    assert torch.equal(expected, found)
    (gradient,) = torch.autograd.grad(found, given.logprobs)
    assert bool(torch.isfinite(gradient).all()) and gradient[2] == 0


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


def test_values_that_would_be_broadcast() -> None:
    mask, ones = torch.ones(3, dtype=torch.bool), torch.ones(3)
    with pytest.raises(ValueError, match=r"values \(3, 1\), old_values \(3,\)"):
        value_loss(ones[:, None], ones, ones, mask, ones)
    with pytest.raises(ValueError, match=r"token_rewards \(2,\) need one entry per value, \(3,\)"):
        gae(torch.ones(1), ones, mask, torch.tensor([3]), token_rewards=torch.ones(2))


def test_padded_input() -> None:
    logits, targets = torch.zeros(2, 3, 5), torch.ones(2, 3, dtype=torch.int64)
    loss = GRPOLoss(AlgorithmConfig())
    with pytest.raises(ValueError, match=r"padding_masks \(2, 1\) and targets \(2, 3\) differ"):
        loss.forward(logits, targets, None, torch.ones(2), torch.ones(2, 1, dtype=torch.bool))
    for advantages in (torch.ones(3), torch.ones(2, 2), torch.ones(1)):
        with pytest.raises(ValueError, match=r"advantages .* do not fit targets \(2, 3\)"):
            loss.forward(logits, targets, None, advantages)
    with pytest.raises(ValueError, match=r"advantages \(2,\) do not fit targets \(3,\)"):
        loss.forward(logits[0], targets[0], None, torch.ones(2))
    with pytest.raises(ValueError, match="add up to 4, but there are 3"):
        loss.forward(logits[0], targets[0], None, torch.ones(3), response_lens=torch.tensor([1, 3]))
    with pytest.raises(ValueError, match=r"temperature=0.0 is not positive"):
        loss.forward(logits, targets, None, torch.ones(2), temperature=0.0)
    with pytest.raises(ValueError, match=r"response_lens belong to packed targets .* in padding_masks"):
        loss.forward(logits, targets, None, torch.ones(2), response_lens=torch.tensor([1, 3]))
    with pytest.raises(ValueError, match=r"targets have shape \(1, 2, 3\)"):
        loss.forward(logits[None], targets[None], None, torch.ones(1, 2, 3))


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "behaviour_logprobs"])
@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 1)])
def test_logprobs_of_padded_input_lie_as_its_targets(name: str, shape: tuple[int, ...]) -> None:
    """(T, B) has as many values as (B, T)."""
    logits, targets = torch.zeros(2, 3, 5), torch.ones(2, 3, dtype=torch.int64)
    given = {"ref_logprobs": None, name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=f"{name} .* and targets .* differ; give one entry per target"):
        GRPOLoss(AlgorithmConfig()).forward(logits, targets, advantages=torch.ones(2), **given)


def test_gae_refuses_what_it_would_round_or_misread() -> None:
    rewards, values, mask, lengths = torch.ones(1), torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor([3])
    with pytest.raises(ValueError, match=r"values are torch.int64"):
        gae(rewards, values.long(), mask, lengths)
    with pytest.raises(ValueError, match=r"response_lens \(1,\) of torch.float32"):
        gae(rewards, values, mask, lengths.float())
    for factors in ({"gamma": NAN}, {"gamma": -0.1}, {"lam": 1.5}):
        with pytest.raises(ValueError, match=r"(gamma|lam)=.* must be 0 to 1"):
            gae(rewards, values, mask, lengths, **factors)


def test_a_value_is_not_clipped_to_less_than_nothing() -> None:
    for clip in (-1.0, NAN):
        with pytest.raises(ValueError, match="bounds no change of a value"):
            value_loss(*torch.ones(3, 2), torch.ones(2, dtype=torch.bool), torch.ones(2), clip)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda logprobs: PolicyTerms(logprobs.mean()), r"returned per_token of shape \(\) for 4 response tokens"),
        (lambda logprobs: PolicyTerms(logprobs, ratio=logprobs[:1]), r"returned ratio of shape \(1,\)"),
        (lambda logprobs: logprobs, r"returned a Tensor; return PolicyTerms"),
    ],
)
def test_a_custom_loss_gives_a_value_per_token(
    made: Callable[[Tensor], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SFT, "__call__", lambda self, inputs: made(inputs.logprobs))
    with pytest.raises(ValueError, match=f"loss 'sft' {message}"):
        build_loss(AlgorithmConfig(loss="sft"))(inputs())


def _one_too_few(rewards: Tensor, groups: Groups) -> Tensor:
    return rewards[1:]


def _without_threshold(rewards: Tensor, groups: Groups) -> Tensor:
    return rewards / groups.std(rewards, ddof=0)


one_too_few, without_threshold = (AdvantageEstimator(f, "group") for f in (_one_too_few, _without_threshold))


def test_a_custom_estimator_gives_a_finite_advantage_per_sample() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0]), [1, 1, 2]
    with pytest.raises(ValueError, match=r"'.*:one_too_few' gave shape \(2,\) for 3 rewards"):
        compute_advantages(rewards, groups, f"{__name__}:one_too_few")
    with pytest.raises(ValueError, match=r"'.*:without_threshold' gave sample 2 the advantage inf"):
        compute_advantages(rewards, groups, f"{__name__}:without_threshold")


def test_temperatures_are_a_tensor() -> None:
    with pytest.raises(ValueError, match="temperatures are a float; give a tensor"):
        logprobs_and_entropy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), 0.7)  # type: ignore[arg-type]


def test_targets_of_a_head_are_integers() -> None:
    with pytest.raises(ValueError, match=r"targets are torch\.float32; give integer token ids"):
        vocab_parallel_logprobs(torch.zeros(2, 5), torch.zeros(2), torch.ones(2), vocab_size=5)


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


# ----------------------------------------------------------------------------------------------------- scoring a head
@pytest.mark.parametrize("value", [0.0, -0.5, NAN, float("inf")])
@pytest.mark.parametrize("form", [fused_logprobs, vocab_parallel_logprobs])
def test_a_head_needs_positive_temperatures(form: Callable[..., object], value: float) -> None:
    first = (torch.ones(3, 2), torch.ones(5, 2)) if form is fused_logprobs else (torch.ones(3, 5),)
    with pytest.raises(ValueError, match=rf"temperature {value} \(entry 2\) cannot scale logits"):
        form(*first, torch.zeros(3, dtype=torch.int64), torch.tensor([1.0, 1.0, value]), vocab_size=5)


@pytest.mark.parametrize("form", [fused_logprobs, vocab_parallel_logprobs])
@pytest.mark.parametrize("given", ["neither", "all_reduce_max", "all_reduce_sum"])
def test_a_part_of_the_vocabulary_needs_both_reductions(form: Callable[..., object], given: str) -> None:
    """Without, the softmax over 5 columns would pass for that over 9."""
    first = (torch.ones(3, 2), torch.ones(5, 2)) if form is fused_logprobs else (torch.ones(3, 5),)
    reductions = {} if given == "neither" else {given: lambda tensor: None}
    for start in (0, 4):
        with pytest.raises(
            ValueError, match=rf"5 columns from {start} on are not the whole vocabulary of 9; give all_"
        ):
            form(
                *first, torch.zeros(3, dtype=torch.int64), torch.ones(3), vocab_start=start, vocab_size=9, **reductions
            )
    with pytest.raises(ValueError, match="vocab_start=-1 is no token's id"):
        form(*first, torch.zeros(3, dtype=torch.int64), torch.ones(3), vocab_start=-1, vocab_size=5)


# --------------------------------------------------------------------------------------------------------- advantages
@pytest.mark.parametrize(
    "ids", [[1.2, 1.7], torch.tensor([1.2, 1.7]), ["a", "b"], torch.tensor([True, False])], ids=str
)
def test_group_ids_are_integers(ids: object) -> None:
    """Cut down to integers, 1.2 and 1.7 would be one group."""
    with pytest.raises(ValueError, match=r"group.ids? .*give (an )?integer"):
        compute_advantages(torch.tensor([0.0, 1.0]), ids)  # type: ignore[arg-type]


def test_options_of_an_estimator() -> None:
    rewards = torch.tensor([0.0, 1.0])
    with pytest.raises(ValueError, match="'rloo' has no option 'ddof'; it has eps"):
        compute_advantages(rewards, [0, 0], "rloo", ddof=0)
    with pytest.raises(ValueError, match="'grpo' has no option 'epsilon'; it has eps, ddof"):
        compute_advantages(rewards, [0, 0], epsilon=1e-3)
    with pytest.raises(ValueError, match="ddof=2 is not supported"):
        compute_advantages(rewards, [0, 0], ddof=2)
    for eps in (-1.0, NAN):
        with pytest.raises(ValueError, match=f"eps={eps} is no spread"):
            compute_advantages(rewards, [0, 0], eps=eps)
    with pytest.raises(ValueError, match="rewards are a list; give a tensor"):
        compute_advantages([0.0, 1.0], [0, 0])  # type: ignore[arg-type]


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


# ------------------------------------------------------------------------------------------------------ losses by name
@pytest.mark.parametrize("name", ["math:sin", "math:pi", "collections:OrderedDict"])
def test_an_import_path_to_something_else_is_no_loss(name: str) -> None:
    with pytest.raises(ValueError, match=rf"loss '{name}' (has no name|is a float)"):
        build_loss(AlgorithmConfig(loss=name))
    if name == "math:pi":
        with pytest.raises(ValueError, match="KL estimator 'math:pi' is a float, which cannot be called"):
            kl_estimate(torch.zeros(1), torch.zeros(1), name)


def test_a_sequence_ratio_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"needs response_lens.*give the \(S,\) lengths"):
        build_loss(AlgorithmConfig(loss="gspo"))(replace(inputs(), response_lens=None))
    for lens in (torch.tensor([3, 2]), torch.tensor([[3, 1]]), torch.tensor([3.0, 1.0])):
        with pytest.raises(ValueError, match=r"response_lens .*but there are 4 response tokens"):
            build_loss(AlgorithmConfig(loss="gspo"))(replace(inputs(), response_lens=lens))


def test_kl_broadcasts_nothing() -> None:
    with pytest.raises(ValueError, match=r"logprobs \(2,\) and ref_logprobs \(1,\) differ"):
        kl_estimate(torch.zeros(2), torch.zeros(1))
    two, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"loss_mask \(1,\) and logprobs \(2,\)"):
        kl_penalty(two, two, mask[:1], torch.tensor([2]), 0.1)
    with pytest.raises(ValueError, match=r"loss_mask is torch.float32; give a bool"):
        kl_penalty(two, two, torch.ones(2), torch.tensor([2]), 0.1)
    with pytest.raises(ValueError, match="add up to 3, but there are 2"):
        kl_penalty(two, two, mask, torch.tensor([3]), 0.1)


@pytest.mark.parametrize(("low", "high"), [(2.0, 0.5), (-1.0, 2.0), (NAN, 2.0), (0.5, NAN)])
def test_importance_bounds(low: float, high: float) -> None:
    two, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    for correction in ("truncate", "mask"):
        with pytest.raises(ValueError, match=f"low={low} and high={high} leave no ratio"):
            importance_weights(two, two, mask, None, correction, low=low, high=high)


def test_importance_broadcasts_nothing() -> None:
    two, mask, lens = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([2])
    with pytest.raises(ValueError, match=r"behaviour_logprobs \(1,\) and loss_mask \(2,\)"):
        importance_weights(two, two[:1], mask, None, "truncate")
    with pytest.raises(ValueError, match=r"loss_mask is torch.int64"):
        importance_weights(two, two, mask.long(), None, "truncate")
    with pytest.raises(ValueError, match=r"advantages \(1,\) and loss_mask \(2,\)"):
        off_policy_sequence_mask(two, two, two[:1], mask, lens, 0.1)
    with pytest.raises(ValueError, match="add up to 3, but there are 2"):
        importance_weights(two, two, mask, torch.tensor([3]), "truncate", "sequence")


# --------------------------------------------------------------------------------------------------- context and rest
def test_a_padded_length_has_a_group_and_a_layout() -> None:
    for cp_size in (0, -1):
        with pytest.raises(ValueError, match=f"cp_size={cp_size} must be at least 1"):
            padded_length(5, cp_size)
    with pytest.raises(ValueError, match="unknown context-parallel layout 'ring'"):
        padded_length(5, 1, "ring")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length=-1 is negative"):
        padded_length(-1, 2)
    assert [padded_length(5, 2), padded_length(8, 2), padded_length(5, 2, "contiguous"), padded_length(5, 1)] == [
        8,
        8,
        5,
        5,
    ]


def test_shards_of_one_pack_alone_are_merged() -> None:
    one, other = (pack_sequences(batch(shapes)) for shapes in (SHAPES, SHAPES[:2]))
    alike = pack_sequences(batch([(3, 4), (1, 1), (2, 5), (2, 4), (4, 1)]))  # as many responses, elsewhere
    first = split_for_context_parallel(one, 2, 0)
    for second, message in (
        (split_for_context_parallel(other, 2, 1), "num_responses=5, that of rank 0 15"),
        (split_for_context_parallel(one, 2, 1, "contiguous"), "layout=contiguous, that of rank 0 zigzag"),
        (split_for_context_parallel(one, 3, 1), "cp_size=3, that of rank 0 2"),
        (split_for_context_parallel(alike, 2, 1), "do not hold every response token once"),
    ):
        values = [torch.zeros(shard.response_slot.numel()) for shard in (first, second)]
        with pytest.raises(ValueError, match=message):
            merge_from_context_parallel([first, second], values)
    with pytest.raises(ValueError, match="1 tensors of values for 2 shards"):
        merge_from_context_parallel([first, split_for_context_parallel(one, 2, 1)], [torch.zeros(3)])
    with pytest.raises(ValueError, match="rank 0 gave 0 values"):
        first.scatter(torch.tensor(1.0))


def test_counts_factors_and_shapes() -> None:
    with pytest.raises(ValueError, match="sample 1 has -2 loss-carrying tokens"):
        step_denominator("tokens", [1, -2], [0, 0])
    with pytest.raises(ValueError, match=r"overlong factor=-1.0 would be no penalty"):
        overlong_penalty(torch.tensor([3]), 20, 4, factor=-1.0)
    with pytest.raises(ValueError, match=r"x has shape \(1, 2\)"):
        sum_of_sample_mean(torch.zeros(1, 2), [2], [torch.ones(2)])
    assert float(sum_of_sample_mean(torch.ones(3), torch.tensor([1, 2]), [torch.ones(1), torch.ones(2)])) == 2.0
    with pytest.raises(ValueError, match="no prompt has samples"):
        mean_pass_at_k([], 1)
