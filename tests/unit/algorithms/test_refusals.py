"""What would be broadcast, read as an index, or rounded away is rejected or done in higher precision."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import (
    ESTIMATORS,
    compute_advantages,
    compute_response_logprobs,
    find_estimator,
    fused_logprobs,
    importance_weights,
    logprobs_and_entropy,
    merge_from_context_parallel,
    off_policy_sequence_mask,
    overlong_penalty,
    pack_sequences,
    padded_length,
    partition_by_tokens,
    partition_full_batches,
    selective_log_softmax,
    split_for_context_parallel,
    step_denominator,
    sum_of_sample_mean,
    token_weights,
    training_flops,
    vocab_parallel_logprobs,
)
from slime_like.algorithms.advantages import AdvantageEstimator, Groups
from slime_like.algorithms.gae import gae
from slime_like.algorithms.losses import GRPOLoss, LossInputs, PolicyTerms, build_loss, kl_estimate
from slime_like.algorithms.losses.policy import SFT
from slime_like.algorithms.losses.value import value_loss
from slime_like.algorithms.pass_at_k import mean_pass_at_k, pass_at_k
from slime_like.algorithms.shaping import kl_penalty
from slime_like.config.algorithm import AlgorithmConfig
from tests.support.rejections import Rejects
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
def test_a_loss_broadcasts_nothing(rejects: Rejects, name: str, shape: str) -> None:
    given = inputs()
    value = getattr(given, name)
    changed = {"column": value[:, None], "one": value[:1], "short": value[:3]}[shape]
    with rejects(ValueError):
        build_loss(AlgorithmConfig())(replace(given, **{name: changed}))


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
        build_loss(AlgorithmConfig(loss="sft"))(inputs())


def _one_too_few(rewards: Tensor, groups: Groups) -> Tensor:
    return rewards[1:]


def _without_threshold(rewards: Tensor, groups: Groups) -> Tensor:
    return rewards / groups.std(rewards, ddof=0)


one_too_few, without_threshold = (AdvantageEstimator(f, "group") for f in (_one_too_few, _without_threshold))


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


# ------------------------------------------------------------------------------------------------- a call that is wrong
def padded(config: AlgorithmConfig = AlgorithmConfig(), **changes: object) -> object:  # noqa: B008
    """The direct loss of padded logits (2, 3, 5)."""
    given = {"pi_logits": PADDED, "targets": TARGETS, "ref_logprobs": None, "advantages": torch.ones(2)}
    return GRPOLoss(config).forward(**given | changes)  # type: ignore[arg-type]


def scored(form: Callable[..., object], temperatures: Tensor = torch.ones(3), **options: object) -> object:  # noqa: B008
    first = (torch.ones(3, 2), torch.ones(5, 2)) if form is fused_logprobs else (torch.ones(3, 5),)
    return form(*first, torch.zeros(3, dtype=torch.int64), temperatures, **{"vocab_size": 5} | options)


def headed(weight: Tensor = torch.ones(6, 3), targets: Tensor | None = None, **options: object) -> object:  # noqa: B008
    targets = IDS if targets is None else targets
    return fused_logprobs(torch.ones(4, 3), weight, targets, torch.ones(4), **{"vocab_size": 6} | options)  # type: ignore[arg-type]


def gspo(response_lens: Tensor | None) -> object:
    return build_loss(AlgorithmConfig(loss="gspo"))(replace(inputs(), response_lens=response_lens))


PACK, IDS = pack_sequences(batch(SHAPES)), torch.zeros(4, dtype=torch.int64)
SHARD = split_for_context_parallel(PACK, 2, 0)
PADDED, TARGETS = torch.zeros(2, 3, 5), torch.ones(2, 3, dtype=torch.int64)
ONES, MASK, LENGTH = torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor([3])
TWO, MASK_2, LENGTH_2 = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([2])
REWARDS, HEADS = torch.tensor([0.0, 1.0]), (fused_logprobs, vocab_parallel_logprobs)
REDUCTIONS: list[dict[str, object]] = [{}, *({name: print} for name in ("all_reduce_max", "all_reduce_sum"))]

CALLS: dict[str, list[Callable[[], object]]] = {
    "values that would be broadcast": [
        lambda: value_loss(ONES[:, None], ONES, ONES, MASK, ONES),
        lambda: gae(ONES[:1], ONES, MASK, LENGTH, token_rewards=TWO),
    ],
    "padded input": [
        lambda: padded(padding_masks=torch.ones(2, 1, dtype=torch.bool)),
        *(lambda shape=shape: padded(advantages=torch.ones(shape)) for shape in ((3,), (2, 2), (1,))),
        lambda: padded(pi_logits=PADDED[0], targets=TARGETS[0]),
        lambda: padded(pi_logits=PADDED[0], targets=TARGETS[0], advantages=ONES, response_lens=torch.tensor([1, 3])),
        lambda: padded(temperature=0.0),
        lambda: padded(response_lens=torch.tensor([1, 3])),
        lambda: padded(pi_logits=PADDED[None], targets=TARGETS[None], advantages=torch.ones(1, 2, 3)),
        # (T, B) has as many values as (B, T)
        *(
            lambda name=name, shape=shape: padded(**{name: torch.zeros(shape)})
            for name in ("old_logprobs", "ref_logprobs", "behaviour_logprobs")
            for shape in ((3, 2), (6,), (2, 1))
        ),
    ],
    "what GAE would round or misread": [
        lambda: gae(ONES[:1], ONES.long(), MASK, LENGTH),
        lambda: gae(ONES[:1], ONES, MASK, LENGTH.float()),
        *(lambda f=f: gae(ONES[:1], ONES, MASK, LENGTH, **f) for f in ({"gamma": NAN}, {"gamma": -0.1}, {"lam": 1.5})),
    ],
    "a value clipped to less than nothing": [
        lambda clip=clip: value_loss(ONES, ONES, ONES, MASK, ONES, clip) for clip in (-1.0, NAN)
    ],
    "estimators": [
        # Cut down to integers, 1.2 and 1.7 would be one group.
        *(
            lambda ids=ids: compute_advantages(REWARDS, ids)
            for ids in ([1.2, 1.7], torch.tensor([1.2, 1.7]), ["a", "b"], torch.tensor([True, False]))
        ),
        lambda: compute_advantages(REWARDS, [0, 0], "rloo", ddof=0),
        lambda: compute_advantages(REWARDS, [0, 0], epsilon=1e-3),
        lambda: compute_advantages(REWARDS, [0, 0], ddof=2),
        *(lambda eps=eps: compute_advantages(REWARDS, [0, 0], eps=eps) for eps in (-1.0, NAN)),
        lambda: find_estimator("gppo"),
        lambda: find_estimator("no.such.module:name"),
        lambda: compute_advantages(torch.zeros(2), [1]),
        lambda: compute_advantages(torch.tensor([0.0, NAN]), [1, 1]),
        lambda: compute_advantages([0.0, 1.0], [0, 0]),  # type: ignore[arg-type]
        # one that gives too few advantages, and one that gives one that is not finite
        *(
            lambda name=name: compute_advantages(torch.tensor([1.0, 0.0, 1.0]), [1, 1, 2], f"{__name__}:{name}")
            for name in ("one_too_few", "without_threshold")
        ),
    ],
    "a head": [
        lambda: logprobs_and_entropy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), 0.7),  # type: ignore[arg-type]
        lambda: vocab_parallel_logprobs(torch.zeros(2, 5), torch.zeros(2), torch.ones(2), vocab_size=5),
        *(
            lambda form=form, value=value: scored(form, torch.tensor([1.0, 1.0, value]))
            for form in HEADS
            for value in (0.0, -0.5, NAN, float("inf"))
        ),
        # Without both reductions the softmax over 5 columns would pass for that over 9.
        *(
            lambda form=form, start=start, given=given: scored(form, vocab_start=start, vocab_size=9, **given)
            for form in HEADS
            for start in (0, 4)
            for given in REDUCTIONS
        ),
        *(lambda form=form: scored(form, vocab_start=-1) for form in HEADS),
    ],
    "import paths to something else": [
        *(
            lambda name=name: build_loss(AlgorithmConfig(loss=name))
            for name in ("math:sin", "math:pi", "collections:OrderedDict")
        ),
        lambda: kl_estimate(TWO, TWO, "math:pi"),
    ],
    "a ratio per sequence": [
        lambda lens=lens: gspo(lens)
        for lens in (None, torch.tensor([3, 2]), torch.tensor([[3, 1]]), torch.tensor([3.0, 1.0]))
    ],
    "KL that would be broadcast": [
        lambda: kl_estimate(TWO, TWO[:1]),
        lambda: kl_penalty(TWO, TWO, MASK_2[:1], LENGTH_2, 0.1),
        lambda: kl_penalty(TWO, TWO, torch.ones(2), LENGTH_2, 0.1),
        lambda: kl_penalty(TWO, TWO, MASK_2, LENGTH, 0.1),
    ],
    "importance": [
        lambda: importance_weights(TWO, TWO, MASK_2, None, "clip"),
        lambda: importance_weights(TWO, TWO, MASK_2, None, "mask", "sequence"),
        *(
            lambda bounds=bounds, name=name: importance_weights(TWO, TWO, MASK_2, None, name, "token", *bounds)
            for bounds in ((2.0, 0.5), (-1.0, 2.0), (NAN, 2.0), (0.5, NAN))
            for name in ("truncate", "mask")
        ),
        lambda: importance_weights(TWO, TWO[:1], MASK_2, None, "truncate"),
        lambda: importance_weights(TWO, TWO, MASK_2.long(), None, "truncate"),
        lambda: off_policy_sequence_mask(TWO, TWO, TWO[:1], MASK_2, LENGTH_2, 0.1),
        lambda: importance_weights(TWO, TWO, MASK_2, LENGTH, "truncate", "sequence"),
    ],
    "lengths and counts": [
        *(lambda cp_size=cp_size: padded_length(5, cp_size) for cp_size in (0, -1)),
        lambda: padded_length(5, 1, "ring"),  # type: ignore[arg-type]
        lambda: padded_length(-1, 2),
        lambda: step_denominator("tokens", [1, -2], [0, 0]),
        lambda: overlong_penalty(torch.tensor([3]), 20, 4, factor=-1.0),
        lambda: sum_of_sample_mean(torch.zeros(1, 2), [2], [torch.ones(2)]),
        lambda: mean_pass_at_k([], 1),
    ],
    "reductions": [
        lambda: step_denominator("tokens", [1, 1.5], [0, 0]),  # type: ignore[list-item]
        lambda: token_weights("groups", [1, 1], torch.zeros(2)),
        lambda: token_weights("constant", [1], [1], NAN),
        lambda: token_weights("mean", [1], [1]),
        lambda: token_weights("constant", [1], [1]),
        lambda: step_denominator("tokens", [1, 2], [1]),
        lambda: sum_of_sample_mean(torch.zeros(4), [1, 2], [torch.ones(1), torch.ones(2)]),
        lambda: sum_of_sample_mean(torch.zeros(3), [1, 2], [torch.ones(2), torch.ones(1)]),
        *(lambda given=given: pass_at_k(*given) for given in ((4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1))),
    ],
    "shards of a pack": [
        lambda: split_for_context_parallel(PACK, 2, 0, "ring"),  # type: ignore[arg-type]
        lambda: split_for_context_parallel(PACK, 2, 2),
        lambda: merge_from_context_parallel([SHARD], [torch.zeros(SHARD.response_slot.numel())]),
        lambda: SHARD.scatter(torch.zeros(1)),
    ],
    "heads and targets": [
        lambda: headed(targets=torch.tensor([0, 6, 1, 2])),
        lambda: headed(weight=torch.ones(6, 2)),
        lambda: headed(targets=IDS[:3]),
        lambda: headed(softcap=0),
        lambda: headed(chunk_tokens=0),
        lambda: vocab_parallel_logprobs(torch.zeros(4, 6), torch.tensor([0, 6, 1, 2]), torch.ones(4), vocab_size=6),
        lambda: vocab_parallel_logprobs(torch.zeros(4, 6), IDS[:3], torch.ones(4), vocab_size=6),
    ],
    "logits": [
        lambda: compute_response_logprobs(torch.zeros(29, 5), PACK),
        lambda: compute_response_logprobs(torch.zeros(30, 5), PACK, 0.0),
        lambda: compute_response_logprobs(torch.zeros(30, 5), PACK, None),
        lambda: selective_log_softmax(torch.zeros(4, 5), IDS[:3]),
        lambda: selective_log_softmax(torch.zeros(3, 5), torch.zeros(3)),
        lambda: selective_log_softmax(torch.zeros(3, 5, dtype=torch.int64), IDS[:3]),
        lambda: logprobs_and_entropy(torch.zeros(3, 5), torch.tensor([0, 5, 1])),
    ],
    "partitions": [
        lambda: partition_by_tokens([3, 4, 11], 10, 1),
        lambda: partition_by_tokens([3, 0], 10, 1),
        lambda: partition_by_tokens([3, 3], 10, 1, costs=[1.0]),
        lambda: partition_full_batches([11], 10, 1),
        lambda: partition_by_tokens([3, 2.5], 10, 1),  # type: ignore[list-item]
        lambda: partition_by_tokens([3, 3], 10, 1, costs=[1.0, NAN]),
        lambda: training_flops([3], -1, 2, 2),
        lambda: partition_full_batches([3], 10, 0),
        lambda: partition_by_tokens([3], 10, 0),
    ],
    "what the direct loss lacks": [
        lambda: padded(pi_logits=PADDED[:, :2]),
        lambda: padded(
            config=AlgorithmConfig(reduction="samples"), pi_logits=PADDED[0], targets=IDS[:3], advantages=ONES
        ),
        lambda: padded(AlgorithmConfig(reduction="groups")),
        lambda: GRPOLoss(AlgorithmConfig()).compute_loss_from_logprobs(ONES, advantages=ONES),
    ],
    "masks of numbers": [
        lambda: build_loss(AlgorithmConfig())(replace(inputs(), loss_mask=torch.tensor([1, 1, 0, 1]))),
        lambda: gae(ONES[:1], ONES, torch.tensor([1, 0, 1]), LENGTH),
        lambda: value_loss(ONES, ONES, ONES, ONES, ONES),
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_refused(name: str, rejects: Rejects) -> None:
    for call in CALLS[name]:
        with rejects(ValueError):
            call()
