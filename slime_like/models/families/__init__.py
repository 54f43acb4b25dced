"""Model families, by kind of layers. To add a family, write its reader in a file here and list it below."""

from slime_like.models.dimensions import FAMILIES

_FILES = {
    "grouped_query": "llama mistral qwen2 qwen3 qwen3_moe glm4_moe",
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "gpt_oss",
    "gemma3": "gemma3_text",
    "qwen3_next": "qwen3_next qwen3_5_text qwen3_5_moe_text",
}
"""Names of the families in each file, which has a family as a constant, without ``_text``."""

FAMILIES.update(
    {
        name: f"{__name__}.{file}:{name.removesuffix('_text').upper()}"
        for file, names in _FILES.items()
        for name in names.split()
    }
)
