"""Conversion of GGUF files, the format of llama.cpp, to Hugging Face directories."""

import shutil
from pathlib import Path
from typing import Any

from slime_like.errors import ConfigError
from slime_like.system.disk import replace_directory

_ROTARY = ("rope_freqs", "rope_factors")


def gguf_to_hugging_face(file: Path, out: Path, dtype: str) -> int:
    """Write dequantized weights, configuration, tokenizer and chat template. Return the number of tensors.

    Raises ``ConfigError`` if the file is not GGUF, transformers does not read its architecture, or tensors are missing.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        _require_plain_rotary(file, GGUFReader(file))
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # `from_pretrained` would need accelerate for this.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(f"FILE={file} cannot be read as GGUF ({error})", code="no-gguf") from error
    found = model.load_state_dict(tensors, strict=False)
    missing = [name for name in found.missing_keys if not (config.tie_word_embeddings and name == "lm_head.weight")]
    if missing or found.unexpected_keys:
        differing = ", ".join([*missing, *found.unexpected_keys][:3])
        raise ConfigError(f"FILE={file} has other tensors than its architecture ({differing}, ...)", code="no-gguf")
    model.tie_weights()
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(getattr(torch, dtype)).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for file in partial.glob("*.safetensors"):  # transformers writes only these without the umask's permissions
        file.chmod((partial / "config.json").stat().st_mode)
    replace_directory(partial, out)
    return len(tensors)


def _require_plain_rotary(file: Path, reader: Any) -> None:
    """Reject scaled rotary embeddings, which transformers ignores when it reads the file."""
    tensors = [tensor.name for tensor in reader.tensors if tensor.name.startswith(_ROTARY)]
    scaled = [name for name in reader.fields if ".rope.scaling." in name]
    if tensors or scaled:
        problem = f"scales its rotary embedding ({[*tensors, *scaled][0]}), which this conversion does not support"
        raise ConfigError(f"FILE={file} {problem}; use the model's safetensors files", code="gguf-rotary")
