"""Packs whose sequences share prefixes give every value and gradient of the same packs without sharing.

In float64, on random trees of sequences: equal ones, one a prefix of another, groups of one, prompts of one token. The
model's norms compute in float64 too (those of Llama's descendants do not in transformers).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface

from backends.fsdp import attention
from backends.fsdp.micro_batch import model_input
from backends.fsdp.model import LogprobModel
from slime_like.algorithms.packing import prefixes
from slime_like.algorithms.packing.pack import pack_sequences, real_tokens, unpack_sequences
from slime_like.algorithms.packing.prefixes import Sharing
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.support.properties import examples

VOCAB = 13
ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "initializer_range": 0.3,
    "pad_token_id": None,
}

Computed = tuple[Tensor, Tensor, dict[str, Tensor], int]


@pytest.fixture(scope="module")
def compute() -> Callable[[PackedTrajectory], Computed]:
    """Logprobs, entropies, gradients of a weighted sum of both, and tokens computed."""
    AttentionInterface.register(attention.NAME, attention.forward)
    torch.manual_seed(0)
    hugging_face = transformers.AutoModelForCausalLM.from_config(
        transformers.PhiConfig(**_SIZES), dtype=torch.float64, attn_implementation=attention.NAME
    )
    model = LogprobModel(hugging_face, {}, None, entropy_gradient=True)

    def computed(pack: PackedTrajectory) -> Computed:
        batch = model_input(pack, torch.device("cpu"), ALONE)
        model.zero_grad()
        shard = batch.shard
        (scored,) = model(shard.tokens, shard.position_ids, batch.boundaries, batch.responses, False)
        logprobs, entropy = batch.whole(scored)
        weights = torch.arange(len(logprobs)).double().sin()
        (weights * logprobs + weights.cos() * entropy).sum().backward()
        gradients = {name: cast(Tensor, each.grad).clone() for name, each in model.named_parameters()}
        return logprobs.detach(), entropy.detach(), gradients, len(shard.tokens)

    return computed


def _row(index: int, group: int, prompt: list[int], response: list[int]) -> ScoredTrajectory:
    return ScoredTrajectory.unrewarded(
        f"s{index}", torch.tensor(prompt), torch.tensor(response), group_id=group, temperature=1.0 + index % 3
    )


@st.composite
def _trees(draw: Callable[..., Any]) -> list[ScoredTrajectory]:
    """Rows of one or two groups, each from nothing or going on from a part of an earlier row of any group."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)
    rows: list[tuple[int, list[int]]] = []
    found = []
    for index in range(draw(st.integers(1, 8))):
        group, begun = draw(st.integers(0, 1)), []
        if rows and draw(st.booleans()):
            group, earlier = draw(st.sampled_from(rows))
            begun = earlier[: draw(st.integers(1, len(earlier)))]
        every = begun + draw(tokens if len(begun) < 2 else st.just([]) | tokens)
        every = every if len(every) > 1 else [*every, 0]
        cut = draw(st.integers(1, len(every) - 1))
        rows.append((group, every))
        found.append(_row(index, group, every[:cut], every[cut:]))
    return found


def _check(
    compute: Callable[[PackedTrajectory], Computed], rows: list[ScoredTrajectory], sharing: Sharing
) -> tuple[int, int]:
    """Tokens computed without sharing, and with."""
    pack = pack_sequences(rows, sharing=sharing)
    expected, found = compute(pack_sequences(rows)), compute(pack)
    for name, one, other in zip(("logprobs", "entropy"), expected, found, strict=False):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10, msg=name)
    for name, gradient in expected[2].items():
        torch.testing.assert_close(found[2][name], gradient, rtol=1e-10, atol=1e-10, msg=name)
    assert found[3] == real_tokens([pack])
    assert [row.response_tokens.tolist() for row in unpack_sequences(pack)] == [
        r.response_tokens.tolist() for r in rows
    ]
    return expected[3], found[3]


@examples(25)
@given(rows=_trees(), sharing=st.sampled_from(["prompts", "tree"]), worth=st.sampled_from([1, 4]))
def test_values_and_gradients_are_those_of_copies(
    rows: list[ScoredTrajectory], sharing: Sharing, worth: int, compute: Callable[[PackedTrajectory], Computed]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_WORTH", worth)
        _check(compute, rows, sharing)


def test_a_group_computes_its_prompt_once(compute: Callable[[PackedTrajectory], Computed]) -> None:
    prompt = [1, 2, 3, 4, 5]
    rows = [_row(i, 0, prompt, [6 + i] * (1 + i)) for i in range(4)] + [_row(4, 1, prompt, [7, 8])]
    assert _check(compute, rows, "prompts") == (37, 22)


def test_a_conversation_cut_into_rows_is_one_segment(compute: Callable[[PackedTrajectory], Computed]) -> None:
    every = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    rows = [_row(i, 0, every[:cut], every[cut : cut + 3]) for i, cut in enumerate((2, 5, 7))]
    assert _check(compute, rows, "tree") == (23, 10)
    assert pack_sequences(rows, sharing="tree").segment_lengths is not None
    assert _check(compute, rows, "prompts") == (23, 23)


def test_rows_part_where_they_differ(compute: Callable[[PackedTrajectory], Computed]) -> None:
    """Level by level: two rollouts go on from one prompt, and three rows from the first one's history."""
    first, second = [1, 2, 3, 4, 5, 6], [1, 2, 3, 9]
    rows = [_row(0, 0, first[:3], first[3:]), _row(1, 0, second[:3], second[3:])]
    rows += [_row(2 + i, 0, [*first, 7], [i, 8]) for i in range(3)]
    assert _check(compute, rows, "tree") == (37, 3 + 3 + 1 + 6 + 1)
    pack = pack_sequences(rows, sharing="tree")
    assert pack.segment_parents is not None and pack.segment_parents.tolist() == [-1, 0, 1, 1, 1, 0]
