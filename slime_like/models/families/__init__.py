"""Model families, by kind of layers. To add a family, write its reader in a file here and list it below."""

from slime_like.models.dimensions import FAMILIES
from slime_like.models.families.deepseek_v3 import DEEPSEEK_V3
from slime_like.models.families.grouped_query import LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE

FAMILIES.update({each.name: each for each in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V3)})
