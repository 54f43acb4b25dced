"""Low-rank factors under every layout of both backends agree with factors written out on transformers' float64 model.

Compared are logprobs with factors and of the frozen base without, the loss, the gradient of every A and B (neither
is 0), the factors after two AdamW steps, and merged weights. No other weight changes by a bit. Not covered here: CUDA.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from backends.fsdp.checkpoint import open_stored
from backends.megatron.attention import for_lora, machine_problems
from backends.megatron.model import build_meta_chunks
from backends.megatron.parallel import alone_as
from slime_like.config import RunConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import ModelDimensions
from tests.parallel.checkpoints import step_of_four, two_seeded_steps
from tests.parallel.checks import GRADIENT_BOUND, LOGPROB_BOUND, check_merged, check_scores, check_tensors, sent
from tests.parallel.features import dropout_rank, masters_of, reference_rank
from tests.parallel.harness import Row, case_of, check, parameters, rows, run_case
from tests.parallel.layouts import layout_of
from tests.parallel.ranks import run_by_size, run_each, run_ranks
from tests.parallel.reference import Reference
from tests.parallel.steps import assert_close, running, same_bits
from tests.parallel.tiny import save_checkpoint

pytestmark = pytest.mark.timeout(900)  # one fork runs many cases

OF_TWO = (("targets", "q_proj,v_proj,up_proj"),)
# The grouped product accepts no rows of 12 bytes, so experts are computed one after the other.
OF_RANK_3 = (("rank", 3), ("targets", "gate_proj,down_proj,k_proj"))
SOME = (("rank", 3), ("targets", "q_proj,gate_proj,down_proj"))
"""A rank of 3 suits no grouped product, and the second of two ranks has fewer rows of A."""

ROWS = [
    *rows("lora", {"qwen3": ("tp2-sp", "cp2", "dp2-distributed-overlap", "recompute-offload")}),
    *rows("lora", {"llama": ("pp2-vpp2-recompute",), "qwen3_moe": ("tp2-sp-ep2",)}),
    *rows("lora", {"llama": ("tp2-sp-pp2-vpp2-recompute",)}, True),
    *rows("lora", dict.fromkeys(("deepseek_v3", "qwen3_5_moe_text"), ("tp2-sp",))),
    *rows("lora", {"qwen3_moe": ("tp2-sp",)}, False, *OF_RANK_3),
    *rows("lora", {"qwen3": ("tp2", "tp4", "pp2-vpp2"), "qwen2": ("pp2-recompute",), "gemma3": ("tp2-sp",)}, True),
    *rows("lora", {"qwen3_moe": ("tp2-sp", "cp2-ep2-distributed-overlap")}, True),
    *rows("lora", {"deepseek_v3_direct": ("pp2-dp2-ep2",)}, True),
    *rows("lora", dict.fromkeys(("glm4_moe", "qwen3_next"), ("tp2-sp-ep2",)), True),
    *rows("lora", {"qwen3": ("tp2-sp",)}, True, *OF_TWO),
    *rows("lora", {"gpt_neox": ("fsdp-dp2",), "deepseek_v3": ("fsdp-cp2",)}),
    *rows("lora", {"qwen3": ("fsdp-dp2",), "qwen3_5_text": ("fsdp-cp2",)}, True),
    *rows("lora", {"qwen3_moe": ("fsdp",)}, False, *SOME),
    *rows("lora", {"qwen3": ("fsdp-cp2-recompute", "fsdp-dp2-sharded")}, False, *SOME),
    *rows("lora", {"qwen3": ("fsdp",), "qwen3_moe": ("fsdp-dp2",)}, True),
    *rows("lora", {"qwen3_moe": ("fsdp-dp2-host",), "qwen3": ("fsdp-dp2-kept",)}, True, *SOME),
]
ROUNDED = [
    *rows("lora", {"qwen3": ("tp2-sp-bfloat16",)}),
    *rows("lora", {"qwen3_moe": ("fsdp-dp2-bfloat16",)}, False, *SOME),
]


@parameters(ROWS)
def test_layout_computes_the_reference(row: Row, cases: Any, results: Any) -> None:
    check(row, cases, results)


@parameters(ROUNDED)
def test_merged_weights_are_rounded_once(row: Row, cases: Any, results: Any) -> None:
    check_merged(case_of(row, cases), results[row])


def test_dropout_is_off_in_scores_and_repeats_in_recomputation(cases: Any, tmp_path: Path) -> None:
    """Tensor-parallel ranks with the same inputs drop the same ones, so their parts of A's gradient agree."""
    case = cases("lora", "qwen3")
    found = {}
    for name in ("single", "recompute", "tp2", "tp2-recompute"):
        results = run_case(case, layout_of(name), tmp_path / name, dropout_rank, dropout=0.4)
        check_scores(case, results)
        gradients = [result.gradients for result in results]
        for one in gradients[1:]:
            assert_close(one, gradients[0], 0.0)
        found[name] = sent(results, "exported")
    for name, gradient in case.expected.gradients.items():
        assert float((found["single"][name] - gradient).norm()) > 0.05 * float(gradient.norm()), name
    check_tensors(found["recompute"], found["single"], GRADIENT_BOUND)
    check_tensors(found["tp2-recompute"], found["tp2"], GRADIENT_BOUND)


def test_a_reference_of_another_path_has_no_factors(cases: Any, tmp_path: Path) -> None:
    case, other = cases("lora", "qwen3"), save_checkpoint("qwen3", tmp_path / "other", seed=1, layers=2)
    config = case.config(tmp_path, {"tensor": 2})
    config = RunConfig(**{**dict(config), "reference": {"path": other}})
    arguments = config, case.packs(), case.factors
    reference = Reference(other, config.algorithm)
    with torch.no_grad():
        of_other = [reference.score(sequence)[0] for sequence in case.sequences]
    for before, scored, after in run_ranks(reference_rank, 2, tmp_path / "ranks", *arguments):
        assert torch.equal(before, after)
        torch.testing.assert_close(scored.double(), torch.cat(of_other), rtol=0, atol=LOGPROB_BOUND)


def test_a_stage_without_factors_is_rejected(cases: Any, rejects: Any, tmp_path: Path) -> None:
    config = cases("lora", "qwen3_moe", layers=4).config(tmp_path, {"pipeline": 2}, targets="layers.3.self_attn.q_proj")
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    with alone_as(config.trainer, rank=0, on_meta=True), rejects(ConfigError, "stage-without-factors"):
        build_meta_chunks(config.model, config.trainer, dimensions)


def test_factors_need_layers_that_return_their_inputs(cases: Any, tmp_path: Path) -> None:
    """Transformer Engine's layers contain the norm before them."""
    case = cases("lora", "qwen3")
    auto = case.config(tmp_path, {})
    assert for_lora(auto).trainer.attention == "ring"
    assert for_lora(case.config(tmp_path, {"share_prefixes": "tree"})).trainer.attention == "allgather"
    assert for_lora(case.config(tmp_path, {}, rank=None, alpha=32.0)).trainer.attention == "auto"
    asked = auto.trainer.model_copy(update={"attention": "transformer_engine"})
    assert any("does not support model.lora" in problem for problem in machine_problems(asked, auto.model, True))


# ------------------------------------------------------------------------------------------------------------ of FSDP
def test_dropout_of_fsdp_acts_only_in_training_and_alike_when_recomputed(cases: Any, tmp_path: Path) -> None:
    case = cases("lora", "qwen3_moe", options=SOME)
    settings = {"plain": ("fsdp", 0.5), "again": ("fsdp-recompute", 0.5), "without": ("fsdp", 0.0)}
    tasks = {name: case.task(tmp_path, layout_of(layout), dropout=share) for name, (layout, share) in settings.items()}
    found = {name: each for name, (each,) in run_by_size(dropout_rank, tmp_path / "ranks", tasks).items()}
    for scores, expected in zip(found["plain"].scored, found["without"].scored, strict=True):
        same_bits(scores, expected)
    dropped, without = found["plain"].exported, found["without"].exported
    same_bits(found["again"].exported, dropped)
    assert all(not torch.equal(dropped[name], gradient) for name, gradient in without.items() if gradient.any())


def _continued(placement: RankPlacement, config: RunConfig, directory: Path, saves: bool) -> list[Any]:
    """Save after two steps, or load after one, and step once more. Return factors before and after, and a number."""
    with running(placement, config) as trainer:
        if saves:
            two_seeded_steps(trainer, placement)
            trainer.save(directory)
        else:
            step_of_four(trainer)
            trainer.load(directory)
        drawn, before = torch.rand(1), masters_of(trainer)
        step_of_four(trainer)
        return [drawn, before, masters_of(trainer)]


def test_only_factors_are_saved_and_continue_bit_for_bit(cases: Any, tmp_path: Path) -> None:
    """Dropout continues, too, with the random numbers of the checkpoint."""
    case = cases("lora", "qwen3_moe", options=SOME)
    config = case.config(tmp_path, layout_of("fsdp-dp2-bfloat16"), dropout=0.2)
    saved, loaded = run_each(
        _continued, 2, tmp_path / "ranks", [(config, tmp_path / "c", saves) for saves in (True, False)]
    )
    for one, other in zip(saved, loaded, strict=True):
        assert torch.equal(one[0], other[0])
        same_bits(other[1], one[1])
        same_bits(other[2], one[2])
    before, after = saved[0][1:]
    assert before.keys() == case.factors.keys() and all(not torch.equal(before[name], after[name]) for name in before)
    stored = open_stored(tmp_path / "c").tensors
    names = {name.partition(".added.")[0] for name in stored if ".added." in name}
    assert {name for name in stored if ".added." not in name} == {"random.0.cpu", "random.1.cpu"}
    assert {name.split(".model.")[0] for name in names} == {"model", "optimizer.exp_avg", "optimizer.exp_avg_sq"}
    single = case.config(tmp_path, layout_of("fsdp-bfloat16"), dropout=0.2)
    ((found,),) = run_each(_continued, 1, tmp_path / "single", [(single, tmp_path / "c", False)])
    same_bits(found[1], before)
