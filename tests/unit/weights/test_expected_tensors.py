"""Tensors of a complete update, compared with a checkpoint written by Hugging Face."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slime_like.examples.tiny_model import make_tiny_model
from slime_like.weights.expected_tensors import expected_tensors


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
