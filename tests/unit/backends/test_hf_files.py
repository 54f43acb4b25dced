"""Checkpoints of Hugging Face: names and shapes, places in Megatron's shards, and files that are rejected."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from backends.common.hugging_face import files
from backends.common.hugging_face.directory import copy_companions
from backends.common.hugging_face.files import HfCheckpoint, ValueModel
from backends.megatron.families import family_of
from backends.megatron.families.transforms import GroupedQkv, Shape, Sources, Split, TensorRank, Transform
from slime_like.errors import CheckpointError, ConfigError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.dimensions import EMBEDDING, VALUE_HEAD, ForeignAttention, ModelDimensions
from slime_like.models.weight_files import stack_parts, weight_file_problems
from slime_like.weights.expected_tensors import expected_tensors
from tests.conftest import Tiny
from tests.parallel.towers import give_tower
from tests.support.rejections import Rejects
from tests.unit.backends.models import MOONLIGHT, PUBLISHED, dimensions
from tests.unit.checks.checkpoint import DEEPSEEK_V3

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def file(tiny: Tiny, tmp_path: Path) -> Path:
    """Copy weights of a tiny model."""
    shutil.copytree(tiny.model, tmp_path, dirs_exist_ok=True)
    return tmp_path / "model.safetensors"


def _require(directory: Path, ignored: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    model = ModelDimensions.from_checkpoint(directory)
    with HfCheckpoint(directory) as checkpoint:
        checkpoint.require(family_of(model).hf_shapes(model), ignored)


@pytest.mark.parametrize(
    ("family", "stacks"),
    [("qwen3_5_moe_text", {"gate_up_proj": (4, 24, 32), "down_proj": (4, 16, 24)}),
     ("other", {"gate_up_proj": (4, 32, 24), "down_proj": (4, 24, 16)})],
)  # fmt: skip
def test_transposed_stacks_and_other_familys_stay_stacks(
    family: str, stacks: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others = {"attention": ForeignAttention("it is not one")} if family == "other" else {}
    known = dimensions(family=family, **others)
    monkeypatch.setattr(ModelDimensions, "from_checkpoint", lambda directory: known)
    assert not stack_parts(tmp_path, {f"model.layers.0.mlp.experts.{name}": shape for name, shape in stacks.items()})


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(keep: int, file: Path) -> None:
    """Loading and checking report the same problem."""
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError) as caught:
        _require(file.parent)
    problems = weight_file_problems(file.parent, ModelDimensions.from_checkpoint(file.parent))
    assert ([str(caught.value)], caught.value.code) == (problems, "weight-file-damaged")


def test_weights_of_another_format_are_to_be_saved_again(file: Path) -> None:
    file.rename(file.with_name("pytorch_model-00001-of-00002.bin"))
    (problem,) = weight_file_problems(file.parent, ModelDimensions.from_checkpoint(file.parent))
    assert "pytorch_model-00001-of-00002.bin" in problem
    assert "save_pretrained" in problem


def _in_two_files(file: Path) -> None:
    save_file({UP: load_file(file)[UP]}, file.with_name("b.safetensors"))
    file.rename(file.with_name("a.safetensors"))


def _stored(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    return lambda file: save_file(change(load_file(file)), file)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (_stored(lambda found: {n: found[n] for n in found if n != "model.norm.weight"}), "tensors-do-not-fit"),
    "unexpected": (_stored(lambda found: found | {"model.layers.3.mlp.up_proj.weight": torch.zeros(2)}),
                   "tensors-do-not-fit"),
    "wrong shape": (_stored(lambda found: found | {UP: found[UP].T.contiguous()}), "tensors-do-not-fit"),
    "quantized": (_stored(lambda found: found | {UP: found[UP].to(torch.int8)}), "tensors-do-not-fit"),
    "longer than its header describes": (lambda file: file.write_bytes(file.read_bytes() + bytes(3)),
                                         "weight-file-damaged"),
    "a tensor in two files": (_in_two_files, "tensor-stored-twice"),
    "no weights": (Path.unlink, "weight-files"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "code"), WRONG.values(), ids=WRONG)
def test_other_files_are_rejected(change: Callable[[Path], object], code: str, file: Path, rejects: Rejects) -> None:
    change(file)
    with rejects(CheckpointError, code):
        _require(file.parent)


def test_files_come_from_the_index_if_there_is_one(file: Path, tmp_path: Path, rejects: Rejects) -> None:
    """A second set of the same weights next to it, which some publishers add, is ignored."""
    tensors = load_file(file)
    others = {f"original.{name}": tensor for name, tensor in tensors.items()}
    save_file(others, tmp_path / "consolidated.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    _require(tmp_path)
    assert expected_tensors(tmp_path) == shapes
    names = sorted(tensors)
    parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / part)
    weight_map = {name: part for part, held in parts.items() for name in held}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with rejects(CheckpointError, "weight-files"):
        _require(tmp_path)
    file.unlink()
    _require(tmp_path)
    assert expected_tensors(tmp_path) == shapes

    (tmp_path / "b.safetensors").unlink()
    with rejects(CheckpointError, "weight-files-missing"):
        _require(tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    with rejects(CheckpointError, "tensors-do-not-fit"):
        _require(tmp_path)
    for wrong in ("{", "[]", "\udcff", json.dumps({"weight_map": {names[0]: 5}})):
        index.write_text(wrong, errors="surrogateescape")
        with rejects(CheckpointError, "weight-files"):
            _require(tmp_path)


def test_only_the_requested_range_is_read_and_nan_is_rejected(file: Path, tmp_path: Path, rejects: Rejects) -> None:
    tensors = load_file(file)
    tensors[UP][7, 3] = float("nan")
    tensors[UP][0, 0], tensors[UP][1, 0] = 3e38, 3e38  # an infinite sum of finite numbers
    save_file(tensors, file)
    with HfCheckpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read(UP, 0, 0, 7), tensors[UP][:7])
        assert torch.equal(checkpoint.read(UP, 1, 4, 9), tensors[UP][:, 4:13])
        for axis, start in ((0, 6), (1, 2)):
            with rejects(CheckpointError, "weights-not-finite"):
                checkpoint.read(UP, axis, start, 4)


@pytest.mark.parametrize("difference", ["last bit", "type"])
def test_a_stored_copy_of_a_tied_head_may_be_ignored_if_it_is_equal(
    difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejects: Rejects
) -> None:
    """transformers would use the stored head, engines the embedding."""
    make_tiny_model(tmp_path, "qwen2")
    tied = load_file(tmp_path / "model.safetensors")
    tied["lm_head.weight"] = tied[EMBEDDING].clone()
    save_file(tied, tmp_path / "model.safetensors")
    monkeypatch.setattr(files, "_COMPARED", 1000)  # a few rows at a time
    _require(tmp_path, ignored={"lm_head.weight"})
    with rejects(CheckpointError, "tensors-do-not-fit"):
        _require(tmp_path)
    with HfCheckpoint(tmp_path) as checkpoint:
        checkpoint.require_copies({"lm_head.weight"}, EMBEDDING)
    if difference == "type":
        tied["lm_head.weight"] = tied["lm_head.weight"].bfloat16()
    else:
        tied["lm_head.weight"].view(torch.int32)[-1, -1] ^= 1
    save_file(tied, tmp_path / "model.safetensors")
    with HfCheckpoint(tmp_path) as checkpoint, rejects(CheckpointError, "tied-tensors-differ"):
        checkpoint.require_copies({"lm_head.weight"}, EMBEDDING)


# --------------------------------------------------------------------------------------------------------- value models
def _as_values(directory: Path) -> Tensor:
    """Read a head like a critic does, with every check of names and shapes."""
    model = ModelDimensions.from_checkpoint(directory, values=True)
    with ValueModel(directory) as checkpoint:
        checkpoint.require(family_of(model).hf_shapes(model), set())
        return checkpoint.read(VALUE_HEAD, 0, 0, 1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_policy_without_a_value_head_becomes_a_critic_whose_head_is_0(family: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family)
    assert torch.equal(_as_values(tmp_path), torch.zeros(1, ModelDimensions.from_checkpoint(tmp_path).hidden_size))


@pytest.mark.parametrize("name", [VALUE_HEAD, "v_head.summary.weight"])
@pytest.mark.parametrize(
    ("classes", "bias", "code"),
    [(1, None, None), (1, 0.0, None), (1, 0.5, "value-head-with-bias"), (2, None, "tensors-do-not-fit")],
)
def test_a_stored_value_head_is_read_unless_it_has_a_bias_or_several_classes(
    name: str, classes: int, bias: float | None, code: str | None, file: Path, rejects: Rejects
) -> None:
    tensors = load_file(file)
    head = torch.randn(classes, len(tensors["model.norm.weight"]))
    others = {} if bias is None else {name.replace("weight", "bias"): torch.tensor([bias])}
    save_file({**tensors, name: head, **others}, file)
    with nullcontext() if code is None else rejects(CheckpointError, code):
        assert torch.equal(_as_values(file.parent), head)


@pytest.mark.parametrize("name", [VALUE_HEAD, "v_head.summary.weight"])
def test_a_value_head_next_to_a_tower_is_read(name: str, file: Path) -> None:
    tensors = load_file(file)
    save_file({**tensors, name: (head := torch.randn(1, len(tensors["model.norm.weight"])))}, file)
    give_tower(file.parent, "qwen3_vl")
    assert torch.equal(_as_values(file.parent), head)


@pytest.mark.parametrize("kind", ["ForSequence", "ForToken", "TextForSequence"])
def test_a_classifier_is_read_only_as_a_critic(kind: str, file: Path) -> None:
    config = file.parent / "config.json"
    plain, settings = ModelDimensions.from_checkpoint(file.parent, values=True), json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"architectures": [f"Qwen3{kind}Classification"]}))
    assert ModelDimensions.from_checkpoint(file.parent, values=True) == plain
    with pytest.raises(ConfigError, match="is not a causal language model"):
        ModelDimensions.from_checkpoint(file.parent)


@pytest.mark.usefixtures("file")
def test_a_critic_is_of_the_language_model_alone(tmp_path: Path) -> None:
    """Its configuration leaves out the tower of the model that it began from."""
    give_tower(tmp_path, "qwen3_vl")
    (tmp_path / "critic").mkdir()
    copy_companions(tmp_path, tmp_path / "critic", torch.float32, values=True)
    begun, critic = (ModelDimensions.from_checkpoint(path, values=True) for path in (tmp_path, tmp_path / "critic"))
    assert begun == critic and not critic.tower
    assert json.loads((tmp_path / "critic" / "config.json").read_text())["architectures"] == [
        "Qwen3ForSequenceClassification"
    ]
    assert ModelDimensions.from_checkpoint(tmp_path).tower


# Fewer layers and experts than published take less time; every kind of layer is left.
_DEEPSEEK = [
    DEEPSEEK_V3 | {"num_hidden_layers": 5, "n_routed_experts": 16},
    MOONLIGHT | {"num_hidden_layers": 3, "n_routed_experts": 8},
]
# The published sizes are transformers' defaults.
_HYBRID = [
    kind(architectures=[architecture]).to_dict() | {"num_experts": 3, "num_experts_per_tok": 2}
    for kind, architecture in (
        (transformers.Qwen3NextConfig, "Qwen3NextForCausalLM"),
        (transformers.Qwen3_5TextConfig, "Qwen3_5ForCausalLM"),
        (transformers.Qwen3_5MoeTextConfig, "Qwen3_5MoeForCausalLM"),
    )
]


@pytest.mark.parametrize("config", [*_DEEPSEEK, *_HYBRID], ids=lambda config: config["architectures"][0])
def test_the_rules_match_what_transformers_would_write_at_published_sizes(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"} | config))
    model = ModelDimensions.from_checkpoint(tmp_path)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    tensors = revert_weight_conversion(module, module.state_dict())
    assert family_of(model).hf_shapes(model) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _qkv(sources: Sequence[Tensor], tp: TensorRank) -> Tensor:
    """Fill one rank's Megatron tensor piece by piece."""
    parts = Sources([tuple(source.shape) for source in sources], tp, dimensions())
    shape = GroupedQkv().shard_shape(parts, (0,))
    target = torch.full(shape, -1.0)
    for piece in GroupedQkv().pieces(parts, shape):
        view = piece.view(target)
        view.copy_(sources[piece.source].narrow(piece.axis, piece.start, piece.length).reshape(view.shape))
    return target


def _numbered(first: float, *shape: int) -> Tensor:
    """Make a tensor whose row r starts with ``first + r``, followed by distinct fractions."""
    rows = first + torch.arange(shape[0], dtype=torch.float32)
    return rows if len(shape) == 1 else rows[:, None] + torch.arange(shape[1]) / 64


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [(), (6,)])
def test_qkv_is_interleaved_by_query_group(size: int, width: tuple[int, ...]) -> None:
    """Group g has query heads 2g and 2g+1, key head g and value head g. With eight ranks, two share a group."""
    sources = [_numbered(first, heads * 3, *width) for first, heads in ((0, 8), (100, 4), (200, 4))]
    order = []
    for group in range(4):
        for head in (2 * group, 2 * group + 1):
            order += [head * 3 + d for d in range(3)]
        order += [100 + group * 3 + d for d in range(3)]
        order += [200 + group * 3 + d for d in range(3)]
    shards = [_qkv(sources, TensorRank(rank, size)) for rank in range(size)]
    assert all(len(shard) == 48 // size for shard in shards)
    fused = torch.cat(shards)
    assert (fused if not width else fused[:, 0]).tolist() == order
    if width:  # rows stay whole
        assert torch.equal(fused - fused[:, :1], sources[0][:1].expand(48, -1) - sources[0][0, 0])


# ------------------------------------------------------------------------------------------------------------- coverage
def _thin(shape: Shape, transform: Transform) -> Shape:
    """Shrink the axis that this kind of transform doesn't split, since its length doesn't matter."""
    if len(shape) == 1:
        return shape
    return (1, shape[1]) if isinstance(transform, Split) and transform.axis == 1 else (shape[0], 1)


@pytest.mark.parametrize(
    ("name", "size"), [(name, n) for name, model in PUBLISHED.items() for n in (1, 2, 4, 8) if model.num_heads % n == 0]
)
def test_every_element_of_a_published_model_has_one_place(name: str, size: int) -> None:
    model = PUBLISHED[name]
    padded = -(-model.vocab_size // (128 * size)) * 128
    for rule in family_of(model).rules_for(model):
        shapes = [_thin(shape, rule.transform) for shape in rule.shapes(model)]
        counted = [torch.zeros(shape) for shape in shapes]
        for rank in range(size):
            sources = Sources(shapes, TensorRank(rank, size), model)
            shape = rule.transform.shard_shape(sources, (padded,))
            shard = torch.zeros(shape)
            for piece in rule.transform.pieces(sources, shape):
                piece.view(shard).add_(1)
                counted[piece.source].narrow(piece.axis, piece.start, piece.length).add_(1)
                assert piece.numel(shapes) == piece.view(shard).numel()
            assert shard.max() <= 1 and (rule.transform.pads or shard.min() == 1), rule.megatron
        expected = 1 if rule.transform.sharded else size
        assert all(bool((count == expected).all()) for count in counted), rule.megatron


def test_a_family_without_adapter_is_rejected(rejects: Rejects) -> None:
    with rejects(CheckpointError, "no-weight-adapter"):
        family_of(dimensions(family="gpt2"))


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_of_the_checkpoint(tmp_path: Path, tied: bool) -> None:
    make_tiny_model(tmp_path, family="qwen3", seed=0, tie_word_embeddings=tied)
    weights = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert expected_tensors(tmp_path) == shapes
    assert ("lm_head.weight" in shapes) is not tied
    # Some checkpoints also store the tied copy and computed buffers, which are not separate weights.
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": weights["model.norm.weight"].clone()}
    if tied:
        extra["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    (tmp_path / "model.safetensors").rename(tmp_path / "main.safetensors")
    save_file(extra, tmp_path / "extra.safetensors")
    assert expected_tensors(tmp_path) == shapes
