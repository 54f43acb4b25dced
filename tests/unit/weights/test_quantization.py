"""8-bit weights: bytes, scales and values as the format defines them, and a checkpoint that transformers reads."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout.sglang import arguments as sglang
from rollout.transformers.weights import destination, destinations
from rollout.vllm import arguments as vllm
from slime_like.config import ModelConfig, RunConfig, SyncConfig
from slime_like.errors import ConfigError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import Manifest, RankCoordinates, WeightBucket, WeightExport
from slime_like.models.families import FAMILIES
from slime_like.models.weight_files import header_shapes
from slime_like.orchestration.run.engines import require_quantizable
from slime_like.orchestration.trainer import rank_export
from slime_like.orchestration.trainer.rank_export import RankExport
from slime_like.weights import quantization
from slime_like.weights.expected_tensors import expected_tensors
from slime_like.weights.quantization import dequantize, dequantize_bucket, quantize, quantize_export, with_scales
from tests.conftest import Tiny
from tests.parallel.towers import give_tower
from tests.support.rejections import Rejects

LARGEST = np.float32(448)
MAGNITUDES = np.array(
    [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
)
"""Non-negative finite values by byte: 4 bits of exponent with bias 7, then 3 of mantissa."""


def defined(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bytes, scales and the values they stand for, block by block, of a float32 matrix."""
    rows, columns = weight.shape
    found, values = np.zeros(weight.shape, np.uint8), np.zeros_like(weight)
    scales = np.ones((-(-rows // 128), -(-columns // 128)), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        if largest := np.abs(weight[part]).max():
            scales[i, j] = max(largest / LARGEST, np.finfo(np.float32).tiny)
        scaled = (weight[part] / scales[i, j]).astype(np.float64)
        above = np.searchsorted(MAGNITUDES, np.abs(scaled)).clip(1, 126)
        down, up = np.abs(scaled) - MAGNITUDES[above - 1], MAGNITUDES[above] - np.abs(scaled)
        nearest = above - ((down < up) | ((down == up) & (above % 2 == 1)))
        found[part] = nearest + 128 * np.signbit(scaled)
        values[part] = np.copysign(MAGNITUDES[nearest], scaled).astype(np.float32) * scales[i, j]
    return found, scales, values


def matrices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = {shape: torch.randn(shape, generator=generator) for shape in [(1, 1), (130, 257), (64, 300), (384, 128)]}
    made = {f"normal {shape}": weight for shape, weight in normal.items()}
    sizes = torch.logspace(-12, 4, 9).view(3, 3).repeat_interleave(128, 0).repeat_interleave(128, 1)
    made["blocks of other sizes"] = torch.randn(384, 384, generator=generator) * sizes
    made["zeros"] = torch.cat([torch.zeros(128, 128), torch.ones(3, 128)])
    ties = torch.from_numpy((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2).float()
    made["ties"] = torch.cat([ties, -ties, torch.tensor([448.0, -0.0])])[None]  # scale 1
    made["denormal"] = torch.randn(130, 2, generator=generator) * 1e-41
    made["least scale"] = torch.randn(2, 130, generator=generator) * 1e-37
    made["largest"] = torch.rand(2, 2, generator=generator) * torch.finfo(torch.float32).max
    made["bfloat16"] = torch.randn(200, 200, generator=generator).to(torch.bfloat16)
    return made


@pytest.mark.parametrize("name", matrices())
def test_bytes_scales_and_values_are_the_defined_ones(name: str) -> None:
    weight = matrices()[name]
    elements, scales = quantize(weight)
    expected = defined(weight.float().numpy())
    found = [elements.view(torch.uint8), scales, dequantize(elements, scales)]
    assert [(each.dtype, each.shape) for each in (elements, scales)] == [
        (torch.float8_e4m3fn, weight.shape),
        (torch.float32, expected[1].shape),
    ]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.numpy().view(np.uint8), np.ascontiguousarray(theirs).view(np.uint8))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_transformers_reads_the_exported_format(tmp_path: Path, family: str) -> None:
    """As a checkpoint, it has the weights that our engine has after loading the same buckets. transformers reads only
    whole blocks right."""
    latent = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 128, "kv_lora_rank": 64}
    make_tiny_model(tmp_path, family, hidden_size=256, **(latent if family == "deepseek_v3" else {}))
    plain = load_file(tmp_path / "model.safetensors")
    export = quantize_export(WeightExport(Manifest.of(plain), iter([WeightBucket(list(plain.items()))])))
    (bucket,) = export
    sent = dict(bucket.tensors)
    assert export.manifest == Manifest.of(sent)
    assert {name: tuple(each.shape) for name, each in sent.items()} == with_scales(
        {name: tuple(each.shape) for name, each in plain.items()}
    )
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    places = destinations(ours)
    with torch.no_grad():
        for name, tensor in dequantize_bucket(bucket.tensors):
            destination(name, places).copy_(tensor)
    config = json.loads((tmp_path / "config.json").read_text())
    shapes = {name: tuple(each.shape) for name, each in plain.items()}
    config["quantization_config"] = quantization.checkpoint_settings(shapes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(sent, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(one, other.float()), name


KEPT = {
    "gpt_oss": {"mlp.router"},
    **{family: {"mlp.gate"} for family in ("deepseek_v3", "glm4_moe", "qwen3_moe")},
    "qwen3_next": {"mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_ba", "linear_attn.in_proj_qkvz"},
    "qwen3_5_text": {f"linear_attn.in_proj_{part}" for part in ("a", "b", "qkv", "z")},
}
KEPT["qwen3_5_moe_text"] = KEPT["qwen3_5_text"] | {"mlp.gate", "mlp.shared_expert_gate"}
"""By family, matrices of layers that keep their type: routers and gates, and projections into gated delta nets."""
TOWERS = {"gemma3_text": "gemma3", "qwen3": "qwen3_vl", "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}


@pytest.mark.parametrize("family", FAMILIES)
def test_which_tensors_have_8_bits(family: str, tmp_path: Path) -> None:
    """Linear layers, but neither embeddings, head, norms, routers nor biases; with a tower, the same by other names."""
    make_tiny_model(tmp_path, family, num_hidden_layers=2)

    def kept() -> set[str]:
        require_quantizable(SyncConfig(quantization="fp8_blocks"), "transformers", ModelConfig(path=tmp_path), False)
        shapes = expected_tensors(tmp_path)
        scaled = {name.removesuffix("_scale_inv") for name in with_scales(shapes).keys() - shapes.keys()}
        assert all(len(shapes[name]) == 2 for name in scaled)
        names = {name for name in shapes.keys() - scaled if len(shapes[name]) == 2 and "bias" not in name}
        return {re.sub(r"model\.(language_model\.)?(layers\.\d+\.)?", "", name)[: -len(".weight")] for name in names}

    expected = {"embed_tokens", "lm_head"} - ({"lm_head"} if family in ("qwen2", "gemma3_text") else set())
    assert kept() == expected | KEPT.get(family, set())
    if family in TOWERS:
        give_tower(tmp_path, TOWERS[family])
        assert kept() == expected | KEPT.get(family, set())
        settings = quantization.checkpoint_settings(header_shapes(tmp_path))
        assert "model.visual.merger" in settings["modules_to_not_convert"]


def test_only_engines_get_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's exports, for comparisons, stay as they are."""
    monkeypatch.setattr(rank_export, "node_address", lambda: "127.0.0.1")
    name, weight = "model.layers.0.mlp.up_proj.weight", torch.randn(130, 200)
    sync = SyncConfig(transport="directory", directory=tmp_path, quantization="fp8_blocks")
    plain = [(name, weight), ("model.norm.weight", torch.ones(200))]
    backend: Any = SimpleNamespace(
        export_weights=lambda: WeightExport(Manifest.of(dict(plain)), iter([WeightBucket(plain)]))
    )
    roles = SimpleNamespace(scoring=[])
    export = RankExport(cast(Any, SimpleNamespace(sync=sync, roles=roles, bucket_bytes=lambda on_gpus: 1 << 20)))
    export.backend, export.place = backend, RankCoordinates(0, 0, 0, 0, 0, 1)
    assert export.begin_export() == Manifest.of(dict(plain))
    assert {each: tensor.dtype for each, tensor in (export.next_tensors() or {}).items()} == dict.fromkeys(
        dict(plain), torch.float32
    )
    export.open_transport("directory", "s" * 32, False)
    manifest, bucket = export.begin_export(), export.next_bucket()
    assert manifest is not None and bucket is not None
    found = {entry.name: (entry.dtype, entry.shape) for entry in bucket.entries}
    assert found == {each: (info.dtype, info.shape) for each, info in manifest.tensors.items()}
    assert found[f"{name}_scale_inv"] == ("float32", (2, 2)) and found[name] == ("float8_e4m3fn", (130, 200))
    export.close_transport()


@pytest.mark.parametrize(
    ("engine", "on_cuda", "family"),
    [("vllm", False, "qwen3"), ("sglang", False, "qwen3"), ("mine", True, "qwen3"), ("transformers", False, "gpt2")],
)
def test_engines_that_cannot_sample_with_8_bits_are_rejected(
    tiny: Tiny, tmp_path: Path, rejects: Rejects, engine: str, on_cuda: bool, family: str
) -> None:
    model = ModelConfig(path=shutil.copytree(tiny.model, tmp_path, dirs_exist_ok=True))
    if family == "gpt2":
        weights = load_file(tmp_path / "model.safetensors")
        renamed = {name.replace("model.layers", "transformer.h"): weight for name, weight in weights.items()}
        save_file(renamed, tmp_path / "model.safetensors")
    with rejects(ConfigError, "sync.quantization"):
        require_quantizable(SyncConfig(quantization="fp8_blocks"), engine, model, on_cuda)
    require_quantizable(SyncConfig(), engine, model, on_cuda)
    if family != "gpt2":
        for known in ("vllm", "sglang", "transformers"):
            require_quantizable(SyncConfig(quantization="fp8_blocks"), known, model, on_cuda=True)


def test_arguments_of_engines(tmp_path: Path) -> None:
    """They start without weights, and with the settings of such a checkpoint."""
    make_tiny_model(tmp_path, "qwen3_moe")
    config = RunConfig(
        run_dir=tmp_path,
        model={"path": tmp_path},
        sync={"quantization": "fp8_blocks"},
        algorithm={"importance": {"correction": "truncate"}},
    )
    expected = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(3)]
    expected["modules_to_not_convert"] = ["lm_head", "model.embed_tokens", *routers]
    ours = vllm.given_arguments(config, cpu=False)
    assert ours["hf_overrides"] == {"head_dtype": "float32", "quantization_config": expected}
    theirs = sglang.engine_arguments(config, 0, ())
    assert json.loads(theirs["json_model_override_args"]) == {"quantization_config": expected}
    assert ours["load_format"] == theirs["load_format"] == "dummy"
    plain = config.model_copy(update={"sync": SyncConfig()})
    assert "load_format" not in vllm.given_arguments(plain, cpu=False) | sglang.engine_arguments(plain, 0, ())
