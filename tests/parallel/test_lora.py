"""Low-rank factors under every layout agree with factors written out on transformers' float64 model.

Compared are logprobs with factors and of the frozen base without, the loss, the gradient of every A and B (neither
is 0), the factors after two AdamW steps, and merged weights. No other weight changes by a bit.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.megatron.attention import for_lora, machine_problems
from backends.megatron.model import build_meta_chunks
from backends.megatron.parallel import alone_as
from slime_like.config import RunConfig
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions
from tests.parallel.layouts import layout_of
from tests.parallel.lora import (
    LoraCase,
    check_lora,
    check_merged,
    dropout_rank,
    lora_rank,
    lora_task,
    make_lora_case,
    reference_rank,
    run_lora,
    sent,
)
from tests.parallel.parity import GRADIENT_BOUND, LOGPROB_BOUND, Settings, check_scores, check_tensors, layers_of
from tests.parallel.ranks import run_by_size, run_ranks, selected
from tests.parallel.reference import Reference
from tests.parallel.steps import assert_close
from tests.parallel.tiny import save_checkpoint
from tests.support.acceptance import some_in_acceptance

pytestmark = pytest.mark.timeout(900)  # one fork runs many cases


@pytest.fixture(scope="module")
def lora_cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, **settings: Any) -> LoraCase:
        return make_lora_case(family, tmp_path_factory.mktemp(family), **settings)

    return make


ALL: tuple[tuple[str, Any], ...] = ()
SOME = (("targets", "q_proj,v_proj,up_proj"),)
# The grouped product accepts no rows of 12 bytes, so experts are computed one after the other.
OF_RANK_3 = (("rank", 3), ("targets", "gate_proj,down_proj,k_proj"))


CASES = [
    *(("qwen3", layout, ALL) for layout in ("tp2-sp", "cp2", "dp2-distributed-overlap", "recompute-offload")),
    ("llama", "tp2-sp-pp2-vpp2-recompute", ALL),
    ("qwen3_moe", "tp2-sp-ep2", ALL),
    ("deepseek_v3", "tp2-sp", ALL),
    ("qwen3_5_moe_text", "tp2-sp", ALL),
    ("qwen3_moe", "tp2-sp", OF_RANK_3),
]
IN_ACCEPTANCE = [
    *(("qwen3", layout, ALL) for layout in ("tp2", "tp4", "pp2-vpp2")),
    ("qwen2", "pp2-recompute", ALL),
    *(("qwen3_moe", layout, ALL) for layout in ("tp2-sp", "cp2-ep2-distributed-overlap")),
    ("gemma3", "tp2-sp", ALL),
    ("deepseek_v3_direct", "pp2-dp2-ep2", ALL),
    *((family, "tp2-sp-ep2", ALL) for family in ("glm4_moe", "qwen3_next")),
    ("qwen3", "tp2-sp", SOME),
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, lora_cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run all selected layouts; return every rank's results by family, layout and settings."""
    directory, tasks = tmp_path_factory.mktemp("ranks"), {}
    for family, layout, settings in selected(request, "test_layout_computes_the_reference"):
        case = lora_cases(family, layers=layers_of(layout_of(layout)), **dict(settings))
        tasks[family, layout, settings] = lora_task(case, layout_of(layout), directory)
    return run_by_size(lora_rank, directory, tasks)


@pytest.mark.parametrize(
    ("family", "layout", "settings"), some_in_acceptance(CASES + IN_ACCEPTANCE, IN_ACCEPTANCE.__contains__)
)
def test_layout_computes_the_reference(
    family: str, layout: str, settings: tuple[tuple[str, Any], ...], lora_cases: Any, results: Any
) -> None:
    case = lora_cases(family, layers=layers_of(layout_of(layout)), **dict(settings))
    check_lora(case, results[family, layout, settings])


def test_merged_weights_are_rounded_once(lora_cases: Any, tmp_path: Path) -> None:
    case = lora_cases("qwen3")
    check_merged(case, run_lora(case, layout_of("tp2-sp"), tmp_path, dtype="bfloat16"))


def test_dropout_is_off_in_scores_and_repeats_in_recomputation(lora_cases: Any, tmp_path: Path) -> None:
    """Tensor-parallel ranks with the same inputs drop the same ones, so their parts of A's gradient agree."""
    case = lora_cases("qwen3")
    found = {}
    for name in ("single", "recompute", "tp2", "tp2-recompute"):
        results = run_lora(case, layout_of(name), tmp_path / name, dropout_rank, dropout=0.4)
        check_scores(case, results)
        gradients = [result.gradients for result in results]
        for one in gradients[1:]:
            assert_close(one, gradients[0], 0.0)
        found[name] = sent(results, "exported")
    for name, gradient in case.expected.gradients.items():
        assert float((found["single"][name] - gradient).norm()) > 0.05 * float(gradient.norm()), name
    check_tensors(found["recompute"], found["single"], GRADIENT_BOUND)
    check_tensors(found["tp2-recompute"], found["tp2"], GRADIENT_BOUND)


def test_a_reference_of_another_path_has_no_factors(lora_cases: Any, tmp_path: Path) -> None:
    case, other = lora_cases("qwen3"), save_checkpoint("qwen3", tmp_path / "other", seed=1, layers=2)
    config = case.config(tmp_path, {"tensor": 2})
    config = RunConfig(**{**dict(config), "reference": {"path": other}})
    arguments = config, case.packs(), case.factors
    reference = Reference(other, config.algorithm)
    with torch.no_grad():
        of_other = [reference.score(sequence)[0] for sequence in case.sequences]
    for before, scored, after in run_ranks(reference_rank, 2, tmp_path / "ranks", *arguments):
        assert torch.equal(before, after)
        torch.testing.assert_close(scored.double(), torch.cat(of_other), rtol=0, atol=LOGPROB_BOUND)


@pytest.mark.parametrize(
    ("layout", "lora", "code"),
    [
        ({"pipeline": 2}, {"targets": "layers.3.self_attn.q_proj"}, "stage-without-factors"),
    ],
)
def test_targets_that_cannot_be_trained_are_rejected(
    layout: Settings, lora: dict[str, Any], code: str, lora_cases: Any, rejects: Any, tmp_path: Path
) -> None:
    config = lora_cases("qwen3_moe", layers=4).config(tmp_path, layout, **lora)
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    with alone_as(config.trainer, rank=0, on_meta=True), rejects(ConfigError, code):
        build_meta_chunks(config.model, config.trainer, dimensions)


def test_factors_need_layers_that_return_their_inputs(lora_cases: Any, tmp_path: Path) -> None:
    """Transformer Engine's layers contain the norm before them."""
    case = lora_cases("qwen3")
    auto = case.config(tmp_path, {})
    assert for_lora(auto).trainer.attention == "ring"
    assert for_lora(case.config(tmp_path, {"share_prefixes": "tree"})).trainer.attention == "allgather"
    assert for_lora(case.config(tmp_path, {}, rank=None, alpha=32.0)).trainer.attention == "auto"
    asked = auto.trainer.model_copy(update={"attention": "transformer_engine"})
    assert any("does not support model.lora" in problem for problem in machine_problems(asked, auto.model, True))
