"""A complete, tiny Hugging Face checkpoint and an arithmetic data set, made from nothing: no download, quick on a CPU.

The checkpoint has everything a real one has (config, safetensors, generation config, tokenizer, chat template), so
trainers and engines treat it as any other model. The data are sums, which such a model learns within a minute.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slime_like.errors import ConfigError

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>")
"""Ids 0 to 7; the 256 byte values follow."""

VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""One token opens every turn, ``<eos>`` ends the model's: a prompt costs two tokens more than its text."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "head_dim": 16,  # in this configuration that of the rotary embedding
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 48,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 128,
        },
    },
}
"""By the model type of transformers: what differs from ``_SIZES``."""

_DEMONSTRATIONS = 4


def make_tiny_model(directory: Path, family: str = "qwen3", seed: int = 0, **overrides: Any) -> None:
    """Write a randomly initialised checkpoint into ``directory``.

    Weights are normal with standard deviation ``1 / sqrt(fan-in)``; norm weights and biases scatter around 1 and 0, so
    that one which is lost or swapped shows in the logits.

    Args:
        family: llama (with llama3 rope scaling), mistral, qwen2 (biases, tied embeddings), qwen3, qwen3_moe or
            deepseek_v3 (latent attention with YaRN, one dense layer, shared experts, routers with a bias).
        overrides: fields of the family's transformers configuration, e.g. ``num_hidden_layers=4``,
            ``tie_word_embeddings=True`` or ``dtype="bfloat16"`` (float32 by default).

    Raises:
        ConfigError: unknown family or field.
    """
    config = tiny_config(family, **overrides)
    write_random_weights(config, Path(directory), seed, transformers.GenerationConfig(**_special_ids()))
    byte_tokenizer().save_pretrained(directory)


def write_random_weights(
    config: Any,
    directory: Path,
    seed: int,
    generation: transformers.GenerationConfig,
    adjust: Callable[[Any], None] = lambda _: None,
) -> None:
    """Write configuration, weights of ``config.dtype`` as ``make_tiny_model`` draws them, and generation settings;
    ``adjust`` is called with the model in float32."""
    dtype = config.dtype
    directory.mkdir(parents=True, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _initialise(model, torch.Generator().manual_seed(seed))
    adjust(model)
    for parameter in model.parameters():  # routers' biases are buffers: in float32, as in published checkpoints
        parameter.data = parameter.data.to(dtype)
    model.generation_config = generation
    with without_progress_bar():
        model.save_pretrained(directory)
    for file in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", file)  # safetensors makes files that only their owner reads


def tiny_config(family: str, **overrides: Any) -> Any:
    """The transformers configuration of ``make_tiny_model``; raises as it does."""
    if family not in _FAMILIES:
        raise ConfigError([f"family={family} is not a tiny model; use one of: {', '.join(_FAMILIES)}"])
    plain = transformers.AutoConfig.for_model(family)
    class_name = type(plain).__name__
    known = plain.to_dict().keys() | _SIZES.keys() | {"dtype"}
    unknown = sorted(overrides.keys() - known)
    if unknown:
        raise ConfigError([f"{name} is not a field of {class_name}; remove it" for name in unknown])
    fields = {"dtype": "float32", **_SIZES, **_FAMILIES[family], **_special_ids(), **overrides}
    return type(plain)(**fields, architectures=[class_name.replace("Config", "ForCausalLM")])


@contextlib.contextmanager
def without_progress_bar() -> Iterator[None]:
    """Inside, transformers shows no bars."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _special_ids() -> dict[str, int]:
    return {f"{kind}_token_id": SPECIAL_TOKENS.index(f"<{kind}>") for kind in ("pad", "bos", "eos")}


@torch.no_grad()
def _initialise(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.1, generator=generator)
        elif parameter.dim() == 1:
            parameter.normal_(0.0, 0.1, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1, generator=generator)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per UTF-8 byte, no merges, the special tokens first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_arithmetic_data(
    directory: Path,
    seed: int = 0,
    num_train: int = 2200,
    num_eval: int = 300,
    max_number: int = 50,
    slip: float = 0.65,
) -> None:
    """Write ``train.jsonl``, ``sft.jsonl`` and ``eval.jsonl``: sums of two numbers from 0 to ``max_number - 1``.

    Rows are ``{"prompt": "12+34=", "answer": "46", "response": "46"}``. Training and held-out problems are disjoint as
    *ordered* pairs: with 12+34 held out, 34+12 may be trained on.

    ``sft.jsonl`` demonstrates every training problem four times, by a careless teacher: the response of a demonstration
    is one too high with probability ``slip``. A model that imitates them knows addition and mostly answers wrong; that
    is the habit which rewards can break, and imitation cannot.

    Raises:
        ConfigError: fewer ordered pairs exist than rows are asked for.
    """
    pairs = [(a, b) for a in range(max_number) for b in range(max_number)]
    if num_train < 1 or num_eval < 1 or num_train + num_eval > len(pairs):
        raise ConfigError(
            [
                f"num_train={num_train} and num_eval={num_eval} must be at least 1 and at most {len(pairs)} together: "
                f"there are {len(pairs)} sums of two numbers below {max_number}; raise max_number or ask for fewer"
            ]
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shuffle: Callable[[list[Any]], None] = random.Random(seed).shuffle
    shuffle(pairs)
    train, held_out = pairs[:num_train], pairs[num_train : num_train + num_eval]
    _write_rows(directory / "train.jsonl", train)
    _write_rows(directory / "eval.jsonl", held_out)
    demonstrated = train * _DEMONSTRATIONS
    shuffle(demonstrated)
    slips = random.Random(seed + 1)
    _write_rows(directory / "sft.jsonl", demonstrated, lambda: int(slips.random() < slip))


def _write_rows(path: Path, pairs: list[tuple[int, int]], error: Callable[[], int] = lambda: 0) -> None:
    rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b + error())} for a, b in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
