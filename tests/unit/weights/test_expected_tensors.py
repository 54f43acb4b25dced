"""Tensors of a complete update, compared with a checkpoint written by Hugging Face."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slime_like.errors import CheckpointError, WeightSyncError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import Manifest
from slime_like.weights.expected_tensors import expected_tensors, require_complete, require_model
from tests.support.rejections import Rejects


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


def test_a_directory_without_safetensors(rejects: Rejects, tmp_path: Path) -> None:
    with rejects(CheckpointError, "weight-files"):
        expected_tensors(tmp_path)


def test_missing_and_unknown_tensors(rejects: Rejects) -> None:
    require_complete({"a", "b"}, {"a", "b"}, "engine")
    with rejects(WeightSyncError, "incomplete-update"):
        require_complete({"a", "c"}, {"a", "b"}, "engine")
    with rejects(WeightSyncError, "incomplete-update"):
        require_complete(set(), {f"t{i}" for i in range(5)}, "engine")


def test_the_manifest_of_a_whole_update_has_the_tensors_of_the_model(rejects: Rejects, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family="qwen3", seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    name, tensor = next(iter(weights.items()))
    model = expected_tensors(tmp_path)
    require_model(Manifest.of(weights), model, "engine")
    others = {n: t for n, t in weights.items() if n != name}
    for changed in (others, weights | {"model.extra": tensor}, weights | {name: tensor.T.contiguous()}):
        with rejects(WeightSyncError, "incomplete-update"):
            require_model(Manifest.of(changed), model, "engine")
