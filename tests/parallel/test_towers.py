"""A language model with a tower trains like transformers' whole model on text, and the tower stays as it came."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForImageTextToText

from backends.megatron.offline.converter import MegatronConverter
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.checks.model_directories import factor_problems, lora_problems
from slime_like.config import RunConfig
from slime_like.config.lora import LoraConfig
from slime_like.conversion.convert import compare_sources
from slime_like.errors import CheckpointError
from slime_like.interfaces import RankPlacement
from slime_like.interfaces.conversion import ConversionOptions
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tower import language_names, language_settings
from slime_like.models.weight_files import keeps_type, weight_file_problems
from slime_like.trajectory import PackedTrajectory
from slime_like.weights.expected_tensors import expected_tensors
from tests.parallel.assembly import stacked_experts
from tests.parallel.parity import (
    BALANCE,
    GRADIENT_BOUND,
    MASKED,
    OPTIMIZER,
    PACKS,
    STEPS,
    Case,
    Settings,
    check_changes,
    check_gradients,
    check_loss,
    check_scores,
    check_tensors,
    check_updates,
    parity_config,
    samples_with_loss,
)
from tests.parallel.ranks import run_each, run_ranks
from tests.parallel.reference import adamw_steps
from tests.parallel.steps import RankResult, assert_close, exported_from, running, same_bits, take_step, train_rank
from tests.parallel.tiny import save_checkpoint, scored_sequences, tiny_config, with_drafts
from tests.parallel.towers import KINDS, WholeReference, is_language, own_name, save_tower, tensors_of, tower_of
from tests.support.rejections import Rejects


def _case(kind: str, directory: Path) -> Case:
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    checkpoint, algorithm = save_tower(kind, directory), {"moe_aux_loss_coef": BALANCE.get(f"{kind}_text", 0.0)}
    reference = WholeReference(checkpoint, parity_config(checkpoint, directory, {}, **algorithm).algorithm)
    initial = {name: each.detach().clone() for name, each in reference.trained().items()}
    denominator = samples_with_loss(sequences)
    expected = reference.step(sequences, denominator)
    lr, eps = OPTIMIZER["lr"], OPTIMIZER["eps"]
    updated = adamw_steps(reference, sequences, denominator, STEPS, OPTIMIZER["clip_grad"], lr, eps)
    if kind == "glm4v_moe":
        expected.balance = 0.0  # not requested
    return Case(checkpoint, sequences, expected, algorithm, updated, initial)


def _run(
    placement: RankPlacement,
    config: RunConfig,
    packs: list[PackedTrajectory],
    denominator: float,
    directory: Path | None = None,
) -> RankResult | dict[str, Tensor]:
    """Train, or take a step and export; return the weights that engines would get."""
    if directory is None:
        return train_rank(placement, config, packs, denominator, STEPS)
    with running(placement, config) as trainer:
        take_step(trainer, packs[:1], denominator, last=True)
        trainer.export_hf(directory)
        return exported_from(trainer)


MEGATRON = ("qwen2_5_vl", "mistral3", "qwen3_vl", "glm4v_moe", "qwen3_5_moe")
LAYOUTS: dict[str, Settings] = {"fsdp": {"backend": "fsdp", "data": 2}, "megatron": {"tensor": 2, "sequence": True}}
RUNS = [(kind, layout) for kind, layout in product(KINDS, LAYOUTS) if layout == "fsdp" or kind in MEGATRON[2:]]
Trained = tuple[Case, list[RankResult], dict[str, Tensor], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Trained]:
    """Run every kind in every layout, in one fork of two ranks."""
    root = tmp_path_factory.mktemp("towers")
    cases = {kind: _case(kind, root / kind) for kind in KINDS}
    configs = [
        parity_config(cases[kind].checkpoint, root, LAYOUTS[layout], **cases[kind].algorithm) for kind, layout in RUNS
    ]
    tasks = [
        (config, cases[kind].packs(), cases[kind].denominator) for config, (kind, _) in zip(configs, RUNS, strict=True)
    ]
    exported = [root / f"{kind}-{layout}" for kind, layout in RUNS]
    results = run_each(
        _run, 2, root / "ranks", [*tasks, *((*task, path) for task, path in zip(tasks, exported, strict=True))]
    )
    return {
        key: (cases[key[0]], list(results[index]), results[index + len(RUNS)][0], exported[index])
        for index, key in enumerate(RUNS)
    }


@pytest.mark.parametrize(("kind", "layout"), RUNS)
def test_training_computes_what_the_whole_model_computes(kind: str, layout: str, trained: Any) -> None:
    case, results, *_ = trained[kind, layout]
    check_scores(case, results)
    check_loss(case, results)
    if layout == "megatron":
        check_gradients(case, results)
        check_updates(case, results)
        return
    for result in results:
        check_tensors(result.gradients, case.expected.gradients, GRADIENT_BOUND)
        check_changes(case, result.weights)


@pytest.mark.parametrize(("kind", "layout"), RUNS)
def test_an_export_has_the_trained_weights_and_the_tower_as_it_came(kind: str, layout: str, trained: Any) -> None:
    case, _, sent, exported = trained[kind, layout]
    source = case.checkpoint
    same_bits(tower_of(exported), tower_of(source))
    before, after = tensors_of(source), tensors_of(exported)
    assert after.keys() == before.keys()
    stored = stacked_experts(sent) if kind == "qwen3_5_moe" else sent
    assert stored.keys() == set(filter(is_language, before))
    same_bits({name: after[name] for name in stored}, stored)
    unchanged = {name for name in stored if torch.equal(stored[name], before[name])}
    assert unchanged == set(filter(keeps_type, before))
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == expected_tensors(source)
    assert _config(exported) == _config(source)
    _, problems = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not any(problems.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adapter_is_of_the_whole_model(layout: str, trained: Any, tmp_path: Path) -> None:
    """PEFT adds it to the whole model, which then has the weights that engines get. Training continues from it."""
    case = trained["gemma3", "fsdp"][0] if layout == "fsdp" else trained["qwen3_vl", "megatron"][0]
    config = parity_config(case.checkpoint, tmp_path, LAYOUTS[layout])
    model = {"path": case.checkpoint, "dtype": "float32", "lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}
    config = RunConfig.model_validate({**config.model_dump(), "model": model})
    merged = run_ranks(_run, 2, tmp_path / "ranks", config, case.packs(), case.denominator, tmp_path / "adapter")[0]
    whole = AutoModelForImageTextToText.from_pretrained(case.checkpoint)
    found = PeftModel.from_pretrained(whole, tmp_path / "adapter").merge_and_unload()
    names = language_names(case.checkpoint, merged)
    expected = {names[name]: tensor for name, tensor in merged.items()}
    assert_close({own_name(name): each for name, each in found.named_parameters() if is_language(name)}, expected, 1e-6)
    before = tensors_of(case.checkpoint)
    assert {name.split(".")[-2] for name in merged if not torch.equal(merged[name], before[name])} == {
        "q_proj",
        "down_proj",
    }
    lora = LoraConfig(path=tmp_path / "adapter")
    again = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    assert not [*lora_problems(again), *factor_problems(again)]


@pytest.mark.parametrize("kind", MEGATRON)
def test_it_is_converted_to_megatron_and_back(kind: str, trained: Any, tmp_path: Path, rejects: Rejects) -> None:
    """The tower, and how experts are stored, come from the directory that was converted."""
    source = trained[kind, "fsdp"][0].checkpoint
    options = ConversionOptions("auto", 40_000, 1, allow_nan=False)

    def converter(path: Path) -> MegatronConverter:
        config = tiny_config(path, tmp_path, {"pipeline": 2})
        return MegatronConverter(config.model, config.trainer)

    converter(source).to_checkpoint(tmp_path / "meg", options, lambda *_: None)
    with rejects(CheckpointError, "no-tower"):
        converter(tmp_path / "meg" / "model").open_checkpoint(tmp_path / "meg" / "trainer")
    converter(source).to_hugging_face(tmp_path / "meg" / "trainer", tmp_path / "hf", options, lambda *_: None)
    same_bits(tensors_of(tmp_path / "hf"), tensors_of(source))
    _, problems = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(problems.values())
    sides = converter(source).open_checkpoint(tmp_path / "meg" / "trainer"), converter(source).open_hugging_face(source)
    assert compare_sources(*sides, 1, lambda *_: None) == []
    assert not weight_file_problems(tmp_path / "hf", ModelDimensions.from_checkpoint(source))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_for_multi_token_prediction_stay_as_they_came(layout: str, tmp_path: Path) -> None:
    sequences = scored_sequences([pair for pack in PACKS[:1] for pair in pack])
    sources = {family: save_checkpoint(family, tmp_path / family, layers=2) for family in ("glm4_moe", "deepseek_v3")}
    before = {family: tensors_of(source) for family, source in sources.items()}
    drafts = {family: with_drafts(source) for family, source in sources.items()}
    tasks = [
        (parity_config(source, tmp_path, LAYOUTS[layout]), [pack_sequences(sequences)], 4.0, tmp_path / f"{family}-out")
        for family, source in sources.items()
    ]
    for family, (sent, _) in zip(sources, run_each(_run, 2, tmp_path / "ranks", tasks), strict=True):
        after = tensors_of(tmp_path / f"{family}-out")
        assert after.keys() == before[family].keys() | drafts[family].keys()
        same_bits({name: after[name] for name in drafts[family]}, drafts[family])
        same_bits({name: after[name] for name in before[family]}, sent)
        assert not torch.equal(after["model.norm.weight"], before[family]["model.norm.weight"])
        assert _config(tmp_path / f"{family}-out") == _config(sources[family])


def _config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def test_the_settings_of_a_language_model_are_those_of_its_publisher(tmp_path: Path) -> None:
    """Multimodal rotary embedding becomes plain, and either place may tie the embeddings.

    The file of the smallest Gemma 3 leaves most out.
    """
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    flat = {"model_type": "qwen2_5_vl", "vision_config": {}, "rope_scaling": rope, "tie_word_embeddings": True}
    found = language_settings(flat)
    assert found is not None and found["rope_scaling"] == {"type": "default"}
    assert (found["model_type"], found["tie_word_embeddings"]) == ("qwen2", True)
    small = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    inner = {"text_config": {"model_type": "gemma3_text", **small, "rope_scaling": scaling}, "vision_config": {}}
    inner |= {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(inner))
    gemma, theirs = ModelDimensions.from_checkpoint(tmp_path), transformers.Gemma3Config(**inner).get_text_config()
    assert (gemma.num_heads, gemma.num_kv_heads, gemma.head_dim, gemma.vocab_size, gemma.norm_eps) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
        theirs.vocab_size,
        theirs.rms_norm_eps,
    )
    assert language_settings({**inner, "tie_word_embeddings": False})["tie_word_embeddings"] is False  # type: ignore[index]
    assert gemma.tied_embeddings and gemma.eos_token_ids == (1, 106)
    assert language_settings({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}) is None
    assert language_settings({"model_type": "qwen2"}) is None
