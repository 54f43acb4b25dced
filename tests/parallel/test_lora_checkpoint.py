"""Checkpoints and PEFT directories of low-rank factors: exact in every layout, without the base, and for PEFT.

Factors are trained for two steps, so neither is 0. What another layout or PEFT reads is compared bit for bit with what
the trainer exported.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement, load_backend
from slime_like.interfaces.conversion import ConversionOptions
from slime_like.weights.adapter import factor_names
from tests.parallel.checkpoints import (
    RankRecord,
    checkpoint_config,
    load_and_continue,
    merged_records,
    save_and_continue,
)
from tests.parallel.ranks import run_by_size, run_ranks, selected
from tests.parallel.steps import as_critic, assert_close, exported_from, running, same_bits
from tests.parallel.tiny import save_checkpoint
from tests.parallel.towers import tensors_of
from tests.support.acceptance import some_in_acceptance

pytestmark = pytest.mark.timeout(900)  # one fork runs many cases

RANK, ALPHA = 4, 6.0


def _config(model: Path, run_dir: Path, layout: str, dtype: str = "float32", **lora: Any) -> RunConfig:
    settings = {"rank": RANK, "alpha": ALPHA, "sync": "adapter", **lora}
    return checkpoint_config(model, run_dir, layout, dtype, lora=settings)


def _run(function: Any, config: RunConfig, directory: Path, *arguments: Any) -> list[Any]:
    return run_ranks(function, config.trainer.parallel.world_size, directory, config, *arguments)


class SavedLora:
    """A run's configuration, its checkpoint and PEFT directory, and its factors then and after another step."""

    def __init__(self, root: Path, family: str, layout: str, **settings: Any) -> None:
        self.model = save_checkpoint(family, root, layers=4 if family == "qwen3" else 2)
        self.config = _config(self.model, root, layout, **settings)
        self.directory = root / "checkpoint"
        records = _run(save_and_continue, self.config, root / "ranks", self.directory)
        self.factors, self.later = (merged_records(records, what) for what in ("at_checkpoint", "later"))


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def save(family: str, layout: str, **settings: Any) -> SavedLora:
        return SavedLora(tmp_path_factory.mktemp(f"{family}-{layout}"), family, layout, **settings)

    return save


CONTINUED = [
    ("qwen3", "tp2-sp-dp2-distributed", "tp2-sp-dp2-distributed"),
    ("qwen3", "tp2-sp-dp2-distributed", "pp2-vpp2-distributed"),
    ("qwen3", "tp2-sp-dp2-distributed", "single-distributed"),
    ("qwen3", "tp2", "single"),
    ("qwen3_moe", "dp2-ep2-distributed", "dp2-ep2-distributed"),
    ("qwen3_moe", "dp2-ep2-distributed", "tp2-sp-distributed"),
    ("qwen3_moe", "dp2-ep2-distributed", "single-distributed"),
    ("qwen3", "fsdp-dp2", "fsdp"),
    ("qwen3_moe", "fsdp-dp2", "fsdp-dp2"),
]
"""Families, and layouts that write and read."""
IN_ACCEPTANCE = [
    ("qwen3", "tp2-sp-dp2-distributed", "single-distributed"),
    ("qwen3", "tp2", "single"),
    ("qwen3_moe", "dp2-ep2-distributed", "single-distributed"),
]


@pytest.fixture(scope="module")
def loaded(
    request: pytest.FixtureRequest, saved_by: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, list[RankRecord]]:
    root, tasks = tmp_path_factory.mktemp("loads"), {}
    for family, wrote, reads in selected(request, "test_every_layout_continues"):
        saved = saved_by(family, wrote)
        tasks[family, wrote, reads] = _config(saved.model, root, reads), saved.directory / "trainer"
    return run_by_size(load_and_continue, root, tasks)


@pytest.mark.parametrize(("family", "wrote", "reads"), some_in_acceptance(CONTINUED, IN_ACCEPTANCE.__contains__))
def test_every_layout_continues(family: str, wrote: str, reads: str, saved_by: Any, loaded: Any) -> None:
    saved, found = saved_by(family, wrote), loaded[family, wrote, reads]
    same_bits(merged_records(found, "at_checkpoint"), saved.factors)
    assert all(float(tensor.abs().max()) > 0 for tensor in saved.factors.values())
    if reads == wrote:
        same_bits(merged_records(found, "later"), saved.later)
    else:  # Ranks are summed in another order, and AdamW divides by small second moments.
        assert_close(merged_records(found, "later"), saved.later, 1e-3)


@pytest.mark.parametrize("layout", ["tp2-sp-dp2-distributed", "fsdp-dp2"])
def test_the_base_is_not_on_disk(layout: str, saved_by: Any) -> None:
    """Only factors and their optimizer state are stored: weights, main weights or masters, and two moments."""
    saved = saved_by("qwen3", layout)
    stored = json.loads((saved.directory / "trainer" / "checksums.json").read_text())["content"]["pieces"]
    pieces = [piece for file in stored.values() for piece in file if not piece[0].startswith("random")]
    assert pieces and all("added" in piece[0] for piece in pieces)


@pytest.mark.parametrize("layout", ["pp2-vpp2-distributed", "fsdp-dp2"])
@pytest.mark.parametrize("source", ["path", "weights"])
def test_training_starts_from_an_adapter_or_a_checkpoint(
    source: str, layout: str, saved_by: Any, tmp_path: Path
) -> None:
    saved = saved_by("qwen3", "fsdp-dp2" if "fsdp" in layout else "tp2-sp-dp2-distributed")
    config = _config(saved.model, tmp_path, layout)
    given = {"lora": {"path": saved.directory / "hf", "sync": "adapter"}}
    given = given if source == "path" else {"lora": config.model.lora, "weights": saved.directory}
    model = {"path": saved.model, "dtype": "float32", **given}
    config = RunConfig.model_validate({**config.model_dump(), "model": model})
    assert config.model.lora.rank == RANK and config.model.lora.alpha == ALPHA
    found = {name: one for part in _run(_start, config, tmp_path / "ranks") for name, one in part.items()}
    same_bits(found, saved.factors)


def _start(placement: RankPlacement, config: RunConfig) -> dict[str, Tensor]:
    with running(placement, config) as trainer:
        return exported_from(trainer)


@pytest.mark.parametrize("layout", ["tp2-sp", "fsdp-dp2"])
def test_a_critic_starts_from_the_merged_adapter(layout: str, saved_by: Any, tmp_path: Path) -> None:
    saved = saved_by("qwen3", "fsdp-dp2" if "fsdp" in layout else "tp2-sp-dp2-distributed")
    config = _config(saved.model, tmp_path, layout)
    model = {"path": saved.model, "dtype": "float32", "lora": {"path": saved.directory / "hf"}}
    algorithm = {"advantage": "gae", "kl": {"coef": 0.0}}
    config = RunConfig.model_validate({**config.model_dump(), "model": model, "algorithm": algorithm})
    found = _run(_start_critic, config.for_critic(), tmp_path / "ranks")[0]
    expected = {name: weight for name, weight in _products(saved).items() if name != "lm_head.weight"}
    assert_close({name: found[name] for name in expected}, expected, 1e-6)


def _start_critic(placement: RankPlacement, config: RunConfig) -> dict[str, Tensor]:
    return _start(as_critic(placement), config)


# ------------------------------------------------------------------------------------------------------- other programs
def converted(saved: SavedLora, output: Path, **options: Any) -> Path:
    """Convert the run's checkpoint as ``slime-like convert to-hf`` does."""
    config = saved.config
    converter = load_backend(config.trainer.backend).converter(config.model, config.trainer)
    settings = ConversionOptions("auto", 100_000, 2, False, **options)
    converter.to_hugging_face(saved.directory / "trainer", output, settings, lambda done, total: None)
    return output


def _products(saved: SavedLora) -> dict[str, Tensor]:
    """Return the base's weights in float64, with the products of the factors added."""
    weights = {name: weight.double() for name, weight in load_file(saved.model / "model.safetensors").items()}
    for name in weights:
        a, b = factor_names(name)
        if a in saved.factors:
            weights[name] += ALPHA / RANK * (saved.factors[b].double() @ saved.factors[a].double())
    return weights


TOKENS = torch.arange(40).view(2, 20)


@torch.no_grad()
def expected_logits(saved: SavedLora) -> Tensor:
    """Return the logits of transformers' model with the products written into its weights, in float64."""
    model = AutoModelForCausalLM.from_pretrained(saved.model, dtype=torch.float64)
    base = model(TOKENS).logits
    model.load_state_dict(_products(saved), strict=False)
    assert float((model(TOKENS).logits - base).abs().max()) > 0.1
    return model(TOKENS).logits


@torch.no_grad()
def check_adapter(saved: SavedLora, adapter: Path, expected: Tensor) -> None:
    """Compare what PEFT computes with the adapter."""
    model = AutoModelForCausalLM.from_pretrained(saved.model, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).double()
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-9)


@torch.no_grad()
def check_whole(merged: Path, expected: Tensor) -> None:
    """Compare what transformers computes with the merged model, whose sums are rounded to float32."""
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["tp2-sp-dp2-distributed", "fsdp-dp2"])
def test_peft_computes_what_was_trained(layout: str, saved_by: Any, tmp_path: Path) -> None:
    """PEFT loads the exported and the converted adapter; transformers loads the merged model."""
    saved = saved_by("qwen3", layout)
    expected = expected_logits(saved)
    check_adapter(saved, saved.directory / "hf", expected)
    check_adapter(saved, converted(saved, tmp_path / "peft"), expected)
    check_whole(converted(saved, tmp_path / "merged", merge=True), expected)


def test_layers_may_have_different_targets(saved_by: Any, tmp_path: Path) -> None:
    targets = "layers.1.mlp.up_proj,q_proj"
    saved = saved_by("qwen3", "tp2", targets=targets)
    assert len(saved.factors) == 2 * (4 + 1)
    config = _config(saved.model, tmp_path, "single", targets=targets)
    records = _run(load_and_continue, config, tmp_path / "ranks", saved.directory / "trainer")
    same_bits(merged_records(records, "at_checkpoint"), saved.factors)
    check_adapter(saved, saved.directory / "hf", expected_logits(saved))
    check_whole(converted(saved, tmp_path / "merged", merge=True), expected_logits(saved))


@pytest.mark.parametrize("layout", ["dp2-ep2-distributed", "fsdp-dp2"])
def test_factors_of_experts_are_exported_and_merged(layout: str, saved_by: Any, tmp_path: Path) -> None:
    saved = saved_by("qwen3_moe", layout)
    for adapter in (saved.directory / "hf", converted(saved, tmp_path / "peft")):
        same_bits(load_file(adapter / "adapter_model.safetensors"), saved.factors)
        assert json.loads((adapter / "adapter_config.json").read_text())["target_modules"] == sorted(
            [f"{name}_proj" for name in ("k", "mlp.experts.down", "mlp.experts.gate", "mlp.experts.up", "o", "q", "v")]
        )
    merged = tensors_of(converted(saved, tmp_path / "merged", merge=True))
    assert_close(merged, _products(saved), 1e-6)
    assert any(".experts." in name for name in saved.factors)


def test_a_merged_weight_is_rounded_once(saved_by: Any, tmp_path: Path) -> None:
    saved = saved_by("qwen3", "tp2", dtype="bfloat16")
    merged = tensors_of(converted(saved, tmp_path / "merged", merge=True))
    base = load_file(saved.model / "model.safetensors")
    for name, weight in base.items():
        a, b = factor_names(name)
        expected = weight.bfloat16().double()
        if a in saved.factors:
            expected = expected + ALPHA / RANK * (saved.factors[b].double() @ saved.factors[a].double())
        # A float32 product may fall on the other side of a middle between two numbers.
        assert merged[name].dtype == torch.bfloat16
        assert float((merged[name] != expected.bfloat16()).double().mean()) < 1e-3, name
