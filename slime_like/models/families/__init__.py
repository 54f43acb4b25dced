"""Model families, by kind of layers. To add a family, write its reader in a file here and list it below."""

from slime_like.models.dimensions import FAMILIES
from slime_like.models.families.deepseek_v3 import DEEPSEEK_V3
from slime_like.models.families.gemma3 import GEMMA3
from slime_like.models.families.gpt_oss import GPT_OSS
from slime_like.models.families.grouped_query import GLM4_MOE, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE
from slime_like.models.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

_GROUPED_QUERY = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GLM4_MOE)
_HYBRID = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
FAMILIES.update({each.name: each for each in (*_GROUPED_QUERY, DEEPSEEK_V3, GPT_OSS, GEMMA3, *_HYBRID)})
