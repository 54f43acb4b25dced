"""Converting Hugging Face to Megatron and back is the identity, bit for bit, for every family and parallel layout.

Streamed buckets and written checkpoints are compared with the original checkpoint tensor by tensor. The unit tests of
the transforms and the logprob parity tests cover that each element is in the *right* place in between.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.megatron import conversion, parallel
from backends.megatron.model import build_chunks
from slime_like.config import RunConfig
from slime_like.errors import CheckpointError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import ModelDimensions
from tests.parallel.layouts import layout_of
from tests.parallel.ranks import run_each, run_ranks
from tests.parallel.steps import joined, same_bits, small_disk
from tests.parallel.tiny import DIVISIBLE, edited_weights, stacked_experts, tiny_config
from tests.parallel.towers import tensors_of
from tests.support.acceptance import some_in_acceptance

DENSE = ("llama", "mistral", "gemma3_text", "qwen2", "qwen3", "qwen3_5_text")
EXPERTS = ("qwen3_moe", "deepseek_v3", "glm4_moe", "qwen3_next", "gpt_oss")
BUCKET_BYTES = 100_000  # smaller than embeddings (135 kB), larger than most other tensors
SHARD_BYTES = 400_000

LAYOUTS = ("single", "tp2", "tp4", "pp2", "pp2-vpp2", "pp3", "tp2-pp2", "cp2", "tp2-dp2")
EXPERT_LAYOUTS = ("dp2-ep2", "tp2-sp-ep2", "tp2-sp-dp2-ep2", "tp2-sp", "pp2-vpp2-dp4-ep4")
IN_ACCEPTANCE = ("tp2", "pp2", "tp2-pp2", "tp2-dp2", "dp2-ep2", "tp2-sp-ep2", "pp2-vpp2-dp4-ep4")
"""Each of their axes is in another layout, too."""
SOME = ("qwen2", "qwen3_5_text", "deepseek_v3", "qwen3_next", "gpt_oss")
"""Biases and tied embeddings, two kinds of layers, experts of each kind. Acceptance runs the others in every layout."""


@dataclass
class Exported:
    """One rank's stream: bucket sizes in bytes, and tensors."""

    buckets: list[int] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    copies: int = 0


def _round_trip(placement: RankPlacement, configs: list[RunConfig], outputs: list[Path]) -> list[Exported]:
    with joined(placement, configs[0]):
        return [_one_family(config, output) for config, output in zip(configs, outputs, strict=True)]


def _one_family(config: RunConfig, output: Path) -> Exported:
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    chunks = build_chunks(config, dimensions)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))  # so that a tensor that is not loaded is noticed
    conversion.load_hf_weights(chunks, config.model.path, dimensions)
    assert all(parameter.isfinite().all() for chunk in chunks for parameter in chunk.parameters())
    exported = Exported()
    for bucket in conversion.export_buckets(chunks, dimensions, BUCKET_BYTES):
        exported.buckets.append(sum(tensor.numel() * tensor.element_size() for _, tensor in bucket.tensors))
        exported.copies += sum(name in exported.tensors for name, _ in bucket.tensors)
        exported.tensors |= {name: tensor.clone() for name, tensor in bucket.tensors}
    conversion.save_hf(chunks, dimensions, config.model.path, output, shard_bytes=SHARD_BYTES)
    return exported


def _configs(root: Path, families: tuple[str, ...], layout: dict[str, Any], **sizes: Any) -> list[RunConfig]:
    for family in families:
        heads = {"linear_num_key_heads": 4} if family in ("qwen3_5_text", "qwen3_next") else {}
        make_tiny_model(root / family, family, **{**DIVISIBLE, **heads, **sizes})
    return [tiny_config(root / family, root, layout, sizes.get("dtype", "float32")) for family in families]


def _check_layout(root: Path, families: tuple[str, ...], layout: dict[str, Any], **sizes: Any) -> None:
    configs = _configs(root / "hf", families, layout, **sizes)
    outputs = [root / "out" / family for family in families]
    world = configs[0].trainer.parallel.world_size
    results = run_ranks(_round_trip, world, root / "ranks", configs, outputs)
    for index, (config, output) in enumerate(zip(configs, outputs, strict=True)):
        original = load_file(config.model.path / "model.safetensors")
        _check_stream([result[index] for result in results], original, config.trainer.parallel.pipeline)
        _check_directory(output, original)


def _check_stream(ranks: list[Exported], original: dict[str, Tensor], num_stages: int) -> None:
    """Check that every tensor comes unchanged from exactly one rank, and that buckets keep their size limit."""
    streamed: dict[str, Tensor] = {}
    for rank in ranks:
        assert rank.copies == 0
        assert not streamed.keys() & rank.tensors.keys()
        streamed |= rank.tensors
    same_bits(streamed, original)
    largest = max(tensor.nbytes for tensor in original.values())
    assert max(size for rank in ranks for size in rank.buckets) <= max(BUCKET_BYTES, largest)
    assert sum(bool(rank.tensors) for rank in ranks) == num_stages  # one sender per stage


def _check_directory(output: Path, original: dict[str, Tensor]) -> None:
    files = sorted(output.glob("*.safetensors"))
    assert len(files) > 1 and (output / "model.safetensors.index.json").is_file()
    assert not list(output.parent.glob(".*"))
    same_bits(tensors_of(output), original)


@pytest.mark.parametrize("others", some_in_acceptance([False, True], bool))
@pytest.mark.parametrize("layout", some_in_acceptance(LAYOUTS + EXPERT_LAYOUTS, IN_ACCEPTANCE.__contains__))
def test_round_trip_is_bit_exact(layout: str, others: bool, tmp_path: Path) -> None:
    families = EXPERTS if layout in EXPERT_LAYOUTS else DENSE
    if layout in LAYOUTS and "tp" not in layout:
        families += EXPERTS
    if layout == "tp2-sp":
        families = families[:-1]  # tensor ranks do not split experts with biases
    if layout != "single":
        families = tuple(family for family in families if (family in SOME) != others)
    _check_layout(tmp_path, families, layout_of(layout))


def test_round_trip_in_bfloat16_is_bit_exact(tmp_path: Path) -> None:
    """Tying is reversed: untied qwen2, and tied qwen3, whose last stage has a copy of the embedding.

    Routers' biases stay in float32. Also without compressed queries, and with two ranks for each of two KV heads.
    """
    for family, tied in (("qwen2", False), ("qwen3", True)):
        layout = {"tensor": 2, "pipeline": 2}
        _check_layout(tmp_path / family, (family,), layout, dtype="bfloat16", tie_word_embeddings=tied)
    layout = {"tensor": 2, "sequence": True, "expert": 2, "pipeline": 2}
    _check_layout(tmp_path / "direct", ("deepseek_v3",), layout, dtype="bfloat16", q_lora_rank=None)
    families = ("qwen2", "qwen3", "qwen3_5_text")
    _check_layout(tmp_path / "shared", families, {"tensor": 4}, dtype="bfloat16", num_key_value_heads=2)


def test_stacks_of_experts_are_written_as_they_were_read(tmp_path: Path) -> None:
    (config,) = _configs(tmp_path / "hf", ("qwen3_5_moe_text",), {"data": 2, "expert": 2, "pipeline": 2})
    file = config.model.path / "model.safetensors"
    stacks = stacked_experts(load_file(file))
    save_file(stacks, file)
    run_ranks(_round_trip, 4, tmp_path / "ranks", [config], [tmp_path / "out"])
    _check_directory(tmp_path / "out", stacks)


def test_transformers_loads_the_written_model(tmp_path: Path) -> None:
    """Saved over an earlier checkpoint and with the tokenizer, it computes the same logits."""
    (config,) = _configs(tmp_path / "hf", ("qwen3",), {"tensor": 2})
    output = tmp_path / "out"
    make_tiny_model(output, "qwen3", seed=5)
    run_ranks(_round_trip, 2, tmp_path / "ranks", [config], [output])
    tokens = AutoTokenizer.from_pretrained(output)("12+34=", return_tensors="pt").input_ids
    logits = [AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (config.model.path, output)]
    assert torch.equal(*logits)
    assert (output / "generation_config.json").is_file() and (output / "chat_template.jinja").is_file()


def test_a_checkpoint_is_cast_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    """Weights in float32 are rounded once for a bfloat16 model, and the written configuration names bfloat16."""
    (config,) = _configs(tmp_path / "hf", ("qwen3",), {})
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    ((exported,),) = run_ranks(_round_trip, 1, tmp_path / "ranks", [config], [tmp_path / "out"])
    original = load_file(config.model.path / "model.safetensors")
    same_bits(exported.tensors, {name: tensor.to(torch.bfloat16) for name, tensor in original.items()})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


class _FusedNames:
    """A model chunk that shows its parameters under the names of Transformer Engine's fused modules."""

    def __init__(self, chunk: Any) -> None:
        self.decoder = chunk.decoder
        self._chunk = chunk

    def parameters(self) -> Iterator[Tensor]:
        yield from self._chunk.parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._chunk.named_buffers()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._chunk.named_parameters():
            name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
            if ".experts." not in name and "router" not in name:
                name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
            yield re.sub(r"local_experts\.(\d+)\.(linear_fc[12])\.weight", r"\2.weight\1", name), parameter


def _load_under_fused_names(placement: RankPlacement, configs: list[RunConfig]) -> list[bool]:
    same = []
    with joined(placement, configs[0]):
        for config in configs:
            dimensions = ModelDimensions.from_checkpoint(config.model.path)
            plain, fused = build_chunks(config, dimensions), build_chunks(config, dimensions)
            conversion.load_hf_weights(plain, config.model.path, dimensions)
            conversion.load_hf_weights([_FusedNames(chunk) for chunk in fused], config.model.path, dimensions)
            pairs = zip(plain[0].parameters(), fused[0].parameters(), strict=True)
            same.append(all(torch.equal(one, other) for one, other in pairs))
    return same


def test_fused_names_of_transformer_engine_are_understood(tmp_path: Path) -> None:
    configs = _configs(tmp_path / "hf", ("qwen2", "qwen3_moe"), {"data": 2, "expert": 2})[1:]
    configs += _configs(tmp_path / "hf", ("qwen2",), {"data": 2})
    assert run_ranks(_load_under_fused_names, 2, tmp_path / "ranks", configs) == [[True, True]] * 2


# --------------------------------------------------------------------------------------------------------------- faults
def _failing(placement: RankPlacement, config: RunConfig, action: Callable[..., None], *arguments: Any) -> str:
    """Return the message of the CheckpointError that ``action`` raises on this rank."""
    with joined(placement, config), pytest.raises(CheckpointError) as caught:
        action(config, ModelDimensions.from_checkpoint(config.model.path), *arguments)
    return str(caught.value)


def _load(config: RunConfig, dimensions: ModelDimensions, changes: dict[str, Any]) -> None:
    """Load into a model whose dimensions differ from the checkpoint's."""
    chunks = build_chunks(config, replace(dimensions, **changes))
    conversion.load_hf_weights(chunks, config.model.path, dimensions)


def test_one_rank_failing_ends_all(tmp_path: Path) -> None:
    """Only the last stage reads the NaN in the last layer; the first stage is told and does not wait."""
    (config,) = _configs(tmp_path / "hf", ("qwen3",), {"pipeline": 2})
    with edited_weights(config.model.path) as tensors:
        tensors["model.layers.3.mlp.down_proj.weight"][5, 7] = float("nan")
    messages = run_ranks(_failing, 2, tmp_path / "ranks", config, _load, {})
    assert "failed on trainer rank 1" in messages[0]
    assert "model.layers.3.mlp.down_proj.weight holds NaN" in messages[1]


NOT_ITS_OWN: list[tuple[dict[str, Any], str]] = [
    ({"qk_norm": False}, "no parameter of any rank takes model.layers.0.self_attn.k_norm.weight"),
    ({"qkv_bias": True}, "parameters that no rule of family qwen3 covers: decoder.layers.0.self_attention.linear_qkv"),
    ({"ffn_hidden_size": 128}, r"decoder.layers.0.mlp.linear_fc1.weight has shape [128, 128]"),
    ({"vocab_size": 100}, r"embedding.word_embeddings.weight has shape [128, 128]"),
    ({"num_layers": 2}, "no parameter of any rank takes model.layers.2."),
    ({"tied_embeddings": True}, "no parameter of any rank takes lm_head.weight"),
]


def test_another_model_than_the_checkpoint_is_rejected(tmp_path: Path) -> None:
    (config,) = _configs(tmp_path / "hf", ("qwen3",), {"tensor": 2})
    found = run_each(_failing, 2, tmp_path / "ranks", [(config, _load, changes) for changes, _ in NOT_ITS_OWN])
    for (changes, message), ranks in zip(NOT_ITS_OWN, found, strict=True):
        assert all(message in each for each in ranks), changes


def _save_on_a_full_disk(config: RunConfig, dimensions: ModelDimensions, output: Path) -> None:
    """Simulate the full disk on the last stage only."""
    chunks = build_chunks(config, dimensions)
    conversion.load_hf_weights(chunks, config.model.path, dimensions)
    with small_disk(200_000 if parallel.coordinates().pipeline == 1 else None):
        conversion.save_hf(chunks, dimensions, config.model.path, output, shard_bytes=SHARD_BYTES)


def test_a_full_disk_leaves_the_earlier_checkpoint_alone(tmp_path: Path) -> None:
    (config,) = _configs(tmp_path / "hf", ("qwen3",), {"tensor": 2, "pipeline": 2})
    output = tmp_path / "out"
    make_tiny_model(output, "qwen3", seed=5)
    before = {file.name: file.read_bytes() for file in output.iterdir()}
    messages = run_ranks(_failing, 4, tmp_path / "ranks", config, _save_on_a_full_disk, output)
    assert "could not be written" in messages[2] and "File too large" in messages[2]
    assert all("failed on trainer rank 2" in messages[rank] for rank in (0, 1, 3))
    assert {file.name: file.read_bytes() for file in output.iterdir()} == before
    assert not list(tmp_path.glob(".*"))


def _save(config: RunConfig, dimensions: ModelDimensions, output: Path) -> None:
    conversion.save_hf(build_chunks(config, dimensions), dimensions, config.model.path, output)


def test_saving_over_other_files_is_rejected(tmp_path: Path) -> None:
    (config,) = _configs(tmp_path / "hf", ("qwen3",), {})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file.txt").write_text("keep me")
    for output, message in (
        (tmp_path / "notes", "is not a Hugging Face checkpoint"),
        (config.model.path, "is the model that training started from"),
    ):
        names = sorted(file.name for file in output.iterdir())
        (found,) = run_ranks(_failing, 1, tmp_path / f"ranks-{output.name}", config, _save, output)
        assert message in found
        assert sorted(file.name for file in output.iterdir()) == names
