"""The parity tests' comparisons of a case with every rank's results, with every bound."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.config import LoraConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tower import language_names
from slime_like.weights.adapter import factor_names
from slime_like.weights.expected_tensors import expected_tensors
from tests.parallel.references import CLIP
from tests.parallel.steps import RankResult, scored_packs
from tests.parallel.tiny import stacked_experts

LOGPROB_BOUND = 1e-5
LOSS_BOUND = 1e-5
GRADIENT_BOUND = 1e-5
UPDATE_BOUND = 1e-4
Results = list[RankResult]


def check_scores(case: Any, results: Results) -> None:
    _check_packs(case, results, {"old_logprobs": case.expected.logprobs, "entropy": case.expected.entropy})


def check_reference(case: Any, results: Results) -> None:
    """The reference is the model without factors, which are off."""
    of_base = [replace(result, scored=result.reference) for result in results]
    _check_packs(case, of_base, {"ref_logprobs": case.base})


def _check_packs(case: Any, results: Results, values: dict[str, list[Tensor]]) -> None:
    found, start = scored_packs(results), 0
    for index, pack in enumerate(case.packs()):
        stop = start + pack.num_sequences
        for name, each in values.items():
            wanted = torch.cat(each[start:stop])
            for scored in found[index]:
                close = {"rtol": 0, "atol": LOGPROB_BOUND}
                torch.testing.assert_close(scored[name].double(), wanted, **close, msg=f"{name} of pack {index}")
        start = stop


def check_mean_scores(case: Any, results: Results) -> None:
    """In 16 bits, the mean gap of each pack's logprobs is below 1e-2 nats."""
    sizes = [pack.num_sequences for pack in case.packs()]
    for index, scored in scored_packs(results).items():
        start = sum(sizes[:index])
        wanted = torch.cat(case.expected.logprobs[start : start + sizes[index]])
        assert float((scored[0]["old_logprobs"].double() - wanted).abs().mean()) < 1e-2


def check_loss(case: Any, results: Results) -> None:
    for stats in _first_stats(results):
        for name, expected in (("loss", case.expected.loss), ("moe_aux_loss", case.expected.balance)):
            found = float(getattr(stats, name))
            assert found == pytest.approx(expected, abs=LOSS_BOUND), f"{name} is {found}, should be {expected}"
        assert float(stats.num_tokens) == sum(int(s.loss_mask.sum()) for s in case.sequences)


def _first_stats(results: Results) -> list[Any]:
    first = [result.stats[0] for result in results if result.stats[0] is not None]
    assert first, "no rank returned the step's statistics"
    return first


def check_norm(case: Any, results: Results) -> None:
    """Every gradient counts once in the norm that clips them, however many ranks hold it."""
    expected = float(torch.stack([gradient.norm() for gradient in case.expected.gradients.values()]).norm())
    for stats in _first_stats(results):
        assert float(stats.grad_norm) == pytest.approx(expected, rel=1e-4)


def whole(case: Any, results: Results, what: str) -> list[dict[str, Tensor]]:
    """Return gradients or weights by Hugging Face's module name: Megatron's exported, FSDP's of every rank."""
    if results[0].config.trainer.backend == "fsdp":
        return [getattr(result, what) for result in results]
    return [_by_module(case, sent(results, "exported" if what == "gradients" else what))]


def _by_module(case: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of a checkpoint: modules and files use different names."""
    names = language_names(case.checkpoint, tensors)
    found = stacked_experts({names[name]: tensor for name, tensor in tensors.items()})
    for name in found.keys() - case.expected.gradients.keys():
        if not name.endswith("e_score_correction_bias"):
            (key,) = (o for o, t in case.expected.gradients.items() if o not in found and t.shape == found[name].shape)
            found[key] = found.pop(name)
    return found


def check_gradients(case: Any, results: Results, bound: float = GRADIENT_BOUND) -> None:
    for found in whole(case, results, "gradients"):
        check_tensors(found, case.expected.gradients, bound)
    check_replicas(results)


def check_replicas(results: Results) -> None:
    """Tensor-parallel ranks have equal copies of what is not split, and stages of tied embeddings; padding is 0."""
    known: dict[tuple[int, int, str], Tensor] = {}
    for result in results:
        for name, tensor in result.replicated.items():
            first = known.setdefault((result.coordinates.data, result.coordinates.context, name), tensor)
            torch.testing.assert_close(tensor, first, rtol=0, atol=1e-7, msg=name)
            assert " of padding " not in name or not tensor.any(), name


def check_exported_gradients(case: Any, results: Results, bound: float = GRADIENT_BOUND) -> None:
    """Check that each tensor comes from exactly one rank, under its name in the checkpoint's files."""
    exported = sent(results, "exported")
    if not case.is_critic:
        checkpoint = expected_tensors(case.checkpoint)
        trained = {name: shape for name, shape in checkpoint.items() if not name.endswith("e_score_correction_bias")}
        assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == trained
    check_tensors(_by_module(case, exported), case.expected.gradients, bound)


def check_updates(case: Any, results: Results) -> None:
    for found in whole(case, results, "weights"):
        check_changes(case, found)


def check_changes(case: Any, weights: dict[str, Tensor]) -> None:
    """Compare how the updates changed the weights, given by Hugging Face name."""
    changes = {name: weights[name].double() - case.initial[name] for name in case.initial}
    expected = {name: case.updated[name] - case.initial[name] for name in case.initial}
    check_tensors(changes, expected, UPDATE_BOUND)


def check_biases(case: Any, results: Results) -> None:
    """Compare the loads of the last step, summed over all ranks, and every rank's biases, bit for bit."""
    if not case.bias_rate:
        return
    first = ModelDimensions.from_checkpoint(case.checkpoint).dense_layers
    for result in results:
        assert result.loads is not None and torch.equal(result.loads[first:], torch.stack(case.loads))
        for layer, bias in result.biases.items():
            assert torch.equal(bias, case.biases[layer - first]), f"layer {layer}: {bias}, {case.biases[layer - first]}"
    assert {layer - first for result in results for layer in result.biases} == set(range(len(case.biases)))


def check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Compare tensor by tensor; ``bound`` is relative, by norm."""
    assert found.keys() == expected.keys()
    errors = {
        name: float((found[name].double() - value).norm() / value.norm().clamp_min(1e-12))
        for name, value in expected.items()
    }
    worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert worst[0][1] <= bound, "\n".join(f"{name}: relative error {error:.2e}" for name, error in worst)


def sent(results: Results, what: str) -> dict[str, Tensor]:
    """Join what the ranks sent. No tensor may come from two ranks."""
    joined: dict[str, Tensor] = {}
    for result in results:
        assert not joined.keys() & getattr(result, what).keys()
        joined |= getattr(result, what)
    return joined


def check_neighbor(case: Any, results: Results) -> None:
    """Other tokens in one sequence change no bit of the others' logprobs."""
    scores, sizes = scored_packs(results), [sequence.response_len for sequence in case.sequences]
    sizes = sizes[: len(sizes) // 2]
    for one, other in zip(scores[0], scores[1], strict=True):
        parts = (each["old_logprobs"].split(sizes) for each in (one, other))
        same = [torch.equal(*pair) for pair in zip(*parts, strict=True)]
        assert same == [index != case.changed for index in range(len(sizes))]


EVERYTHING = (check_scores, check_loss, check_gradients, check_exported_gradients, check_updates, check_biases)


# ------------------------------------------------------------------------------------------------- low-rank factors
def check_factor_gradients(case: Any, results: Results) -> None:
    assert all(gradient.norm() > 0 for gradient in case.expected.gradients.values())
    check_tensors(sent(results, "exported"), case.expected.gradients, GRADIENT_BOUND)


def check_factors(case: Any, results: Results) -> None:
    check_changes(case, sent(results, "weights"))


def check_base(case: Any, results: Results) -> None:
    """No bit of the other weights may change, in training or by merging."""
    assert not any(result.changed for result in results)


def check_merged(case: Any, results: Results) -> None:
    """Merged weights are ``W + s B A``, and all others are the base's."""
    base, factors, merged = (sent(results, what) for what in ("base", "weights", "merged"))
    scale, expected = LoraConfig(**case.lora).scale, dict(base)
    for name, weight in base.items():
        a, b = factor_names(name)
        if a in factors:
            product = scale * (factors[b].float().double() @ factors[a].float().double())
            expected[name] = weight.double() + product
    assert merged.keys() == base.keys()
    for name, weight in merged.items():
        if weight.dtype == torch.bfloat16:  # float32 may round a tie differently
            assert float((weight != expected[name].bfloat16()).double().mean()) < 1e-3, name
        else:
            assert float((weight - expected[name]).abs().max()) < 1e-6, name


# ------------------------------------------------------------------------------------------ routes, teachers, critics
def check_own_routes(case: Any, results: Results) -> None:
    """Replaying the trainer's own routes changes no bit."""
    assert case.disagreement > 0.3
    for result in results:
        assert not result.changed and result.recorded > 0, result.changed


def check_disagreement(case: Any, results: Results) -> None:
    shares = [float(stats.routing_disagreement) for result in results for stats in result.stats if stats is not None]
    assert shares == pytest.approx([case.disagreement] * len(shares), abs=1e-9)


def check_kls(case: Any, results: Results) -> None:
    """Compare the mean KL of all tokens, and of each source's, which must be far above the bounds."""
    assert min(case.kls.values()) > 0.5
    for stats in _first_stats(results):
        found = {None: float(stats.distillation_kl), **stats.source_kls}
        assert found == pytest.approx(case.kls, abs=LOSS_BOUND)


def check_values(case: Any, results: Results, bound: float = LOGPROB_BOUND) -> None:
    expected, found = torch.cat(case.expected.logprobs), scored_packs(results)
    rows = torch.cat([found[index][0]["values"] for index in sorted(found)])
    assert rows.dtype == torch.float32 and float(expected.abs().mean()) > 0.1
    torch.testing.assert_close(rows.double(), expected, rtol=0, atol=bound)
    assert all(torch.equal(scored[0]["values"], each["values"]) for scored in found.values() for each in scored)


def check_statistics(case: Any, results: Results) -> None:
    mask = torch.cat([sequence.loss_mask for sequence in case.sequences])
    values = torch.cat(case.expected.logprobs)[mask]
    returns = torch.cat([sequence.returns for sequence in case.sequences]).double()[mask]
    old = torch.cat([sequence.values for sequence in case.sequences]).double()[mask]
    bounded = old + (values - old).clamp(-CLIP, CLIP)
    clipped = ((bounded - returns) ** 2 > (values - returns) ** 2).double().mean()
    wanted: dict[str, Tensor | float] = {
        "loss": case.expected.loss,
        "moe_aux_loss": case.expected.balance,
        "values": values.mean(),
        "returns": returns.mean(),
        "explained_variance": 1 - (returns - values).var() / returns.var(),
        "clipfrac": clipped,
        "old_gap_max": (values - old).abs().max(),
        "num_tokens": float(mask.sum()),
    }
    assert 0.1 < float(clipped) < 0.9
    for stats in _first_stats(results):
        for name, value in wanted.items():
            assert float(getattr(stats, name)) == pytest.approx(float(value), abs=LOSS_BOUND), name
