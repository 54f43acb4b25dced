"""Functions of one rank that train with low-rank factors and with replayed routes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.trainer.lora import Initial
from backends.fsdp.weights import export_buckets
from backends.megatron.trainer import MegatronTrainer
from slime_like.config import RunConfig
from slime_like.interfaces import Manifest, RankPlacement, Scores
from slime_like.trajectory import PackedTrajectory
from slime_like.weights.adapter import ADAPTER
from tests.parallel.references import Factors
from tests.parallel.steps import (
    RankResult,
    Trainer,
    balanced,
    exported_from,
    exported_gradients,
    optimizer_steps,
    packs_of_rank,
    running,
    same_bits,
    train_windows,
    whole_tensors,
)


# ------------------------------------------------------------------------------------------------- low-rank factors
class Given(Initial):
    """Given factors, readable like a checkpoint."""

    def __init__(self, values: Factors, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(shapes)
        self._values = values

    def read(self, name: str, axis: int, start: int, length: int) -> Tensor:
        assert self._values[name].shape == self.shapes[name]
        return self._values[name].narrow(axis, start, length)


def fill(trainer: Trainer, factors: Factors) -> None:
    """Set the factors of a trainer that is ready to train."""
    trainer.state.fill_lora_weights(lambda shapes: Given(factors, shapes))
    if isinstance(trainer, MegatronTrainer):
        trainer.optimizer.megatron.reload_model_params()


def lora_rank(
    placement: RankPlacement,
    config: RunConfig,
    packs: list[PackedTrajectory],
    denominator: float,
    steps: int,
    factors: Factors,
) -> RankResult:
    """Score with and without factors, and train these for ``steps`` updates."""
    with running(placement, config) as trainer:
        indices, filled = packs_of_rank(trainer.coordinates, packs)
        base = exported_from(trainer)
        fill(trainer, factors)
        frozen, role = _frozen_weights(trainer), config.roles["reference"]
        scored = trainer.score(filled)
        if isinstance(trainer, MegatronTrainer):
            trainer._add_frozen(role)  # as if the run continued an adapter
            _same_scores(trainer.score(filled, "reference"), scored)
            trainer._add_frozen(replace(role, path=config.model.path))
        reference = trainer.score(filled, "reference")
        train_windows(trainer, filled, denominator)
        exported = exported_gradients(trainer, denominator)
        stats = optimizer_steps(trainer, steps, denominator, lambda: train_windows(trainer, filled, denominator))
        trainer.settle_weights()
        _check_trained(trainer)
        merged = exported_from(trainer)
        if config.trainer.backend == "fsdp":  # the first export must not have changed the base
            merged = exported_from(trainer)
        changed = [name for name, weight in _frozen_weights(trainer).items() if not torch.equal(weight, frozen[name])]
        scored, reference = (part and part[: len(indices)] for part in (scored, reference))
        return RankResult(
            config, trainer.coordinates, indices, scored, {}, stats, _updated_factors(trainer), exported,
            reference=reference, base=base, merged=merged, changed=changed,
        )  # fmt: skip


def dropout_rank(
    placement: RankPlacement,
    config: RunConfig,
    packs: list[PackedTrajectory],
    denominator: float,
    steps: int,
    factors: Factors,
) -> RankResult:
    """Return scores, exported gradients, and gradients of the factors that every tensor-parallel rank holds."""
    with running(placement, config) as trainer:
        fill(trainer, factors)
        scored = trainer.score(packs)
        if config.trainer.backend == "fsdp":
            torch.manual_seed(5)
        train_windows(trainer, packs, denominator)
        exported, replicated = exported_gradients(trainer, denominator), {}
        if isinstance(trainer, MegatronTrainer):
            for name, parameter in trainer.chunks[0].named_parameters():
                if parameter.requires_grad and not parameter.tensor_model_parallel:
                    replicated[name] = parameter.main_grad.clone()
        return RankResult(config, trainer.coordinates, list(range(len(packs))), scored, replicated, [], {}, exported)


def reference_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], factors: Factors
) -> tuple[Tensor, ...]:
    """Return logprobs of the policy, of the reference, and of the policy again."""
    with running(placement, config) as trainer:
        fill(trainer, factors)
        found = [trainer.score(packs, role) for role in (None, "reference", None)]
        return tuple(torch.cat([next(iter(scores.values())) for scores in one]) for one in found)


def masters_of(trainer: Any) -> Factors:
    """Return float32 copies of all factors of FSDP on the first rank, by PEFT's names."""
    model, factors = trainer.model, trainer.model.stored_by_name()
    rows = {name: each.to_local().detach() for name, each in factors.items()}
    buckets = export_buckets(factors, rows.__getitem__, model.pieces, torch.float32, 1 << 12, trainer.device)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors}


def _same_scores(scores: list[Scores] | None, others: list[Scores] | None) -> None:
    """Compare the first field of each pack's scores bit for bit."""
    for one, other in zip(scores or (), others or (), strict=True):
        assert torch.equal(*(next(iter(each.values())) for each in (one, other)))


def _frozen_weights(trainer: Any) -> Factors:
    """Return copies of this rank's part of all weights that are not trained."""
    if isinstance(trainer, MegatronTrainer):
        named = {
            f"{n}.{name}": each for n, chunk in enumerate(trainer.chunks) for name, each in chunk.named_parameters()
        }
        return {name: each.detach().clone() for name, each in named.items() if not each.requires_grad}
    own = trainer.model.own_by_name() | trainer.model.kept_by_name()
    return {name: getattr(each, "_local_tensor", each).detach().clone() for name, each in own.items()}


def _check_trained(trainer: Any) -> None:
    """Check which parameters have gradients and optimizer state, and their types."""
    if isinstance(trainer, MegatronTrainer):
        buffered = [parameter for chunk in trainer.wrapped for parameter in chunk.param_to_bucket_group]
        assert all(parameter.requires_grad for parameter in buffered)
        return
    of_model = getattr(torch, trainer.config.model.dtype)
    for name, parameter in trainer.model.parameters_by_name().items():
        of_factor = ".added." in name
        assert parameter.requires_grad == of_factor and (of_factor or parameter.grad is None), name
        assert parameter.dtype == (torch.float32 if of_factor else of_model), name
    assert trainer.optimizer.moments.keys() == trainer.model.stored_by_name().keys()


def _updated_factors(trainer: Any) -> Factors:
    """Return the factors of this rank that a sync of only the adapter sends. FSDP sends them rounded, checked here."""
    model = trainer.config.model
    adapter = model.model_copy(update={"lora": model.lora.model_copy(update={"sync": ADAPTER})})
    if isinstance(trainer, MegatronTrainer):
        trainer.state._model = adapter
        return exported_from(trainer)
    masters = masters_of(trainer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.state, "_config", trainer.config.model_copy(update={"model": adapter}))
        export = trainer.export_weights()
        sent = {name: tensor.clone() for bucket in export for name, tensor in bucket.tensors}
    same_bits(sent, {name: each.to(getattr(torch, model.dtype)) for name, each in masters.items()})
    assert export.manifest == (Manifest.of(sent, ADAPTER) if masters else None)
    return masters


# -------------------------------------------------------------------------------------------------- replayed routes
def routed_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, steps: int
) -> RankResult:
    """Compare passes with and without the trainer's own routes, then train with the packs' routes."""
    with running(placement, config) as trainer:
        indices, filled = packs_of_rank(trainer.coordinates, packs)
        plain = [replace(pack, routes=None) for pack in filled]

        def passes(mode: str) -> tuple[Any, dict[str, Tensor]]:
            _set_replay(trainer, mode)
            scored = trainer.score(plain, "policy")
            train_windows(trainer, plain, denominator)
            return scored, exported_gradients(trainer, denominator)

        own, changed = passes("none"), list[str]()
        for mode in ("old", "rollout"):  # the first scoring pass records what all later passes replay
            again = passes(mode)
            for one, other in zip(own[0] or [], again[0] or [], strict=True):
                changed += [f"{mode}: {name}" for name in one if not torch.equal(one[name], other[name])]
            changed += [f"{mode}: {name}" for name in own[1] if not torch.equal(own[1][name], again[1][name])]
        recorded = sum(int((pack.routes >= 0).sum()) for pack in plain if pack.routes is not None)
        scored = trainer.score(filled, "policy")
        train_windows(trainer, filled, denominator)
        exported, gradients = exported_gradients(trainer, denominator), whole_tensors(trainer, gradients=True)
        stats = optimizer_steps(trainer, 1, denominator, lambda: None)
        return RankResult(
            config, trainer.coordinates, indices, scored and scored[: len(indices)], gradients, stats, {}, exported,
            {}, None, *balanced(trainer), changed=changed, recorded=recorded,
        )  # fmt: skip


def later_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, steps: int
) -> RankResult:
    """Score, update, and return the second update's gradients and statistics."""
    with running(placement, config) as trainer:
        indices, filled = packs_of_rank(trainer.coordinates, packs)
        trainer.score(filled, "policy")
        train_windows(trainer, filled, denominator)
        first = trainer.finish_step(denominator)
        assert first is None or float(first.routing_disagreement) == 0.0
        train_windows(trainer, filled, denominator)
        exported, gradients = exported_gradients(trainer, denominator), whole_tensors(trainer, gradients=True)
        stats = optimizer_steps(trainer, 1, denominator, lambda: None)
        return RankResult(config, trainer.coordinates, indices, None, gradients, stats, {}, exported)


def _set_replay(trainer: Any, mode: str) -> None:
    algorithm = trainer.config.algorithm.model_copy(update={"routing_replay": mode})
    trainer.config = trainer.config.model_copy(update={"algorithm": algorithm})
