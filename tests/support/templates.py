"""Chat templates: a sound one, adversarial ones that differ from it in one thing each, and those of installed packages.

All but the packages' own write turns as ChatML does; ``<|im_end|>`` ends them.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import processors

from slime_like.examples.tiny_model import VOCAB_SIZE, byte_tokenizer

END = "<|im_end|>"
CONTROL = ("<|im_start|>", END)
_CONTENT = "{{ message.content }}"
_CALLS = "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


def chatml(
    head: str = "",
    content: str = _CONTENT,
    end: str = "<|im_end|>",
    turn: str = "{content}{calls}{end}{{ '\\n' }}",
    generation: str = "<|im_start|>assistant\n",
) -> str:
    """A ChatML template with parts replaced; ``turn`` is what stands behind a header."""
    body = turn.replace("{content}", content).replace("{calls}", _CALLS).replace("{end}", end)
    return (
        f"{head}{_TOOLS}{{% for message in messages %}}<|im_start|>{{{{ message.role }}}}\n{body}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{generation}{{% endif %}}"
    )


SOUND = chatml()

MARKED = chatml(
    turn="{% if message.role == 'assistant' %}{% generation %}{content}{calls}{end}{% endgeneration %}"
    "{% else %}{content}{end}{% endif %}{{ '\\n' }}"
)
"""With ``{% generation %}`` around what the assistant says and the end of its turn."""

MARKED_TO_THE_NEXT = chatml(
    turn="{% if message.role == 'assistant' %}{% generation %}{content}{calls}{end}{{ '\\n' }}{% endgeneration %}"
    "{% else %}{content}{end}{{ '\\n' }}{% endif %}"
)
"""The markers hold the line break behind the end of a turn, too."""

MARKED_TOO_SHORT = chatml(
    turn="{% if message.role == 'assistant' %}{% generation %}{content}{calls}{% endgeneration %}{end}"
    "{% else %}{content}{end}{% endif %}{{ '\\n' }}"
)
"""The markers leave out the end of the turn, which the model must learn."""

DROPS_THINKING = chatml(
    content="{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>\n\n')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}"
)

MERGES_TOOLS = (
    _TOOLS + "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>{{ message.content }}</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}" + _CALLS + "<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

STRIPS = chatml(content="{{ message.content | trim }}")

COUNTS = chatml(head="<|im_start|>system\n{{ messages | length }} messages follow.<|im_end|>\n")
"""A header that depends on the history."""

THINKS_FIRST = chatml(generation="<|im_start|>assistant\n<think>\n")
"""The generation prompt opens a block that history does not have."""

CLOSES_THINKING = chatml(
    content="{% if message.role == 'assistant' %}</think>{% endif %}{{ message.content }}",
    generation="<|im_start|>assistant\n<think>",
)
"""History closes the block that the generation prompt opens."""

NEVER_THINKS = chatml(generation="<|im_start|>assistant\n<think>\n\n</think>\n\n")
"""The generation prompt holds a whole block that history does not have."""

EMPTY_BLOCKS = chatml(
    content="{% if message.role == 'assistant' %}<think></think>{% endif %}{{ message.content }}",
    generation="<|im_start|>assistant\n<think>\n",
)
"""History has an empty block, with other white space than the generation prompt."""

NO_PROMPT = chatml(generation="")

DEFAULT_SYSTEM = chatml(
    head="{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
)

NO_END = chatml(end="{% if message.role != 'assistant' %}<|im_end|>{% endif %}")

NO_END_BUT_HEADERS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A turn ends where the next header begins, as GLM writes them."""

LAST_ENDS_TWICE = chatml(end="<|im_end|>{% if loop.last and message.role == 'assistant' %}<|im_end|>{% endif %}")

BARE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}<|im_end|>{% endif %}"
    "{% endfor %}"
)
"""Without headers."""

IGNORES_TOOLS = (
    "{% for message in messages %}{% if message.role != 'tool' %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


NAMES_CALLS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Calls without their arguments."""


def tokenizer_of(
    template: str | None,
    eos: str = END,
    control: tuple[str, ...] = CONTROL,
    merges: Sequence[tuple[str, str]] = (),
    trims: bool = False,
) -> Any:
    """The tiny model's tokenizer with another template, and more control tokens.

    Args:
        merges: pairs of its tokens that are one token where they stand together.
        trims: white space is no part of a token's offsets.
    """
    plain = byte_tokenizer()
    state = json.loads(plain.backend_tokenizer.to_str())
    state["model"]["merges"] = merges
    state["model"]["vocab"] |= {first + second: VOCAB_SIZE + number for number, (first, second) in enumerate(merges)}
    backend = type(plain.backend_tokenizer).from_str(json.dumps(state))
    if trims:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = type(plain)(tokenizer_object=backend, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(control)})
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    return tokenizer


def of_vllm(name: str) -> str:
    """A template of the installed vLLM, e.g. ``chatml``."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "transformers_utils" / "chat_templates"
    return (folder / f"template_{name}.jinja").read_text(encoding="utf-8")
