"""The FSDP trainer agrees with Hugging Face's float64 model on unpacked sequences, and with the Megatron trainer.

The same values are compared as for Megatron (``test_parity``), within the same bounds. Any Hugging Face causal language
model trains completely, or is rejected with a reason: families without formulas in this project are compared like the
known ones. Not covered here: CUDA.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from backends.common.linear_attention import Recurrence
from backends.fsdp.model import _require_nothing_else
from backends.fsdp.trainer import FsdpTrainer
from rollout.transformers.weights import destination, destinations
from slime_like.algorithms.context import Layout, split_for_context_parallel
from slime_like.algorithms.packing.pack import pack_sequences, real_tokens
from slime_like.config import RunConfig
from slime_like.errors import ConfigError, TrainerError
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import keeps_type
from slime_like.planning.plan import count_parameters
from slime_like.trajectory import PackedTrajectory
from tests.parallel.cases import LENGTHS, PACKS
from tests.parallel.checks import GRADIENT_BOUND, LOGPROB_BOUND, UPDATE_BOUND, check_tensors, whole
from tests.parallel.feature_cases import value_config
from tests.parallel.harness import Row, case_of, check, parameters, rows
from tests.parallel.ranks import run_each, run_ranks
from tests.parallel.steps import as_critic, exported_gradients, running, scored_packs
from tests.parallel.tiny import OTHERS, RENAMED, SIZES, save_checkpoint, scored_sequences, tiny_config

pytestmark = pytest.mark.timeout(900)  # one fork runs many cases

FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe", "deepseek_v3", "gpt_oss")
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
WINDOWS = ("gpt_oss", "gemma3_text")
OURS = Row("plain", "qwen3_moe", "fsdp-dp2-cp2")
ROWS = [
    *rows("plain", dict.fromkeys(FAMILIES, ("fsdp",))),
    *rows("plain", {"qwen2": ("fsdp-cp2",), OURS.family: (OURS.layout,)}),
    *rows("plain", dict.fromkeys((each for each in FAMILIES if each != OURS.family), ("fsdp-dp2-cp2",)), True),
    *rows("plain", {"glm4_moe": ("fsdp-cp2",), "qwen3_moe": ("fsdp-dp2-recompute",)}),
    *rows("plain", {"deepseek_v3": ("fsdp-cp2-recompute1",)}),
    *rows("plain", {"qwen3": ("fsdp-dp2-sharded", "fsdp-dp2-host", "fsdp-cp2-ring_flash_attn")}),
    *rows("plain", {"qwen2": ("fsdp-dp2-kept",), "llama": ("fsdp-cp4",)}, True),
    *rows("plain", {"deepseek_v3_direct": ("fsdp-cp2-ring_flash_attn",)}, True),
    *(replace(row, steps=1) for row in rows("plain", dict.fromkeys(OTHERS, ("fsdp-cp2",)))),
    *rows("lengths", dict.fromkeys(HYBRID, ("fsdp-recompute", "fsdp-cp2"))),
    *rows("lengths", dict.fromkeys(WINDOWS, ("fsdp-cp2",))),
    *rows("neighbor", {"qwen3_5_text": ("fsdp-bfloat16", "fsdp-cp2-bfloat16")}, False, ("only", True)),
    *rows("neighbor", dict.fromkeys(WINDOWS, ("fsdp-cp2",)), False, ("changed", 2), ("only", True)),
    *rows("shared", {"qwen3": ("fsdp-recompute", "fsdp-cp2"), "qwen3_moe": ("fsdp-recompute", "fsdp-dp2-cp2")}),
    *rows("shared", {"qwen3": ("fsdp-dp2-cp2",)}, True),
    *rows("supports", {"qwen3": ("fsdp-cp2",)}),
    *rows("supports", {"qwen3": ("fsdp-dp2-cp2",)}, True),
    *rows("supports", {"qwen3": ("fsdp-dp2-cp2",)}, True, ("shares", True)),
]


@parameters(ROWS)
def test_a_family_computes_the_reference(row: Row, cases: Any, results: Any) -> None:
    check(row, cases, results)


@pytest.mark.parametrize(("row", "other"), [(OURS, Row("plain", "qwen3_moe", "dp2-distributed"))], ids=str)
def test_megatron_and_fsdp_agree(row: Row, other: Row, cases: Any, results: Any) -> None:
    case, ours, theirs = case_of(row, cases), results[row], results[other]
    for index, scored in scored_packs(theirs).items():
        of_ours = scored_packs(ours)[index][0]
        torch.testing.assert_close(scored[0]["old_logprobs"], of_ours["old_logprobs"], rtol=0, atol=LOGPROB_BOUND)
    changes = [
        {name: weights[name].double() - value for name, value in case.initial.items()}
        for weights in (whole(case, each, "weights")[0] for each in (ours, theirs))
    ]
    check_tensors(changes[0], changes[1], UPDATE_BOUND)
    for mine, their in zip(ours[0].stats, theirs[0].stats, strict=True):
        assert mine is not None and their is not None
        for name in ("loss", "grad_norm", "moe_aux_loss", "entropy", "learning_rate"):
            assert float(getattr(mine, name)) == pytest.approx(float(getattr(their, name)), rel=2e-4), name


def test_context_ranks_share_heads_in_both_layouts(tmp_path: Path) -> None:
    pack = pack_sequences(scored_sequences(LENGTHS[0]))
    (alone,) = run_ranks(_mixed, 1, tmp_path / "1", pack)
    shared = run_ranks(_mixed, 2, tmp_path / "2", pack)
    for layout, expected in alone.items():
        for of_one, *parts in zip(expected, *(found[layout] for found in shared), strict=True):
            torch.testing.assert_close(sum(parts), of_one, rtol=0, atol=1e-11)


def _mixed(placement: RankPlacement, pack: PackedTrajectory) -> dict[str, list[Tensor]]:
    """Return this rank's outputs, among zeros for all tokens, and its part of all gradients, by layout."""
    address = f"tcp://{placement.master_address}:{placement.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=placement.rank, world_size=placement.world_size)
    assert dist.group.WORLD is not None
    found = {}
    for layout in get_args(Layout):
        generator = torch.Generator().manual_seed(0)
        tokens, shapes = len(pack.tokens), ((2, 8), (2, 8), (4, 6), (4,), (4,))
        shapes_of_parameters = (2 * 2 * 8 + 4 * 6, 4), (4,), (4,)
        leaves = [
            torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
            for shape in (*((tokens, *shape) for shape in shapes), *shapes_of_parameters)
        ]
        shard = split_for_context_parallel(pack, placement.world_size, placement.rank, layout)
        real = (shard.source >= 0).nonzero()[:, 0]
        local = [x[shard.source.clamp_min(0)] for x in leaves[:5]]  # padding has values that must not matter
        out = Recurrence.of(shard, dist.group.WORLD).mix(*local, *leaves[5:])
        whole = out.new_zeros(tokens, *out.shape[1:]).index_copy(0, shard.source[real], out[real])
        grad = torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
        found[layout] = [whole.detach(), *torch.autograd.grad(whole, leaves, grad)]
    return found


# ----------------------------------------------------------------------------------------------------------- any model
REFUSED = {
    "Gemma2Config": "asks for softcap in attention",
    "OlmoHybridConfig": "checkpoints of OlmoHybridForCausalLM are arranged differently from its modules",
    "GlmMoeDsaConfig": "the layers of transformers cannot compute a micro-batch without its masks and cache (TypeError",
    "FalconConfig": "no causal language model for it whose attention can be replaced",
    "Lfm2Config": "a sequence affects the next one in a micro-batch",
    "Qwen2MoeConfig": "differ from those of transformers' own forward pass",  # a window in its mask only
    "a factor that its head leaves out": "differ from those of transformers' own forward pass",
    "a sequence longer than a chunk": f"a sequence has {max(map(sum, PACKS[1]))} tokens, but layers of",
}
"""Configuration class of transformers, or a fault of a checkpoint, and the message."""


def test_models_that_do_not_support_packs_are_rejected_by_name(tmp_path: Path) -> None:
    """Runs in bfloat16, whose rounding could hide a difference."""
    models = [_checkpoint(name, tmp_path / str(index)) for index, name in enumerate(REFUSED)]
    wide = pack_sequences(scored_sequences(PACKS[1]))
    configs = [_config(model, name) for name, model in zip(REFUSED, models, strict=True)]
    messages = run_each(_refusal, 1, tmp_path / "ranks", [(config, wide) for config in configs])
    for (name, sentence), (message,) in zip(REFUSED.items(), messages, strict=True):
        assert sentence in message, f"{name}: {message}"


def test_critics_of_other_families_start_unless_they_do_not_support_packs(tmp_path: Path) -> None:
    """The check at the start gives the head weights for a moment; it begins at 0, without a bias of the logits."""
    kinds = [save_checkpoint(family, tmp_path / family) for family in ("gemma3_text", "phi", "cohere", "qwen3_5_text")]
    models = [*kinds, _checkpoint("Lfm2Config", tmp_path / "lfm2")]
    tasks = [(value_config(model, tmp_path, {"backend": "fsdp"}, "bfloat16"),) for model in models]
    *found, (refused,) = run_each(_start_of_a_critic, 1, tmp_path / "ranks", tasks)
    assert found == [("started with 0.0",)] * len(kinds)
    assert "a sequence affects the next one in a micro-batch (values change by" in refused


def _start_of_a_critic(placement: RankPlacement, config: RunConfig) -> str:
    trainer = FsdpTrainer(config, as_critic(placement))
    try:
        trainer.setup()
        return f"started with {float(trainer.model.hugging_face.score.weight.full_tensor().detach().abs().max())}"
    except ConfigError as error:
        return str(error)
    finally:
        trainer.shutdown()


@pytest.mark.parametrize("family", [*RENAMED])
def test_tensors_of_modules_with_other_names(family: str, tmp_path: Path) -> None:
    """transformers names the reference's gradients as in checkpoints. Routers' biases and layers' scalars are exported
    as they were, also in bfloat16, whose values would be others."""
    model = save_checkpoint(family, tmp_path / "model")
    stored = load_file(model / "model.safetensors")
    kept = {name: value for name, value in stored.items() if keeps_type(name)}
    found = destinations(transformers.AutoModelForCausalLM.from_pretrained(model))
    assert all(destination(name, found).shape == value.shape for name, value in stored.items())  # of an engine
    assert len(kept) in (1, 2) and all((value != value.bfloat16()).any() for value in kept.values())
    sequences = scored_sequences(LENGTHS[0])
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    reference.set_attn_implementation("eager")
    reference.set_experts_implementation("eager")
    for each in sequences:
        tokens = torch.cat([each.prompt_tokens, each.response_tokens])
        logits = reference(tokens[None]).logits[0, each.prompt_len - 1 : -1]
        logprobs = (logits / each.temperature).log_softmax(-1).gather(1, each.response_tokens[:, None])[:, 0]
        (-logprobs[each.loss_mask].mean() / 10).backward()  # a sample's tokens have the weight 1 together
    gradients = {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}
    expected = {n: g.contiguous() for n, g in revert_weight_conversion(reference, gradients).items() if n not in kept}
    layout, objective = {"context": 2}, {"loss": "sft", "reduction": "samples"}
    config = tiny_config(model, tmp_path, layout, algorithm=objective, trainer={"backend": "fsdp"})
    found = run_ranks(_gradients, 2, tmp_path / "ranks", config, pack_sequences(sequences), tmp_path / "hf")
    check_tensors(found[0], expected, GRADIENT_BOUND)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name].float(), value) for name, value in stored.items())
    halves = tiny_config(model, tmp_path, None, "bfloat16", trainer={"backend": "fsdp"})
    run_ranks(_export, 1, tmp_path / "halves", halves, tmp_path / "bf16")
    exported = load_file(tmp_path / "bf16" / "model.safetensors")
    assert all(exported[name].dtype == torch.float32 and torch.equal(exported[name], kept[name]) for name in kept)


def _gradients(
    placement: RankPlacement, config: RunConfig, pack: PackedTrajectory, directory: Path
) -> dict[str, Tensor]:
    """Return the gradients of the summed negative logprobs over 10, by their names in checkpoints."""
    with running(placement, config) as trainer:
        trainer.export_hf(directory)
        trainer.begin_step(10.0, real_tokens([pack]))
        trainer.accumulate([pack], last=True)
        return exported_gradients(trainer, 10.0)


def _export(placement: RankPlacement, config: RunConfig, directory: Path) -> None:
    with running(placement, config) as trainer:
        trainer.export_hf(directory)


def test_a_buffer_of_the_checkpoint_is_rejected_by_name() -> None:
    """Buffers that follow from the configuration are in no checkpoint, and routers' biases are kept."""
    module = torch.nn.Linear(2, 2)
    module.register_buffer("angles", torch.zeros(2), persistent=False)
    module.register_buffer("e_score_correction_bias", torch.zeros(2))
    model = torch.nn.ModuleDict({"gate": module})
    _require_nothing_else(model)
    module.register_buffer("running_mean", torch.zeros(2))
    with pytest.raises(ConfigError, match=r"has 1 tensor \(gate\.running_mean, "):
        _require_nothing_else(model)


def test_a_plan_counts_the_model_itself(tmp_path: Path) -> None:
    """A token passes two of four experts and everything else except the embedding."""
    model = save_checkpoint("qwen2_moe", tmp_path)
    found = ModelDimensions.from_checkpoint(model)
    counted = count_parameters(_config(model, ""), found, FsdpTrainer)
    sizes = {name: value.numel() for name, value in load_file(model / "model.safetensors").items()}
    assert found.attention.unsupported is not None and counted.num_parameters == sum(sizes.values())
    idle = sum(size for name, size in sizes.items() if ".experts.0." in name or ".experts.1." in name)
    assert counted.active_parameters == sum(sizes.values()) - idle - sizes["model.embed_tokens.weight"]


def _refusal(placement: RankPlacement, config: RunConfig, pack: Any) -> str:
    """Return the error of the run's start, or of its first pack."""
    trainer = FsdpTrainer(config, placement)
    try:
        trainer.setup()
        trainer.score([pack])
    except (ConfigError, TrainerError) as error:
        return str(error)
    finally:
        trainer.shutdown()
    return "nothing"


def _config(model: Path, name: str) -> RunConfig:
    supervised = {"loss": "sft"} if "chunk" in name else {}  # lengths of samples are rejected before anything starts
    lengths: dict[str, Any] = {"data": {"max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 16}}
    return tiny_config(model, model, None, "bfloat16", **lengths, algorithm=supervised, trainer={"backend": "fsdp"})


def _checkpoint(name: str, directory: Path) -> Path:
    if not name.endswith("Config"):
        save_checkpoint("llama", directory)
        change = {
            "attention_chunk_size": 32,
            "mlp_bias": False,
            "hidden_act": "silu",
            "architectures": ["Llama4ForCausalLM"],
        }
        file = directory / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | (change if "chunk" in name else {"logits_scaling": 4.0})))
        return directory
    torch.manual_seed(0)
    sizes = {**SIZES, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, name)(**sizes, **_FEATURES.get(name, {}))
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


_FEATURES: dict[str, dict[str, Any]] = {
    "Gemma2Config": {"head_dim": 16},
    "OlmoHybridConfig": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "GlmMoeDsaConfig": {
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
    },
    "Qwen2MoeConfig": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": 200,
        "layer_types": ["sliding_attention"] * 4,
    },
    "Lfm2Config": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_multiple_of": 32},
}
