"""Exact distillation for parity tests: a teacher of another width, and the float64 reference."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_like.config import RunConfig
from slime_like.config.sections import DistillationConfig
from slime_like.trajectory import ScoredTrajectory
from tests.parallel.parity import STEPS, Case, Settings, computed_case, parity_config
from tests.parallel.reference import Reference
from tests.parallel.tiny import SIZES, save_checkpoint

COEFFICIENT = 0.7

SOURCES = dict(enumerate(("sums", "sums", "sums", "sums", "words", "words", "sums", "sums")))
"""Source of each sequence of the parity test's packs."""


class DistillingReference(Reference):
    """The reference with the KL to the float64 teacher of each sequence's source, summed over the vocabulary."""

    def __init__(self, checkpoint: Path, algorithm: Any, teachers: Mapping[str | None, Path]) -> None:
        super().__init__(checkpoint, algorithm)
        self.teachers = {
            source: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
            for source, path in teachers.items()
        }
        self.kls: list[Tensor] = []

    def taught(self, sequence: ScoredTrajectory) -> Tensor:
        """Return the teacher's hidden states that predict the response, (response_len, H)."""
        tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
        with torch.no_grad():
            hidden = self.teachers[sequence.source].model(input_ids=tokens[None]).last_hidden_state[0]
        return hidden[sequence.prompt_len - 1 : -1]

    def score(self, sequence: ScoredTrajectory) -> tuple[Tensor, Tensor]:
        """Return each response token's logprob and entropy; keep the KL to the teacher."""
        self._routed.clear()
        tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
        logits = self.model(input_ids=tokens[None]).logits[0][sequence.prompt_len - 1 : -1]
        own = torch.log_softmax(logits / sequence.temperature, dim=-1)
        head = self.teachers[sequence.source].lm_head
        other = torch.log_softmax(head(self.taught(sequence)).detach() / sequence.temperature, dim=-1)
        self.kls.append((own.exp() * (own - other)).sum(1))
        logprobs = own.gather(1, sequence.response_tokens[:, None]).squeeze(1)
        return logprobs, -(own.exp() * own).sum(1)

    def _loss(self, sequence: ScoredTrajectory, logprobs: Tensor, entropy: Tensor) -> Tensor:
        rest = super()._loss(sequence, logprobs, entropy)
        return rest + COEFFICIENT * sequence.token_weight * self.kls[-1][sequence.loss_mask].sum()


def save_teacher(directory: Path, seed: int = 7, width: int = 48) -> Path:
    """Write a tiny teacher that is narrower than every student, with other tokens likely."""
    torch.manual_seed(seed)
    sizes = {**SIZES, "hidden_size": width, "num_hidden_layers": 2, "initializer_range": 0.25}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen2Config(**sizes, tie_word_embeddings=False, pad_token_id=None)
    )
    model.save_pretrained(directory)
    return directory


def distilled_case(
    sequences: list[ScoredTrajectory],
    directory: Path,
    kind: type[Case] = Case,
    steps: int = STEPS,
    second: int | None = None,
) -> tuple[Case, dict[str | None, Path], dict[str | None, float]]:
    """Return the case of a Qwen3 student, the teachers, and the mean KL of the first step: of all sequences by
    ``None``, and of those of each source.

    Sequences get their teacher's hidden states in float32. ``second``: width of a second teacher.
    """
    checkpoint = save_checkpoint("qwen3", directory, layers=2)
    teachers: dict[str | None, Path] = {None: save_teacher(directory / "teacher")}
    if second is not None:
        teachers = {"sums": teachers[None], "words": save_teacher(directory / "second", seed=8, width=second)}
        for index, sequence in enumerate(sequences):
            sequence.source = SOURCES[index]
    algorithm = parity_config(checkpoint, directory, {}).algorithm
    reference = DistillingReference(checkpoint, algorithm, teachers)
    for sequence in sequences:
        sequence.teacher_hidden = reference.taught(sequence).float()
    case: Case = computed_case(kind, reference, checkpoint, sequences, {}, steps)
    kls: dict[str | None, list[Tensor]] = {}
    for kl, one in zip(reference.kls, sequences, strict=False):  # the divergences of the updates follow
        for source in {None, one.source}:
            kls.setdefault(source, []).append(kl.detach()[one.loss_mask])
    return case, teachers, {source: float(torch.cat(found).mean()) for source, found in kls.items()}


def distilled_config(case: Case, teachers: dict[str | None, Path], run_dir: Path, layout: Settings) -> RunConfig:
    named: dict[str, Any] = {"path": teachers[None]} if None in teachers else {"teachers": teachers}
    section = DistillationConfig(coef=COEFFICIENT, mode="exact", placement="workers", **named)
    return parity_config(case.checkpoint, run_dir, layout).model_copy(update={"distillation": section})
