"""Make tiny Hugging Face checkpoints of every family, and scored sequences for them, from seeds."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.trajectory import ScoredTrajectory

VOCAB = 151  # a prime: no layout divides it

DIVISIBLE = {"num_hidden_layers": 4, "num_key_value_heads": 4}
"""Sizes of the tiny model that allow tensor=4 (four KV heads) and interleaving (four layers)."""

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "rms_norm_eps": 1e-6,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
_FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Values narrower than queries and keys, YaRN scaling of rotary table and softmax, two of four groups chosen.
_DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "num_nextn_predict_layers": 0,
    "pad_token_id": None,
    "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
}
# Partly rotary heads, a gate for each, value heads that share key heads; layers of either kind.
_HYBRID: dict[str, Any] = {
    "rms_norm_eps": 1e-3,  # outputs of recurrences are often near 0, where a smaller one would amplify rounding errors
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "pad_token_id": None,
}
_HYBRID_EXPERTS = {**_FOUR_EXPERTS, "shared_expert_intermediate_size": 32}
# Families that Megatron trains here: config class, and differences from ``SIZES``.
_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_SCALING}),
    "mistral": ("MistralConfig", {"sliding_window": 7, "pad_token_id": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 32, "tie_word_embeddings": False, "norm_topk_prob": True, **_FOUR_EXPERTS},
    ),
    "glm4_moe": (  # a head's rotary part, biases and norms of heads, experts in one group
        "Glm4MoeConfig",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
            "pad_token_id": None,
        },
    ),
    "gpt_oss": (  # windows narrower than most sequences, and a scaled table that keeps no whole dimension
        "GptOssConfig",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "sliding_window": 7,
            "pad_token_id": None,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "gemma3": (  # two kinds of layers with two rotary embeddings, of which one is scaled
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "pad_token_id": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", {**_HYBRID, **_HYBRID_EXPERTS}),
    "qwen3_5_text": ("Qwen3_5TextConfig", _HYBRID),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**_HYBRID, **_HYBRID_EXPERTS}),
    "deepseek_v3": ("DeepseekV3Config", {**_DEEPSEEK, "q_lora_rank": 32}),
    # Without compressed queries, like Moonlight-16B-A3B.
    "deepseek_v3_direct": ("DeepseekV3Config", {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "q_lora_rank": None}),
}
# Families that only FSDP trains, of two layers; comments name what distinguishes each from Llama.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": (  # scaled embeddings, norms around 1 + w, capped logits, windows
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "phi3": ("Phi3Config", {"tie_word_embeddings": False}),  # fused projections
    "granite": (  # four multipliers
        "GraniteConfig",
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),  # parallel residuals, partly rotary heads, other names
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),  # LayerNorm, one norm per layer, tied
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),  # a bias in the head
    "gpt2": (
        "GPT2Config",
        {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 256, "initializer_range": 0.08},
    ),  # learned positions
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),  # layers that pass on only their own outputs
    "qwen2_moe": ("Qwen2MoeConfig", {**_HYBRID_EXPERTS, "mlp_only_layers": [1]}),
}

RENAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5_moe": (  # routers' biases as parameters, under other names in checkpoints
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    ),
    "minimax_m2": (  # Mixtral's names of experts, norms over all heads
        "MiniMaxM2Config",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "gemma4_text": (  # scalars of layers, two sizes of heads, keys as values
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
        },
    ),
}
"""Families of two layers whose modules have other names or stacks than their checkpoints."""


def save_checkpoint(family: str, directory: Path, seed: int = 0, layers: int = 4) -> Path:
    """Write a float32 checkpoint with random weights, norms and biases, and return its directory.

    ``OTHERS`` have two layers.
    """
    torch.manual_seed(seed)
    model = _model(family, layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.1)
            elif name.endswith("A_log"):  # states that last for some tokens
                parameter.normal_(-1.0, 0.5)
            elif name.endswith("conv1d.weight"):  # queries and keys far from 0, as they are divided by their length
                parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return directory


def stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a checkpoint's tensors to those of Hugging Face's module: stacked experts, gate rows above up rows."""
    experts = [name for name in tensors if ".experts." in name and name.endswith("_proj.weight")]
    stacked = {name: tensor for name, tensor in tensors.items() if name not in experts}
    for prefix in dict.fromkeys(name.partition(".experts.")[0] for name in experts):
        count = sum(name.startswith(f"{prefix}.experts.") and name.endswith(".down_proj.weight") for name in experts)
        of = {kind: [tensors[f"{prefix}.experts.{n}.{kind}_proj.weight"] for n in range(count)]
              for kind in ("gate", "up", "down")}  # fmt: skip
        gate_up = [torch.cat(pair) for pair in zip(of["gate"], of["up"], strict=True)]
        stacked[f"{prefix}.experts.gate_up_proj"] = torch.stack(gate_up)
        stacked[f"{prefix}.experts.down_proj"] = torch.stack(of["down"])
    return stacked


def _model(family: str, layers: int) -> torch.nn.Module:
    class_name, features = (_KNOWN | OTHERS | RENAMED)[family]
    sizes = (
        {"vocab_size": VOCAB}
        if family == "gpt2"
        else SIZES | {"num_hidden_layers": 2 if family in OTHERS | RENAMED else layers}
    )
    # transformers gives the embedding of a padding token no gradient.
    ids = {} if family in _KNOWN else {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, class_name)(**{**sizes, **features, **ids})
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def scored_sequences(
    lengths: list[tuple[int, int]], seed: int = 0, fully_masked: tuple[int, ...] = ()
) -> list[ScoredTrajectory]:
    """Make one sequence per (prompt, response) length, with all inputs of an RL loss with KL and entropy."""
    generator = torch.Generator().manual_seed(seed)
    return [
        _scored(index, prompt, response, generator, index in fully_masked)
        for index, (prompt, response) in enumerate(lengths)
    ]


def _scored(index: int, prompt: int, response: int, generator: torch.Generator, masked: bool) -> ScoredTrajectory:
    def noise() -> torch.Tensor:
        return torch.randn(response, generator=generator)

    loss_mask = torch.rand(response, generator=generator) < 0.85
    if masked:
        loss_mask.zero_()
    elif not loss_mask.any():
        loss_mask[-1] = True
    old = -5.0 + 0.3 * noise()
    return ScoredTrajectory(
        prompt_tokens=torch.randint(0, VOCAB, (prompt,), generator=generator),
        response_tokens=torch.randint(0, VOCAB, (response,), generator=generator),
        prompt_len=prompt,
        response_len=response,
        logprobs=old + 0.01 * noise(),
        old_logprobs=old,
        ref_logprobs=old + 0.2 * noise(),
        rewards=torch.zeros(1),
        successes=torch.zeros(1),
        # Large, so that updates are far above the rounding error of weights near 1.
        advantages=8.0 * torch.randn((), generator=generator),
        answer="",
        sequence_id=f"s{index}",
        group_id=index // 2,
        reward_metadata={"func_names": ["none"]},
        policy_version=0,
        loss_mask=loss_mask,
        token_weight=1.0 / max(1, int(loss_mask.sum())),
        temperature=(1.0, 0.7, 1.3)[index % 3],
    )


def tiny_config(
    model: Path, run_dir: Path, layout: dict[str, Any] | None = None, dtype: str = "float32", **sections: Any
) -> RunConfig:
    """Return a configuration with one thread per rank and a time limit for tests, changed by ``sections``."""
    trainer = {"parallel": layout or {}, "step_timeout_s": 300.0, "cpu_threads": 1}
    trainer |= sections.pop("trainer", {})
    return RunConfig(run_dir=run_dir, model={"path": model, "dtype": dtype}, trainer=trainer, **sections)


@contextmanager
def edited_weights(directory: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of a one-file model and write them back, changed, after the block."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    yield tensors
    save_file(tensors, file, metadata={"format": "pt"})


def with_drafts(directory: Path) -> dict[str, torch.Tensor]:
    """Add a layer for multi-token prediction to a one-file model; return its tensors."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    names = ("eh_proj", "enorm", "mlp.gate", "mlp.experts.0.gate_proj", "shared_head.head")
    prefix = f"model.layers.{config['num_hidden_layers']}"
    drafts = {f"{prefix}.{name}.weight": torch.randn(6, 4).bfloat16() for name in names}
    with edited_weights(directory) as tensors:
        tensors |= drafts
    return drafts
