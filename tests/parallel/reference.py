"""The independent reference: Hugging Face's model in float64, one sequence at a time, and the published formulas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_like.config import AlgorithmConfig
from slime_like.trajectory import ScoredTrajectory


@dataclass
class ReferenceStep:
    """What the reference computes for one optimizer step's sequences.

    Attributes:
        logprobs, entropy: (response_len,) float64 of every sequence.
        loss: weighted sum over all sequences divided by the denominator.
        gradients: by Hugging Face name, of ``loss``.
    """

    logprobs: list[Tensor]
    entropy: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


class Reference:
    """A float64 model with the loss written out: clipped surrogate, k3 estimate of the KL, entropy bonus."""

    def __init__(self, checkpoint: Path, algorithm: AlgorithmConfig) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        self.algorithm = algorithm

    def step(self, sequences: list[ScoredTrajectory], denominator: float) -> ReferenceStep:
        """Forward and backward over all sequences."""
        self.model.zero_grad()
        logprobs, entropies, total = [], [], 0.0
        for sequence in sequences:
            logprob, entropy = self.score(sequence)
            loss = self._loss(sequence, logprob, entropy) / denominator
            loss.backward()
            logprobs.append(logprob.detach())
            entropies.append(entropy.detach())
            total += loss.item()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return ReferenceStep(logprobs, entropies, total, gradients)

    def score(self, sequence: ScoredTrajectory) -> tuple[Tensor, Tensor]:
        """Logprob of each response token given all tokens before it, and the entropy there, at its temperature."""
        tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
        logits = self.model(input_ids=tokens[None]).logits[0] / sequence.temperature
        distribution = torch.log_softmax(logits[sequence.prompt_len - 1 : -1], dim=-1)
        logprobs = distribution.gather(1, sequence.response_tokens[:, None]).squeeze(1)
        return logprobs, -(distribution.exp() * distribution).sum(1)

    def _loss(self, sequence: ScoredTrajectory, logprobs: Tensor, entropy: Tensor) -> Tensor:
        config = self.algorithm
        ratio = (logprobs - sequence.old_logprobs.double()).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        surrogate = torch.minimum(ratio * sequence.advantages.double(), clipped * sequence.advantages.double())
        log_ref_ratio = sequence.ref_logprobs.double() - logprobs
        kl = log_ref_ratio.exp() - log_ref_ratio - 1
        per_token = -surrogate + config.kl_coef * kl - config.entropy_coef * entropy
        return sequence.token_weight * per_token[sequence.loss_mask].sum()


def adamw_steps(
    reference: Reference,
    sequences: list[ScoredTrajectory],
    denominator: float,
    steps: int,
    clip: float,
    lr: float,
    eps: float,
) -> dict[str, Tensor]:
    """Weights by name after torch's AdamW with global clipping and decay on matrices only."""
    named = dict(reference.model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps)
    for _ in range(steps):
        reference.step(sequences, denominator)
        torch.nn.utils.clip_grad_norm_(named.values(), clip)
        optimizer.step()
    return {name: p.detach().clone() for name, p in named.items()}
