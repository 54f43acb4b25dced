"""Encoding of an environment's observation to the token ids that the model reads."""

from collections.abc import Sequence
from typing import Any

from slime_like.errors import ConfigError

PLACE = "{observation}"
_WORD, _SENTINEL = "said-by-the-model", "said-by-the-environment"


class ObservationEncoder:
    """Encodes an observation between the tokens that open and close it.

    The template may contain special tokens, which open and close turns. The environment's text never becomes one,
    whatever it spells: a tool's output must not be able to end a turn or to speak for someone else.

    Args:
        tokenizer: Hugging Face tokenizer.
        template: text that contains ``{observation}`` once; ``None`` derives it from the chat template.
        max_tokens: limit on an observation's tokens, without the template's. Longer observations are cut.

    Raises:
        ConfigError: there is no chat template, or it does not render messages of role ``tool``.
    """

    def __init__(self, tokenizer: Any, template: str | None, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        opening, _, closing = (template or tool_template(tokenizer)).partition(PLACE)
        self._opening: list[int] = tokenizer.encode(opening, add_special_tokens=False)
        self._closing: list[int] = tokenizer.encode(closing, add_special_tokens=False)

    def encode(self, observation: str) -> tuple[list[int], int]:
        """Return the token ids, and the number of the observation's tokens that were cut off."""
        said: Sequence[int] = self._tokenizer(observation, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        kept = list(said[: self._max_tokens])
        return [*self._opening, *kept, *self._closing], len(said) - len(kept)


def tool_template(tokenizer: Any) -> str:
    """Return the text that the chat template puts around a tool's answer between two assistant turns."""
    if tokenizer.chat_template is None:
        raise _refusal("the tokenizer has no chat template")
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": _WORD},
        {"role": "tool", "content": _SENTINEL},
    ]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the checkpoint and can raise anything
        raise _refusal(f"the chat template rejects a message of role tool ({error})") from error
    after = text.rpartition(_WORD)[2]
    if _WORD not in text or after.count(_SENTINEL) != 1:
        raise _refusal("the chat template does not render messages of role tool")
    # The model samples the EOS token that ends its turn.
    return after.removeprefix(tokenizer.eos_token or "").replace(_SENTINEL, PLACE)


def _refusal(problem: str) -> ConfigError:
    remedy = f"set rollout.environment.template to text that contains {PLACE}"
    return ConfigError([f"rollout.environment.template=none: {problem}; {remedy}"])
