"""Packs that share prefixes agree with the float64 reference on whole sequences, under every layout.

Compared as in ``test_parity`` and ``test_fsdp_parity``, within the same bounds. The packs hold samples of one prompt,
two of them equal and one the start of another, next to an unrelated sequence; a prompt that is longer than its
responses and cut by context ranks; and rows of two rollouts that continue parts of one history. Not covered: CUDA.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.layouts import layout_of
from tests.parallel.parity import (
    Case,
    Settings,
    check_everything,
    check_gradients,
    check_loss,
    layers_of,
    run_case,
    task_of,
)
from tests.parallel.ranks import run_by_size, selected
from tests.parallel.shared_prefixes import PromptsCase, SharedCase, balanced_case, shared_case, sharing_sequences
from tests.parallel.steps import train_rank
from tests.parallel.test_fsdp_parity import check_case, run_cases
from tests.support.acceptance import some_in_acceptance

STEPS = 1


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, kind: type[Case] = SharedCase, layers: int = 2) -> Case:
        return shared_case(family, tmp_path_factory.mktemp(family), STEPS, kind, layers=layers)

    return make


OF_QWEN3 = ("single", "pp2-vpp2", "dp2-distributed", "cp4", "tp2-sp-cp2", "recompute", "recompute2", "offload")
CASES = [("qwen3", layout) for layout in OF_QWEN3]
CASES += [("qwen3_moe", "tp2-sp-ep2"), ("deepseek_v3", "single"), ("deepseek_v3", "cp2")]
IN_ACCEPTANCE = [("qwen3", layout) for layout in ("dp2-distributed", "recompute", "recompute2")]
BALANCED = ("dp2-ep2", "tp2-sp-ep2", "cp2")


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a case whose routers' loss is more than half of their gradient."""
    return balanced_case(tmp_path_factory.mktemp("balanced"), 0.5)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, cases: Any, balanced: Case, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Return every rank's results by family (or "balanced") and layout."""
    directory = tmp_path_factory.mktemp("ranks")
    chosen = selected(request, "test_layout_computes_the_reference")
    named = {(family, layout): cases(family, layers=layers_of(layout_of(layout))) for family, layout in chosen}
    named |= {("balanced", layout): balanced for layout in BALANCED}
    tasks = {
        name: task_of(case, {"share_prefixes": "tree", **layout_of(name[1])}, directory, STEPS)
        for name, case in named.items()
    }
    return run_by_size(train_rank, directory, tasks)


@pytest.mark.parametrize(("family", "layout"), some_in_acceptance(CASES, IN_ACCEPTANCE.__contains__))
def test_layout_computes_the_reference(family: str, layout: str, cases: Any, results: Any) -> None:
    check_everything(cases(family, layers=layers_of(layout_of(layout))), results[family, layout])


@pytest.mark.parametrize("layout", BALANCED)
def test_a_shared_token_counts_once_in_the_balancing_loss(layout: str, balanced: Case, results: Any) -> None:
    check_loss(balanced, results["balanced", layout])
    check_gradients(balanced, results["balanced", layout])


def test_only_prompts_are_shared(cases: Any, tmp_path: Path) -> None:
    case, settings = cases("qwen3", PromptsCase), {"share_prefixes": "prompts"}
    check_everything(case, run_case(case, settings, tmp_path, steps=STEPS))


@pytest.mark.parametrize(
    "layout",
    [{"data": 2, "context": 2}, {"recompute": "full"}],
    ids=["dp2-cp2", "full-recompute"],
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
