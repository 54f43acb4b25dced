"""Dispatch of tokens to rows of experts and back sums in a fixed order and rounds once."""

import torch

from backends.megatron.dispatch import FromExperts, Routes, ToExperts

ROUTES = Routes.of(torch.tensor([1, 0, 2, 2, 1, 0, 0, 1, 2]), 3)  # rows in the order of experts
PARTS = torch.tensor([256.0, 256.0, 256.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16).unsqueeze(1)
"""Each token has the parts 256, 1 and 1. In bfloat16, 256 + 1 is 256."""
SUMS = torch.full((3, 1), 258.0, dtype=torch.bfloat16)


def test_rows_are_summed_in_float32() -> None:
    rows = PARTS.clone().requires_grad_()
    combined = FromExperts.apply(rows, ROUTES)
    assert torch.equal(combined, SUMS)
    combined.backward(torch.tensor([[3.0], [5.0], [7.0]], dtype=torch.bfloat16))
    assert rows.grad is not None and rows.grad.flatten().tolist() == [5, 3, 7, 7, 5, 3, 3, 5, 7]


def test_gradients_of_rows_are_summed_in_float32() -> None:
    tokens = torch.tensor([[10.0], [20.0], [30.0]], dtype=torch.bfloat16, requires_grad=True)
    rows = ToExperts.apply(tokens, ROUTES)
    assert rows.flatten().tolist() == [20, 10, 30, 30, 20, 10, 10, 20, 30]
    rows.backward(PARTS)
    assert tokens.grad is not None and torch.equal(tokens.grad, SUMS)
