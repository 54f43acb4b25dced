"""Conversion of GGUF files, which the package ``gguf`` writes, to Hugging Face directories."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_like.commands.main import main
from slime_like.examples.tiny_model import make_tiny_model


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
