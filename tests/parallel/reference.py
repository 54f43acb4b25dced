"""The independent reference: Hugging Face's model in float64, one sequence at a time, with the published formulas."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from slime_like.config import AlgorithmConfig
from slime_like.trajectory import ScoredTrajectory


@dataclass
class ReferenceStep:
    """The reference's results for the sequences of one optimizer step.

    Attributes:
        logprobs, entropy: (response_len,) float64, one per sequence.
        loss: weighted sum over all sequences divided by the denominator.
        balance: mean over layers and tokens of the routers' balancing loss; 0 without experts.
        gradients: by Hugging Face name, of ``loss`` plus the routers' loss times its coefficient.
    """

    logprobs: list[Tensor]
    entropy: list[Tensor]
    loss: float
    balance: float
    gradients: dict[str, Tensor]


class _Wide:
    """torch, in which float32 is float64: some of transformers' layers name the type they compute in."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float64" if name in ("float", "float32") else name)


class Reference:
    """A float64 model with the loss written out: clipped surrogate, k3 estimate of the KL, entropy bonus.

    The routers' loss is Hugging Face's own, computed for one layer and one sequence at a time and divided by the number
    of experts per token (it counts choices, not their share), summed over layers and weighted by each sequence's share
    of the step's tokens. Hugging Face has none for sigmoid routers, so theirs is written out (DeepSeek-V3,
    arXiv:2412.19437, eqs. 17 to 20).
    """

    auto: Any = AutoModelForCausalLM

    def __init__(self, checkpoint: Path, algorithm: AlgorithmConfig) -> None:
        self.model = self.auto.from_pretrained(
            checkpoint, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        self.algorithm = algorithm
        self._routed: list[tuple[Tensor, Tensor]] = []
        self._gates: list[Any] = []
        self.loads: list[Tensor] = []
        for name, module in self.model.named_modules():
            if name.endswith(("mlp.gate", "mlp.router")):
                self._gates.append(module)
                module.register_forward_hook(lambda _, __, output: self._routed.append((output[0], output[2])))

    def trained(self) -> dict[str, Tensor]:
        """Return what has gradients, by name."""
        return dict(self.model.named_parameters())

    def round_weights(self) -> None:
        """Round the weights to bfloat16, as a bfloat16 trainer reads them. Its tables (of angles) stay in float32."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.bfloat16().double()

    def step(self, sequences: list[ScoredTrajectory], denominator: float) -> ReferenceStep:
        for parameter in self.trained().values():
            parameter.grad = None
        logprobs, entropies, total, total_balance = [], [], 0.0, 0.0
        tokens = sum(sequence.total_len for sequence in sequences)
        self.loads = [torch.zeros(len(gate.weight), dtype=torch.int64) for gate in self._gates]
        for sequence in sequences:
            logprob, entropy = self.score(sequence)
            for load, (_, chosen) in zip(self.loads, self._routed, strict=True):
                load += torch.bincount(chosen.flatten(), minlength=len(load))
            loss = self._loss(sequence, logprob, entropy) / denominator
            balance = sequence.total_len / tokens * self._balance()
            (loss + self.algorithm.moe_aux_loss_coef * balance).backward()
            logprobs.append(logprob.detach())
            entropies.append(entropy.detach())
            total += loss.item()
            total_balance += float(torch.as_tensor(balance).detach()) / max(1, len(self._routed))
        gradients = {name: p.grad.clone() for name, p in self.trained().items() if p.grad is not None}
        return ReferenceStep(logprobs, entropies, total, total_balance, gradients)

    def score(self, sequence: ScoredTrajectory) -> tuple[Tensor, Tensor]:
        """Return each response token's logprob given all tokens before it, and the entropy, at its temperature."""
        self._routed.clear()
        tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
        with patch.object(sys.modules[type(self.model).__module__], "torch", _Wide()):
            output = self.model(input_ids=tokens[None])
        logits = (output.logits[0] / sequence.temperature)[sequence.prompt_len - 1 : -1]
        if (
            sequence.support_ids is not None and sequence.support_sizes is not None
        ):  # far below the others but finite: their share of the entropy is 0, not nan
            supports = sequence.support_ids.long().split(sequence.support_sizes.tolist())
            for row, support in zip(range(len(logits)), supports, strict=True):
                kept = support.tolist() or list(range(logits.shape[1]))
                outside = torch.ones(logits.shape[1], dtype=torch.bool).index_fill(0, torch.tensor(kept), False)
                logits = logits.index_put((torch.tensor(row), outside.nonzero()[:, 0]), torch.tensor(-1e9).double())
        distribution = torch.log_softmax(logits, dim=-1)
        logprobs = distribution.gather(1, sequence.response_tokens[:, None]).squeeze(1)
        return logprobs, -(distribution.exp() * distribution).sum(1)

    def _balance(self) -> Tensor | float:
        """Return the last scored sequence's loss, from (T, E) logits and (T, k) choices of each layer with experts."""
        total: Tensor | float = 0.0
        for logits, chosen in self._routed:
            experts, top_k = logits.shape[1], self.model.config.get_text_config().num_experts_per_tok
            if hasattr(self._gates[0], "e_score_correction_bias"):
                affinity = logits.sigmoid()
                share = (affinity / affinity.sum(1, keepdim=True)).mean(0)
                load = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
                total = total + experts * (load * share).sum()
            else:
                total = total + load_balancing_loss_func((logits,), experts, top_k) / top_k
        return total

    @property
    def biases(self) -> list[Tensor]:
        """The sigmoid routers' biases, in float32, in the order of layers."""
        return [gate.e_score_correction_bias.float() for gate in self._gates]

    def move_biases(self, rate: float) -> None:
        """Do one step of algorithm 1 of arXiv:2408.15664, expert by expert. Biases are sums in float32."""
        for gate, load in zip(self._gates, self.loads, strict=True):
            for expert, (bias, count) in enumerate(zip(gate.e_score_correction_bias, load.tolist(), strict=True)):
                error = int(load.sum()) - len(load) * count
                sign = (error > 0) - (error < 0)
                gate.e_score_correction_bias[expert] = float(np.float32(float(bias)) + np.float32(rate) * sign)

    def _loss(self, sequence: ScoredTrajectory, logprobs: Tensor, entropy: Tensor) -> Tensor:
        config = self.algorithm
        ratio = (logprobs - sequence.old_logprobs.double()).exp()
        low, high = (config.loss.options.get(name, 0.2) for name in ("clip_low", "clip_high"))
        clipped = ratio.clamp(1 - low, 1 + high)
        surrogate = torch.minimum(ratio * sequence.advantages.double(), clipped * sequence.advantages.double())
        log_ref_ratio = sequence.ref_logprobs.double() - logprobs
        kl = log_ref_ratio.exp() - log_ref_ratio - 1
        per_token = -surrogate + config.kl.coef * kl - config.entropy_coef * entropy
        return sequence.token_weight * per_token[sequence.loss_mask].sum()


def adamw_steps(
    reference: Reference,
    sequences: list[ScoredTrajectory],
    denominator: float,
    steps: int,
    clip: float,
    lr: float,
    eps: float,
    bias_rate: float = 0.0,
) -> dict[str, Tensor]:
    """Return the weights by name after torch's AdamW with global clipping and decay on matrices only.

    The first update has the gradients of the last ``step`` of the reference.
    """
    named, decays = reference.trained(), dict[bool, list[Tensor]]({True: [], False: []})
    for name, parameter in named.items():
        decays[parameter.ndim > 1 and not name.endswith("bias")].append(parameter)  # experts' biases are stacked
    groups = [{"params": decays[True], "weight_decay": 0.1}, {"params": decays[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps)
    for update in range(steps):
        if update:
            reference.step(sequences, denominator)
        torch.nn.utils.clip_grad_norm_(named.values(), clip)
        optimizer.step()
        if bias_rate:
            reference.move_biases(bias_rate)
    return {name: p.detach().clone() for name, p in named.items()}
