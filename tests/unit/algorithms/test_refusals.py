"""Calls that are wrong are refused in a sentence: what would be broadcast, misread, rounded away or is missing."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import (
    ContextShard,
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
    spread_over_tokens,
    step_denominator,
    sum_of_sample_mean,
    token_weights,
    training_flops,
    unpack_response_logprobs,
    vocab_parallel_logprobs,
)
from slime_like.algorithms.advantages import AdvantageEstimator, Groups
from slime_like.algorithms.gae import gae
from slime_like.algorithms.losses import GRPOLoss, LossSums, build_loss, kl_estimate
from slime_like.algorithms.losses.value import value_loss
from slime_like.algorithms.pass_at_k import mean_pass_at_k, pass_at_k
from slime_like.algorithms.shaping import kl_penalty
from slime_like.config.algorithm import AlgorithmConfig
from tests.support.rejections import Rejects
from tests.unit.algorithms.cases import SHAPES, batch
from tests.unit.algorithms.test_losses import LENGTHS, make_inputs

NAN, INF = float("nan"), float("inf")


def _one_too_few(rewards: Tensor, groups: Groups) -> Tensor:
    return rewards[1:]


def _without_threshold(rewards: Tensor, groups: Groups) -> Tensor:
    return rewards / groups.std(rewards, ddof=0)


one_too_few, without_threshold = (AdvantageEstimator(f, "group") for f in (_one_too_few, _without_threshold))


CONFIG = AlgorithmConfig()
LIST, LOGITS = [0.0, 0.0], torch.zeros(2, 5)
BARE = SimpleNamespace(
    loss="sft", importance_correction="none", kl_coef=0.0, entropy_coef=0.0, off_policy_mask=None, reduction="tokens"
)


def forward(**changes: Any) -> object:
    given = {"pi_logits": LOGITS, "targets": IDS_2, "ref_logprobs": TWO, "advantages": TWO}
    return GRPOLoss(CONFIG).forward(**given | changes)


def built(**changes: Any) -> object:
    return build_loss(SimpleNamespace(**vars(BARE) | changes))  # type: ignore[arg-type]


def padded(config: AlgorithmConfig = CONFIG, **changes: object) -> object:
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
    return build_loss(AlgorithmConfig(loss="gspo"))(replace(make_inputs(), response_lens=response_lens))


def merge_all(shards: list[ContextShard]) -> Tensor:
    return merge_from_context_parallel(shards, [torch.zeros(shard.response_slot.numel()) for shard in shards])


PACK, IDS = pack_sequences(batch(SHAPES)), torch.zeros(4, dtype=torch.int64)
PLAIN = pack_sequences([replace(s, temperature=1.0) for s in batch(SHAPES)])
SHARD = split_for_context_parallel(PACK, 2, 0)
PADDED, TARGETS = torch.zeros(2, 3, 5), torch.ones(2, 3, dtype=torch.int64)
ONES, MASK, LENGTH = torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor([3])
TWO, MASK_2, LENGTH_2 = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([2])
IDS_2 = torch.zeros(2, dtype=torch.int64)
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
        lambda: logprobs_and_entropy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), "0.7"),  # type: ignore[arg-type]
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
    "names and import paths of something else": [
        *(
            lambda name=name: build_loss(AlgorithmConfig(loss=name))
            for name in ("math:sin", "math:pi", "collections:OrderedDict", "ppo")
        ),
        lambda: kl_estimate(TWO, TWO, "k4"),
        lambda: kl_estimate(TWO, TWO, "math:pi"),
    ],
    "a ratio per sequence": [
        lambda lens=lens: gspo(lens)
        for lens in (None, torch.tensor([5, 2, 8]), torch.tensor([LENGTHS]), torch.tensor(LENGTHS).float())
    ],
    "values per sequence": [
        lambda: spread_over_tokens([1.0, 2.0], [3]),
        lambda: sum_of_sample_mean(ONES, [3], torch.ones(2)),
        lambda: forward(advantages=torch.ones(3), response_lens=torch.tensor([1, 1])),
    ],
    "KL that would be broadcast": [
        lambda: kl_estimate(TWO, TWO[:1]),
        lambda: kl_penalty(TWO, TWO, MASK_2[:1], LENGTH_2, 0.1),
        lambda: kl_penalty(TWO, TWO, torch.ones(2), LENGTH_2, 0.1),
        lambda: kl_penalty(TWO, TWO, MASK_2, LENGTH, 0.1),
    ],
    "importance": [
        lambda: importance_weights(TWO, TWO, MASK_2, None, "cut"),
        lambda: importance_weights(TWO, TWO, MASK_2, None, "mask", "sequence"),
        lambda: importance_weights(TWO, TWO, MASK_2, None, "mask", veto=1e-4),
        *(lambda veto=veto: importance_weights(TWO, TWO, MASK_2, LENGTH_2, "mask", veto=veto) for veto in (0.0, NAN)),
        *(
            lambda bounds=bounds, name=name: importance_weights(TWO, TWO, MASK_2, None, name, "token", *bounds)
            for bounds in ((2.0, 0.5), (-1.0, 2.0), (NAN, 2.0), (0.5, NAN))
            for name in ("truncate", "mask")
        ),
        lambda: importance_weights(TWO, TWO[:1], MASK_2, None, "truncate"),
        lambda: importance_weights(TWO, TWO, MASK_2.long(), None, "truncate"),
        lambda: off_policy_sequence_mask(TWO, TWO, TWO[:1], MASK_2, LENGTH_2, 0.1),
        lambda: importance_weights(TWO, TWO, MASK_2, LENGTH, "truncate", "sequence"),
        lambda: build_loss(AlgorithmConfig(loss="policy_gradient", off_policy_mask=0.1))(
            replace(make_inputs(), old_logprobs=None, behaviour_logprobs=None)
        ),
    ],
    "lengths and counts": [
        *(lambda cp_size=cp_size: padded_length(5, cp_size) for cp_size in (0, -1)),
        lambda: padded_length(5, 1, "ring"),  # type: ignore[arg-type]
        lambda: padded_length(-1, 2),
        lambda: step_denominator("tokens", [1, -2], [0, 0]),
        lambda: overlong_penalty(LENGTH, 20, 4, factor=-1.0),
        lambda: overlong_penalty(LENGTH, 20, 0),
        lambda: gae(ONES[:1], ONES, MASK, LENGTH + 1),
        lambda: gae(TWO, ONES, MASK, LENGTH),
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
        lambda: merge_all([SHARD]),
        lambda: merge_from_context_parallel([SHARD, split_for_context_parallel(PACK, 2, 1)], [torch.zeros(3)]),
        *(lambda x=x: SHARD.scatter(x) for x in (torch.zeros(1), torch.tensor(1.0))),
        # of another pack, another layout, another number of ranks, and of as many responses elsewhere
        *(
            lambda shapes=shapes, number=number: merge_all(
                [SHARD, split_for_context_parallel(pack_sequences(batch(shapes)), *number)]  # type: ignore[arg-type]
            )
            for shapes, number in (
                (SHAPES[:2], (2, 1)),
                (SHAPES, (2, 1, "contiguous")),
                (SHAPES, (3, 1)),
                ([(3, 4), (1, 1), (2, 5), (2, 4), (4, 1)], (2, 1)),
            )
        ),
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
        lambda: logprobs_and_entropy(torch.zeros(3, 5), IDS[:3], torch.ones(2)),
        *(
            lambda x=x: logprobs_and_entropy(torch.zeros(3, 5), IDS[:3], torch.tensor([1.0, x, 1.0]))
            for x in (0.0, -1.0, NAN, INF)
        ),
        *(lambda x=x: compute_response_logprobs(torch.zeros(30, 29), PLAIN, x) for x in (0.0, -1.0, NAN, INF)),
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
        lambda: build_loss(AlgorithmConfig())(replace(make_inputs(), loss_mask=make_inputs().loss_mask.long())),
        lambda: gae(ONES[:1], ONES, torch.tensor([1, 0, 1]), LENGTH),
        lambda: value_loss(ONES, ONES, ONES, ONES, ONES),
    ],
    "lists that are not arguments by themselves": [
        lambda: compute_response_logprobs([[0.0]], PACK),  # type: ignore[arg-type]
        lambda: unpack_response_logprobs(PACK, torch.zeros(16)),
        lambda: unpack_response_logprobs(PACK, [0.0] * 15),  # type: ignore[arg-type]
        lambda: merge_from_context_parallel([split_for_context_parallel(PACK, 1, 0)], [[0.0] * 15]),  # type: ignore[list-item]
        lambda: sum_of_sample_mean(TWO, [2], [LIST]),  # type: ignore[list-item]
        lambda: GRPOLoss(CONFIG).compute_loss_from_logprobs(LIST),  # type: ignore[arg-type]
    ],
    "lengths below 0": [
        lambda: gae(TWO, TWO, MASK_2, torch.tensor([3, -1])),
        lambda: kl_penalty(TWO, TWO, MASK_2, torch.tensor([-1, 3]), 0.1),
        lambda: importance_weights(TWO, TWO, MASK_2, torch.tensor([3, -1]), "mask", "sequence"),
        lambda: forward(response_lens=torch.tensor([3, -1])),
        lambda: overlong_penalty(torch.tensor([4, -2]), 5, 2),
        lambda: sum_of_sample_mean(TWO, [3, -1], [MASK_2, MASK_2]),
        lambda: training_flops([5, -2], 2, 3, 4),
        lambda: training_flops([NAN], 2, 3, 4),
    ],
    "numbers that have to be whole, or finite": [
        *(
            lambda partition=partition, budget=budget: partition([1, 2], budget, 1)
            for partition in (partition_by_tokens, partition_full_batches)
            for budget in (NAN, INF, 2.5)
        ),
        lambda: partition_by_tokens([1, 2], 5, 1.5),  # type: ignore[arg-type]
        *(
            lambda x=x: pack_sequences(batch(SHAPES), **x)
            for x in (
                {"target_tokens_per_batch": 99.5},
                {"ignore_index": -1.5},
                {"ignore_index": 0},
                {"pad_token_id": 0.5},
            )
        ),
        *(lambda x=x: kl_penalty(TWO, TWO, MASK_2, LENGTH_2, x) for x in (NAN, INF)),
        *(lambda x=x: off_policy_sequence_mask(TWO, TWO, TWO, MASK_2, LENGTH_2, x) for x in (NAN, INF)),
        *(
            lambda name=name, x=x: built(**{name: x})
            for name in ("kl_coef", "entropy_coef", "off_policy_mask")
            for x in (NAN, INF, -0.1)
        ),
        *(lambda x=x: LossSums.zeros().to_stats(x, 0.0, 0.0) for x in (0, 0.0, -1.0, NAN, INF)),
    ],
    "vocabularies, ids and types": [
        lambda: logprobs_and_entropy(torch.zeros(2, 0), IDS_2 - 1),
        lambda: logprobs_and_entropy(torch.tensor(0.0), torch.tensor(0)),
        lambda: logprobs_and_entropy(LOGITS, IDS_2.to(torch.uint8)),
        lambda: vocab_parallel_logprobs(LOGITS, IDS_2.to(torch.uint8), TWO + 1, vocab_size=5),
        lambda: vocab_parallel_logprobs(LOGITS[:, :0], IDS_2, TWO + 1, vocab_size=0),
        lambda: vocab_parallel_logprobs(LOGITS.long(), IDS_2, TWO + 1, vocab_size=5),
        lambda: fused_logprobs(LOGITS, LOGITS[:0], IDS_2, TWO + 1, vocab_size=0),
        lambda: fused_logprobs(LOGITS.bfloat16(), LOGITS, IDS_2, TWO + 1, vocab_size=2),
        lambda: fused_logprobs(LOGITS.long(), LOGITS.long(), IDS_2, TWO + 1, vocab_size=2),
        lambda: forward(pi_logits=LOGITS[0]),
        lambda: forward(pi_logits=[LOGITS[0], LOGITS[1]]),
        lambda: forward(targets=IDS_2.to(torch.uint8)),
    ],
    "what a loss needs, and masks": [
        lambda: forward(advantages=None),
        lambda: forward(padding_masks=torch.ones(2)),
        lambda: GRPOLoss(AlgorithmConfig(loss="sft")).compute_loss_from_logprobs(TWO, loss_mask=torch.ones(2).long()),
    ],
    "estimators and devices": [
        lambda: AdvantageEstimator(len, "galaxy"),  # type: ignore[arg-type]
        lambda: AdvantageEstimator(3, "group"),  # type: ignore[arg-type]
        lambda: pack_sequences(batch(SHAPES), device="gpu"),
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_refused(name: str, rejects: Rejects) -> None:
    for call in CALLS[name]:
        with rejects(ValueError):
            call()
