"""Parity of low-rank factors: the hand-written reference, one rank's results, and their comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from backends.common.trainer.lora import Initial
from slime_like.algorithms.packing.pack import zero_weight_pack
from slime_like.config import AlgorithmConfig, LoraConfig, RunConfig
from slime_like.interfaces import RankCoordinates, RankPlacement, Scores
from slime_like.models.weight_files import header_shapes
from slime_like.trajectory import PackedTrajectory
from slime_like.weights.adapter import factor_names, factor_shapes
from tests.parallel.parity import (
    BALANCE,
    GRADIENT_BOUND,
    LOGPROB_BOUND,
    MASKED,
    PACKS,
    STEPS,
    Case,
    Settings,
    check_changes,
    check_loss,
    check_scores,
    check_tensors,
    computed_case,
    parity_config,
)
from tests.parallel.ranks import run_ranks
from tests.parallel.reference import Reference
from tests.parallel.steps import RankResult, exported_from, exported_gradients, optimizer_steps, running, train_windows
from tests.parallel.tiny import save_checkpoint, scored_sequences

Factors = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------------- the reference
class _Product(torch.nn.Module):
    """W + s B A; of experts, (E, out, in) with several pairs of factors each, one above the other."""

    def __init__(self, scale: float, pairs: list[list[tuple[Tensor, Tensor] | int]]) -> None:
        super().__init__()
        self._scale, self._pairs = scale, pairs

    def forward(self, weight: Tensor) -> Tensor:
        width = weight.shape[-1]
        products = [
            torch.cat([weight.new_zeros(part, width) if isinstance(part, int) else part[1] @ part[0] for part in parts])
            for parts in self._pairs
        ]
        return weight + self._scale * (torch.stack(products) if weight.ndim == 3 else products[0])


class LoraReference(Reference):
    """transformers' model in float64 with ``W + s B A`` written out for every matrix that has factors."""

    def __init__(self, checkpoint: Path, algorithm: AlgorithmConfig, scale: float, factors: Factors) -> None:
        super().__init__(checkpoint, algorithm)
        self.model.requires_grad_(False)
        self.factors = {name: value.double().requires_grad_() for name, value in factors.items()}
        for name, module in list(self.model.named_modules()):
            if isinstance(module, torch.nn.Linear):
                pair = self._pair(f"{name}.weight")
                if pair is not None:
                    parametrize.register_parametrization(module, "weight", _Product(scale, [[pair]]), unsafe=True)
            if name.endswith(".mlp.experts"):
                width = module.down_proj.shape[-1]
                for weight, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
                    rows = width if weight == "gate_up_proj" else module.down_proj.shape[1]
                    parts = [
                        [self._pair(f"{name}.{expert}.{kind}_proj.weight") or rows for kind in kinds]
                        for expert in range(len(module.down_proj))
                    ]
                    parametrize.register_parametrization(module, weight, _Product(scale, parts), unsafe=True)

    def _pair(self, weight: str) -> tuple[Tensor, Tensor] | None:
        a, b = factor_names(weight)
        return (self.factors[a], self.factors[b]) if a in self.factors else None

    def trained(self) -> dict[str, Tensor]:
        return self.factors


def random_factors(checkpoint: Path, settings: LoraConfig) -> Factors:
    """Return factors of which neither is 0, in float32.

    They are small, and alpha is large, so that updates are far above the rounding error of factors.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = factor_shapes(settings, header_shapes(checkpoint))
    return {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@dataclass
class LoraCase(Case):
    """A case whose reference trains factors. ``base`` has the logprobs of the model without them."""

    settings: dict[str, Any] = field(default_factory=dict)
    base: list[Tensor] = field(default_factory=list)

    def config(self, directory: Path, layout: Settings, dtype: str = "float32", **lora: Any) -> RunConfig:
        config = parity_config(self.checkpoint, directory, layout, dtype, **self.algorithm)
        model = {"path": self.checkpoint, "dtype": dtype, "lora": {**self.settings, **lora}}
        return RunConfig(**{**dict(config), "model": model})

    @property
    def factors(self) -> Factors:
        return {name: value.float() for name, value in self.initial.items()}


def make_lora_case(family: str, directory: Path, steps: int = STEPS, layers: int = 2, **settings: Any) -> LoraCase:
    """Save a tiny checkpoint, and compute the reference's step and updates of random factors."""
    checkpoint = save_checkpoint(family, directory, layers=layers)
    settings = {"rank": 4, "alpha": 24.0, **settings}
    lora, algorithm = LoraConfig(**settings), {"moe_aux_loss_coef": BALANCE.get(family, 0.0)}
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    of_algorithm = parity_config(checkpoint, directory, {}, **algorithm).algorithm
    with torch.no_grad():
        base = [Reference(checkpoint, of_algorithm).score(sequence)[0] for sequence in sequences]
    factors = random_factors(checkpoint, lora)
    reference = LoraReference(checkpoint, of_algorithm, lora.scale, factors)
    more = {"settings": settings, "base": base}
    case: LoraCase = computed_case(LoraCase, reference, checkpoint, sequences, algorithm, steps, **more)
    return case


# ------------------------------------------------------------------------------------------------------------- a rank
@dataclass
class LoraResult(RankResult):
    """``weights`` and ``exported`` are factors and their gradients by PEFT's name, only on ranks that send them.

    ``base`` and ``merged`` are the weights without factors, and with the updated ones. ``changed`` are the names of
    other parameters that changed.
    """

    reference: list[Scores] | None = None
    base: Factors = field(default_factory=dict)
    merged: Factors = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)


class Given(Initial):
    """Given factors, readable like a checkpoint."""

    def __init__(self, values: Factors, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(shapes)
        self._values = values

    def read(self, name: str, axis: int, start: int, length: int) -> Tensor:
        assert self._values[name].shape == self.shapes[name]
        return self._values[name].narrow(axis, start, length)


def fill(trainer: Any, factors: Factors) -> None:
    """Set the factors of a trainer that is ready to train."""
    trainer.state.fill_lora_weights(lambda shapes: Given(factors, shapes))
    trainer.optimizer.megatron.reload_model_params()


def packs_of_rank(
    place: RankCoordinates, packs: Sequence[PackedTrajectory]
) -> tuple[list[int], list[PackedTrajectory], list[PackedTrajectory]]:
    """Return numbers and packs of a replica, and these filled up to as many as every replica has."""
    indices = list(range(place.data, len(packs), place.data_size))
    mine = [packs[index] for index in indices]
    return indices, mine, mine + [zero_weight_pack(packs[0])] * (-(-len(packs) // place.data_size) - len(mine))


def same_values(scores: list[Scores] | None, others: list[Scores] | None) -> None:
    """Compare the first field of each pack's scores bit for bit."""
    for one, other in zip(scores or (), others or (), strict=True):
        assert torch.equal(*(next(iter(each.values())) for each in (one, other)))


def lora_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, factors: Factors
) -> LoraResult:
    """Return everything that the tests compare, from one rank."""
    with running(placement, config) as trainer:
        place = trainer.coordinates
        indices, mine, filled = packs_of_rank(place, packs)
        base = exported_from(trainer)
        fill(trainer, factors)
        frozen, role = _untrained(trainer), config.roles["reference"]
        trainer._add_frozen(role)  # as if the run continued an adapter
        scored, initial = trainer.score(filled), trainer.score(filled, "reference")
        same_values(initial, scored)
        trainer._add_frozen(replace(role, path=config.model.path))
        reference = trainer.score(filled, "reference")
        train_windows(trainer, filled, denominator)
        exported = exported_gradients(trainer, denominator)
        stats = optimizer_steps(trainer, STEPS, denominator, lambda: train_windows(trainer, filled, denominator))
        trainer.settle_weights()
        merged = exported_from(trainer)
        changed = [name for name, weight in _untrained(trainer).items() if not torch.equal(weight, frozen[name])]
        buffered = [parameter for chunk in trainer.wrapped for parameter in chunk.param_to_bucket_group]
        assert all(parameter.requires_grad for parameter in buffered)
        adapter = config.model.lora.model_copy(update={"sync": "adapter"})
        trainer.state._model = config.model.model_copy(update={"lora": adapter})
        scored, reference = (part and part[: len(mine)] for part in (scored, reference))
        weights = exported_from(trainer)
        return LoraResult(
            place,
            indices,
            scored,
            {},
            stats,
            weights,
            exported,
            reference=reference,
            base=base,
            merged=merged,
            changed=changed,
        )


def dropout_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, factors: Factors
) -> LoraResult:
    """Return scores, exported gradients, and gradients of the factors that every tensor-parallel rank holds."""
    with running(placement, config) as trainer:
        fill(trainer, factors)
        scored = trainer.score(packs)
        train_windows(trainer, packs, denominator)
        exported = exported_gradients(trainer, denominator)
        replicated = {
            name: parameter.main_grad.clone()
            for name, parameter in trainer.chunks[0].named_parameters()
            if parameter.requires_grad and not parameter.tensor_model_parallel
        }
        return LoraResult(trainer.coordinates, list(range(len(packs))), scored, replicated, [], {}, exported)


def reference_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], factors: Factors
) -> tuple[Tensor, ...]:
    """Return logprobs of the policy, of the reference, and of the policy again."""
    with running(placement, config) as trainer:
        fill(trainer, factors)
        found = [trainer.score(packs, role) for role in (None, "reference", None)]
        return tuple(torch.cat([next(iter(scores.values())) for scores in one]) for one in found)


def _untrained(trainer: Any) -> Factors:
    return {
        f"{number}.{name}": parameter.detach().clone()
        for number, chunk in enumerate(trainer.chunks)
        for name, parameter in chunk.named_parameters()
        if not parameter.requires_grad
    }


def lora_task(case: LoraCase, layout: Settings, directory: Path, dtype: str = "float32", **lora: Any) -> Any:
    """Return the arguments of a rank function for the case's step and updates under ``layout``."""
    return case.config(directory, layout, dtype, **lora), case.packs(), case.denominator, case.factors


def run_lora(
    case: LoraCase, layout: Settings, directory: Path, function: Any = lora_rank, dtype: str = "float32", **lora: Any
) -> Any:
    """Run the case's step and updates on every rank of ``layout``."""
    task = lora_task(case, layout, directory, dtype, **lora)
    return run_ranks(function, task[0].trainer.parallel.world_size, directory / "ranks", *task)


# ------------------------------------------------------------------------------------------------------ the comparisons
def sent(results: list[LoraResult], what: str) -> Factors:
    """Join what the ranks sent. No tensor may come from two ranks."""
    joined: Factors = {}
    for result in results:
        assert not joined.keys() & getattr(result, what).keys()
        joined |= getattr(result, what)
    return joined


def check_lora(case: LoraCase, results: list[LoraResult]) -> None:
    """Compare logprobs, the frozen reference's logprobs, the loss, gradients, updates and merged weights."""
    check_scores(case, results)  # type: ignore[arg-type]
    check_reference(case, results)
    check_loss(case, results)  # type: ignore[arg-type]
    check_factor_gradients(case, results)
    check_norm(case, results)
    check_changes(case, sent(results, "weights"))
    check_merged(case, results)
    check_base(case, results)


def check_reference(case: LoraCase, results: list[LoraResult]) -> None:
    """The reference is the model without factors, which are off."""
    of_base = [replace(result, scored=result.reference) for result in results]
    without = replace(case, expected=replace(case.expected, logprobs=case.base))
    start = 0
    found = {i: s for r in of_base if r.scored is not None for i, s in zip(r.pack_indices, r.scored, strict=True)}
    for index, pack in enumerate(without.packs()):
        wanted = torch.cat(case.base[start : start + pack.num_sequences])
        torch.testing.assert_close(found[index]["ref_logprobs"].double(), wanted, rtol=0, atol=LOGPROB_BOUND)
        start += pack.num_sequences


def check_base(case: LoraCase, results: list[LoraResult]) -> None:
    """No bit of the other weights may change, in training or by merging."""
    assert not any(result.changed for result in results)


def check_factor_gradients(case: LoraCase, results: list[LoraResult]) -> None:
    gradients = case.expected.gradients
    assert all(gradients[name].norm() > 0 for name in gradients)
    check_tensors(sent(results, "exported"), gradients, GRADIENT_BOUND)


def check_norm(case: LoraCase, results: list[LoraResult]) -> None:
    """Every factor counts once in the norm that clips gradients, however many ranks hold it."""
    expected = float(torch.stack([gradient.norm() for gradient in case.expected.gradients.values()]).norm())
    norms = [stats.grad_norm for result in results if (stats := result.stats[0]) is not None]
    assert norms and all(float(norm) == pytest.approx(expected, rel=1e-4) for norm in norms)


def check_merged(case: LoraCase, results: list[LoraResult]) -> None:
    """Merged weights are ``W + s B A``, and all others are the base's."""
    base, factors = sent(results, "base"), sent(results, "weights")
    scale = LoraConfig(**case.settings).scale
    expected = dict(base)
    for name, weight in base.items():
        a, b = factor_names(name)
        if a in factors:
            product = scale * (factors[b].float().double() @ factors[a].float().double())
            expected[name] = weight.double() + product
    merged = sent(results, "merged")
    assert merged.keys() == base.keys()
    for name, weight in merged.items():
        if weight.dtype == torch.bfloat16:  # float32 may round a tie differently
            assert float((weight != expected[name].bfloat16()).double().mean()) < 1e-3, name
        else:
            assert float((weight - expected[name]).abs().max()) < 1e-6, name
