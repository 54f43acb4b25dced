"""Our use of Megatron's layer spec for Transformer Engine, with stand-ins for its modules, which exist for CUDA only.

Covered: the inputs of layers and attention, Hugging Face names, and that each spec reads the other's checkpoints.
``scripts/test_te.sh`` runs these tests, and layouts for which there are no stand-ins, with the real modules above
kernels for a CPU.
"""

import os
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from backends.megatron import attention, checkpoint, trainer
from backends.megatron import model as construction
from backends.megatron.attention import attention_of, context_layout_of, machine_problems, uses_transformer_engine
from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.checks.packages import has_transformer_engine
from slime_like.config import RunConfig, TrainerConfig
from slime_like.interfaces import RankPlacement
from tests.parallel.cases import Case, parity_config
from tests.parallel.checks import check_changes, check_exported_gradients, check_loss, check_scores, sent
from tests.parallel.harness import run_case
from tests.parallel.layouts import Settings
from tests.parallel.ranks import run_each
from tests.parallel.steps import RankResult, assert_close, exported_from, running, take_step, train_rank
from tests.parallel.tiny import save_checkpoint as save_tiny
from tests.parallel.tiny import scored_sequences, stacked_experts
from tests.unit.backends.models import PUBLISHED, dimensions

IS_REAL = "TE_CPU_KERNELS" in os.environ
if IS_REAL:
    from tests.te import real as modules
else:
    from tests.parallel import te_stand_ins as modules  # type: ignore[no-redef]


def _install() -> None:
    """Make this rank believe that it has Transformer Engine and a GPU."""
    modules.install()
    attention.has_transformer_engine = lambda: True
    construction.uses_transformer_engine = lambda *arguments: uses_transformer_engine(*arguments[:2], on_cuda=True)
    trainer.machine_problems = lambda *arguments: []  # type: ignore[assignment]


# ---------------------------------------------------------------------------------------------------------- the layers
def _trained(placement: RankPlacement, config: RunConfig, packs: Any, denominator: float, steps: int) -> Any:
    """Train, checking that the linear layers add their gradients to Megatron's sums."""
    _install()

    class Checked(MegatronTrainer):
        def shutdown(self) -> None:
            linear = [m for m in self.chunks[0].modules() if hasattr(m, "fuse_wgrad_accumulation")]
            # Experts' products are not its own.
            assert len(linear) == (2 if self.dimensions.num_experts else 4) * len(self.chunks[0].decoder.layers)
            assert all(module.fuse_wgrad_accumulation for module in linear)
            super().shutdown()

    train_rank.__globals__["MegatronTrainer"] = Checked
    return train_rank(placement, config, packs, denominator, steps)


REAL_LAYOUTS: list[tuple[str, Settings]] = [
    ("qwen3", {"context": 2}),
    ("qwen3", {"context": 4}),
    ("qwen3", {"tensor": 2, "sequence": True, "context": 2}),
    ("qwen3_moe", {"context": 2, "expert": 2}),
    ("qwen3", {"pipeline": 2}),
    ("qwen3", {"recompute": "full"}),
    ("qwen3", {"pipeline": 2, "context": 2, "recompute": "full"}),
]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", {}),
        ("qwen2", {"tensor": 2, "sequence": True}),
        ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 2}),
        *(REAL_LAYOUTS if IS_REAL else ()),
    ],
)
def test_its_layers_compute_the_reference(family: str, layout: Settings, cases: Any, tmp_path: Path) -> None:
    case = cases("plain", family, 1)
    _check(case, layout | {"attention": "transformer_engine"}, tmp_path)


def test_its_layers_use_the_attention_of_shared_prefixes(cases: Any, tmp_path: Path) -> None:
    case = cases("shared", "qwen3")
    _check(case, {"share_prefixes": "tree", "attention": "auto", "tensor": 2, "sequence": True}, tmp_path)


def _check(case: Case, layout: Settings, directory: Path) -> None:
    results: list[RankResult] = run_case(case, layout, directory, _trained)
    check_scores(case, results)
    check_loss(case, results)
    check_exported_gradients(case, results)
    check_changes(case, stacked_experts(sent(results, "weights")))


# ------------------------------------------------------------------------------------------------------ canonical names
# Names of Megatron's TransformerLayer and Transformer Engine's LayerNormLinear and Linear, written out.
LAYER = "decoder.layers."
ATTENTION_KEYS = {
    LAYER + "self_attention.linear_qkv.layer_norm_weight",
    LAYER + "self_attention.linear_qkv.weight",
    LAYER + "self_attention.q_layernorm.weight",
    LAYER + "self_attention.k_layernorm.weight",
    LAYER + "self_attention.linear_proj.weight",
}
OUTER_KEYS = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
CANONICAL = {
    "qwen3": ATTENTION_KEYS
    | OUTER_KEYS
    | {LAYER + "mlp.linear_fc1.layer_norm_weight", LAYER + "mlp.linear_fc1.weight", LAYER + "mlp.linear_fc2.weight"},
    "qwen3_moe": ATTENTION_KEYS
    | OUTER_KEYS
    | {LAYER + "pre_mlp_layernorm.weight", LAYER + "mlp.router.weight"}
    | {LAYER + f"mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2)},
}


def _keys(placement: RankPlacement, config: RunConfig) -> tuple[set[str], set[str]]:
    """Return the names in a checkpoint and the names of the modules' own parameters."""
    _install()
    with running(placement, config) as model:
        state = checkpoint.sharded_models(model.chunks)
        names = {name for name, _ in model.chunks[0].named_parameters()}
    return {value.key for value in state.values()}, names


def test_both_specs_write_the_canonical_names(tmp_path: Path) -> None:
    cases = [(family, spec) for family in CANONICAL for spec in ("transformer_engine", "ring")]
    models = {family: save_tiny(family, tmp_path / family, layers=2) for family in CANONICAL}
    tasks = [(parity_config(models[family], tmp_path, {"attention": spec}),) for family, spec in cases]
    for (family, spec), ((keys, names),) in zip(cases, run_each(_keys, 1, tmp_path / "ranks", tasks), strict=True):
        assert keys == CANONICAL[family]
        fused = any("layer_norm_weight" in name for name in names)
        assert fused == (spec == "transformer_engine")
        assert any("experts.linear_fc1.weight3" in name for name in names) == (family == "qwen3_moe")


# ---------------------------------------------------------------------------------------------------------- checkpoints
def train_and_save(
    placement: RankPlacement, config: RunConfig, save: Path | None, load: Path | None, grouped: bool = True
) -> dict[str, Tensor]:
    """Return the weights after two steps with a save between them, or after loading that save and doing the second.

    Experts are grouped, or computed in a loop under Megatron's names. Without the other spec, the first save is by
    torch's AdamW, as on a machine without Transformer Engine.
    """
    if config.trainer.attention != "ring" or load is not None:
        _install()
    construction.can_be_grouped = lambda *arguments: grouped
    packs = [pack_sequences(scored_sequences([(5, 9), (3, 6), (11, 2)], seed=seed)) for seed in (0, 1)]
    with running(placement, config) as model:
        if load is not None:
            model.load(load)
        if save is not None:
            take_step(model, packs, 6.0, last=True)
            model.save(save)
        take_step(model, packs, 6.0, last=True)
        return exported_from(model)


def resume_configs(family: str, attention: str, directory: Path, layout: Settings) -> tuple[RunConfig, RunConfig]:
    """Return a new model's configuration with the ring and with other attention."""
    model = save_tiny(family, directory / "model")
    ring, other = (parity_config(model, directory, {**layout, "attention": each}) for each in ("ring", attention))
    return ring, other


@pytest.mark.parametrize(
    ("family", "attention", "grouped"),
    [("qwen3", "transformer_engine", True), ("qwen3_moe", "transformer_engine", True), ("qwen3_moe", "ring", False)],
)
def test_each_spec_continues_from_the_checkpoint_of_the_other(
    family: str, attention: str, grouped: bool, tmp_path: Path
) -> None:
    """Including moments: the step after the checkpoint is the same up to rounding of the other spec's kernels."""
    layout: Settings = {"tensor": 2, "sequence": True}
    if family == "qwen3_moe":
        layout |= {"expert": 2, "distributed": True}
    ring, others = resume_configs(family, attention, tmp_path, layout)
    by_ring, by_other = tmp_path / "by-ring", tmp_path / "by-other"
    tasks = [
        (ring, by_ring, None, True),
        (others, by_other, None, grouped),
        (others, None, by_ring, grouped),
        (ring, None, by_other, True),
    ]
    (first, _), (second, _), (further, _), (back, _) = run_each(train_and_save, 2, tmp_path / "ranks", tasks)
    assert_close(further, first, 1e-6)
    assert_close(back, second, 1e-6)


# ----------------------------------------------------------------------------------------------------------- the choice
@pytest.mark.skipif(IS_REAL, reason="Transformer Engine is installed")
@pytest.mark.parametrize("place", [".", "transformer_engine", "transformer_engine/wheel_lib"])
def test_transformer_engine_without_its_extension_is_not_taken_for_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its wheels installs the package, but it cannot be imported without the extension."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "transformer_engine" / "wheel_lib").mkdir(parents=True)
    invalidate_caches()
    assert not has_transformer_engine()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    invalidate_caches()
    assert not has_transformer_engine()
    (tmp_path / place / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()
    assert has_transformer_engine()


@pytest.mark.parametrize(
    ("asked", "layout"),
    [
        ("transformer_engine", "zigzag"),
        ("ring", "zigzag"),
        ("allgather", "contiguous"),
        ("ring_flash_attn", "contiguous"),
    ],
)
def test_the_configured_attention_is_used(asked: Any, layout: str) -> None:
    attention = attention_of(TrainerConfig(attention=asked), dimensions(), on_cuda=True)
    assert attention == asked and context_layout_of(attention) == layout


def test_auto_takes_the_best_available(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr("backends.megatron.attention.has_transformer_engine", lambda: bool(found))
    auto, model = TrainerConfig(), dimensions()
    assert attention_of(auto, model, on_cuda=True) == attention_of(auto, model, on_cuda=False) == "ring"
    found.append("transformer_engine")
    assert attention_of(auto, model, on_cuda=True) == "transformer_engine"
    assert attention_of(auto, model, on_cuda=False) == "ring"
    assert attention_of(auto, PUBLISHED["DeepSeek-V3"], on_cuda=True) == "ring"


def test_a_machine_without_it_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def problems(attention: Any, on_cuda: bool, *found: str) -> str:
        monkeypatch.setattr("slime_like.checks.packages.find_spec", lambda name: name in found or None)
        monkeypatch.setattr("slime_like.checks.packages.has_transformer_engine", lambda: "transformer_engine" in found)
        monkeypatch.setattr("backends.megatron.attention.missing_compiler", lambda on_cuda: ())
        config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, trainer={"attention": attention})
        return " ".join(machine_problems(config.trainer, config.model, on_cuda))

    assert problems("ring", False) == problems("auto", True) == problems("allgather", True) == ""
    missing = problems("transformer_engine", True)
    assert "needs the package transformer_engine" in missing and "attention=auto" in missing
    assert "needs a CUDA device" in problems("transformer_engine", False, "transformer_engine")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")  # as Megatron sets it
    assert problems("auto", True) == ""
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert "NVTE_FLASH_ATTN=0" in problems("auto", True)
    monkeypatch.delenv("NVTE_FLASH_ATTN")
    assert "pip install ring-flash-attn==0.1.8" in problems("ring_flash_attn", False)
    assert problems("ring_flash_attn", False, "ring_flash_attn") == ""
    assert "needs flash-attn 2 on CUDA" in problems("ring_flash_attn", True, "ring_flash_attn")
    assert problems("ring_flash_attn", True, "ring_flash_attn", "flash_attn_2_cuda") == ""
