"""The FSDP trainer agrees with Hugging Face's float64 model on unpacked sequences, and with the Megatron trainer.

The same values are compared as for Megatron (``test_parity``), within the same bounds. All families of one layout run
in one fork. Not covered here: CUDA.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.models.dimensions import ModelDimensions
from tests.parallel.assembly import to_hugging_face
from tests.parallel.parity import (
    GRADIENT_BOUND,
    LOGPROB_BOUND,
    STEPS,
    UPDATE_BOUND,
    Case,
    Settings,
    check_biases,
    check_changes,
    check_exported_gradients,
    check_loss,
    check_scores,
    check_tensors,
    fsdp_config,
    layers_of,
    run_case,
)
from tests.parallel.ranks import run_by_size, run_each, selected
from tests.parallel.steps import RankResult, by_stage, scored_packs, train_rank
from tests.support.acceptance import some_in_acceptance

FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe", "deepseek_v3", "gpt_oss")
LAYOUTS: dict[str, Settings] = {"single": {}, "dp2-cp2": {"data": 2, "context": 2}}
VARIANTS: dict[str, tuple[str, Settings]] = {
    "cp2-partly-rotary": ("glm4_moe", {"context": 2}),
    "dp2-full-recompute": ("qwen3_moe", {"data": 2, "recompute": "full"}),
    "cp2-block-recompute": ("deepseek_v3", {"context": 2, "recompute": 1}),
    "dp2-sharded-gradients": ("qwen3", {"data": 2, "fsdp": {"accumulate": "sharded"}}),
    "dp2-kept-weights": ("qwen2", {"data": 2, "fsdp": {"reshard_after_forward": False}}),
    "dp2-offload": ("qwen3", {"data": 2, "offload": True}),
    "cp2-ring-flash-attn": ("qwen3", {"context": 2, "attention": "ring_flash_attn"}),
    "cp4": ("llama", {"context": 4}),
    "cp2-latent-ring-flash-attn": ("deepseek_v3_direct", {"context": 2, "attention": "ring_flash_attn"}),
}
IN_ACCEPTANCE = ("dp2-kept-weights", "cp4", "cp2-latent-ring-flash-attn")


def run_cases(cases: list[Case], layout: Settings, directory: Path, steps: int = STEPS) -> list[list[RankResult]]:
    """Return every rank's results, by case."""
    configs = [fsdp_config(case, directory, layout) for case in cases]
    world = configs[0].trainer.parallel.world_size
    tasks = [(config, case.packs(), case.denominator, steps) for config, case in zip(configs, cases, strict=True)]
    return [list(results) for results in run_each(train_rank, world, directory / "ranks", tasks)]


def check_case(case: Case, results: list[RankResult]) -> None:
    check_scores(case, results)
    check_loss(case, results)
    check_exported_gradients(case, results)
    for result in results:
        check_tensors(result.gradients, case.expected.gradients, GRADIENT_BOUND)
        check_changes(case, result.weights)
    check_biases(case, results)


@pytest.fixture(scope="module")
def every_family(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(layout: str) -> dict[str, list[RankResult]]:
        results = run_cases([cases(family, 2) for family in FAMILIES], LAYOUTS[layout], tmp_path_factory.mktemp(layout))
        return dict(zip(FAMILIES, results, strict=True))

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_computes_the_reference(layout: str, cases: Any, every_family: Any) -> None:
    for family, results in every_family(layout).items():
        check_case(cases(family, 2), results)


@pytest.fixture(scope="module")
def of_variants(
    request: pytest.FixtureRequest, cases: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Case, list[RankResult]]]:
    directory = tmp_path_factory.mktemp("variants")
    chosen = {name: VARIANTS[name] for (name,) in selected(request, "test_settings_do_not_change_the_result")}
    made = {name: cases(family, layers_of(layout)) for name, (family, layout) in chosen.items()}
    tasks = {
        name: (fsdp_config(case, directory, VARIANTS[name][1]), case.packs(), case.denominator, STEPS)
        for name, case in made.items()
    }
    return {name: (made[name], ranks) for name, ranks in run_by_size(train_rank, directory, tasks).items()}


@pytest.mark.parametrize("variant", some_in_acceptance(VARIANTS, IN_ACCEPTANCE.__contains__))
def test_settings_do_not_change_the_result(variant: str, of_variants: Any) -> None:
    check_case(*of_variants[variant])


def test_megatron_and_fsdp_agree(cases: Any, every_family: Any, tmp_path: Path) -> None:
    case = cases("qwen3_moe", 2)
    megatron = run_case(case, {"data": 2, "distributed": True}, tmp_path / "megatron")
    ours = every_family("dp2-cp2")["qwen3_moe"]
    for index, scored in scored_packs(megatron).items():
        other = scored_packs(ours)[index][0]
        torch.testing.assert_close(scored[0]["old_logprobs"], other["old_logprobs"], rtol=0, atol=LOGPROB_BOUND)
    theirs = to_hugging_face(by_stage(megatron, "weights"), ModelDimensions.from_checkpoint(case.checkpoint))
    changes = [
        {name: weights[name].double() - value for name, value in case.initial.items()}
        for weights in (ours[0].weights, theirs)
    ]
    check_tensors(changes[0], changes[1], UPDATE_BOUND)
    for mine, other in zip(ours[0].stats, megatron[0].stats, strict=True):
        assert mine is not None and other is not None
        for name in ("loss", "grad_norm", "moe_aux_loss", "entropy", "learning_rate"):
            assert float(getattr(mine, name)) == pytest.approx(float(getattr(other, name)), rel=2e-4), name
