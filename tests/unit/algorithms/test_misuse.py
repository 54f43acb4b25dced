"""What a newcomer gives by mistake is rejected in a sentence that names what, where and the remedy."""

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_like.algorithms import (
    AdvantageEstimator,
    GRPOLoss,
    LossInputs,
    LossSums,
    build_loss,
    compute_response_logprobs,
    fused_logprobs,
    gae,
    importance_weights,
    kl_penalty,
    logprobs_and_entropy,
    merge_from_context_parallel,
    off_policy_sequence_mask,
    overlong_penalty,
    pack_sequences,
    partition_by_tokens,
    partition_full_batches,
    selective_log_softmax,
    split_for_context_parallel,
    sum_of_sample_mean,
    training_flops,
    unpack_response_logprobs,
    value_loss,
    vocab_parallel_logprobs,
)
from slime_like.algorithms.losses import kl_estimate
from slime_like.config.algorithm import AlgorithmConfig
from tests.support.rejections import Rejects
from tests.unit.algorithms.cases import SHAPES, batch, scored

NAN, INF = float("nan"), float("inf")
LIST = [0.0, 0.0]
TWO, MASK, LENGTHS = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([2])
IDS, LOGITS = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 5)
CONFIG = AlgorithmConfig()
BARE = SimpleNamespace(
    loss="sft", importance_correction="none", kl_coef=0.0, entropy_coef=0.0, off_policy_mask=None, reduction="tokens"
)


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


def packed() -> Any:
    return pack_sequences([replace(s, temperature=1.0) for s in batch(SHAPES)])


def half() -> list[Any]:
    return [split_for_context_parallel(packed(), 1, 0)]


def estimated(scope: object = "group", compute: object = len) -> AdvantageEstimator:
    return AdvantageEstimator(compute, scope)  # type: ignore[arg-type]


def forward(config: Any = CONFIG, **changes: Any) -> object:
    given = {"pi_logits": LOGITS, "targets": IDS, "ref_logprobs": TWO, "advantages": TWO}
    return GRPOLoss(config).forward(**given | changes)


def built(**changes: Any) -> object:
    return build_loss(SimpleNamespace(**vars(BARE) | changes))  # type: ignore[arg-type]


CALLS: list[Callable[[], object]] = [
    # lists that are not arguments by themselves
    lambda: compute_response_logprobs([[0.0]], packed()),  # type: ignore[arg-type]
    lambda: unpack_response_logprobs(packed(), [0.0] * 15),  # type: ignore[arg-type]
    lambda: merge_from_context_parallel(half(), [[0.0] * 15]),  # type: ignore[list-item]
    lambda: sum_of_sample_mean(TWO, [2], [LIST]),  # type: ignore[list-item]
    lambda: GRPOLoss(CONFIG).compute_loss_from_logprobs(LIST),  # type: ignore[arg-type]
    # lengths below 0
    lambda: gae(TWO, TWO, MASK, torch.tensor([3, -1])),
    lambda: kl_penalty(TWO, TWO, MASK, torch.tensor([-1, 3]), 0.1),
    lambda: importance_weights(TWO, TWO, MASK, torch.tensor([3, -1]), "mask", "sequence"),
    lambda: forward(response_lens=torch.tensor([3, -1])),
    lambda: overlong_penalty(torch.tensor([4, -2]), 5, 2),
    lambda: sum_of_sample_mean(TWO, [3, -1], [MASK, MASK]),
    lambda: training_flops([5, -2], 2, 3, 4),
    lambda: training_flops([NAN], 2, 3, 4),
    # numbers that have to be whole, or finite
    *(
        lambda partition=partition, budget=budget: partition([1, 2], budget, 1)
        for partition in (partition_by_tokens, partition_full_batches)
        for budget in (NAN, INF, 2.5)
    ),
    lambda: partition_by_tokens([1, 2], 5, 1.5),  # type: ignore[arg-type]
    *(
        lambda x=x: pack_sequences(batch(SHAPES), **x)
        for x in ({"target_tokens_per_batch": 99.5}, {"ignore_index": -1.5}, {"pad_token_id": 0.5})
    ),
    *(lambda x=x: kl_penalty(TWO, TWO, MASK, LENGTHS, x) for x in (NAN, INF)),
    *(lambda x=x: off_policy_sequence_mask(TWO, TWO, TWO, MASK, LENGTHS, x) for x in (NAN, INF)),
    *(
        lambda name=name, x=x: built(**{name: x})
        for name in ("kl_coef", "entropy_coef", "off_policy_mask")
        for x in (NAN, INF, -0.1)
    ),
    *(lambda x=x: LossSums.zeros().to_stats(x, 0.0, 0.0) for x in (0, 0.0, -1.0, NAN, INF)),
    # vocabularies, ids and types
    lambda: logprobs_and_entropy(torch.zeros(2, 0), IDS - 1),
    lambda: logprobs_and_entropy(torch.tensor(0.0), torch.tensor(0)),
    lambda: logprobs_and_entropy(LOGITS, IDS.to(torch.uint8)),
    lambda: vocab_parallel_logprobs(LOGITS, IDS.to(torch.uint8), TWO + 1, vocab_size=5),
    lambda: vocab_parallel_logprobs(LOGITS[:, :0], IDS, TWO + 1, vocab_size=0),
    lambda: vocab_parallel_logprobs(LOGITS.long(), IDS, TWO + 1, vocab_size=5),
    lambda: fused_logprobs(LOGITS, LOGITS[:0], IDS, TWO + 1, vocab_size=0),
    lambda: fused_logprobs(LOGITS.bfloat16(), LOGITS, IDS, TWO + 1, vocab_size=2),
    lambda: fused_logprobs(LOGITS.long(), LOGITS.long(), IDS, TWO + 1, vocab_size=2),
    lambda: forward(pi_logits=LOGITS[0]),
    lambda: forward(pi_logits=[LOGITS[0], LOGITS[1]]),
    lambda: forward(targets=IDS.to(torch.uint8)),
    # what a loss needs, and masks
    lambda: forward(advantages=None),
    lambda: forward(padding_masks=torch.ones(2)),
    lambda: GRPOLoss(AlgorithmConfig(loss="sft")).compute_loss_from_logprobs(TWO, loss_mask=torch.ones(2).long()),
    # estimators and devices
    lambda: estimated("galaxy"),
    lambda: estimated(compute=3),
    lambda: pack_sequences(batch(SHAPES), device="gpu"),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_call_by_mistake(number: int, rejects: Rejects) -> None:
    with rejects(ValueError):
        CALLS[number]()


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
