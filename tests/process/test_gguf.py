"""Conversion of GGUF files, and damaged files of converted checkpoints."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_like.checks.check import check
from slime_like.commands.main import main
from slime_like.config.reading.load import load_config
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.converted import converted_problem
from tests.unit.checks.checkpoint import sound_flags


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of a rotary projection in llama.cpp's order, which interleaves the halves of each head."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a Llama without scaled rotary embeddings."""
    source = tmp_path_factory.mktemp("gguf") / "source"
    make_tiny_model(source, family="llama", seed=3)
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    (source / "config.json").write_text(json.dumps(config))
    return source


def write_gguf(source: Path, file: Path, **further: Tensor) -> Path:
    """Write the model as a GGUF file."""
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = AutoTokenizer.from_pretrained(source)
    special = {token.content for token in tokenizer.added_tokens_decoder.values()}
    tokens = tokenizer.convert_ids_to_tokens(range(config["vocab_size"]))
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
        tensor = tensor.float()
        if "q_proj" in name or "k_proj" in name:
            tensor = interleaved(tensor, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    for name, tensor in further.items():
        writer.add_tensor(f"{name}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_every_number_and_the_template_arrive(source: Path, tmp_path: Path) -> None:
    file, out = write_gguf(source, tmp_path / "model.gguf"), tmp_path / "out"
    assert main(["convert", "from-gguf", str(file), str(out), "--dtype", "float32"]) == 0
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    ids = torch.tensor([[5, 6, 7, 8]])
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, out)]
    one, other = (model(ids).logits for model in models)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    said = [{"role": "user", "content": "12+30="}]
    rendered = [AutoTokenizer.from_pretrained(path).apply_chat_template(said, tokenize=False) for path in (source, out)]
    assert rendered[0] == rendered[1]


def test_unsupported_files_are_rejected(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3.1's frequency factors are a tensor in the file, which transformers would ignore."""
    (tmp_path / "text.gguf").write_text("no")
    write_gguf(source, tmp_path / "scaled.gguf", rope_freqs=torch.ones(8))
    for file, code in (("text.gguf", "no-gguf"), ("nothing.gguf", "no-gguf"), ("scaled.gguf", "gguf-rotary")):
        assert main(["convert", "from-gguf", str(tmp_path / file), str(tmp_path / "out")]) == 2
        assert f"[{code}]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint."""
    root = tmp_path_factory.mktemp("converted")
    make_tiny_model(root / "hf", "qwen3")
    assert main(["convert", "to-megatron", str(root / "hf"), str(root / "meg")]) == 0
    return root / "meg"


@pytest.fixture
def converted(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "meg"))


def _replace_by_a_pipe(path: Path) -> None:
    """Make a file that could be read forever."""
    path.unlink()
    os.mkfifo(path)


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_every_flipped_byte_and_every_file_of_the_model_is_found(converted: Path) -> None:
    assert converted_problem(converted) is None
    description = converted / "conversion.json"
    sound = description.read_bytes()
    for position in range(len(sound)):
        _flip(description, position)
        problem = converted_problem(converted)
        assert problem is not None and "(conversion.json has changed)" in problem, position
        description.write_bytes(sound)
    names = sorted(file.name for file in (converted / "model").iterdir())
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(names)
    for name in names:
        _flip(converted / "model" / name, -3)
    faults = ", ".join(f"model/{name} has changed" for name in names)
    assert converted_problem(converted) == f"is damaged ({faults}); restore the files, or convert the model again"


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda meg: _flip(meg / "model" / "tokenizer.json", 1000), "model/tokenizer.json has changed"),
    (lambda meg: (meg / "model" / "tokenizer.json").unlink(), "model/tokenizer.json is missing"),
    (lambda meg: (meg / "model" / "tokenizer.json").write_bytes(b""), "model/tokenizer.json is empty: it has 0 of "),
    (lambda meg: (meg / "conversion.json").unlink(), "conversion.json is missing"),
    (lambda meg: _replace_by_a_pipe(meg / "conversion.json"), "conversion.json is missing"),
]


@pytest.mark.parametrize(("damage", "fault"), DAMAGE, ids=[case[1] for case in DAMAGE])
def test_every_command_rejects_the_damaged_checkpoint(
    converted: Path, tmp_path: Path, damage: Callable[[Path], object], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, other = sound_flags(tmp_path), tmp_path / "tokens.jsonl"
    other.write_text("{}\n")
    commands = [
        ["convert", "check", str(converted), str(converted)],
        ["convert", "to-hf", str(converted), "out"],
        ["score", str(converted), "--input", str(other), "--output", str(tmp_path / "scores.jsonl")],
    ]
    source = shutil.copytree(converted / "model", tmp_path / "source")
    damage(converted)
    for command in commands:
        assert main(command) == 2
        assert capsys.readouterr().err.startswith(f"slime-like: CHECKPOINT={converted} is damaged ({fault}")
    given = ["--model.path", str(source), "--model.weights", str(converted), "--algorithm.loss", "sft"]
    [problem] = check(load_config(None, [*sound, *given]))
    assert problem.text.startswith(f"model.weights={converted} is damaged ({fault}")


def test_a_run_from_the_damaged_checkpoints_model_is_rejected(converted: Path, tmp_path: Path) -> None:
    given = ["--model.path", str(converted / "model"), "--model.weights", str(converted), "--algorithm.loss", "sft"]
    flags = [*sound_flags(tmp_path), *given]
    assert check(load_config(None, flags)) == []
    _flip(converted / "model" / "tokenizer.json", 1000)
    fault = "damaged (model/tokenizer.json has changed); "
    [problem] = check(load_config(None, flags))
    assert problem.text.startswith(f"model.weights={converted} is {fault}")
    alone = [*sound_flags(tmp_path), "--model.path", str(converted / "model")]
    start = f"model.path={converted / 'model'} belongs to a checkpoint that is {fault}"
    assert any(problem.text.startswith(start) for problem in check(load_config(None, alone)))
