"""Value models for parity tests: checkpoints with a trained head, the float64 reference, and configurations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from slime_like.config import RunConfig
from slime_like.config.roles import CRITIC
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.parallel.parity import (
    BALANCE,
    MASKED,
    PACKS,
    STEPS,
    Case,
    Settings,
    computed_case,
    parity_config,
)
from tests.parallel.reference import Reference
from tests.parallel.steps import RankResult, train_rank
from tests.parallel.tiny import save_checkpoint, scored_sequences

CLIP = 0.3
"""Between the changes of the values, so that some tokens are clipped."""

WIDE = 1e3


class ValueReference(Reference):
    """A float64 value model with the clipped loss written out, token by token."""

    auto = AutoModelForSequenceClassification
    clip = CLIP

    def score(self, sequence: ScoredTrajectory) -> tuple[Tensor, Tensor]:
        """Return the value before each response token, and zeros."""
        self._routed.clear()
        tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
        hidden = self.model.base_model(input_ids=tokens[None]).last_hidden_state[0]
        values = (hidden @ self.model.score.weight[0])[sequence.prompt_len - 1 : -1]
        return values, torch.zeros_like(values)

    def _loss(self, sequence: ScoredTrajectory, logprobs: Tensor, entropy: Tensor) -> Tensor:
        assert sequence.values is not None and sequence.returns is not None
        total = torch.zeros((), dtype=torch.float64)
        for now, old, wanted, counts in zip(
            logprobs, sequence.values.double(), sequence.returns.double(), sequence.loss_mask, strict=True
        ):
            bounded = old + (now - old).clamp(-self.clip, self.clip)
            total = total + 0.5 * torch.maximum((now - wanted) ** 2, (bounded - wanted) ** 2) * counts
        return sequence.token_weight * total


def save_values(family: str, directory: Path, layers: int = 2) -> Path:
    """Write a tiny float32 value model as transformers stores it, and return its directory."""
    save_checkpoint(family, directory / "causal", layers=layers)
    model = AutoModelForSequenceClassification.from_pretrained(directory / "causal", num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(directory / "critic")
    return directory / "critic"


def valued_sequences() -> list[ScoredTrajectory]:
    """Return the parity tests' sequences with values near the reference's scale, and returns."""
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    generator = torch.Generator().manual_seed(5)
    for sequence in sequences:
        sequence.values, noise = torch.randn((2, sequence.response_len), generator=generator).unbind()
        sequence.returns = 3.0 * noise
    return sequences


def value_case(family: str, directory: Path, steps: int = STEPS, layers: int = 2, rounded: bool = False) -> Case:
    """Save a value model of ``family`` in ``directory`` and compute the float64 reference's step and updates.

    If ``rounded`` to bfloat16, nothing is clipped: rounding a value across the edge would change its gradient abruptly.
    """
    checkpoint, sequences = save_values(family, directory, layers), valued_sequences()
    algorithm = {"moe_aux_loss_coef": BALANCE.get(family, 0.0)}
    reference = ValueReference(checkpoint, value_config(checkpoint, directory, {}, **algorithm).algorithm)
    if rounded:
        reference.round_weights()
        reference.clip = WIDE
    case: Case = computed_case(Case, reference, checkpoint, sequences, algorithm, steps)
    return case


def value_config(
    checkpoint: Path, run_dir: Path, layout: Settings, dtype: str = "float32", **algorithm: Any
) -> RunConfig:
    """Return the configuration of the critic's ranks."""
    algorithm = {"advantage": "gae", "kl": {"coef": 0.0}, "entropy_coef": 0.0, **algorithm}
    config = parity_config(checkpoint, run_dir, layout, dtype, **algorithm)
    clip = CLIP if dtype == "float32" else WIDE
    critic = config.critic.model_copy(update={"value_clip": clip, "optimizer": config.trainer.optimizer})
    return config.model_copy(update={"critic": critic}).for_critic()


def as_critic(placement: RankPlacement) -> RankPlacement:
    """Return the placement of one of the critic's ranks."""
    return replace(placement, role=CRITIC)


def train_critic(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, steps: int
) -> RankResult:
    """Do what ``train_rank`` does on one of the critic's ranks."""
    return train_rank(as_critic(placement), config, packs, denominator, steps)
