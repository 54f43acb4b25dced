"""What a small model computes of packs in float64, to compare packs that share prefixes with those that do not.

The model's norms compute in float64 too (those of Llama's descendants do not in transformers).
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface

from backends.fsdp import attention
from backends.fsdp.model import FsdpModel
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.algorithms.packing.prefixes import Sharing
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory

VOCAB = 13
_ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
_SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "initializer_range": 0.3, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Computed:
    """Of one pack: (R,) logprobs and entropies, gradients of a weighted sum of both, and the tokens that took."""

    logprobs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]
    tokens: int


class SmallModel:
    """The FSDP backend's model on one rank, not sharded."""

    def __init__(self) -> None:
        AttentionInterface.register(attention.NAME, attention.forward)
        torch.manual_seed(0)
        hugging_face = transformers.AutoModelForCausalLM.from_config(
            transformers.PhiConfig(**_SIZES), dtype=torch.float64, attn_implementation=attention.NAME
        )
        self._model = FsdpModel(hugging_face, {}, None, entropy_gradient=True)

    def compute(self, pack: PackedTrajectory) -> Computed:
        batch = attention.model_input(pack, torch.device("cpu"), _ALONE)
        self._model.zero_grad()
        shard = batch.shard
        scored = self._model(shard.tokens, shard.position_ids, batch.mixers, batch.responses)
        logprobs, entropy = batch.whole(scored)
        weights = torch.arange(len(logprobs)).double().sin()
        (weights * logprobs + weights.cos() * entropy).sum().backward()
        gradients = {name: cast(Tensor, each.grad).clone() for name, each in self._model.named_parameters()}
        return Computed(logprobs.detach(), entropy.detach(), gradients, len(shard.tokens))

    def check_scores(self, rows: list[ScoredTrajectory], sharing: Sharing) -> tuple[Computed, Computed]:
        """Require the logprobs and entropies of a pack without sharing, within 1e-10; what was computed of both."""
        expected = self.compute(pack_sequences(rows))
        found = self.compute(pack_sequences(rows, sharing=sharing))
        for name in ("logprobs", "entropy"):
            one, other = getattr(found, name), getattr(expected, name)
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10, msg=name)
        return expected, found


def check_gradients(expected: Computed, found: Computed) -> None:
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


def row(index: int, group: int, prompt: list[int], response: list[int]) -> ScoredTrajectory:
    """One sequence; temperatures differ."""
    return ScoredTrajectory.unrewarded(
        f"s{index}", torch.tensor(prompt), torch.tensor(response), group_id=group, temperature=1.0 + index % 3
    )


def group_of_four() -> list[ScoredTrajectory]:
    """Responses of four lengths to one prompt, and a sequence of another group with the same prompt."""
    prompt = [1, 2, 3, 4, 5]
    return [row(i, 0, prompt, [6 + i] * (1 + i)) for i in range(4)] + [row(4, 1, prompt, [7, 8])]
