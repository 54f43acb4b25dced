"""Parity of replayed routes: forced random routes, their float64 reference, and one rank's passes."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.config import AlgorithmConfig, RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.parallel.lora import packs_of_rank
from tests.parallel.parity import (
    BALANCE,
    GRADIENT_BOUND,
    MASKED,
    OPTIMIZER,
    PACKS,
    RATES,
    Case,
    check_biases,
    check_gradients,
    check_loss,
    check_scores,
    check_tensors,
    parity_config,
    samples_with_loss,
)
from tests.parallel.reference import Reference, ReferenceStep, adamw_steps
from tests.parallel.shared_prefixes import SharedCase, sharing_sequences
from tests.parallel.steps import RankResult, balanced, exported_gradients, rank_tensors, running, train_windows
from tests.parallel.tiny import save_checkpoint, scored_sequences

UNKNOWN = 0.2
"""Share of the forced routes that are unknown, in single layers."""

OLD_RATE = 1e-2
"""Learning rate at which one update changes some routes."""


class RoutedReference(Reference):
    """transformers' model in float64, whose routers use the scored sequence's routes with hand-written weights.

    Attributes:
        tallies: by sequence of the last ``step`` and token, the routes that are not the router's own choice, and all.
    """

    def __init__(self, checkpoint: Path, algorithm: AlgorithmConfig) -> None:
        super().__init__(checkpoint, algorithm)
        self._given: Tensor | None = None
        self.tallies: list[dict[int, tuple[int, int]]] = []
        gates = [module for name, module in self.model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
        for index, gate in enumerate(gates):
            gate.register_forward_hook(partial(self._replace, index))

    def step(self, sequences: list[ScoredTrajectory], denominator: float) -> ReferenceStep:
        self.tallies.clear()
        return super().step(sequences, denominator)

    def score(self, sequence: ScoredTrajectory) -> tuple[Tensor, Tensor]:
        self._given = None if sequence.routes is None else sequence.routes.long()
        self.tallies.append({})
        return super().score(sequence)

    @torch.no_grad()
    def choices(self, sequence: ScoredTrajectory) -> Tensor:
        """Return the routers' own choices in the form of ``routes``."""
        super().score(replace(sequence, routes=None))
        return torch.stack([chosen[:-1] for _, chosen in self._routed], dim=1).to(torch.int16)

    def _replace(self, index: int, gate: Any, inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, _, own = output
        chosen = own.clone()
        for token, route in enumerate([] if self._given is None else self._given[:, index]):
            if route[0] >= 0:
                differing, known = self.tallies[-1].get(token, (0, 0))
                differs = set(route.tolist()) != set(own[token].tolist())
                self.tallies[-1][token] = (differing + differs, known + 1)
                chosen[token] = route
        if hasattr(self._gates[0], "e_score_correction_bias"):
            scores = logits.sigmoid().gather(1, chosen)
            weights = scores / scores.sum(1, keepdim=True) * self.model.config.routed_scaling_factor
        else:
            weights = logits.gather(1, chosen).softmax(dim=1)
        self._routed[-1] = (logits, chosen)
        return logits, weights, chosen

    def _balance(self) -> Tensor | float:
        total: Tensor | float = 0.0
        for logits, chosen in self._routed:
            sigmoid = hasattr(self._gates[0], "e_score_correction_bias")
            scores = logits.sigmoid() if sigmoid else logits.exp()
            share = (scores / scores.sum(1, keepdim=True)).mean(0)
            load = torch.bincount(chosen.flatten(), minlength=logits.shape[1]) / chosen.numel()
            total = total + logits.shape[1] * (load * share).sum()
        return total


def disagreement(reference: RoutedReference, packs: list[PackedTrajectory]) -> float:
    """Return the share of routes that are not the routers' own choices. A shared token counts once."""
    counted, tallies = list[tuple[int, int]](), iter(reference.tallies)
    for pack in packs:
        lengths = (pack.prompt_lens + pack.response_lens).tolist()
        places = torch.arange(sum(lengths)) if pack.segment_places is None else pack.segment_places
        of_pack: dict[int, tuple[int, int]] = {}
        for own in places.split(lengths):
            of_pack |= {int(own[token]): counts for token, counts in next(tallies).items()}
        counted += of_pack.values()
    return sum(differing for differing, _ in counted) / sum(known for _, known in counted)


def force_routes(sequences: list[ScoredTrajectory], dimensions: ModelDimensions) -> list[ScoredTrajectory]:
    """Give sequences random routes. Equal beginnings of one group get equal ones; some are unknown."""
    generator = torch.Generator().manual_seed(3)
    layers, experts = len(dimensions.expert_layers), dimensions.num_experts
    known: dict[tuple[int, ...], Tensor] = {}
    for sequence in sequences:
        tokens = [sequence.group_id, *sequence.prompt_tokens.tolist(), *sequence.response_tokens.tolist()]
        for end in range(2, len(tokens)):
            route = torch.rand(layers, experts, generator=generator).argsort(dim=1)[:, : dimensions.moe_top_k]
            route[torch.rand(layers, generator=generator) < UNKNOWN] = -1
            known.setdefault(tuple(tokens[:end]), route)
        sequence.routes = torch.stack([known[tuple(tokens[:end])] for end in range(2, len(tokens))]).to(torch.int16)
    return sequences


@dataclass
class RoutedCase(Case):
    """A case of forced routes. ``disagreement`` is the expected share that the routers would choose otherwise."""

    disagreement: float = 0.0


class SharedRoutedCase(RoutedCase, SharedCase):
    """A case of forced routes whose packs share prefixes."""


def routed_case(family: str, directory: Path, shared: bool = False) -> RoutedCase:
    """Save a tiny checkpoint of ``family`` and compute the reference's step with forced routes."""
    checkpoint = save_checkpoint(family, directory)
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    # A tree's balancing loss counts shared tokens once, which this reference does not.
    algorithm = {"moe_aux_loss_coef": 0.0 if shared else BALANCE[family], "routing_replay": "rollout"}
    sequences = force_routes(sharing_sequences() if shared else sequences, ModelDimensions.from_checkpoint(checkpoint))
    reference = RoutedReference(checkpoint, parity_config(checkpoint, directory, {}, **algorithm).algorithm)  # type: ignore[arg-type]
    expected = reference.step(sequences, samples_with_loss(sequences))
    expected = replace(expected, balance=0.0) if shared else expected
    case = (SharedRoutedCase if shared else RoutedCase)(checkpoint, sequences, expected, algorithm)  # type: ignore[arg-type]
    case.disagreement = disagreement(reference, case.packs())
    if family in RATES and not shared:
        reference.move_biases(RATES[family])
        case.bias_rate, case.loads, case.biases = RATES[family], reference.loads, reference.biases
    return case


@dataclass
class RoutedResult(RankResult):
    """Results with forced routes; ``changed`` names what differed in any bit when the trainer's own were replayed."""

    changed: list[str] = field(default_factory=list)
    recorded: int = 0


def replayed(trainer: Any, mode: str) -> None:
    """Set ``algorithm.routing_replay`` of a trainer."""
    algorithm = trainer.config.algorithm.model_copy(update={"routing_replay": mode})
    trainer.config = trainer.config.model_copy(update={"algorithm": algorithm})


def routed_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float
) -> RoutedResult:
    """Compare passes with and without the trainer's own routes, then train with the packs' routes."""
    with running(placement, config) as trainer:
        indices, mine, filled = packs_of_rank(trainer.coordinates, packs)
        plain = [replace(pack, routes=None) for pack in filled]

        def passes(mode: str) -> tuple[Any, dict[str, Tensor]]:
            replayed(trainer, mode)
            scored = trainer.score(plain, "policy")
            train_windows(trainer, plain, denominator)
            trainer.finalize_gradients(denominator)
            return scored, rank_tensors(trainer, gradients=True)

        own = passes("none")
        changed = []
        for mode in ("old", "rollout"):  # the first scoring pass records what all later passes replay
            again = passes(mode)
            changed += [mode for one, other in zip(own[0] or [], again[0] or [], strict=True) if not _equal(one, other)]
            changed += [f"{mode}: {name}" for name in own[1] if not torch.equal(own[1][name], again[1][name])]
        recorded = sum(int((pack.routes >= 0).sum()) for pack in plain if pack.routes is not None)
        scored = trainer.score(filled, "policy")
        train_windows(trainer, filled, denominator)
        exported, gradients = exported_gradients(trainer, denominator), rank_tensors(trainer, gradients=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "finalize_gradients", lambda denominator: None)
            stats = [trainer.finish_step(denominator)]
        given = scored[: len(mine)] if scored is not None else None
        results = (trainer.coordinates, indices, given, gradients, stats, {}, exported, None, *balanced(trainer))
        return RoutedResult(*results, changed=changed, recorded=recorded)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def check_routed(case: RoutedCase, results: list[Any]) -> None:
    """Compare logprobs, loss, gradients, the share of differing routes and moved biases with the reference."""
    check_scores(case, results)
    check_loss(case, results)
    check_gradients_of_any(case, results)
    check_disagreement(case, results)
    check_biases(case, results)


def check_disagreement(case: RoutedCase, results: list[Any]) -> None:
    shares = [float(stats.routing_disagreement) for result in results for stats in result.stats if stats is not None]
    assert shares == pytest.approx([case.disagreement] * len(shares), abs=1e-9)


def check_gradients_of_any(case: Case, results: list[Any]) -> None:
    """Compare gradients of either backend; FSDP's are whole on every rank."""
    if results[0].gradients.keys() == case.expected.gradients.keys():
        for result in results:
            check_tensors(result.gradients, case.expected.gradients, GRADIENT_BOUND)
    else:
        check_gradients(case, results)


# ------------------------------------------------------------------------------------------------- several updates
def old_case(family: str, directory: Path) -> Case:
    """Compute the reference's second update of a step, with the routes that it takes before the first one.

    The case's sequences have other routes, as if an engine had recorded them; they must not be used.
    """
    checkpoint = save_checkpoint(family, directory)
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    algorithm = {"routing_replay": "old", "epochs": 2}
    reference = RoutedReference(checkpoint, parity_config(checkpoint, directory, {}, **algorithm).algorithm)  # type: ignore[arg-type]
    routed = [replace(sequence, routes=reference.choices(sequence)) for sequence in sequences]
    denominator = samples_with_loss(sequences)
    adamw_steps(reference, routed, denominator, 1, OPTIMIZER["clip_grad"], OLD_RATE, OPTIMIZER["eps"])
    expected = reference.step(routed, denominator)
    force_routes(sequences, ModelDimensions.from_checkpoint(checkpoint))
    case = RoutedCase(checkpoint, sequences, expected, algorithm)  # type: ignore[arg-type]
    case.disagreement = disagreement(reference, case.packs())
    assert case.disagreement > 0.01, "the first update changes no routes"
    return case


def old_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float
) -> RoutedResult:
    """Score, update, and return the second update's gradients and both updates' statistics."""
    with running(placement, config) as trainer:
        indices, mine, filled = packs_of_rank(trainer.coordinates, packs)
        trainer.score(filled, "policy")
        train_windows(trainer, filled, denominator)
        first = trainer.finish_step(denominator)
        assert first is None or float(first.routing_disagreement) == 0.0
        train_windows(trainer, filled, denominator)
        trainer.finalize_gradients(denominator)
        gradients = rank_tensors(trainer, gradients=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "finalize_gradients", lambda denominator: None)
            stats = [trainer.finish_step(denominator)]
        scored = trainer.score(filled)
        given = scored[: len(mine)] if scored is not None else None
        return RoutedResult(trainer.coordinates, indices, given, gradients, stats, {})
