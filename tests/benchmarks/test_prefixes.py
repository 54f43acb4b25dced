"""The benchmark of shared prefixes: what it packs, and which memory it counts. Not covered: times."""

import pytest
import torch

from benchmarks.prefixes import SHAPES, _Kept, _rows
from slime_like.algorithms import pack_sequences, real_tokens


@pytest.mark.parametrize(("shape", "share"), zip(SHAPES, (0.30, 1.0), strict=True))
def test_packs_have_the_share_of_tokens_that_the_goals_are_for(shape: object, share: float) -> None:
    rows = _rows(shape, 2, 100)  # type: ignore[arg-type]
    ratio = real_tokens([pack_sequences(rows, sharing="prompts")]) / real_tokens([pack_sequences(rows)])
    assert ratio == pytest.approx(share)


def test_every_storage_that_autograd_keeps_counts_once_and_weights_do_not() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8))
    x = torch.ones(4, 8, requires_grad=True)
    kept = _Kept({weight.untyped_storage()._cdata})
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        hidden = x @ weight
        (hidden * hidden).sum().backward()
    assert kept.nbytes == x.nbytes + hidden.nbytes
