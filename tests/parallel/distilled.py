"""Exact distillation for parity tests: a teacher of another width, and the float64 reference."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_like.config import RunConfig
from slime_like.config.sections import DistillationConfig
from slime_like.trajectory import ScoredTrajectory
from tests.parallel.parity import OPTIMIZER, STEPS, Case, Settings, parity_config, samples_with_loss
from tests.parallel.reference import Reference, adamw_steps
from tests.parallel.tiny import SIZES, save_checkpoint

COEFFICIENT = 0.7


class DistillingReference(Reference):
    """The reference with the KL to a float64 teacher, summed over the vocabulary, in its loss."""

    def __init__(self, checkpoint: Path, algorithm: Any, teacher: Path) -> None:
        super().__init__(checkpoint, algorithm)
        self.teacher = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64, attn_implementation="eager")
        self.kls: list[Tensor] = []

    def taught(self, sequence: ScoredTrajectory) -> Tensor:
        """Return the teacher's hidden states that predict the response, (response_len, H)."""
        tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
        with torch.no_grad():
            hidden = self.teacher.model(input_ids=tokens[None]).last_hidden_state[0]
        return hidden[sequence.prompt_len - 1 : -1]

    def score(self, sequence: ScoredTrajectory) -> tuple[Tensor, Tensor]:
        """Return each response token's logprob and entropy; keep the KL to the teacher."""
        self._routed.clear()
        tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
        logits = self.model(input_ids=tokens[None]).logits[0][sequence.prompt_len - 1 : -1]
        own = torch.log_softmax(logits / sequence.temperature, dim=-1)
        other = torch.log_softmax(self.teacher.lm_head(self.taught(sequence)).detach() / sequence.temperature, dim=-1)
        self.kls.append((own.exp() * (own - other)).sum(1))
        logprobs = own.gather(1, sequence.response_tokens[:, None]).squeeze(1)
        return logprobs, -(own.exp() * own).sum(1)

    def _loss(self, sequence: ScoredTrajectory, logprobs: Tensor, entropy: Tensor) -> Tensor:
        rest = super()._loss(sequence, logprobs, entropy)
        return rest + COEFFICIENT * sequence.token_weight * self.kls[-1][sequence.loss_mask].sum()


def save_teacher(directory: Path) -> Path:
    """Write a tiny teacher that is narrower than every student, with other tokens likely."""
    torch.manual_seed(7)
    sizes = {**SIZES, "hidden_size": 48, "num_hidden_layers": 2, "initializer_range": 0.25}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen2Config(**sizes, tie_word_embeddings=False, pad_token_id=None)
    )
    model.save_pretrained(directory)
    return directory


def distilled_case(
    sequences: list[ScoredTrajectory], directory: Path, kind: type[Case] = Case, steps: int = STEPS
) -> tuple[Case, Path, float]:
    """Return the case of a Qwen3 student, the teacher, and the mean KL of the first step.

    Sequences get the teacher's hidden states in float32.
    """
    checkpoint, teacher = save_checkpoint("qwen3", directory, layers=2), save_teacher(directory / "teacher")
    algorithm = parity_config(checkpoint, directory, {}).algorithm
    reference = DistillingReference(checkpoint, algorithm, teacher)
    for sequence in sequences:
        sequence.teacher_hidden = reference.taught(sequence).float()
    initial = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
    denominator = samples_with_loss(sequences)
    expected = reference.step(sequences, denominator)
    kls = [kl.detach()[one.loss_mask] for kl, one in zip(reference.kls, sequences, strict=True)]
    updated = adamw_steps(
        reference, sequences, denominator, steps, OPTIMIZER["clip_grad"], OPTIMIZER["lr"], OPTIMIZER["eps"]
    )
    return kind(checkpoint, sequences, expected, {}, updated, initial), teacher, float(torch.cat(kls).mean())


def distilled_config(case: Case, teacher: Path, run_dir: Path, layout: Settings) -> RunConfig:
    section = DistillationConfig(path=teacher, coef=COEFFICIENT, mode="exact", placement="workers")
    return parity_config(case.checkpoint, run_dir, layout).model_copy(update={"distillation": section})
