"""Tiny Hugging Face checkpoints with random weights, and their data sets. They need no download and are fast on a CPU.

A checkpoint has everything a real one has (config, safetensors, generation config, tokenizer, chat template), so
trainers and engines treat it like any other model. The tiny model learns sums within a minute. It can't learn products,
but it can learn to copy them from a calculator. A look-alike has the family, features and tokenizer of a given model.
"""

import contextlib
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slime_like.errors import ConfigError
from slime_like.models.dimensions import FAMILIES, OTHER, ModelDimensions
from slime_like.models.special_tokens import tokenizer_files
from slime_like.models.tower import transformers_config

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>")
"""Ids 0 to 7; the 256 byte values follow."""

VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""One token opens every turn, and ``<eos>`` ends the model's. A prompt has two more tokens than its text."""

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

_DEMONSTRATIONS = 4

_HEAD_DIM = 32
_HIDDEN = 128
_COMMON = 3.0
"""Norm of the part that all embeddings share, relative to their mean norm."""
_SHARE, _LARGEST_PART, _HALVINGS = 1 / 16, 64.0, 16
_VOCABULARY, _MULTIPLE = 2048, 512
"""The vocabulary size modulo ``_MULTIPLE`` is kept, so padding to a multiple is exercised."""
_LARGEST_GROUP = 3
"""Query heads per key head. Larger odd groups become 3, larger even ones 2."""


def make_tiny_model(directory: Path, family: str = "qwen3", seed: int = 0, **overrides: Any) -> None:
    """Write a randomly initialized checkpoint to ``directory``.

    Weights are normal with standard deviation ``1 / sqrt(fan-in)``. Norm weights and biases scatter around 1 and 0 (0
    and 0 if norms add 1), so a lost or swapped one changes the logits.

    Args:
        family: llama (with llama3 rope scaling), mistral, qwen2 (biases, tied embeddings), qwen3, qwen3_moe,
            deepseek_v3 (latent attention with YaRN, one dense layer, shared experts, routers with a bias), glm4_moe
            (the same feed-forward layers), gpt_oss (sinks, windows, experts with biases), gemma3_text (windows, tied
            embeddings), or qwen3_next, qwen3_5_text, qwen3_5_moe_text (gated delta nets in every other layer).
        overrides: fields of the family's transformers configuration, e.g. ``num_hidden_layers=4``,
            ``tie_word_embeddings=True`` or ``dtype="bfloat16"`` (float32 by default).

    Raises ``ConfigError`` if the family or a field is unknown.
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
    """Write configuration, random weights (see ``make_tiny_model``) in ``config.dtype``, and generation settings.

    ``adjust`` is called with the model in float32.
    """
    dtype = config.dtype
    directory.mkdir(parents=True, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _initialize(model, torch.Generator().manual_seed(seed))
    adjust(model)
    for parameter in model.parameters():  # router biases are buffers and stay float32, like in published checkpoints
        parameter.data = parameter.data.to(dtype)
    model.generation_config = generation
    with without_progress_bar():
        model.save_pretrained(directory)
    for file in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", file)  # safetensors makes files that only their owner can read


def tiny_config(family: str, **overrides: Any) -> Any:
    """Return the transformers configuration for ``make_tiny_model``; raises the same errors."""
    if family not in FAMILIES:
        raise ConfigError([f"family={family} has no tiny model; use one of {', '.join(FAMILIES)}"])
    plain = transformers.AutoConfig.for_model(family)
    class_name = type(plain).__name__
    known = plain.to_dict().keys() | _SIZES.keys() | {"dtype"}
    unknown = sorted(overrides.keys() - known)
    if unknown:
        raise ConfigError([f"{name} is not a field of {class_name}; remove it" for name in unknown])
    special = {**FAMILIES[family].small, **FAMILIES[family].tiny, **_special_ids()}
    fields = {"dtype": "float32", **_SIZES, **special, **overrides}
    return type(plain)(**fields, architectures=[class_name.replace("Config", "ForCausalLM")])


def make_look_alike(
    model: Path, directory: Path, layers: int = 2, with_vocabulary: bool = True, ends: Sequence[int] = ()
) -> None:
    """Write a float32 checkpoint like ``model``. Does not read the weights of ``model``.

    Keeps the family, biases, norms, tied or untied embeddings, rotary embeddings and their scaling, lengths, groups of
    query heads (up to three), and a dense layer in front of the layers with experts.

    Args:
        with_vocabulary: keep the vocabulary, the tokenizer's files and the EOS ids; otherwise use about 2,000 ids.
        ends: tokens of which the model samples one about every sixteen tokens, e.g. to end its turns.

    Raises ``ConfigError`` if the family of ``model`` is not supported.
    """
    dimensions = ModelDimensions.from_checkpoint(model)
    if dimensions.family == OTHER:
        raise ConfigError(
            f"model.path={model}: {dimensions.attention.unsupported}; use a model of a supported family to make a "
            "small one like it",
            code="look-alike-family",
        )
    config = transformers_config(model)
    small = FAMILIES[dimensions.family].small
    small = {name: value for name, value in small.items() if getattr(config, name, None) is not None}
    for name, value in _sizes(dimensions, small, layers, has_head_dim=hasattr(config, "head_dim")).items():
        if hasattr(config, name):
            setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-config.num_hidden_layers :]  # ends with attention, if any layer has it
    config.dtype = torch.float32
    if not with_vocabulary:
        config.vocab_size = min(config.vocab_size, _VOCABULARY + config.vocab_size % _MULTIPLE)
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, None
    has_generation = with_vocabulary and (model / "generation_config.json").is_file()
    generation = transformers.GenerationConfig.from_pretrained(model) if has_generation else None
    write_random_weights(
        config,
        directory,
        0,
        generation or transformers.GenerationConfig.from_model_config(config),
        lambda made: _sample_often(made, list(ends)) if ends else None,
    )
    for file in tokenizer_files(model) if with_vocabulary else ():
        copied = directory / file.relative_to(model)
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copied)


@torch.no_grad()
def _sample_often(model: Any, tokens: list[int]) -> None:
    """Add a common vector to all embeddings, and enough of it to these tokens' rows of the head to make them likely."""
    generator = torch.Generator().manual_seed(0)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    common = torch.randn(embedding.shape[1], generator=generator)
    common /= common.norm()
    embedding += _COMMON * embedding.norm(dim=1).mean() * common
    asked = torch.randint(0, embedding.shape[0], (4, 16), generator=generator)
    rows, low, high = head[tokens].clone(), 0.0, _LARGEST_PART
    for _ in range(_HALVINGS):
        part = (low + high) / 2
        head[tokens] = rows + part * common
        often = model(asked).logits.log_softmax(-1)[..., tokens].logsumexp(-1).mean() > math.log(_SHARE)
        low, high = (low, part) if often else (part, high)


@contextlib.contextmanager
def without_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bars inside the block."""
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
def _initialize(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            around = float(parameter[0])  # 0 if it is added to 1
            parameter.normal_(around, 0.1, generator=generator)
        elif parameter.dim() == 1:
            parameter.normal_(0.0, 0.1, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1, generator=generator)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with one token per UTF-8 byte. Special tokens come first."""
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
    directory: Path, seed: int = 0, num_train: int = 2200, num_eval: int = 300, max_number: int = 50, slip: float = 0.65
) -> None:
    """Write ``train.jsonl``, ``sft.jsonl`` and ``eval.jsonl``: sums of two numbers from 0 to ``max_number - 1``.

    Rows are ``{"prompt": "12+34=", "answer": "46", "response": "46"}``. Training and held-out problems are disjoint as
    *ordered* pairs: if 12+34 is held out, 34+12 may be in the training set.

    ``sft.jsonl`` demonstrates every training problem four times. A response is one too high with probability ``slip``.
    A model that imitates it knows addition but mostly answers wrong. Rewards can break this habit, imitation can't.
    """
    rng = random.Random(seed)
    demonstrated = _problems(directory, rng, range(max_number), _sum, num_train, num_eval) * _DEMONSTRATIONS
    rng.shuffle(demonstrated)
    slips = random.Random(seed + 1)
    _write_rows(directory / "sft.jsonl", [_sum(*pair, slips.random() < slip) for pair in demonstrated])


def make_calculator_data(
    directory: Path, seed: int = 0, num_train: int = 1300, num_eval: int = 200, guesses: float = 0.7
) -> None:
    """Write ``train.jsonl``, ``sft.jsonl`` and ``eval.jsonl``: products of two numbers from 10 to 49.

    Rows are ``{"prompt": "37*48=", "answer": "1776"}``. Training and held-out problems are disjoint as ordered pairs.

    ``sft.jsonl`` demonstrates both turns of every training problem. The first guesses a number with probability
    ``guesses``, and otherwise calls the calculator (``[37*48]``). The second repeats the calculator's reply. A model
    that imitates this can use the tool but mostly doesn't. Rewards can change this habit.
    """
    rng = random.Random(seed)
    train = _problems(directory, rng, range(10, 50), _product, num_train, num_eval)
    demonstrations = [row for pair in train * _DEMONSTRATIONS for row in _calculator_turns(*pair, rng, guesses)]
    rng.shuffle(demonstrations)
    _write_rows(directory / "sft.jsonl", demonstrations)


def _problems(
    directory: Path, rng: random.Random, numbers: range, row: Callable[[int, int], dict[str, Any]], *sizes: int
) -> list[tuple[int, int]]:
    """Write ``train.jsonl`` and ``eval.jsonl`` of disjoint pairs, and return those of training."""
    pairs = [(a, b) for a in numbers for b in numbers]
    rng.shuffle(pairs)
    train, held_out = pairs[: sizes[0]], pairs[sizes[0] : sum(sizes)]
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("eval", held_out)):
        _write_rows(directory / f"{name}.jsonl", [row(*pair) for pair in part])
    return train


def _sum(a: int, b: int, error: int = 0) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b + error)}


def _product(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}*{b}=", "answer": str(a * b)}


def _calculator_turns(a: int, b: int, rng: random.Random, guesses: float) -> list[dict[str, Any]]:
    problem, call, guess = _product(a, b), f"[{a}*{b}]", str(rng.randint(100, 2401))
    messages = [
        {"role": "user", "content": problem["prompt"]},
        {"role": "assistant", "content": call},
        {"role": "tool", "content": problem["answer"]},
    ]
    return [
        {**problem, "response": guess if rng.random() < guesses else call},
        {**problem, "prompt": messages, "response": problem["answer"]},
    ]


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _sizes(dimensions: ModelDimensions, small: Mapping[str, Any], layers: int, has_head_dim: bool) -> dict[str, Any]:
    group = dimensions.num_heads // dimensions.num_kv_heads
    key_heads = min(2, dimensions.num_kv_heads)
    heads = small.get("num_attention_heads", key_heads * (group if group <= _LARGEST_GROUP else 3 if group % 2 else 2))
    hidden = _HIDDEN if has_head_dim and _HIDDEN % heads == 0 else heads * _HEAD_DIM
    dense = min(1, dimensions.dense_layers)
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers + dense,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": _HEAD_DIM,
        "max_window_layers": layers + dense,
    }
    if dimensions.num_experts:
        experts = min(8, dimensions.num_experts)
        groups = min(4, dimensions.moe_groups)
        top_groups = max(1, groups // 2)  # each gives two experts, as in DeepSeek-V3
        sizes |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), experts)
        sizes |= {
            "num_experts_per_tok": min(2 * top_groups, dimensions.moe_top_k),
            "moe_intermediate_size": hidden // 2,
        }
        sizes |= {"n_group": groups, "topk_group": top_groups, "first_k_dense_replace": dense}
        sizes |= {"num_nextn_predict_layers": 0, "decoder_sparse_step": 1}
    return sizes | dict(small)
