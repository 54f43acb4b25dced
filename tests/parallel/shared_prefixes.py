"""Make sequences that share prefixes, to be compared with the float64 reference on whole sequences."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.algorithms.packing.prefixes import Sharing
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.parallel.parity import Case, case_of, parity_config
from tests.parallel.reference import Reference, ReferenceStep
from tests.parallel.tiny import scored_sequences

# The packs' numbers of sequences; per sequence (prompt, response) lengths and the sequence that starts with its prompt.
PACKS = (5, 2, 5, 2)
SEQUENCES: list[tuple[int, int, int | None]] = [
    *[(9, 9, None), (9, 1, 0), (9, 6, 0), (9, 6, 0), (3, 5, None)],
    *[(60, 2, None), (60, 3, 5)],
    *[(8, 5, None), (13, 6, 7), (13, 4, 7), (8, 7, 7), (10, 3, 7)],
    *[(7, 3, None), (4, 12, None)],
]
EQUAL, BEGINNING = (2, 3), (1, 0)
"""Pairs of sequences: equal responses, and a response that is the start of the other one."""


class SharedCase(Case):
    """A case whose packs share prefixes."""

    sharing: Sharing = "tree"

    def packs(self) -> list[PackedTrajectory]:
        parts = torch.arange(len(self.sequences)).split(PACKS)
        return [pack_sequences([self.sequences[i] for i in part], sharing=self.sharing) for part in parts]


class PromptsCase(SharedCase):
    """A case whose packs share only equal prompts."""

    sharing: Sharing = "prompts"


def sharing_sequences() -> list[ScoredTrajectory]:
    plain = scored_sequences([lengths[:2] for lengths in SEQUENCES], fully_masked=(2, 11))
    found: list[ScoredTrajectory] = []
    for index, (sequence, (prompt, _, earlier)) in enumerate(zip(plain, SEQUENCES, strict=True)):
        tokens = sequence.prompt_tokens
        if earlier is not None:
            tokens = torch.cat([found[earlier].prompt_tokens, found[earlier].response_tokens])[:prompt]
        group = sum(start <= index for start in (0, 4, 5, 7, 12, 13))
        found.append(replace(sequence, prompt_tokens=tokens, group_id=group))
    for index, other in (EQUAL, BEGINNING):
        found[index].response_tokens = found[other].response_tokens[: found[index].response_len]
    return found


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
        trees = [tree for first, pack in zip(_firsts(packs), packs, strict=True) for tree in _trees(first, pack)]
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


def _firsts(packs: list[PackedTrajectory]) -> list[int]:
    return [0, *accumulate(pack.num_sequences for pack in packs[:-1])]


def _trees(first: int, pack: PackedTrajectory) -> list[list[tuple[int, int]]]:
    """Return each tree's distinct tokens as (sequence, position); sequences that share a token are in one tree."""
    lengths = (pack.prompt_lens + pack.response_lens).tolist()
    places = torch.arange(sum(lengths)) if pack.segment_places is None else pack.segment_places
    trees: list[dict[int, tuple[int, int]]] = []
    for number, own in enumerate(places.split(lengths)):
        found = {place: (first + number, position) for position, place in enumerate(own.tolist())}
        for tree in [tree for tree in trees if tree.keys() & found.keys()]:
            trees.remove(tree)
            found |= tree
        trees.append(found)
    return [list(tree.values()) for tree in trees]


def balanced_case(directory: Path, coefficient: float) -> Case:
    """Make a case of one step with shared prefixes and a balancing loss."""
    case = shared_case("qwen3_moe", directory, 1)
    case.algorithm["moe_aux_loss_coef"] = coefficient
    algorithm = parity_config(case.checkpoint, directory, {}, **case.algorithm).algorithm
    reference = TreeReference(case.checkpoint, algorithm)
    case.expected = reference.balanced_step(case.sequences, case.denominator, case.packs())
    return case


def shared_case(
    family: str,
    directory: Path,
    steps: int,
    kind: type[Case] = SharedCase,
    sequences: Sequence[ScoredTrajectory] = (),
    layers: int = 2,
) -> Case:
    """Make a case of packs that share, expecting the reference's step on the whole sequences."""
    case = case_of(list(sequences) or sharing_sequences(), family, directory, steps, layers=layers)
    case.expected = replace(case.expected, balance=0.0)  # without a coefficient none is reported
    return kind(**{each.name: getattr(case, each.name) for each in fields(case)})
