"""A language model with a tower trains like transformers' whole model on text, and the tower stays as it came."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForImageTextToText

from backends.megatron.offline import MegatronConverter
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
from tests.parallel.cases import PACKS, parity_config
from tests.parallel.harness import Row, case_of, check, parameters, rows
from tests.parallel.layouts import layout_of
from tests.parallel.ranks import run_each, run_ranks
from tests.parallel.steps import assert_close, exported_from, running, same_bits, take_step
from tests.parallel.tiny import save_checkpoint, scored_sequences, stacked_experts, tiny_config, with_drafts
from tests.parallel.towers import KINDS, is_language, own_name, tensors_of, tower_of
from tests.support.rejections import Rejects


def _export(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, directory: Path
) -> dict[str, Tensor]:
    """Take a step and export; return the weights that engines would get."""
    with running(placement, config) as trainer:
        take_step(trainer, packs[:1], denominator, last=True)
        trainer.export_hf(directory)
        return exported_from(trainer)


MEGATRON = ("qwen2_5_vl", "mistral3", "qwen3_vl", "glm4v_moe", "qwen3_5_moe")
LAYOUTS = ("fsdp-dp2", "tp2-sp")
ROWS = [*rows("tower", dict.fromkeys(KINDS, LAYOUTS[:1])), *rows("tower", dict.fromkeys(MEGATRON[2:], LAYOUTS[1:]))]


@parameters(ROWS)
def test_training_computes_what_the_whole_model_computes(row: Row, cases: Any, results: Any) -> None:
    check(row, cases, results)


@pytest.fixture(scope="module")
def exports(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Row, tuple[dict[str, Tensor], Path]]:
    """Return what engines would get, and the exported directory, after a step."""
    root, tasks = tmp_path_factory.mktemp("towers"), []
    for row in ROWS:
        config, packs, denominator, _ = case_of(row, cases).task(root, layout_of(row.layout))
        tasks.append((config, packs, denominator, root / str(row)))
    found = run_each(_export, 2, root / "ranks", tasks)
    return {row: (ranks[0], root / str(row)) for row, ranks in zip(ROWS, found, strict=True)}


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[str(row) for row in ROWS])
def test_an_export_has_the_trained_weights_and_the_tower_as_it_came(number: int, cases: Any, exports: Any) -> None:
    row = ROWS[number]
    source, (sent, exported) = case_of(row, cases).checkpoint, exports[row]
    same_bits(tower_of(exported), tower_of(source))
    before, after = tensors_of(source), tensors_of(exported)
    assert after.keys() == before.keys()
    stored = stacked_experts(sent) if row.family == "qwen3_5_moe" else sent
    assert stored.keys() == set(filter(is_language, before))
    same_bits({name: after[name] for name in stored}, stored)
    unchanged = {name for name in stored if torch.equal(stored[name], before[name])}
    assert unchanged == set(filter(keeps_type, before))
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == expected_tensors(source)
    assert _config(exported) == _config(source)
    _, problems = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not any(problems.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adapter_is_of_the_whole_model(layout: str, cases: Any, tmp_path: Path) -> None:
    """PEFT adds it to the whole model, which then has the weights that engines get. Training continues from it."""
    case = cases("tower", "gemma3" if "fsdp" in layout else "qwen3_vl")
    config = parity_config(case.checkpoint, tmp_path, layout_of(layout))
    model = {"path": case.checkpoint, "dtype": "float32", "lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}
    config = RunConfig.model_validate({**config.model_dump(), "model": model})
    merged = run_ranks(_export, 2, tmp_path / "ranks", config, case.packs(), case.denominator, tmp_path / "adapter")[0]
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
def test_it_is_converted_to_megatron_and_back(kind: str, cases: Any, tmp_path: Path, rejects: Rejects) -> None:
    """The tower, and how experts are stored, come from the directory that was converted."""
    source = cases("tower", kind).checkpoint
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
        (
            parity_config(source, tmp_path, layout_of(layout)),
            [pack_sequences(sequences)],
            4.0,
            tmp_path / f"{family}-out",
        )
        for family, source in sources.items()
    ]
    for family, (sent, _) in zip(sources, run_each(_export, 2, tmp_path / "ranks", tasks), strict=True):
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
