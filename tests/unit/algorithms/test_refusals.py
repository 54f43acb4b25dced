"""Wrong calls are rejected if torch would broadcast, round or misinterpret arguments, or a result would be wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like import algorithms as algo
from slime_like.algorithms.advantages import SampleGroups
from slime_like.algorithms.losses.policy import PolicyTerms
from slime_like.algorithms.losses.sums import LossSums
from slime_like.algorithms.losses.surrogates import SFT
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.plugins.objective import LOSSES, SEQUENCE_LOSSES, STEP_LOSSES
from slime_like.statistics import mean_pass_at_k, pass_at_k
from tests.unit.algorithms.cases import SHAPES, batch
from tests.unit.algorithms.test_losses import LENGTHS, make_inputs

NAN = float("nan")
PACK = algo.pack_sequences(batch(SHAPES))
PLAIN = algo.pack_sequences([replace(s, temperature=1.0) for s in batch(SHAPES)])
TWO, MASK, LENGTH = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([2])
IDS, BEYOND = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 5])
LOGITS, HEAD = torch.zeros(2, 5), torch.ones(5, 5)
PADDED = {"pi_logits": torch.zeros(2, 3, 5), "targets": torch.ones(2, 3, dtype=torch.int64), "ref_logprobs": None}


def _one_too_few(rewards: Tensor, groups: SampleGroups) -> Tensor:
    return rewards[1:]


def _without_threshold(rewards: Tensor, groups: SampleGroups) -> Tensor:
    return rewards / groups.std(rewards, ddof=0)


one_too_few, without_threshold = (algo.AdvantageEstimator(f, "group") for f in (_one_too_few, _without_threshold))


def built(**config: Any) -> object:
    return algo.build_loss(AlgorithmConfig(**config))(make_inputs())


def padded(reduction: str = "tokens", **changes: Any) -> object:
    """Compute the direct loss of padded logits (2, 3, 5)."""
    return algo.GRPOLoss(AlgorithmConfig(reduction=reduction)).forward(**{"advantages": TWO, **PADDED, **changes})


def custom(name: str) -> object:
    return algo.compute_advantages(torch.tensor([1.0, 0.0, 1.0]), [1, 1, 2], f"{__name__}:{name}")


CALLS: dict[str, Callable[[], object]] = {
    "values broadcast": lambda: algo.value_loss(TWO[:, None], TWO, TWO, MASK, TWO),
    "rewards per token broadcast": lambda: algo.gae(TWO[:1], TWO, MASK, LENGTH, token_rewards=TWO[:1]),
    "a KL broadcast": lambda: algo.kl_estimate(TWO, TWO[:1]),
    "ratios broadcast": lambda: algo.importance_weights(TWO, TWO[:1], MASK, None, "truncate"),
    "advantages broadcast": lambda: algo.off_policy_sequence_mask(TWO, TWO, TWO[:1], MASK, LENGTH, 0.1),
    "a padding mask broadcast": lambda: padded(padding_masks=torch.ones(2, 1, dtype=torch.bool)),
    "(T, B) for (B, T)": lambda: padded(old_logprobs=torch.zeros(3, 2)),
    "advantages of other sequences": lambda: padded(advantages=torch.ones(3)),
    "a mask of numbers in the loss": lambda: padded(padding_masks=torch.ones(2, 3, dtype=torch.int64)),
    "a mask of numbers in GAE": lambda: algo.gae(TWO[:1], TWO, IDS, LENGTH),
    "lengths of other tokens": lambda: padded(response_lens=LENGTH + 1),
    "lengths below 0": lambda: algo.kl_penalty(TWO, TWO, MASK, torch.tensor([-1, 3]), 0.1),
    "values of other sequences": lambda: algo.spread_over_tokens([1.0, 2.0], [3]),
    "samples of other lengths": lambda: algo.sum_of_sample_mean(torch.zeros(3), [1, 2], [torch.ones(2), torch.ones(1)]),
    "groups cut to integers": lambda: algo.compute_advantages(TWO, [1.2, 1.7]),  # type: ignore[list-item]
    "no such estimator": lambda: algo.find_estimator("gppo"),
    "no such module": lambda: algo.find_estimator("no.such.module:name"),
    "a NaN reward": lambda: algo.compute_advantages(torch.tensor([0.0, NAN]), [1, 1]),
    "an estimator that gives too few": lambda: custom("one_too_few"),
    "an estimator that divides by 0": lambda: custom("without_threshold"),
    "an estimator of no scope": lambda: algo.AdvantageEstimator(_one_too_few, "galaxy"),  # type: ignore[arg-type]
    "no such loss": lambda: built(loss="trpo"),
    "a class that is no loss": lambda: built(loss="collections:OrderedDict"),
    "an estimator that cannot be called": lambda: algo.kl_estimate(TWO, TWO, "math:pi"),
    "no such correction": lambda: algo.importance_weights(TWO, TWO, MASK, None, "cut"),
    "a level without lengths": lambda: algo.importance_weights(TWO, TWO, MASK, None, "mask", "sequence"),
    "a reduction without groups": lambda: padded("groups"),
    "a reduction without its length": lambda: algo.token_weights("constant", [1], [1]),
    "rollouts of other rows": lambda: algo.token_weights("tokens", [1, 2], [0, 0], rollout_ids=["a"]),
    "a rollout in two groups": lambda: algo.step_denominator("samples", [1, 2], [0, 1], ["a", "a"]),
    "a denominator of 0": lambda: LossSums.zeros().to_stats(0.0, 0.0, 0.0),
    "an id beyond the logits": lambda: algo.selective_log_softmax(LOGITS, BEYOND),
    "an id beyond the head's vocabulary": lambda: algo.fused_logprobs(LOGITS, HEAD, BEYOND, 1.0, vocab_size=5),
    "a vocabulary part without reductions": lambda: algo.fused_logprobs(LOGITS, HEAD, IDS, 1.0, vocab_size=9),
    "a temperature of 0": lambda: algo.logprobs_and_entropy(LOGITS, IDS, torch.tensor([1.0, 0.0])),
    "a temperature of NaN": lambda: algo.compute_response_logprobs(torch.zeros(30, 29), PLAIN, NAN),
    "logits of another pack": lambda: algo.compute_response_logprobs(torch.zeros(29, 29), PACK, None),
    "logprobs of another pack": lambda: algo.unpack_response_logprobs(PACK, torch.zeros(16)),
    "no such layout": lambda: algo.padded_length(5, 1, "ring"),  # type: ignore[arg-type]
    "a rank outside the group": lambda: algo.split_for_context_parallel(PACK, 2, 2),
    "a sequence over the budget": lambda: algo.partition_full_batches([3, 11], 10, 1),
    "a sequence without tokens": lambda: algo.partition_by_tokens([3, 0], 10, 1),
    "an ignore_index that is a token's id": lambda: algo.pack_sequences(batch(SHAPES), ignore_index=0),
    "more successes than samples": lambda: pass_at_k(4, 5, 1),
    "a mean over no prompt": lambda: mean_pass_at_k([], 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="; "):  # with a remedy
        CALLS[name]()


@pytest.mark.parametrize(
    "lengths", [None, torch.tensor([5, 2, 8]), torch.tensor([LENGTHS])], ids=["none", "sum", "2-d"]
)
def test_a_ratio_per_sequence_needs_its_lengths(lengths: Tensor | None) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        algo.build_loss(AlgorithmConfig(loss="gspo"))(replace(make_inputs(), response_lens=lengths))


@pytest.mark.parametrize(
    "name",
    ["entropy", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages", "loss_mask", "token_weights"],
)
def test_a_loss_does_not_broadcast(name: str) -> None:
    given = make_inputs()
    value = getattr(given, name)
    for changed in (value[:, None], value[:1], value[:3]):
        with pytest.raises(ValueError, match="differ; "):
            algo.build_loss(AlgorithmConfig())(replace(given, **{name: changed}))


@pytest.mark.parametrize(
    "made",
    [
        lambda logprobs: PolicyTerms(logprobs.mean()),
        lambda logprobs: PolicyTerms(logprobs, ratio=logprobs[:1]),
        lambda logprobs: logprobs,
    ],
)
def test_a_custom_loss_returns_a_value_per_token(
    made: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SFT, "__call__", lambda self, inputs: made(inputs.logprobs))
    with pytest.raises(ValueError, match="loss 'sft' returned"):
        built(loss="sft")


def test_settings_per_sequence() -> None:
    """Settings that need sequence lengths are listed by name. A level without a correction has no effect."""
    assert AlgorithmConfig(importance={"level": "sequence"}).per_sequence == ()
    corrected = {"correction": "mask", "veto": 1e-4, "level": "geometric"}
    assert AlgorithmConfig(importance=corrected).per_sequence == (
        "importance.level=geometric", "importance.veto=0.0001",
    )  # fmt: skip
    pack = algo.pack_sequences(batch([(3, 4)]))
    for name in LOSSES.keys() - STEP_LOSSES:
        config = AlgorithmConfig(loss=name)
        others = pack.old_logprobs, pack.logprobs, pack.ref_logprobs, pack.advantages
        inputs = algo.LossInputs(torch.zeros(4), pack.loss_mask, pack.token_weights, torch.zeros(4), *others)
        if name in SEQUENCE_LOSSES:
            assert config.per_sequence == (f"loss={name}",)
            with pytest.raises(ValueError, match="response_lens"):
                algo.build_loss(config)(inputs)
        else:
            assert config.per_sequence == () and algo.build_loss(config)(inputs).loss.isfinite()
