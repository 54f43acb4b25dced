"""The float64 references of what a step can have besides its loss, each written out on transformers' model."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from slime_like.config import AlgorithmConfig
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from slime_like.weights.adapter import factor_names
from tests.parallel.reference import Reference, ReferenceStep
from tests.parallel.towers import is_language, own_name

Factors = dict[str, Tensor]
CLIP, WIDE = 0.3, 1e3
"""Clips of a critic's values: between their changes, so that some tokens are clipped, and above all of them."""

COEFFICIENT = 0.7
"""Of the distillation's KL."""


class WholeReference(Reference):
    """transformers' whole model with a tower, on text."""

    auto = AutoModelForImageTextToText

    def trained(self) -> dict[str, Tensor]:
        return {own_name(name): each for name, each in super().trained().items() if is_language(name)}


class ValueReference(Reference):
    """A value model with the clipped loss written out, token by token."""

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


# ------------------------------------------------------------------------------------------------- low-rank factors
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
    """``W + s B A`` written out for every matrix that has factors."""

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


# ------------------------------------------------------------------------------------------------- replayed routes
class RoutedReference(Reference):
    """The routers use the scored sequence's routes with hand-written weights.

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

    def disagreement(self, packs: list[PackedTrajectory]) -> float:
        """Return the share of routes that are not the routers' own choices. A shared token counts once."""
        counts, tallies = list[tuple[int, int]](), iter(self.tallies)
        for pack in packs:
            of_pack: dict[int, tuple[int, int]] = {}
            for own in _places(pack):
                of_pack |= {int(own[token]): each for token, each in next(tallies).items()}
            counts += of_pack.values()
        return sum(differing for differing, _ in counts) / sum(known for _, known in counts)


# -------------------------------------------------------------------------------------------------- shared prefixes
class TreeReference(Reference):
    """Computes the routers' loss over the tokens that packs compute: a tree counts as one sequence, each token once."""

    def balanced_step(
        self, sequences: list[ScoredTrajectory], denominator: float, packs: list[PackedTrajectory]
    ) -> ReferenceStep:
        """Do a ``step`` with both losses in the gradients."""
        self.model.zero_grad()
        scores, routed, total = [], [], torch.tensor(0.0, dtype=torch.float64)
        for sequence in sequences:
            scores.append(self.score(sequence))
            total = total + self._loss(sequence, *scores[-1]) / denominator
            routed.append(list(self._routed))
        firsts = [0, *accumulate(pack.num_sequences for pack in packs[:-1])]
        trees = [tree for first, pack in zip(firsts, packs, strict=True) for tree in _trees(first, pack)]
        tokens = sum(map(len, trees))
        balance = torch.stack([len(tree) / tokens * self._balance_of(tree, routed) for tree in trees]).sum()
        (total + self.algorithm.moe_aux_loss_coef * balance).backward()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        logprobs, entropies = ([part.detach() for part in parts] for parts in zip(*scores, strict=True))
        return ReferenceStep(logprobs, entropies, total.item(), balance.item() / len(routed[0]), gradients)

    def _balance_of(self, tree: list[tuple[int, int]], routed: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
        """Return the sum over layers; ``tree`` has the sequence and the position of each token."""
        total = torch.zeros((), dtype=torch.float64)
        for layer in range(len(routed[0])):
            logits = torch.stack([routed[sequence][layer][0][position] for sequence, position in tree])
            top_k = self.model.config.num_experts_per_tok
            total = total + load_balancing_loss_func((logits,), logits.shape[1], top_k) / top_k
        return total


def _places(pack: PackedTrajectory) -> tuple[Tensor, ...]:
    """Return the place in the pack of each token of every sequence."""
    lengths = (pack.prompt_lens + pack.response_lens).tolist()
    places = torch.arange(sum(lengths)) if pack.segment_places is None else pack.segment_places
    return places.split(lengths)


def _trees(first: int, pack: PackedTrajectory) -> list[list[tuple[int, int]]]:
    """Return each tree's distinct tokens as (sequence, position); sequences that share a token are in one tree."""
    trees: list[dict[int, tuple[int, int]]] = []
    for number, own in enumerate(_places(pack)):
        found = {place: (first + number, position) for position, place in enumerate(own.tolist())}
        for tree in [tree for tree in trees if tree.keys() & found.keys()]:
            trees.remove(tree)
            found |= tree
        trees.append(found)
    return [list(tree.values()) for tree in trees]
