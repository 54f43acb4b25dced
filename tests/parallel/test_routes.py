"""Replayed routes in every layout of both backends.

Replaying the trainer's own routes changes no bit of logprobs and gradients. Forced random routes, some of them unknown,
agree with a float64 mixture that has hand-written weights: logprobs, the loss with the balancing term, and every
gradient. A step's later updates repeat the routes of its start. All layouts of one size run in one fork.
"""

from functools import cache
from typing import Any

import pytest

from tests.parallel.layouts import layout_of
from tests.parallel.parity import Case, parity_config
from tests.parallel.ranks import run_each
from tests.parallel.routes import (
    RoutedResult,
    check_disagreement,
    check_gradients_of_any,
    check_routed,
    old_case,
    old_rank,
    routed_case,
    routed_rank,
)
from tests.support.acceptance import some_in_acceptance

LAYOUTS = {
    "alone": ("single", "recompute", "fsdp", "fsdp-recompute"),
    "pairs": ("pp2-vpp2", "cp2", "tp2-sp-ep2", "fsdp-cp2"),
    "more pairs": ("tp2-sp", "dp2", "fsdp-dp2"),
    "sharing": ("tp2-sp-tree", "cp2-tree", "fsdp-cp2-tree"),
    "later": ("tp2-sp-ep2", "pp2-vpp2", "cp2", "fsdp-cp2"),
}
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
ROUTED = [(family, kind) for family in FAMILIES for kind in ("alone", "pairs", "more pairs", "sharing")][:-1]
"""gpt-oss is trained by FSDP only, and its windows exclude shared prefixes."""
QUICK = (("qwen3_moe", "pairs"), ("qwen3_moe", "sharing"), ("deepseek_v3", "alone"), ("gpt_oss", "pairs"))
each_routed = pytest.mark.parametrize(("family", "kind"), some_in_acceptance(ROUTED, lambda case: case not in QUICK))


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs a rank function in several layouts, and returns the case and each one's results."""

    @cache
    def run(family: str, kind: str) -> tuple[Case, dict[str, list[RoutedResult]]]:
        directory = tmp_path_factory.mktemp(f"{family}-{kind}")
        layouts = [name for name in LAYOUTS[kind] if family != "gpt_oss" or "fsdp" in name]
        later = kind == "later"
        case = old_case(family, directory) if later else routed_case(family, directory, kind == "sharing")
        more = {"router_bias_rate": case.bias_rate, **({"lr": 1e-2} if later else {})}
        configs = [
            parity_config(case.checkpoint, directory, {**layout_of(name), **more}, **case.algorithm) for name in layouts
        ]
        tasks = [(config, case.packs(), case.denominator) for config in configs]
        function, world = old_rank if later else routed_rank, configs[0].trainer.parallel.world_size
        results = run_each(function, world, directory / "ranks", tasks)
        return case, {name: list(found) for name, found in zip(layouts, results, strict=True)}

    return run


@each_routed
def test_own_routes_change_no_bit(family: str, kind: str, routed: Any) -> None:
    for name, results in routed(family, kind)[1].items():
        for result in results:
            assert not result.changed, f"{name}: {result.changed}"
            assert result.recorded > 0, name


@each_routed
def test_forced_routes_compute_the_reference(family: str, kind: str, routed: Any) -> None:
    case, found = routed(family, kind)
    assert case.disagreement > 0.3
    for name, results in found.items():
        try:
            check_routed(case, results)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("family", some_in_acceptance(FAMILIES, lambda family: family != "qwen3_moe"))
def test_later_updates_repeat_the_routes_of_the_start(family: str, routed: Any) -> None:
    case, found = routed(family, "later")
    for results in found.values():
        check_gradients_of_any(case, results)
        check_disagreement(case, results)
