"""Packs that share prefixes agree with the float64 reference on whole sequences, under every layout.

Compared as in ``test_parity`` and ``test_fsdp_parity``, within the same bounds. The packs hold samples of one prompt,
two of them equal and one the start of another, next to an unrelated sequence; a prompt that is longer than its
responses and cut by context ranks; and rows of two rollouts that continue parts of one history. Not covered: CUDA.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.parity import Case, Settings, check_everything, check_gradients, check_loss, layers_of, run_case
from tests.parallel.shared_prefixes import PromptsCase, SharedCase, balanced_case, shared_case, sharing_sequences
from tests.parallel.test_fsdp_parity import check_case, run_cases

STEPS = 1


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, kind: type[Case] = SharedCase, layers: int = 2) -> Case:
        return shared_case(family, tmp_path_factory.mktemp(family), STEPS, kind, layers=layers)

    return make


LAYOUTS: dict[str, Settings] = {
    "single": {},
    "tp2-sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "pp2-interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "dp2-distributed": {"data": 2, "distributed": True},
    "cp2": {"context": 2},
    "cp4": {"context": 4},
    "tp2-sp-cp2": {"tensor": 2, "sequence": True, "context": 2},
    "full-recompute": {"recompute": "full"},
    "block-recompute": {"recompute": 2},
    "offload": {"activation_offload": True},
    "ep2": {"data": 2, "expert": 2},
    "tp2-sp-ep2": {"tensor": 2, "sequence": True, "expert": 2},
}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *[("qwen3", layout) for layout, settings in LAYOUTS.items() if "expert" not in settings],
        ("qwen3_moe", "ep2"),
        ("qwen3_moe", "tp2-sp-ep2"),
        ("deepseek_v3", "single"),
        ("deepseek_v3", "cp2"),
    ],
)
def test_layout_computes_the_reference(family: str, layout: str, cases: Any, tmp_path: Path) -> None:
    case = cases(family, layers=layers_of(LAYOUTS[layout]))
    settings = {"share_prefixes": "tree", **LAYOUTS[layout]}
    check_everything(case, run_case(case, settings, tmp_path, steps=STEPS))


@pytest.mark.parametrize("layout", ["ep2", "tp2-sp-ep2", "cp2"])
def test_a_shared_token_counts_once_in_the_balancing_loss(layout: str, tmp_path: Path) -> None:
    """With a large coefficient, so that this loss makes up more than half of the routers' gradient."""
    case, settings = balanced_case(tmp_path, 0.5), {"share_prefixes": "tree", **LAYOUTS[layout]}
    results = run_case(case, settings, tmp_path, steps=1)
    check_loss(case, results)
    check_gradients(case, results)


def test_only_prompts_are_shared(cases: Any, tmp_path: Path) -> None:
    case, settings = cases("qwen3", PromptsCase), {"share_prefixes": "prompts"}
    check_everything(case, run_case(case, settings, tmp_path, steps=STEPS))


@pytest.mark.parametrize(
    "layout",
    [{}, {"data": 2}, {"context": 2}, {"data": 2, "context": 2}, {"recompute": "full"}],
    ids=["single", "dp2", "cp2", "dp2-cp2", "full-recompute"],
)
def test_fsdp_computes_the_reference(layout: Settings, cases: Any, tmp_path: Path) -> None:
    families = [cases(family) for family in ("qwen3", "qwen3_moe")]
    found = run_cases(families, {"share_prefixes": "tree", **layout}, tmp_path, STEPS)
    for case, results in zip(families, found, strict=True):
        check_case(case, results)


def test_the_packs_are_smaller() -> None:
    """Otherwise the tests above would compare packs that share nothing."""
    packs = SharedCase(Path(), sharing_sequences(), None).packs()  # type: ignore[arg-type]
    assert [pack.shared_tokens for pack in packs] == [9 * 3 + 1 + 6, 60, 13 + 13 + 8 + 10, 0]
