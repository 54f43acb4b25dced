"""Cases of low-rank factors, critics, replayed routes, teachers and towers, and all features by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from slime_like.config import LoraConfig, RunConfig
from slime_like.config.sections import DistillationConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import header_shapes
from slime_like.trajectory import ScoredTrajectory
from slime_like.weights.adapter import factor_shapes
from tests.parallel import checks, references
from tests.parallel.cases import (
    BALANCE,
    OPTIMIZER,
    RATES,
    Case,
    balanced_case,
    computed,
    lengths_case,
    neighbor_case,
    parity_config,
    plain_case,
    plain_sequences,
    rounded_case,
    samples_with_loss,
    shared_case,
    sharing_fields,
    sharing_sequences,
    supports_case,
)
from tests.parallel.checks import EVERYTHING
from tests.parallel.features import later_rank, lora_rank, routed_rank
from tests.parallel.layouts import Settings
from tests.parallel.reference import Reference, adamw_steps
from tests.parallel.references import Factors, RoutedReference
from tests.parallel.steps import RankResult, train_critic, train_rank
from tests.parallel.tiny import SIZES, save_checkpoint
from tests.parallel.towers import save_tower

UNKNOWN = 0.2
"""Share of the forced routes that are unknown, in single layers."""
OLD_RATE = 1e-2
"""Learning rate at which one update changes some routes."""
SOURCES = ("sums", "sums", "sums", "sums", "words", "words", "sums", "sums")
"""Source of each sequence with two teachers."""


# ------------------------------------------------------------------------------------------------- low-rank factors
@dataclass
class LoraCase(Case):
    """A case whose reference trains factors. ``base`` has the logprobs of the model without them."""

    lora: dict[str, Any] = field(default_factory=dict)
    base: list[Tensor] = field(default_factory=list)
    checks: Sequence[Callable[..., None]] = (
        *(checks.check_scores, checks.check_reference, checks.check_loss, checks.check_factor_gradients),
        *(checks.check_norm, checks.check_factors, checks.check_merged, checks.check_base),
    )
    run: ClassVar[Callable[..., RankResult]] = staticmethod(lora_rank)

    def config(self, directory: Path, layout: Settings, **lora: Any) -> RunConfig:
        config = super().config(directory, layout)
        return RunConfig(**{**dict(config), "model": {**dict(config.model), "lora": {**self.lora, **lora}}})

    def task(self, directory: Path, layout: Settings, **lora: Any) -> tuple[Any, ...]:
        return *super().task(directory, layout, **lora), self.factors

    @property
    def factors(self) -> Factors:
        return {name: value.float() for name, value in self.initial.items()}


def _lora(family: str, directory: Path, steps: int, layers: int, **settings: Any) -> LoraCase:
    """Compute the step and updates of random factors, of which neither is 0.

    They are small, and alpha is large, so that updates are far above the rounding error of factors.
    """
    checkpoint = save_checkpoint(family, directory, layers=layers)
    settings = {"rank": 4, "alpha": 24.0, **settings}
    lora, algorithm = LoraConfig(**settings), {"moe_aux_loss_coef": BALANCE.get(family, 0.0)}
    sequences = plain_sequences()
    of_algorithm = parity_config(checkpoint, directory, {}, **algorithm).algorithm
    with torch.no_grad():
        plain = Reference(checkpoint, of_algorithm)
        base = [plain.score(sequence)[0] for sequence in sequences]
    generator = torch.Generator().manual_seed(1)
    shapes = factor_shapes(lora, header_shapes(checkpoint))
    factors = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    reference = references.LoraReference(checkpoint, of_algorithm, lora.scale, factors)
    more = {"lora": settings, "base": base, "algorithm": algorithm}
    case: LoraCase = computed(reference, checkpoint, sequences, steps, LoraCase, **more)
    return case


# ------------------------------------------------------------------------------------------------------------- critics
@dataclass
class ValueCase(Case):
    """A case of a critic with a trained head."""

    checks: Sequence[Callable[..., None]] = (
        *(checks.check_values, checks.check_statistics, checks.check_exported_gradients),
        *(checks.check_gradients, checks.check_updates),
    )
    is_critic: ClassVar[bool] = True
    run: ClassVar[Callable[..., RankResult]] = staticmethod(train_critic)

    def config(self, directory: Path, layout: Settings, **algorithm: Any) -> RunConfig:
        return value_config(self.checkpoint, directory, {**self.settings, **layout}, **self.algorithm, **algorithm)


def valued_sequences() -> list[ScoredTrajectory]:
    """Return the plain sequences with values near the reference's scale, and returns."""
    sequences, generator = plain_sequences(), torch.Generator().manual_seed(5)
    for sequence in sequences:
        sequence.values, noise = torch.randn((2, sequence.response_len), generator=generator).unbind()
        sequence.returns = 3.0 * noise
    return sequences


def _values(family: str, directory: Path, steps: int, layers: int, rounded: bool = False) -> Case:
    """Save a float32 value model as transformers stores it.

    If ``rounded`` to bfloat16, nothing is clipped: rounding a value across the edge would change its gradient abruptly.
    """
    save_checkpoint(family, directory / "causal", layers=layers)
    model = AutoModelForSequenceClassification.from_pretrained(directory / "causal", num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(checkpoint := directory / "critic")
    algorithm = {} if rounded else {"moe_aux_loss_coef": BALANCE.get(family, 0.0)}
    reference = references.ValueReference(checkpoint, value_config(checkpoint, directory, {}, **algorithm).algorithm)
    more: dict[str, Any] = {"algorithm": algorithm}
    if rounded:
        reference.round_weights()
        reference.clip, steps = references.WIDE, 0
        bounded = [partial(check, bound=0.05) for check in (checks.check_values, checks.check_exported_gradients)]
        more |= {"settings": {"dtype": "bfloat16"}, "checks": bounded}
    case: Case = computed(reference, checkpoint, valued_sequences(), steps, ValueCase, **more)
    return case


def value_config(
    checkpoint: Path, run_dir: Path, layout: Settings, dtype: str = "float32", **algorithm: Any
) -> RunConfig:
    """Return the configuration of the critic's ranks."""
    algorithm = {"advantage": "gae", "kl": {"coef": 0.0}, "entropy_coef": 0.0, **algorithm}
    config = parity_config(checkpoint, run_dir, layout, dtype, **algorithm)
    clip = references.CLIP if config.model.dtype == "float32" else references.WIDE
    critic = config.critic.model_copy(update={"value_clip": clip, "optimizer": config.trainer.optimizer})
    return config.model_copy(update={"critic": critic}).for_critic()


# ---------------------------------------------------------------------------------------------------- replayed routes
@dataclass
class RoutedCase(Case):
    """A case of forced routes. ``disagreement`` is the expected share that the routers would choose otherwise."""

    disagreement: float = 0.0
    checks: Sequence[Callable[..., None]] = (
        *(checks.check_own_routes, checks.check_scores, checks.check_loss, checks.check_gradients),
        *(checks.check_disagreement, checks.check_biases),
    )
    run: ClassVar[Callable[..., RankResult]] = staticmethod(routed_rank)


@dataclass
class LaterCase(RoutedCase):
    """A case of a step's second update."""

    checks: Sequence[Callable[..., None]] = (checks.check_gradients, checks.check_disagreement)
    run: ClassVar[Callable[..., RankResult]] = staticmethod(later_rank)


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


class ForcedCase(RoutedCase):
    """A case of forced routes without passes with the trainer's own."""

    run = staticmethod(train_rank)


def _routed(
    family: str, directory: Path, steps: int, layers: int, shares: bool = False, kind: type[RoutedCase] = RoutedCase
) -> RoutedCase:
    """Compute the step with forced routes."""
    checkpoint = save_checkpoint(family, directory)
    # A tree's balancing loss counts shared tokens once, which this reference does not.
    algorithm: dict[str, Any] = {"moe_aux_loss_coef": 0.0 if shares else BALANCE[family], "routing_replay": "rollout"}
    sequences = sharing_sequences() if shares else plain_sequences()
    force_routes(sequences, ModelDimensions.from_checkpoint(checkpoint))
    reference = RoutedReference(checkpoint, parity_config(checkpoint, directory, {}, **algorithm).algorithm)
    expected = reference.step(sequences, samples_with_loss(sequences))
    case = kind(checkpoint, sequences, expected, algorithm, steps=steps, **(sharing_fields() if shares else {}))
    case.disagreement = reference.disagreement(case.packs())
    if shares:
        case.expected = replace(expected, balance=0.0)
    elif family in RATES:
        reference.move_biases(RATES[family])
        case.bias_rate, case.loads, case.biases = RATES[family], reference.loads, reference.biases
    return case


def _later(family: str, directory: Path, steps: int, layers: int) -> RoutedCase:
    """Compute the second update of a step, with the routes that it takes before the first one.

    The case's sequences have other routes, as if an engine had recorded them; they must not be used.
    """
    checkpoint, sequences = save_checkpoint(family, directory), plain_sequences()
    algorithm: dict[str, Any] = {"routing_replay": "old", "epochs": 2}
    reference = RoutedReference(checkpoint, parity_config(checkpoint, directory, {}, **algorithm).algorithm)
    routed = [replace(sequence, routes=reference.choices(sequence)) for sequence in sequences]
    denominator = samples_with_loss(sequences)
    reference.step(routed, denominator)
    adamw_steps(reference, routed, denominator, 1, OPTIMIZER["clip_grad"], OLD_RATE, OPTIMIZER["eps"])
    expected = reference.step(routed, denominator)
    force_routes(sequences, ModelDimensions.from_checkpoint(checkpoint))
    case = LaterCase(checkpoint, sequences, expected, algorithm, settings={"lr": OLD_RATE})
    case.disagreement = reference.disagreement(case.packs())
    assert case.disagreement > 0.01, "the first update changes no routes"
    return case


# ------------------------------------------------------------------------------------------------------- distillation
@dataclass
class DistilledCase(Case):
    """A case with exact distillation. ``kls``: mean KL of all sequences by ``None``, and of those of each source."""

    teachers: dict[str | None, Path] = field(default_factory=dict)
    kls: dict[str | None, float] = field(default_factory=dict)
    checks: Sequence[Callable[..., None]] = (checks.check_kls, *EVERYTHING)

    def config(self, directory: Path, layout: Settings, **algorithm: Any) -> RunConfig:
        named: dict[str, Any] = {"path": self.teachers[None]} if None in self.teachers else {"teachers": self.teachers}
        section = DistillationConfig(coef=references.COEFFICIENT, mode="exact", placement="workers", **named)
        return super().config(directory, layout, **algorithm).model_copy(update={"distillation": section})


def save_teacher(directory: Path, seed: int = 7, width: int = 48) -> Path:
    """Write a tiny teacher that is narrower than every student, with other tokens likely."""
    torch.manual_seed(seed)
    sizes = {**SIZES, "hidden_size": width, "num_hidden_layers": 2, "initializer_range": 0.25}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen2Config(**sizes, tie_word_embeddings=False, pad_token_id=None)
    )
    model.save_pretrained(directory)
    return directory


def _distilled(
    family: str, directory: Path, steps: int, layers: int, shares: bool = False, second: int | None = None
) -> DistilledCase:
    """Sequences get their teacher's hidden states in float32. ``second``: width of a second teacher."""
    sequences = sharing_sequences() if shares else plain_sequences()
    checkpoint = save_checkpoint(family, directory, layers=layers)
    teachers: dict[str | None, Path] = {None: save_teacher(directory / "teacher")}
    if second is not None:
        teachers = {"sums": teachers[None], "words": save_teacher(directory / "second", seed=8, width=second)}
        for sequence, source in zip(sequences, SOURCES, strict=True):
            sequence.source = source
    algorithm = parity_config(checkpoint, directory, {}).algorithm
    reference = references.DistillingReference(checkpoint, algorithm, teachers)
    for sequence in sequences:
        sequence.teacher_hidden = reference.taught(sequence).float()
    more = {"teachers": teachers, **(sharing_fields() if shares else {})}
    case: DistilledCase = computed(reference, checkpoint, sequences, steps, DistilledCase, **more)
    kls: dict[str | None, list[Tensor]] = {}
    for kl, sequence in zip(reference.kls, sequences, strict=False):  # the divergences of the updates follow
        for source in {None, sequence.source}:
            kls.setdefault(source, []).append(kl.detach()[sequence.loss_mask])
    case.kls = {source: float(torch.cat(found).mean()) for source, found in kls.items()}
    return case


def _tower(kind: str, directory: Path, steps: int, layers: int) -> Case:
    checkpoint, algorithm = save_tower(kind, directory), {"moe_aux_loss_coef": BALANCE.get(f"{kind}_text", 0.0)}
    whole = references.WholeReference(checkpoint, parity_config(checkpoint, directory, {}, **algorithm).algorithm)
    compared = (checks.check_scores, checks.check_loss, checks.check_gradients, checks.check_updates)
    case: Case = computed(whole, checkpoint, plain_sequences(), steps, algorithm=algorithm, checks=compared)
    if kind == "glm4v_moe":
        case.expected.balance = 0.0  # not requested
    return case


FEATURES: dict[str, Callable[..., Case]] = {
    "plain": plain_case,
    "rounded": rounded_case,
    "lengths": lengths_case,
    "neighbor": neighbor_case,
    "shared": shared_case,
    "balanced": balanced_case,
    "supports": supports_case,
    "lora": _lora,
    "values": _values,
    "routes": _routed,
    "forced routes": partial(_routed, kind=ForcedCase),
    "later routes": _later,
    "distilled": _distilled,
    "tower": _tower,
}
"""Make a case of a family: (family, directory, steps, layers, options) to the case."""
