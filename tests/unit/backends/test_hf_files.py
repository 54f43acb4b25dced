"""A checkpoint that is not exactly the model of its config.json is rejected, and the message names the tensors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.common.hugging_face import files
from backends.common.hugging_face.files import HfCheckpoint
from backends.megatron.conversion.families import family_of
from slime_like.errors import CheckpointError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.dimensions import EMBEDDING, ModelDimensions
from slime_like.models.weight_files import weight_file_problems
from slime_like.weights.expected_tensors import expected_tensors

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
UP = "model.layers.1.mlp.up_proj.weight"


def _require(directory: Path, ignored: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    model = ModelDimensions.from_checkpoint(directory)
    with HfCheckpoint(directory) as checkpoint:
        checkpoint.require(family_of(model).hf_shapes(model), ignored)


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_expect_what_transformers_writes(family: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family)
    _require(tmp_path)
    model = ModelDimensions.from_checkpoint(tmp_path)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert family_of(model).hf_shapes(model) == written


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors[UP], tensors["model.norm.weight"]


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(2)


def _transpose(tensors: dict[str, Tensor]) -> None:
    tensors[UP] = tensors[UP].T.contiguous()


def _quantise(tensors: dict[str, Tensor]) -> None:
    tensors[UP] = tensors[UP].to(torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, rf"missing: {UP}, model.norm.weight"),
        (_add, r"unexpected: model.layers.3.mlp.up_proj.weight"),
        (_transpose, rf"wrong shape: {UP} is \[128, 256\], not \[256, 128\]"),
        (_quantise, rf"floating-point type \(quantised\?\): {UP} \(I8\)"),
    ],
)
def test_other_tensors_are_listed(damage: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        _require(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 50_000, -1])
def test_a_file_that_is_cut_off_is_named_with_the_tensors_it_lacks(keep: int, tmp_path: Path) -> None:
    """In its header, in its data, by one byte: in one sentence, whether weights are read or a run is checked."""
    make_tiny_model(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    last = max(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])
    file.write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*is cut off or .*; copy or download it") as caught:
        _require(tmp_path)
    (problem,) = weight_file_problems(tmp_path, ModelDimensions.from_checkpoint(tmp_path))
    lacks = {-1: f", and lacks {last}; copy", 50_000: "and lacks lm_head.weight, model.embed_tokens.weight, "}
    assert lacks.get(keep, f"header does not fit its {keep} bytes") in problem
    assert str(caught.value) == problem


def test_a_file_longer_than_its_header_describes_is_rejected(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(bytes(3))
    with pytest.raises(CheckpointError) as caught:
        _require(tmp_path)
    message = f"{file} has {size + 3} bytes, but its header describes {size}: it is too long or damaged; copy or"
    assert str(caught.value).startswith(message)


def test_files_come_from_the_index_where_there_is_one(tmp_path: Path) -> None:
    """A second set of the same weights beside it (as some publishers add) is left alone."""
    make_tiny_model(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {f"of_its_maker.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "consolidated.safetensors"
    )
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
    with pytest.raises(CheckpointError, match=r"model\.safetensors and an .*index\.json that does not list it"):
        _require(tmp_path)
    file.unlink()
    _require(tmp_path)
    assert expected_tensors(tmp_path) == shapes

    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"files that its index lists are missing: b\.safetensors"):
        _require(tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    with pytest.raises(CheckpointError, match="missing: "):
        _require(tmp_path)
    for wrong in ("{", "[]", "\udcff", json.dumps({"weight_map": {names[0]: 5}})):
        index.write_text(wrong, errors="surrogateescape")
        with pytest.raises(CheckpointError, match="is no index of safetensors files"):
            _require(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3")
    file = (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({UP: load_file(file)[UP]}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=f"b.safetensors: tensors that another file has too: {UP}"):
        _require(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        HfCheckpoint(tmp_path)


def test_only_the_range_that_is_asked_for_is_read_and_nan_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[UP][7, 3] = float("nan")
    tensors[UP][0, 0], tensors[UP][1, 0] = 3e38, 3e38  # an infinite sum of finite numbers
    save_file(tensors, file)
    with HfCheckpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read(UP, 0, 0, 7), tensors[UP][:7])
        assert torch.equal(checkpoint.read(UP, 1, 4, 9), tensors[UP][:, 4:13])
        with pytest.raises(CheckpointError, match=f"{UP} holds NaN"):
            checkpoint.read(UP, 0, 6, 4)
        with pytest.raises(CheckpointError, match=f"{UP} holds NaN"):
            checkpoint.read(UP, 1, 2, 4)


def test_a_stored_copy_of_a_tied_head_may_be_ignored(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    _require(tmp_path, ignored={"lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"unexpected: lm_head\.weight"):
        _require(tmp_path)


@pytest.mark.parametrize("difference", ["last bit", "type"])
def test_a_tied_head_that_differs_is_refused(difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would keep the stored head, engines the embedding: neither is meant for sure."""
    monkeypatch.setattr(files, "_COMPARED", 1000)  # a few rows at a time
    make_tiny_model(tmp_path, "qwen2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors[EMBEDDING].clone()
    save_file({**tensors, "lm_head.weight": head}, file)
    with HfCheckpoint(tmp_path) as checkpoint:
        checkpoint.require_copies({"lm_head.weight"}, EMBEDDING)
    if difference == "type":
        head = head.bfloat16()
    else:
        head.view(torch.int32)[-1, -1] ^= 1
    save_file({**tensors, "lm_head.weight": head}, file)
    with (
        HfCheckpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=f"but lm_head.weight and {EMBEDDING} are stored and differ"),
    ):
        checkpoint.require_copies({"lm_head.weight"}, EMBEDDING)
