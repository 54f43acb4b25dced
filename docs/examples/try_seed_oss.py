"""Compare the rules of conversion with the names and shapes that transformers writes."""

import tempfile
from pathlib import Path

from seed_oss import SEED_OSS
from transformers import SeedOssConfig, SeedOssForCausalLM

from backends.megatron.families import family_of
from slime_like.models.dimensions import FAMILIES, ModelDimensions

FAMILIES[SEED_OSS.name] = SEED_OSS  # as the entry in families/__init__.py does
config = SeedOssConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
    architectures=["SeedOssForCausalLM"],
)
with tempfile.TemporaryDirectory() as directory:
    config.save_pretrained(directory)
    dimensions = ModelDimensions.from_checkpoint(Path(directory))
written = {name: tuple(tensor.shape) for name, tensor in SeedOssForCausalLM(config).state_dict().items()}
assert family_of(dimensions).hf_shapes(dimensions) == written
