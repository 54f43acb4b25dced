"""Model families, one file per publisher. To add a family, write a reader in a file here and list it below."""

from slime_like.models.families.deepseek_v3 import DEEPSEEK_V3
from slime_like.models.families.llama import LLAMA, MISTRAL
from slime_like.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from slime_like.models.family import FAMILIES

FAMILIES.update({each.name: each for each in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V3)})
