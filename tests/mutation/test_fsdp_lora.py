"""Put known bugs of low-rank factors into the FSDP trainer, one at a time: its comparisons must notice each."""

from pathlib import Path

import torch
from torch import Tensor

from backends.fsdp import lora
from tests.mutation.planted import Bug, Comparison, Patch, no_bug, require_caught, run_planted
from tests.mutation.test_fsdp import gradients_are_not_synchronised
from tests.parallel.lora import check_factor_gradients, check_merged, check_reference, make_lora_case
from tests.parallel.parity import check_scores
from tests.parallel.test_fsdp_lora import fsdp_lora_config, fsdp_lora_rank


def alpha_is_forgotten_in_the_export(patch: Patch) -> None:
    correct = lora.merged

    def merged(weight: Tensor, a: Tensor, b: Tensor, owner: Tensor, scale: float) -> Tensor:
        return correct(weight, a, b, owner, 1.0)

    patch.setattr(lora, "merged", merged)


def the_merged_base_is_merged_again(patch: Patch) -> None:
    """As if the export had changed the weights in place."""
    correct = lora.FsdpLora.merge

    def merge(self: lora.FsdpLora, rows: Tensor) -> Tensor:
        return rows.copy_(correct(self, rows))

    patch.setattr(lora.FsdpLora, "merge", merge)


def gate_and_up_are_swapped(patch: Patch) -> None:
    correct = lora.FsdpLora.forward

    def forward(self: lora.FsdpLora, x: Tensor, ends: Tensor | None = None) -> Tensor:
        found = correct(self, x, ends)
        return found if self._matrices == 1 else torch.cat(found.chunk(2, dim=-1)[::-1], dim=-1)

    patch.setattr(lora.FsdpLora, "forward", forward)


COMPARISONS = (check_reference, check_scores, check_factor_gradients, check_merged)
MUTATIONS: list[tuple[Bug, Comparison | None]] = [
    (gradients_are_not_synchronised, check_factor_gradients),
    (alpha_is_forgotten_in_the_export, check_merged),
    (the_merged_base_is_merged_again, check_merged),
    (gate_and_up_are_swapped, check_scores),
    (no_bug, None),
]


def test_the_comparisons_catch(tmp_path: Path) -> None:
    case = make_lora_case("qwen3_moe", tmp_path / "model", steps=1)
    task = (fsdp_lora_config(case, tmp_path, {"data": 2}), case.packs(), case.denominator, case.factors)
    found = run_planted(fsdp_lora_rank, tmp_path, {bug: (bug, task) for bug, _ in MUTATIONS})
    for bug, caught_by in MUTATIONS:
        require_caught(COMPARISONS, caught_by, case, found[bug])
