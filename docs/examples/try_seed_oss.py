"""Compare the rule table with the names and shapes that transformers writes."""

from seed_oss import SEED_OSS
from transformers import SeedOssConfig, SeedOssForCausalLM

from slime_like.models.dimensions import ModelDimensions

config = SeedOssConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
dimensions = ModelDimensions(
    family="seed_oss",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=48,
    vocab_size=64,
    max_position_embeddings=config.max_position_embeddings,
    norm_eps=config.rms_norm_eps,
    rope_theta=10000.0,
    rope_scaling=None,
    tied_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
    eos_token_ids=(1,),
)
written = {name: tuple(tensor.shape) for name, tensor in SeedOssForCausalLM(config).state_dict().items()}
assert SEED_OSS.hf_shapes(dimensions) == written
