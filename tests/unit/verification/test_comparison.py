"""Differences between two layouts are found and named; names of layouts and their effect."""

import io
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_like.config import ParallelConfig, RunConfig
from slime_like.errors import ConfigError, DataError
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.comparison import (
    Measurement,
    Parity,
    add_frozen_logprobs,
    add_gaps,
    compare_gradient,
    compare_measurements,
    compare_tensor,
    misplaced_tensor,
    require_fit,
    synthetic_batch,
)
from slime_like.verification.layouts import (
    DEFAULT_LAYOUTS,
    ONE_RANK,
    ROUTED_BFLOAT16,
    TOLERANCES,
    parse_layout,
    tolerances_of,
)
from slime_like.verification.verify import LayoutResult, TensorStore, print_table
from tests.conftest import Tiny
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import EXPERTS, write_checkpoint

FROZEN = ("old_logprobs", "logprobs", "ref_logprobs")
FLOAT32, BFLOAT16 = TOLERANCES["float32"], TOLERANCES["bfloat16"]
NAMES = (
    "model.embed_tokens.weight",
    "model.layers.2.self_attn.q_proj.weight",
    "model.layers.2.mlp.down_proj.weight",
    "model.layers.10.input_layernorm.weight",
    "model.norm.weight",
    "lm_head.weight",
)


@pytest.fixture(scope="module")
def batch(tiny: Tiny) -> list[ScoredTrajectory]:
    return synthetic_batch(ModelDimensions.from_checkpoint(tiny.model))


def measured(batch: list[ScoredTrajectory]) -> Measurement:
    generator = torch.Generator().manual_seed(1)
    logprobs = [-5 + torch.randn(row.response_len, generator=generator) for row in batch]
    return Measurement(logprobs, [0.5, -0.25], [3.0, 2.0])


# ------------------------------------------------------------------------------------------------------ measurements
def test_rounding_is_no_difference(batch: list[ScoredTrajectory]) -> None:
    noisy = measured(batch)
    noisy.logprobs = [logprobs + 5e-6 for logprobs in noisy.logprobs]
    noisy.loss[0] += 1e-6
    noisy.grad_norm[1] *= 1 + 1e-5
    parity = compare_measurements(noisy, measured(batch), batch, FLOAT32)
    assert parity.differences == []
    assert parity.logprob_max == pytest.approx(5e-6, rel=0.1) and parity.logprob_mean == pytest.approx(5e-6, rel=0.1)
    assert parity.loss == pytest.approx(1e-6 / 1.5) and parity.grad_norm == pytest.approx(1e-5)


@pytest.mark.parametrize("wrong", [-4.0, math.nan])
def test_the_first_wrong_token_is_named(batch: list[ScoredTrajectory], wrong: float) -> None:
    """Token 3 of sequence 5, whose prompt has 8 tokens, and a later one differ."""
    found, expected = measured(batch), measured(batch)
    found.logprobs[5][3] = wrong
    found.logprobs[9][0] += 1
    (sentence,) = compare_measurements(found, expected, batch, FLOAT32).differences
    assert sentence.startswith("logprob of sequence synthetic-5, response token 3 (position 11 of 29) is ")
    assert sentence.endswith(f"; 2 of {sum(row.response_len for row in batch)} tokens differ")


def test_wrong_figures_are_named(batch: list[ScoredTrajectory]) -> None:
    """Of a bias, each token is within bfloat16's bound, but not the mean. Of steps, the first wrong one is named."""
    found = measured(batch)
    found.logprobs = [logprobs + 0.1 for logprobs in found.logprobs]
    found.loss[1] += 2.0
    found.grad_norm[1] = math.nan
    parity = compare_measurements(found, measured(batch), batch, BFLOAT16)
    assert parity.differences == [
        "logprobs differ by 1.00e-01 nats on average, 2e-02 is allowed",
        "loss of step 2 is 1.75 instead of -0.25",
        "gradient norm of step 2 is nan instead of 2",
    ]
    assert (parity.loss, parity.grad_norm) == (pytest.approx(2.0 / 1.25), math.inf)


# ----------------------------------------------------------------------------------------------------------- tensors
def trained(name: str) -> tuple[Tensor, Tensor]:
    """Return a tensor before and after training, which moves every element by about 1e-3."""
    generator = torch.Generator().manual_seed(len(name))
    before = 0.1 * torch.randn(6, 8, generator=generator)
    return before, before + 1e-3 * torch.randn(6, 8, generator=generator).sign()


def test_tensors_that_differ_by_rounding_are_the_same() -> None:
    for tolerances, dtype in ((FLOAT32, torch.float32), (BFLOAT16, torch.bfloat16)):
        before, after = trained(NAMES[0])
        size = 1.0 if dtype == torch.float32 else 20.0  # in bfloat16 the step is larger
        after = (before + size * (after - before)).to(dtype)
        one_unit = torch.finfo(dtype).eps * after.abs() / 2
        assert compare_tensor("x", after + one_unit, after, before.to(dtype), tolerances).difference is None
        assert compare_tensor("x", after, after, before.to(dtype), tolerances).relative == 0


def test_a_perturbed_tensor_is_named_and_located() -> None:
    """One row changes by half, and in another case nothing changes."""
    name = "model.layers.2.self_attn.q_proj.weight"
    before, after = trained(name)
    halved = after.clone()
    halved[4] = before[4] + 0.5 * (after[4] - before[4])
    gap = compare_tensor(name, halved, after, before, FLOAT32)
    assert gap.relative == pytest.approx(0.5 * (1 / 6) ** 0.5, rel=1e-2)
    assert re.match(r"layer 2, self_attn\.q_proj\.weight deviates by 2\.0.*most at \[4, ", str(gap.difference))
    for tolerances in (FLOAT32, BFLOAT16):
        assert compare_tensor(name, before, after, before, tolerances).relative == pytest.approx(1.0)
    assert compare_tensor(name, before, after, before, FLOAT32).difference is not None
    assert compare_tensor(name, before, before + 20 * (after - before), before, BFLOAT16).difference is not None


def test_nan_and_another_shape_are_differences() -> None:
    before, after = trained("x")
    broken = after.clone()
    broken[1, 2] = torch.nan
    gap = compare_tensor("lm_head.weight", broken, after, before, FLOAT32)
    assert "most at [1, 2]: nan instead of" in str(gap.difference)
    shape = compare_tensor("lm_head.weight", after[:3], after, before, FLOAT32).difference
    assert shape == "lm_head.weight has the shape (3, 8) instead of (6, 8)"
    parity = Parity()
    add_gaps(parity, "weights", [compare_tensor("x", after, after, before, FLOAT32), gap])
    assert parity.weights == math.inf


def test_of_several_the_first_in_the_model_is_named() -> None:
    for first in range(len(NAMES)):
        gaps = []
        for index, name in enumerate(NAMES):
            before, after = trained(name)
            gaps.append(compare_tensor(name, before if index >= first else after, after, before, FLOAT32))
        parity = Parity()
        add_gaps(parity, "weights", gaps[::-1])
        (sentence,) = parity.differences
        assert NAMES[first].rpartition("layers.")[2].partition(".")[2] in sentence
        assert sentence.endswith(f"; {6 - first} of 6 tensors differ") == (first < 5)


def test_gradients_are_compared_by_their_norm() -> None:
    """Rounding passes, also for a tiny gradient; half of a gradient and other faults do not."""
    _, gradient = trained(NAMES[1])
    for tolerances, rounding in ((FLOAT32, 1e-5), (BFLOAT16, 1e-2)):
        same = compare_gradient(NAMES[1], gradient * (1 + rounding), gradient, 1.0, tolerances)
        assert same.difference is None and same.relative == pytest.approx(rounding, rel=1e-2)
        nothing = tolerances.gradient_floor / 100 * torch.ones(6, 8)
        assert compare_gradient(NAMES[1], -nothing, nothing, 1.0, tolerances).difference is None
        assert compare_gradient(NAMES[1], gradient / 2, gradient, 1.0, tolerances).relative == pytest.approx(0.5)
    partial = gradient.clone()
    partial[3, 5] += float(gradient.norm())
    found = compare_gradient(NAMES[1], partial, gradient, 1.0, FLOAT32).difference
    where = "the gradient of layer 2, self_attn.q_proj.weight"
    assert str(found).startswith(f"{where} deviates by 1.00e+00 of its norm; most at [3, 5]")
    assert compare_gradient(NAMES[1], gradient * torch.nan, gradient, 1.0, FLOAT32).difference is not None
    shape = compare_gradient(NAMES[1], gradient[:2], gradient, 1.0, FLOAT32).difference
    assert shape == f"{where} has the shape (2, 8) instead of (6, 8)"


def test_wrong_missing_and_extra_tensors_are_named() -> None:
    parity, gaps = Parity(), []
    for index, name in enumerate(NAMES):
        _, gradient = trained(name)
        gaps.append(compare_gradient(name, gradient * (2 if index in (1, 3) else 1), gradient, 1.0, FLOAT32))
    add_gaps(parity, "gradients", gaps[::-1])
    (sentence,) = parity.differences
    assert sentence.startswith("the gradient of layer 2, self_attn.q_proj.weight deviates by 1.00e+00")
    assert sentence.endswith("; 2 of 6 gradients differ, the last in the model is layer 10, input_layernorm.weight")
    assert parity.gradients == pytest.approx(1.0)
    parity = Parity()
    missing = misplaced_tensor("model.layers.1.mlp.up_proj.weight", "is missing")
    add_gaps(parity, "weights", [missing, misplaced_tensor("model.odd.weight", "should not exist")])
    assert parity.differences == ["layer 1, mlp.up_proj.weight is missing; 2 of 2 tensors differ"]


# ----------------------------------------------------------------------------------------------------- batch and rest
def test_the_synthetic_batch_is_the_same_every_time_and_awkward(batch: list[ScoredTrajectory]) -> None:
    assert {row.response_len for row in batch} >= {1, 64}
    assert sum(not row.loss_mask.any() for row in batch) == 1
    assert any(row.total_len % 4 for row in batch) and any(row.prompt_len > 100 for row in batch)
    scores = [{"old_logprobs": torch.full((row.response_len,), -5.0)} for row in batch]
    frozen, again = add_frozen_logprobs(batch, scores), add_frozen_logprobs(batch, scores)
    for row, other, bare in zip(frozen, again, batch, strict=True):
        for name in FROZEN:
            assert getattr(bare, name) is None
            assert torch.equal(getattr(row, name), getattr(other, name))
            assert float((getattr(row, name) + 5).abs().max()) < 1.0
        assert not torch.equal(row.old_logprobs, row.ref_logprobs)
    kept = add_frozen_logprobs(frozen[:1], [{"old_logprobs": torch.full((9,), -7.0)}])  # from a dump
    for name in FROZEN:
        assert torch.equal(getattr(kept[0], name), getattr(frozen[0], name))


def test_a_batch_of_another_model_is_rejected(batch: list[ScoredTrajectory], tmp_path: Path, rejects: Rejects) -> None:
    """The tiny model's ids are 0 to 263, and its sequences have up to 183 tokens."""
    tall = ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "tall", vocab_size=200))
    short = ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "short", max_position_embeddings=182))
    fits = ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "fits", max_position_embeddings=183))
    require_fit(batch, fits, "a.pt")
    for dimensions in (tall, short):
        with rejects(DataError, "rollouts-of-another-model"):
            require_fit(batch, dimensions, "a.pt")
    with rejects(DataError, "empty-dump"):
        require_fit([], fits, "a.pt")


def test_a_store_gives_back_what_it_was_given(tmp_path: Path) -> None:
    store = TensorStore(tmp_path / "store")
    tensors = {"a": torch.randn(3, 4).t(), "b": torch.arange(5, dtype=torch.bfloat16)}
    store.add(tensors)
    store.add({"c": torch.zeros(())})
    assert store.names == {"a", "b", "c"}
    assert torch.equal(store["a"], tensors["a"]) and torch.equal(store["b"], tensors["b"])


def test_the_table_has_a_line_per_layout_and_a_sentence_per_problem() -> None:
    rows = [
        LayoutResult("single", 1, Parity()),
        LayoutResult("tp2", 2, Parity(logprob_max=0.5, differences=["token 3 is wrong", "layer 1 is wrong"])),
        LayoutResult("tp16", 64, skipped="needs 64 ranks"),
        LayoutResult("cp2", 2, failed="rank 1 died"),
    ]
    stream = io.StringIO()
    print_table("Differences", rows, stream)
    assert [row.verdict for row in rows] == ["same", "DIFFERS", "skipped", "FAILED"]
    sentences = ["tp2: token 3 is wrong", "tp2: layer 1 is wrong", "tp16: needs 64 ranks", "cp2: rank 1 died"]
    assert stream.getvalue().splitlines()[-4:] == sentences


def test_routes_that_rounding_changed_are_no_difference(tmp_path: Path) -> None:
    """This holds only in bfloat16, and a missing half of a sum is still a difference."""
    dense = ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "dense"))
    mixture = ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "mixture", **EXPERTS))
    assert tolerances_of("float32", mixture) == FLOAT32 and tolerances_of("bfloat16", dense) == BFLOAT16
    routed = tolerances_of("bfloat16", mixture)
    assert routed == ROUTED_BFLOAT16
    parts = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    whole = parts.sum(0)
    norm = float(whole.norm())
    jumped = whole + 0.35 * parts[0]
    assert compare_gradient("w", jumped, whole, norm, routed).difference is None
    assert compare_gradient("w", jumped, whole, norm, BFLOAT16).difference is not None
    assert compare_gradient("w", parts[0], whole, norm, routed).difference is not None


def test_a_name_sets_every_axis(tmp_path: Path) -> None:
    layout = parse_layout("tp2-sp-pp4-vpp3-cp8-dp5-ep10-distributed-overlap-allgather")
    axes = {"tensor": 2, "pipeline": 4, "virtual_pipeline": 3, "context": 8, "data": 5, "expert": 10}
    assert layout.parallel == ParallelConfig(**axes, sequence=True)
    config = RunConfig(
        run_dir=tmp_path, model={"path": tmp_path}, trainer={"optimizer": {"lr": 0.5}, "head_chunk_tokens": 7}
    )
    applied = layout.apply_to(config)
    assert applied.trainer.parallel == layout.parallel
    assert applied.trainer.optimizer.distributed and applied.trainer.optimizer.overlap
    assert applied.trainer.attention == "allgather"
    assert (applied.trainer.optimizer.lr, applied.trainer.head_chunk_tokens) == (0.5, 7)
    assert config.trainer.parallel == ParallelConfig()


def test_fsdp_shards_and_one_rank_keeps_the_attention(tmp_path: Path) -> None:
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, trainer={"backend": "fsdp"})
    for name in (ONE_RANK, "dp2"):
        assert parse_layout(name).apply_to(config).trainer.optimizer.distributed
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, trainer={"attention": "allgather"})
    applied = parse_layout(ONE_RANK).apply_to(config)
    assert applied.trainer.parallel.world_size == 1 and not applied.trainer.optimizer.distributed
    assert applied.trainer.attention == "allgather"


@pytest.mark.parametrize("name", ["", "tp", "tp0", "tp2-", "tp2-tp2", "tp2-tensor", "TP2", "single-tp2", "sp-sp"])
def test_other_names_are_rejected(rejects: Rejects, name: str) -> None:
    with rejects(ConfigError, "config"):
        parse_layout(name)


def test_default_layouts_are_distinct_and_cover_every_axis() -> None:
    layouts = [parse_layout(name) for name in DEFAULT_LAYOUTS]
    assert len({(each.parallel, each.distributed, each.attention) for each in layouts}) == len(layouts)
    for axis in ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "sequence"):
        assert any(getattr(each.parallel, axis) > 1 or getattr(each.parallel, axis) is True for each in layouts), axis
    assert max(each.parallel.world_size for each in layouts) == 8
