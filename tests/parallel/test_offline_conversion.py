"""`slime-like convert` preserves every bit, names damage, and never shows an incomplete output.

Results are compared with the bytes of the safetensors files, with Megatron's loader on real ranks, and with
transformers.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.megatron import conversion
from backends.megatron.checkpoint import load_weights, parts_of, sharded_models
from backends.megatron.families import family_of
from backends.megatron.model import build_chunks
from backends.megatron.offline import MegatronConverter, RankPlan, plan_ranks, require_exactly_once
from slime_like.config import RunConfig
from slime_like.errors import CheckpointError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import RankPlacement
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import weight_file_problems
from slime_like.weights.expected_tensors import expected_tensors
from tests.parallel.layouts import layout_of
from tests.parallel.ranks import run_ranks
from tests.parallel.steps import joined, same_bits, small_disk
from tests.parallel.tiny import DIVISIBLE, edited_weights, tiny_config, with_drafts
from tests.parallel.towers import tensors_of
from tests.support.acceptance import some_in_acceptance
from tests.support.rejections import Rejects
from tests.unit.backends.models import PUBLISHED

DENSE = ("llama", "mistral", "gemma3_text", "qwen2", "qwen3", "qwen3_5_text")
EXPERTS = ("qwen3_moe", "deepseek_v3", "glm4_moe", "qwen3_next")
IN_ACCEPTANCE = ("llama", "mistral", "gemma3_text", "qwen2", "qwen3_moe", "glm4_moe")
OPTIONS = ConversionOptions(dtype="auto", max_file_bytes=200_000, workers=2, allow_nan=False)
ONE_BY_ONE = replace(OPTIONS, workers=1, max_file_bytes=100_000)

LAYOUTS = {
    DENSE: ("single", "tp4", "pp2-vpp2", "tp2-pp2"),
    EXPERTS: ("single", "tp4-sp", "dp2-ep2", "pp2-vpp2-dp2-ep2", "tp2-sp-pp2-ep2"),
}


def _silent(done: int, total: int) -> None:
    assert 0 <= done <= total


def _config(model: Path, layout: dict[str, Any] | None = None) -> RunConfig:
    return tiny_config(model, model, layout, "bfloat16")


def _converter(model: Path, layout: dict[str, Any] | None = None) -> MegatronConverter:
    config = _config(model, layout)
    return MegatronConverter(config.model, config.trainer)


def _plans(model: Path, layout: dict[str, Any], dimensions: ModelDimensions) -> list[RankPlan]:
    config = _config(model, layout)
    return plan_ranks(config.model, config.trainer, dimensions)


def _to_megatron(model: Path, output: Path, layout: dict[str, Any] | None = None, **changes: Any) -> ConversionSummary:
    return _converter(model, layout).to_checkpoint(output, replace(OPTIONS, **changes), _silent)


def _to_hf(converted: Path, output: Path, **changes: Any) -> ConversionSummary:
    converter = _converter(converted / "model")
    return converter.to_hugging_face(converted / "trainer", output, replace(OPTIONS, **changes), _silent)


def _read_back(converted: Path) -> dict[str, Tensor]:
    """Read every tensor of a converted checkpoint, by Hugging Face name."""
    source = _converter(converted / "model").open_checkpoint(converted / "trainer")
    return {name: tensor for group in source.groups for name, tensor in source.read(group).items()}


def _model(directory: Path, family: str = "qwen3", **changes: Any) -> Path:
    heads = {"linear_num_key_heads": 4} if family in ("qwen3_5_text", "qwen3_next") else {}
    make_tiny_model(directory / "hf", family, **DIVISIBLE, **heads, **changes)
    return directory / "hf"


# ---------------------------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("family", some_in_acceptance([*DENSE, *EXPERTS], IN_ACCEPTANCE.__contains__))
def test_every_bit_comes_back_from_every_layout(family: str, tmp_path: Path) -> None:
    """Each dtype is used in every third layout."""
    layouts = next(layouts for families, layouts in LAYOUTS.items() if family in families)
    for name, dtype in zip(layouts, cycle(["float32", "bfloat16", "float16"]), strict=False):
        model = tmp_path / dtype / "hf"
        if not model.exists():
            _model(tmp_path / dtype, family, dtype=dtype)
        _to_megatron(model, tmp_path / name, layout_of(name), max_file_bytes=10_000_000)
        same_bits(_read_back(tmp_path / name), load_file(model / "model.safetensors"))


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2", "tp2-pp2"), ("qwen3_moe", "tp2-sp-pp2-ep2"), ("deepseek_v3", "tp4-sp")]
)
def test_transformers_loads_the_written_model(family: str, layout: str, tmp_path: Path) -> None:
    """The model has tensors of different types in several files, and the same logits."""
    _model(tmp_path, family, dtype="bfloat16")
    with edited_weights(tmp_path / "hf") as tensors:
        tensors |= {name: tensor.float() for name, tensor in tensors.items() if "norm" in name}
    _to_megatron(tmp_path / "hf", tmp_path / "meg", layout_of(layout))
    summary = _to_hf(tmp_path / "meg", tmp_path / "back")
    assert summary.files == len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == summary.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    same_bits(tensors_of(tmp_path / "back"), tensors)
    assert (tmp_path / "back" / "generation_config.json").is_file()
    tokens = AutoTokenizer.from_pretrained(tmp_path / "back")("12+34=", return_tensors="pt").input_ids
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="float32") for name in ("hf", "back")]
    assert torch.equal(*(model(tokens).logits for model in models))


def test_a_requested_type_is_rounded_to_once(tmp_path: Path) -> None:
    _model(tmp_path)
    original = load_file(tmp_path / "hf" / "model.safetensors")
    _to_megatron(tmp_path / "hf", tmp_path / "half", dtype="bfloat16")
    same_bits(_read_back(tmp_path / "half"), {name: value.bfloat16() for name, value in original.items()})
    assert json.loads((tmp_path / "half" / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    _to_megatron(tmp_path / "hf", tmp_path / "meg")
    _to_hf(tmp_path / "meg", tmp_path / "back", dtype="float16")
    same_bits(tensors_of(tmp_path / "back"), {name: value.half() for name, value in original.items()})
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float16"


def test_a_routers_bias_keeps_its_type(tmp_path: Path) -> None:
    """A rounded bias would choose other experts."""
    _model(tmp_path, "deepseek_v3")
    _to_megatron(tmp_path / "hf", tmp_path / "meg", dtype="bfloat16")
    _to_hf(tmp_path / "meg", tmp_path / "back", dtype="float16")
    for written in (_read_back(tmp_path / "meg"), tensors_of(tmp_path / "back")):
        kinds = {name.endswith("e_score_correction_bias"): tensor.dtype for name, tensor in written.items()}
        assert kinds[True] == torch.float32 and kinds[False] != torch.float32


def test_layers_for_multi_token_prediction_are_kept(tmp_path: Path, rejects: Rejects) -> None:
    """A published checkpoint stores them after its layers. They come from the directory that was converted."""
    source = _model(tmp_path, "deepseek_v3")
    own = load_file(source / "model.safetensors").keys()
    drafts = with_drafts(source)
    assert weight_file_problems(source, ModelDimensions.from_checkpoint(source)) == []
    assert expected_tensors(source).keys() == own
    _to_megatron(source, tmp_path / "meg", {"tensor": 2, "sequence": True})
    with rejects(CheckpointError, "no-tower"):
        _to_hf(tmp_path / "meg", tmp_path / "back")
    options = replace(OPTIONS, dtype="float16")
    _converter(source).to_hugging_face(tmp_path / "meg" / "trainer", tmp_path / "back", options, _silent)
    written = tensors_of(tmp_path / "back")
    same_bits({name: written[name] for name in drafts}, drafts)
    assert written.keys() == own | drafts.keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_layers_for_multi_token_prediction_that_are_not_stored_are_not_named(tmp_path: Path) -> None:
    """transformers leaves them out but keeps their number."""
    source = _model(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    _to_megatron(source, tmp_path / "meg")
    _to_hf(tmp_path / "meg", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def _load_both_ways(placement: RankPlacement, configs: list[RunConfig], converted: list[Path]) -> list[list[str]]:
    """Return parameters that Megatron's loader fills differently than our loader of Hugging Face files."""
    different = []
    with joined(placement, configs[0]):
        for config, checkpoint in zip(configs, converted, strict=True):
            dimensions = ModelDimensions.from_checkpoint(config.model.path)
            direct, loaded = build_chunks(config, dimensions), build_chunks(config, dimensions)
            conversion.load_hf_weights(direct, config.model.path, dimensions)
            load_weights(checkpoint / "trainer", loaded)
            _require_alike_for_megatron(checkpoint / "trainer", loaded)
            found = [parameter for chunk in loaded for parameter in chunk.parameters()]
            wanted = [named for chunk in direct for named in chunk.named_parameters()]
            pairs = zip(wanted, found, strict=True)
            different.append([name for (name, one), other in pairs if not torch.equal(one, other)])
    return different


def _require_alike_for_megatron(checkpoint: Path, loaded: list[Any]) -> None:
    """Compare what we have loaded with what Megatron's own code loads."""
    state = sharded_models(loaded)
    values = {name: [part.data.clone() for part in parts_of(each)] for name, each in state.items()}
    with torch.no_grad():
        for part in (part for each in state.values() for part in parts_of(each)):
            part.data.fill_(float("nan"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)  # ranks exchange plans
        found = dist_checkpointing.load(state, str(checkpoint), validate_access_integrity=False)
    for name, (first, *rest) in values.items():
        assert torch.equal(torch.cat([first, *rest]).view(-1), found[name].view(-1)), name


@pytest.mark.parametrize(
    ("written_as", "read_as"),
    [({"tensor": 4}, {"pipeline": 2}), ({"pipeline": 2, "virtual_pipeline": 2}, {"tensor": 2, "sequence": True})],
)
def test_megatron_loads_converted_checkpoints(
    written_as: dict[str, Any], read_as: dict[str, Any], tmp_path: Path
) -> None:
    """The ranks have another layout, and the model's dtype."""
    families = ("qwen2", *EXPERTS)
    for family in families:
        _model(tmp_path / family, family)
        sequence = {"sequence": True} if family in EXPERTS and "tensor" in written_as else {}
        _to_megatron(tmp_path / family / "hf", tmp_path / f"{family}-meg", {**written_as, **sequence})
    configs = [_config(tmp_path / family / "hf", read_as) for family in families]
    converted = [tmp_path / f"{family}-meg" for family in families]
    assert run_ranks(_load_both_ways, 2, tmp_path / "ranks", configs, converted) == [[[]] * len(families)] * 2


# --------------------------------------------------------------------------------------------------------- completeness
LARGE = {"tensor": 8, "pipeline": 4}
LARGE_EXPERTS = LARGE | {"sequence": True, "expert": 8}


PUBLISHED_LARGE: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    *((name, LARGE, {"num_layers": 8}) for name in ("Qwen2.5-32B", "Qwen3-32B", "Llama-3-70B")),
    # Two ranks for each of its four KV heads.
    ("Qwen3-30B-A3B", LARGE_EXPERTS, {"num_layers": 8, "num_experts": 16}),
    # Nine layers, like 61, are not a multiple of four stages; three of them are dense.
    ("DeepSeek-V3", LARGE_EXPERTS, {"num_layers": 9, "num_experts": 16}),
]


@pytest.mark.parametrize(
    ("name", "layout", "changes"), some_in_acceptance(PUBLISHED_LARGE, lambda case: case in PUBLISHED_LARGE[1:3])
)
def test_every_element_of_a_published_model_has_one_place_in_a_large_layout(
    name: str, layout: dict[str, Any], changes: dict[str, int], tmp_path: Path
) -> None:
    """Only shapes of the modules that train are needed. The remaining layers and experts are equal to these."""
    model = replace(PUBLISHED[name], **changes)
    plans = _plans(tmp_path, layout, model)
    assert len(plans) == 32
    placed = {key for plan in plans for parameter in plan.parameters for key in parameter.placement.source_names()}
    assert placed == family_of(model).hf_shapes(model).keys()


@pytest.mark.parametrize("fault", ["lost", "twice"])
def test_the_proof_finds_lost_and_duplicate_elements(fault: str, tmp_path: Path) -> None:
    dimensions = PUBLISHED["Qwen2.5-0.5B"]
    first, *others = _plans(tmp_path, {"tensor": 2}, dimensions)
    index, victim = next(
        (index, parameter)
        for index, parameter in enumerate(first.parameters)
        if parameter.placement.name.endswith("3.self_attention.linear_qkv.bias")
    )
    kept = list(first.parameters)
    if fault == "lost":
        del kept[index]
    else:
        kept.append(victim)
    with pytest.raises(CheckpointError, match=r"no place, or two: .*model\.layers\.3\.self_attn\.q_proj\.bias"):
        require_exactly_once(
            [replace(first, parameters=tuple(kept)), *others], family_of(dimensions).hf_shapes(dimensions)
        )


# -------------------------------------------------------------------------------------------------------- interruptions
def _interrupted(convert: Callable[[Callable[[int, int], None]], ConversionSummary]) -> None:
    """Simulate Ctrl-C in the main thread, which reports progress, after a file is finished."""

    def report(done: int, total: int) -> None:
        if done > total / 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(report)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    _model(tmp_path)
    converter = _converter(tmp_path / "hf", {"tensor": 2})
    _interrupted(lambda report: converter.to_checkpoint(tmp_path / "meg", ONE_BY_ONE, report))
    assert not list(tmp_path.glob("*meg*"))
    converter.to_checkpoint(tmp_path / "meg", ONE_BY_ONE, _silent)
    model, trainer, back = _converter(tmp_path / "meg" / "model"), tmp_path / "meg" / "trainer", tmp_path / "back"
    _interrupted(lambda report: model.to_hugging_face(trainer, back, ONE_BY_ONE, report))
    assert not list(tmp_path.glob("*back*"))


def test_leftovers_of_a_killed_conversion_are_not_used(tmp_path: Path) -> None:
    left = tmp_path / ".meg.partial" / "trainer"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_text("left")
    _to_megatron(_model(tmp_path), tmp_path / "meg")
    same_bits(_read_back(tmp_path / "meg"), load_file(tmp_path / "hf" / "model.safetensors"))


# --------------------------------------------------------------------------------------------------------------- faults
def test_a_full_disk_names_the_tensors_and_leaves_nothing(tmp_path: Path) -> None:
    _model(tmp_path)
    _to_megatron(tmp_path / "hf", tmp_path / "meg")
    refused = r" could not be written .*File too large"
    with small_disk(150_000):
        with pytest.raises(CheckpointError, match=r"with embedding\.word_embeddings\.weight, .*" + refused):
            _to_megatron(tmp_path / "hf", tmp_path / "other", workers=1)
        with pytest.raises(CheckpointError, match=r"with model\..*weight.*" + refused):
            _to_hf(tmp_path / "meg", tmp_path / "back", workers=1)
    assert not (tmp_path / "other").exists() and not (tmp_path / "back").exists()


def test_tensors_that_are_not_finite_are_all_named_and_can_be_allowed(tmp_path: Path) -> None:
    _model(tmp_path)
    bad = ("model.layers.1.self_attn.k_proj.weight", "model.layers.3.mlp.down_proj.weight")
    with edited_weights(tmp_path / "hf") as tensors:
        for name, value in zip(bad, ("nan", "-inf"), strict=True):
            tensors[name][3, 5] = float(value)
    message = "tensors with NaN or infinity in them: " + ", ".join(bad) + "; use a checkpoint from before"
    with pytest.raises(CheckpointError, match=message):
        _to_megatron(tmp_path / "hf", tmp_path / "meg", {"tensor": 2})
    assert not (tmp_path / "meg").exists()
    _to_megatron(tmp_path / "hf", tmp_path / "meg", {"tensor": 2}, allow_nan=True)
    with pytest.raises(CheckpointError, match=message):
        _to_hf(tmp_path / "meg", tmp_path / "back")
    _to_hf(tmp_path / "meg", tmp_path / "back", allow_nan=True)
    same_bits(tensors_of(tmp_path / "back"), tensors)


def test_numbers_that_the_requested_type_cannot_hold_are_rejected(tmp_path: Path) -> None:
    """They would become infinite. Numbers that are already infinite don't count."""
    _model(tmp_path)
    large, infinite = "model.layers.1.self_attn.k_proj.weight", "model.layers.3.mlp.down_proj.weight"
    with edited_weights(tmp_path / "hf") as tensors:
        tensors[infinite][3, 5] = float("inf")
        tensors[large][3, 5] = 65519.0  # rounded to float16's largest number, 65504
    _to_megatron(tmp_path / "hf", tmp_path / "fits", {"tensor": 2}, dtype="float16", allow_nan=True)
    with edited_weights(tmp_path / "hf") as tensors:
        tensors[large][3, 5] = -65520.0
    message = f"tensors with numbers that --dtype float16 cannot hold: {large}; use bfloat16 or float32"
    with pytest.raises(CheckpointError, match=message):
        _to_megatron(tmp_path / "hf", tmp_path / "narrow", {"tensor": 2}, dtype="float16", allow_nan=True)
    _to_megatron(tmp_path / "hf", tmp_path / "meg", {"tensor": 2}, allow_nan=True)
    with pytest.raises(CheckpointError, match=message):
        _to_hf(tmp_path / "meg", tmp_path / "back", dtype="float16")
    _to_hf(tmp_path / "meg", tmp_path / "back", dtype="bfloat16", allow_nan=True)


def test_the_output_is_not_called_quantized(tmp_path: Path) -> None:
    """Weights that were converted back to 16 bits may come with a configuration that still names 8."""
    _model(tmp_path)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    _to_megatron(tmp_path / "hf", tmp_path / "meg")
    assert "quantization_config" not in json.loads((tmp_path / "meg" / "model" / "config.json").read_text())


def _spoil(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors |= {"extra.weight": torch.zeros(2), "model.norm.weight": torch.ones(7)}


SPOILT = ["missing: model.layers.1.mlp.up_proj.weight", "unexpected: extra.weight"]
SPOILT += ["wrong shape: model.norm.weight is [7], not [128]"]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# All layers' weights of a kind are one tensor on disk, and a key and its value are one parameter.
KIND, PAIR = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("family", "change", "code", "named"),
    [
        ("qwen2", lambda tensors: tensors.update({HEAD: 2 * tensors[EMBEDDING]}), "tied-tensors-differ", [HEAD]),
        ("qwen3", _spoil, "tensors-do-not-fit", SPOILT),
        ("qwen3", lambda tensors: tensors.update({KIND: tensors[KIND].bfloat16()}), "mixed-dtypes", [KIND]),
        ("qwen3", lambda tensors: tensors.update({PAIR: tensors[PAIR].bfloat16()}), "mixed-dtypes", [PAIR]),
    ],
)
def test_wrong_tensors_are_named(
    family: str, change: Callable[..., None], code: str, named: list[str], tmp_path: Path, rejects: Rejects
) -> None:
    with edited_weights(_model(tmp_path, family)) as tensors:
        change(tensors)
    with rejects(CheckpointError, code) as caught:
        _to_megatron(tmp_path / "hf", tmp_path / "meg")
    assert all(each in str(caught.value) for each in named), caught.value
    assert not list(tmp_path.glob("*meg*"))
    if code == "mixed-dtypes":
        _to_megatron(tmp_path / "hf", tmp_path / "meg", dtype="float32")


def test_a_truncated_tokenizer_is_not_copied(tmp_path: Path, rejects: Rejects) -> None:
    file = _model(tmp_path) / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-100])
    with rejects(CheckpointError, "file-damaged") as caught:
        _to_megatron(tmp_path / "hf", tmp_path / "meg")
    assert "hf/tokenizer.json" in str(caught.value) and not (tmp_path / "meg").exists()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a converted checkpoint of two tensor-parallel ranks, which no test may change."""
    root = tmp_path_factory.mktemp("converted")
    _to_megatron(_model(root), root / "meg", {"tensor": 2})
    return root / "meg"


def test_a_checkpoint_of_another_model_is_rejected_with_its_tensors(
    converted: Path, tmp_path: Path, rejects: Rejects
) -> None:
    wide = _model(tmp_path / "wide", intermediate_size=192)
    biased = _model(tmp_path / "biased", "qwen2")
    for model, named in (
        (wide, "wrong shape: decoder.layers.mlp.linear_fc1.weight is"),
        (biased, "missing: decoder.layers.self_attention.linear_qkv.bias"),
        (biased, "unexpected: decoder.layers.self_attention"),
    ):
        with rejects(CheckpointError, "checkpoint-of-another-model") as caught:
            _converter(model).open_checkpoint(converted / "trainer")
        assert named in str(caught.value)


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "flipped": (_flipped, "FILE: bytes .*, are not as written"),
    "cut off": (lambda content: content[: len(content) // 2], "FILE is cut off: it has .*, and lacks decoder.layers."),
    "by one byte": (lambda content: content[:-1], "FILE is cut off: it has .*, and lacks decoder.layers."),
    "empty": (lambda content: b"", "FILE is empty: it has 0 of the .*, and lacks decoder.layers."),
    "longer": (lambda content: content + b"x", "FILE has .* bytes, though .* were written"),
    "removed": (lambda content: None, "files that its index lists are missing: FILE"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_damaged_files_are_found(fault: str, converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "meg")
    file = tmp_path / "meg" / "trainer" / "__1_1.distcp"
    damage, sentence = DAMAGE[fault]
    content = damage(file.read_bytes())
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    reason = sentence.replace("FILE", r"__1_1\.distcp")
    with pytest.raises(CheckpointError, match=rf"is damaged \({reason}.*\); convert the model again$"):
        _to_hf(tmp_path / "meg", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_two_conversions_do_not_write_the_same_output(tmp_path: Path) -> None:
    _model(tmp_path)

    def report(done: int, total: int) -> None:
        with pytest.raises(CheckpointError, match="another process is writing it"):
            _to_megatron(tmp_path / "hf", tmp_path / "meg")

    _converter(tmp_path / "hf").to_checkpoint(tmp_path / "meg", OPTIONS, report)
    same_bits(_read_back(tmp_path / "meg"), load_file(tmp_path / "hf" / "model.safetensors"))
