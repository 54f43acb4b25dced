"""Products in FP8 (``trainer.fp8``): Megatron's settings, padding, the plan and, in ``scripts/test_te.sh``, results.

There, Transformer Engine's layers are compared with ours, whose products take factors rounded by the recipes and are
computed in float64. Both run with the same ranks, because scales and blocks belong to a rank's part of a tensor.
"""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from backends.common.trainer.base import TrainerBase
from backends.megatron import micro_batch
from backends.megatron import model as construction
from backends.megatron.attention import machine_problems
from backends.megatron.head import ScoredLayer
from backends.megatron.model import transformer_config
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig, TrainerConfig
from slime_like.interfaces import RankPlacement, load_backend
from tests.parallel import tiny
from tests.parallel.cases import parity_config
from tests.parallel.checks import sent
from tests.parallel.feature_cases import FEATURES
from tests.parallel.layouts import Settings
from tests.parallel.ranks import run_by_size, run_each
from tests.parallel.steps import RankResult, exported_from, running, same_bits, scored_packs, take_step, train_rank
from tests.parallel.taken import planned_config
from tests.parallel.test_transformer_engine import IS_REAL, _install
from tests.parallel.tiny import save_checkpoint, scored_sequences
from tests.unit.backends.models import PUBLISHED

Recipe = Literal["current", "blockwise"]


def test_megatron_gets_the_recipe() -> None:
    def found(**settings: Any) -> Any:
        model = RunConfig(run_dir="/tmp/none", model={"path": "/tmp/none"}).model
        return transformer_config(model, TrainerConfig(**settings), PUBLISHED["Qwen3-32B"])

    plain, tensors, blocks = (found(fp8=recipe) for recipe in ("none", "current", "blockwise"))
    assert plain.fp8 is None and not plain.disable_parameter_transpose_cache
    assert (tensors.fp8, tensors.fp8_recipe) == ("hybrid", "tensorwise")
    assert (blocks.fp8, blocks.fp8_recipe) == ("e4m3", "blockwise")
    for each in (tensors, blocks):  # weights, attention and the first and last layers keep their types
        assert not (each.fp8_param or each.fp8_dot_product_attention or each.first_last_layers_bf16)
        assert each.fp8_wgrad and each.disable_parameter_transpose_cache
    kept = found(fp8="blockwise", fp8_bf16_layers=2)
    assert kept.first_last_layers_bf16
    assert (kept.num_layers_at_start_in_bf16, kept.num_layers_at_end_in_bf16) == (2, 2)


def test_a_machine_without_a_gpu_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_like.checks.packages.has_transformer_engine", lambda: True)
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, trainer={"fp8": "current"}, **CORRECTED)
    (problem,) = machine_problems(config.trainer, config.model, on_cuda=False)
    assert problem.startswith("trainer.fp8=current needs a GPU")
    for capability, problems in (((8, 9), 1), ((9, 0), 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        monkeypatch.setattr("backends.megatron.attention.missing_compiler", lambda on_cuda: ())
        assert len(machine_problems(config.trainer, config.model, on_cuda=True)) == problems


CORRECTED: dict[str, Any] = {"algorithm": {"importance": {"correction": "truncate"}}}


# ------------------------------------------------------------------------------------------------------------- the plan
def test_the_plan_counts_rounded_weights_and_products(tmp_path: Path) -> None:
    """Each of two layers has 64 hidden units, 4 + 2 * 2 heads of 32 elements and 96 columns."""
    model = save_checkpoint("qwen3", tmp_path / "model", layers=2)
    estimate = load_backend("megatron").planner().estimate

    weights, tokens = 2 * (64 * 256 + 128 * 64 + 64 * 192 + 96 * 64), 608

    def planned(recipe: str, edges: int = 0, recompute: str = "none") -> Any:
        settings: dict[str, Any] = {"target_tokens_per_batch": tokens, "recompute": recompute}
        config = planned_config("megatron", model, tmp_path, **settings)
        trainer = config.trainer.model_copy(update={"fp8": recipe, "fp8_bf16_layers": edges})
        return estimate(config.model_copy(update={"trainer": trainer}), 0)

    inputs, outputs = 2 * tokens * (64 + 128 + 64 + 96), 2 * tokens * (256 + 64 + 192 + 64)
    plain, rounded = planned("none"), planned("current")
    kept = 2 * weights - 2 * tokens * (64 + 64 + 96)
    for name in ("activation_bytes", "saved_bytes"):
        assert getattr(rounded.memory, name) - getattr(plain.memory, name) == kept
    assert rounded.forward.kernel_bytes - plain.forward.kernel_bytes == 4 * (weights + inputs)
    assert rounded.training.kernel_bytes - plain.training.kernel_bytes == 4 * (weights + inputs + outputs)
    assert plain.forward.fp8_share == 0 and 0.9 < rounded.forward.fp8_share == rounded.training.fp8_share <= 1
    assert planned("current", recompute="full").memory == planned("none", recompute="full").memory
    edges = planned("current", edges=1)
    assert (edges.memory, edges.training) == (plain.memory, plain.training)


# ------------------------------------------------------------------------------------------------- the recipes' results
def _scale(largest: Tensor, kind: torch.dtype, powers: bool) -> Tensor:
    scale = torch.finfo(kind).max / largest.float()
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    return 2.0 ** scale.log2().floor() if powers else scale


def _rounded(x: Tensor, recipe: Recipe, kind: torch.dtype, block: tuple[int, int]) -> Tensor:
    """Return the matrix in float64, rounded with one scale, or with one for each ``block``."""
    out, (down, across) = torch.empty(x.shape, dtype=torch.float64), x.shape if recipe == "current" else block
    for row in range(0, x.shape[0], down):
        for column in range(0, x.shape[1], across):
            part = slice(row, row + down), slice(column, column + across)
            scale = _scale(x[part].abs().max(), kind, recipe == "blockwise")
            out[part] = (x[part].float() * scale).to(kind).double() / scale.double()
    return out


class _Product(torch.autograd.Function):
    """x @ w.T with rounded factors in both passes. Each pass rounds along the axis that its product sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, rows = recipe, x.reshape(-1, x.shape[-1])
        kind = torch.float8_e4m3fn
        out = _rounded(rows, recipe, kind, (1, 128)) @ _rounded(weight, recipe, kind, (128, 128)).t()
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, weight), recipe, kind = ctx.saved_tensors, ctx.recipe, torch.float8_e4m3fn
        of_gradient = torch.float8_e5m2 if recipe == "current" else kind
        rows, sent = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        of_rows = _rounded(sent, recipe, of_gradient, (1, 128)) @ _rounded(weight, recipe, kind, (128, 128))
        columns = _rounded(sent, recipe, of_gradient, (128, 1)).t() @ _rounded(rows, recipe, kind, (128, 1))
        return of_rows.to(x.dtype).view(x.shape), columns.to(weight.dtype), None


def _reference(placement: RankPlacement, config: RunConfig, recipe: Recipe, *arguments: Any) -> RankResult:
    """Train with our layers and rounded factors, of all tokens that Transformer Engine computes."""

    def product(
        self: Any, input: Tensor, weight: Tensor, bias: Tensor | None, allreduce_dgrad: bool, sequence_parallel: bool,
        **unused: Any,
    ) -> Tensor:  # fmt: skip
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=self.tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        out = _Product.apply(input, weight, recipe)
        return out if bias is None else out + bias.bfloat16()  # type: ignore[no-any-return]

    alignment, trainer = micro_batch.fp8_alignment, config.trainer
    as_recipe = trainer.model_copy(update={"fp8": recipe})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "fp8_alignment", lambda _: alignment(as_recipe))
        patch.setattr(ScoredLayer, "scores", property(lambda self: False, lambda self, value: None), raising=False)
        patch.setattr(ColumnParallelLinear, "_forward_impl", product)
        patch.setattr(RowParallelLinear, "_forward_impl", product)
        return train_rank(placement, config, *arguments)


def _trained(placement: RankPlacement, config: RunConfig, recipe: Recipe, *arguments: Any) -> RankResult:
    """Train with Transformer Engine's layers. Training starts from the logprobs of scoring, bit for bit."""
    _install()
    seen: list[Tensor] = []
    correct = TrainerBase.loss_inputs

    def inputs(self: Any, batch: Any, *outputs: Tensor) -> Any:
        seen.append(outputs[0].detach().float())
        return correct(self, batch, *outputs)

    changes = {"fp8": recipe, "attention": "transformer_engine"}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerBase, "loss_inputs", inputs)
        result = train_rank(placement, config, *arguments)
    if result.scored is not None:
        for scored, trained in zip(result.scored, seen, strict=False):
            assert torch.equal(scored["old_logprobs"], trained)
    return result


def _keeping(*arguments: Any) -> RankResult:
    """Train with layers that keep rounded weights, and so overwrite the gradient of a step's first window."""
    with pytest.MonkeyPatch.context() as patch:
        settings = construction._fp8
        patch.setattr(
            construction, "_fp8", lambda trainer: settings(trainer) | {"disable_parameter_transpose_cache": False}
        )
        return _trained(*arguments)


RUNS = {"plain": train_rank, "reference": _reference, "trained": _trained, "kept": _keeping}


def _run(placement: RankPlacement, config: RunConfig, kind: str, recipe: Recipe, *arguments: Any) -> RankResult:
    return RUNS[kind](placement, config, *((recipe,) if kind != "plain" else ()), *arguments)


REAL_ROWS: list[tuple[str, Settings, Recipe]] = [
    ("qwen3", {}, "current"),
    ("qwen3", {}, "blockwise"),
    ("qwen3", {"recompute": "full"}, "current"),
    ("qwen2", {"tensor": 2, "sequence": True}, "current"),
    ("qwen2", {"tensor": 2, "sequence": True}, "blockwise"),
    ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 2}, "blockwise"),
    ("qwen3", {"pipeline": 2, "tensor": 2}, "blockwise"),
    ("qwen3", {"context": 2}, "blockwise"),
]


@pytest.mark.skipif(not IS_REAL, reason="for scripts/test_te.sh")
@pytest.mark.parametrize(("family", "layout", "recipe"), REAL_ROWS)
def test_products_round_as_the_recipe_says(
    family: str, layout: Settings, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several blocks of 128, of which the last is not whole. Rounding itself is far above the bounds."""
    monkeypatch.setitem(tiny.SIZES, "hidden_size", 192)
    monkeypatch.setitem(tiny.SIZES, "intermediate_size", 320)
    case = FEATURES["plain"](family, tmp_path, 1, 2)
    ring = case.task(tmp_path, {**layout, "attention": "ring"})
    kinds = [kind for kind in RUNS if kind != "kept" or (family == "qwen3" and not layout)]
    found = run_by_size(_run, tmp_path / "ranks", {kind: (ring[0], kind, recipe, *ring[1:]) for kind in kinds})
    gaps = {kind: _gaps(results, found["reference"]) for kind, results in found.items()}
    assert gaps["trained"][0] < 1e-5 < 1e-1 < min(gaps["plain"])
    bounds = {"current": (1e-3, 3e-2), "blockwise": (2e-4, 2e-4)}[recipe]
    assert gaps["trained"][1] < bounds[0] and gaps["trained"][2] < bounds[1]
    if family == "qwen3" and not layout:
        assert gaps["kept"][0] < 1e-5 < 1e-1 < gaps["kept"][2]


def _gaps(found: list[RankResult], expected: list[RankResult]) -> tuple[float, float, float]:
    """Return the largest gap of a logprob, and those of the last layer's gradient and the whole one's, relative to
    their norms.

    Where sums in another order move a gradient over the middle between two numbers of FP8, it changes by a quarter, and
    with it a part of what is rounded after it. So the bound on earlier layers is a tenth of the effect of rounding.
    """
    scores, wanted = scored_packs(found), scored_packs(expected)
    logprobs = [(scores[n][0]["old_logprobs"] - one[0]["old_logprobs"]).abs().max() for n, one in wanted.items()]
    gradients, right = sent(found, "exported"), sent(expected, "exported")
    assert gradients.keys() == right.keys()
    off = {name: torch.stack([(gradients[name] - each).norm(), each.norm()]) for name, each in right.items()}
    last = {name: pair for name, pair in off.items() if ".layers.1." in name}
    relative = [torch.stack(list(each.values())).norm(dim=0).tolist() for each in (last, off)]
    return float(max(logprobs)), *(gap / norm for gap, norm in relative)


def _updated(placement: RankPlacement, config: RunConfig, packs: Any, save: Path | None, load: Path | None) -> Any:
    """Return the weights after two updates with a save between them, or after loading that save and the second one."""
    _install()
    changes = {"fp8": "current", "attention": "transformer_engine"}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
    with running(placement, config) as trainer:
        if load is not None:
            trainer.load(load)
        if save is not None:
            take_step(trainer, packs, 6.0, last=True)
            trainer.save(save)
        take_step(trainer, packs, 6.0, last=True)
        return exported_from(trainer)


@pytest.mark.skipif(not IS_REAL, reason="for scripts/test_te.sh")
def test_a_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    model = save_checkpoint("qwen3", tmp_path / "model", layers=2)
    config, packs = parity_config(model, tmp_path, {}), [pack_sequences(scored_sequences([(5, 9), (11, 2)]))]
    saved = tmp_path / "saved"
    tasks = [(config, packs, saved, None), (config, packs, None, saved)]
    (expected,), (found,) = run_each(_updated, 1, tmp_path / "ranks", tasks)
    same_bits(found, expected)
