"""A complete, tiny Hugging Face checkpoint and its data sets. Needs no download and is fast on a CPU.

The checkpoint has everything a real one has (config, safetensors, generation config, tokenizer, chat template), so
trainers and engines treat it like any other model. It learns sums within a minute. It can't learn products, but it can
learn to copy them from a calculator.
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
from slime_like.models.dimensions import FAMILIES

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
    """Write ``train.jsonl`` and ``eval.jsonl`` of disjoint pairs, and return the training pairs."""
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
