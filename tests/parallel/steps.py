"""Functions that run on one rank: start a trainer, read its tensors, and do the parity tests' steps."""

import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.checkpoint.writing import CheckpointWriter
from backends.fsdp.trainer import FsdpTrainer
from backends.megatron import parallel
from backends.megatron.cpu_runtime import megatron_runtime
from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms.packing.pack import real_tokens, zero_weight_pack
from slime_like.config import RunConfig
from slime_like.config.roles import CRITIC
from slime_like.interfaces import RankCoordinates, RankPlacement, Scores
from slime_like.statistics import GRPOStats
from slime_like.trajectory import PackedTrajectory
from tests.parallel.held import Held, held_by

Trainer = MegatronTrainer | FsdpTrainer


@dataclass
class RankResult:
    """One rank's scores of the packs ``pack_indices``, and its finished gradients (reduced and divided).

    ``exported`` holds the gradients that the trainer exports, under their Hugging Face names, and ``weights`` those of
    the last step. FSDP's ``gradients`` and ``weights`` are whole on every rank, and what it holds is not counted.
    ``replicated`` holds what several of Megatron's ranks have, gradients and weights. ``loads`` are of the last step,
    by layer and expert, and ``biases`` those of this rank's routers, by layer.

    Of low-rank factors, ``weights`` and ``exported`` are factors and their gradients by PEFT's names, only on ranks
    that send them; ``base`` and ``merged`` are the weights without and with the updated factors, and ``reference`` the
    scores without. ``changed`` names what must not have changed by a bit but did, and ``recorded`` counts own routes.
    """

    config: RunConfig
    coordinates: RankCoordinates
    pack_indices: list[int]
    scored: list[Scores] | None
    gradients: dict[str, Tensor]
    stats: list[GRPOStats | None]
    weights: dict[str, Tensor]
    exported: dict[str, Tensor] = field(default_factory=dict)
    replicated: dict[str, Tensor] = field(default_factory=dict)
    held: Held | None = None
    loads: Tensor | None = None
    biases: dict[int, Tensor] = field(default_factory=dict)
    reference: list[Scores] | None = None
    base: dict[str, Tensor] = field(default_factory=dict)
    merged: dict[str, Tensor] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    recorded: int = 0


@contextmanager
def running(placement: RankPlacement, config: RunConfig, scores: bool = False) -> Iterator[Any]:
    """Set the configured trainer up (to train, or only to score) and shut it down after the block."""
    trainer = (MegatronTrainer if config.trainer.backend == "megatron" else FsdpTrainer)(config, placement)
    (trainer.setup_for_scoring if scores else trainer.setup)()
    try:
        yield trainer
    finally:
        trainer.shutdown()


@contextmanager
def joined(placement: RankPlacement, config: RunConfig) -> Iterator[None]:
    """Make the configured layout's process groups, without a trainer."""
    with megatron_runtime():
        parallel.initialize(config.trainer, placement, config.seed)
        yield
        parallel.leave()


def take_step(
    trainer: Trainer, packs: list[PackedTrajectory], denominator: float, last: bool = False
) -> GRPOStats | None:
    """Do one update from one window, announced as the last one if ``last``."""
    trainer.begin_step(denominator, real_tokens(packs))
    trainer.accumulate(packs, last=last)
    return trainer.finish_step(denominator)


def weights_of(trainer: MegatronTrainer) -> list[Tensor]:
    """Return copies of this rank's parameters."""
    return [parameter.detach().clone() for chunk in trainer.chunks for parameter in chunk.parameters()]


def gradients_in(trainer: MegatronTrainer) -> list[Tensor]:
    """Return copies of the gradients of this rank's parameters."""
    return [parameter.main_grad.clone() for chunk in trainer.chunks for parameter in chunk.parameters()]


def exported_from(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of the weights under their Hugging Face names."""
    return {name: tensor.clone() for bucket in trainer.export_weights() for name, tensor in bucket.tensors}


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that the tensors have equal types, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Check that the names are equal and that no element differs by more than ``bound``."""
    assert found.keys() == expected.keys()
    gaps = {name: float((found[name].double() - tensor.double()).abs().max()) for name, tensor in expected.items()}
    worst = max(gaps, key=gaps.__getitem__)
    assert gaps[worst] <= bound, f"{worst}: {gaps[worst]:.2e}"


@contextmanager
def small_disk(nbytes: int | None) -> Iterator[None]:
    """Simulate a full disk by limiting the size of this process's files; ``None`` sets no limit."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if nbytes is None else nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def held_writes() -> Iterator[threading.Event]:
    """Let no checkpoint be written, also in the background, before the event is set."""
    gate, write = threading.Event(), CheckpointWriter.write

    def late(writing: CheckpointWriter) -> None:
        assert gate.wait(60)
        write(writing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "write", late)
        yield gate


def packs_of_rank(
    place: RankCoordinates, packs: Sequence[PackedTrajectory]
) -> tuple[list[int], list[PackedTrajectory]]:
    """Return the numbers of a replica's packs, and these packs, filled up to as many as every replica has."""
    indices = list(range(place.data, len(packs), place.data_size))
    mine = [packs[index] for index in indices]
    return indices, mine + [zero_weight_pack(packs[0])] * (-(-len(packs) // place.data_size) - len(mine))


def train_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, steps: int
) -> RankResult:
    """Score, and do ``steps`` updates."""
    with running(placement, config) as trainer:
        indices, filled = packs_of_rank(trainer.coordinates, packs)
        scored = trainer.score(filled)
        train_windows(trainer, filled, denominator)
        exported = exported_gradients(trainer, denominator)
        gradients, replicated = whole_tensors(trainer, gradients=True), replicas(trainer, gradients=True)
        stats = optimizer_steps(trainer, steps, denominator, lambda: train_windows(trainer, filled, denominator))
        trainer.settle_weights()
        fsdp = config.trainer.backend == "fsdp"
        return RankResult(
            config,
            trainer.coordinates,
            indices,
            scored and scored[: len(indices)],
            gradients,
            stats,
            whole_tensors(trainer, gradients=False) if fsdp else exported_from(trainer),
            exported,
            replicated | replicas(trainer, gradients=False),
            None if fsdp else held_by(trainer),
            *balanced(trainer),
        )


def train_critic(placement: RankPlacement, *arguments: Any) -> RankResult:
    """Do what ``train_rank`` does on one of the critic's ranks."""
    return train_rank(as_critic(placement), *arguments)


def as_critic(placement: RankPlacement) -> RankPlacement:
    """Return the placement of one of the critic's ranks."""
    return replace(placement, role=CRITIC)


def balanced(trainer: Trainer) -> tuple[Tensor | None, dict[int, Tensor]]:
    """Return the last step's loads of experts, and copies of this rank's biases, by layer, unless they are frozen."""
    loads = trainer._step.balance.loads
    if loads is None:
        return None, {}
    return loads.counts, {layer: bias.clone() for layer, bias in trainer._router_biases().items()}


def train_windows(trainer: Trainer, packs: list[PackedTrajectory], denominator: float) -> None:
    """Accumulate in two windows, as when micro-batches stream in, and let FSDP score between them.

    Neither may change the result.
    """
    trainer.begin_step(denominator, real_tokens(packs))
    trainer.accumulate(packs[:1], last=len(packs) == 1)
    if isinstance(trainer, FsdpTrainer) and trainer.state.frozen:
        trainer.score(packs[1:], "reference")
    if packs[1:]:
        trainer.accumulate(packs[1:], last=True)


def whole_tensors(trainer: Trainer, gradients: bool) -> dict[str, Tensor]:
    """Return FSDP's whole weights or gradients by Hugging Face's module name; nothing for Megatron."""
    if isinstance(trainer, MegatronTrainer):
        return {}
    trainer.model.shard_weights()
    named: dict[str, Any] = dict(trainer.model.hugging_face.named_parameters())
    parts = {name: parameter.grad if gradients else parameter for name, parameter in named.items()}
    return {name: part.full_tensor().detach().float().clone() for name, part in parts.items()}


def replicas(trainer: Trainer, gradients: bool) -> dict[str, Tensor]:
    """Return the weights, or gradients, that other ranks of Megatron have too, and the padding's."""
    found: dict[str, Tensor] = {}
    if isinstance(trainer, FsdpTrainer):
        return found
    place, dimensions, kind = trainer.coordinates, trainer.dimensions, "gradient" if gradients else "weight"
    for number, chunk in enumerate(trainer.chunks):
        for name, parameter in chunk.named_parameters():
            tensor = (parameter.main_grad if gradients else parameter.detach()).clone()
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                start = max(0, dimensions.vocab_size - place.tensor * len(tensor))
                found[f"{kind} of padding {place.tensor} of {name}"] = tensor[start:]
                if dimensions.tied_embeddings:  # a copy is on the first and the last stage
                    found[f"{kind} of rows {place.tensor}"] = tensor
            elif not getattr(parameter, "tensor_model_parallel", False) and ".experts." not in name:
                found[f"{kind} of {place.pipeline}.{number}.{name}"] = tensor
    return found


def exported_gradients(trainer: Any, denominator: float) -> dict[str, Tensor]:
    """Return copies of the step's finished gradients as the trainer exports them."""
    return {name: tensor.clone() for bucket in trainer.export_gradients(denominator) for name, tensor in bucket.tensors}


def optimizer_steps(trainer: Any, steps: int, denominator: float, accumulate: Callable[[], None]) -> list[Any]:
    """Do ``steps`` updates; the first one uses the finished gradients that are already there."""
    stats = []
    for step in range(steps):
        with pytest.MonkeyPatch.context() as patch:
            if step == 0:
                patch.setattr(trainer, "finalize_gradients", lambda denominator: None)
            else:
                accumulate()
            stats.append(trainer.finish_step(denominator))
    return stats


def scored_packs(results: list[RankResult]) -> dict[int, list[Scores]]:
    """Map each pack index to the results of all ranks that return it."""
    found: dict[int, list[Any]] = {}
    for result in results:
        if result.scored is not None:
            for index, scored in zip(result.pack_indices, result.scored, strict=True):
                found.setdefault(index, []).append(scored)
    return found
