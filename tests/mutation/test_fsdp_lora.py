"""Put known bugs of low-rank factors into the FSDP trainer, one at a time: its comparisons must notice each.

See ``test_fsdp``: the comparison named for a bug must fail, and the earlier ones must not.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.fsdp import lora
from slime_like.interfaces import RankPlacement
from tests.mutation.test_fsdp import gradients_are_not_synchronised
from tests.mutation.test_trainer import no_bug
from tests.parallel.lora import LoraResult, check_factor_gradients, check_merged, check_reference, make_lora_case
from tests.parallel.parity import check_scores
from tests.parallel.ranks import run_ranks
from tests.parallel.test_fsdp_lora import fsdp_lora_config, fsdp_lora_rank


def alpha_is_forgotten_in_the_export() -> None:
    correct = lora.merged

    def merged(weight: Tensor, a: Tensor, b: Tensor, owner: Tensor, scale: float) -> Tensor:
        return correct(weight, a, b, owner, 1.0)

    lora.merged = merged  # type: ignore[attr-defined]


def the_merged_base_is_merged_again() -> None:
    """As if the export had changed the weights in place."""
    correct = lora.Factors.merge

    def merge(self: lora.Factors, rows: Tensor) -> Tensor:
        return rows.copy_(correct(self, rows))

    lora.Factors.merge = merge  # type: ignore[method-assign]


def gate_and_up_are_swapped() -> None:
    correct = lora.Factors.forward

    def forward(self: lora.Factors, x: Tensor, ends: Tensor | None = None) -> Tensor:
        found = correct(self, x, ends)
        return found if self._matrices == 1 else torch.cat(found.chunk(2, dim=-1)[::-1], dim=-1)

    lora.Factors.forward = forward  # type: ignore[method-assign]


MUTATIONS: list[tuple[Callable[[], None], str]] = [
    (gradients_are_not_synchronised, "gradients"),
    (alpha_is_forgotten_in_the_export, "merged"),
    (the_merged_base_is_merged_again, "merged"),
    (gate_and_up_are_swapped, "scores"),
]


def _train_with(bug: Callable[[], None], placement: RankPlacement, *arguments: Any) -> LoraResult:
    bug()
    return fsdp_lora_rank(placement, *arguments)


@pytest.mark.parametrize(("bug", "caught_by"), [(no_bug, ""), *MUTATIONS], ids=lambda one: getattr(one, "__name__", ""))
def test_the_comparisons_catch(bug: Callable[[], None], caught_by: str, tmp_path: Path) -> None:
    case = make_lora_case("qwen3_moe", tmp_path / "model", steps=1)
    config = fsdp_lora_config(case, tmp_path, {"data": 2})
    arguments = config, case.packs(), case.denominator, case.factors
    results = run_ranks(partial(_train_with, bug), 2, tmp_path / "ranks", *arguments)
    checks: dict[str, Callable[..., None]] = {
        "reference": check_reference,
        "scores": check_scores,
        "gradients": check_factor_gradients,
        "merged": check_merged,
    }
    for name, check in checks.items():
        if name == caught_by:
            with pytest.raises(AssertionError):
                check(case, results)
            return
        check(case, results)
