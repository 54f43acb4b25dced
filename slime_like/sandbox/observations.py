"""Encoding of an environment's observation to the token ids that the model reads."""

from functools import cache, partial
from typing import Any

from slime_like.errors import ConfigError
from slime_like.models.tokenization import (
    CUT,
    TemplateFault,
    cut_special,
    decode_exactly,
    encode_pieces,
    last_turn_end,
    render_messages,
    special_token_pattern,
    text_after_turn,
)

PLACE = "{observation}"
_PROBE = "said-by-the-environment"
_FORMS = (("tool", False), ("tool", True), ("user", False))
"""Roles of an observation, and whether the turn before calls a tool."""


class ObservationEncoder:
    """Encodes what comes between two turns of the model: the end of the first, an observation, and the next header.

    The template may contain special tokens, which open and close turns. The environment's text never becomes one,
    whatever it spells: a tool's output must not be able to end a turn or to speak for someone else.

    Args:
        tokenizer: Hugging Face tokenizer.
        template: text that contains ``{observation}`` once. If ``None``, the chat template renders observations as
            messages of role ``tool``, or of role ``user`` if it knows no tools or only a user follows the turn's end.
        max_tokens: limit on an observation's tokens, without the template's. Longer observations are cut.

    Raises ``ConfigError`` if there is no chat template, or it renders neither role.
    """

    def __init__(self, tokenizer: Any, template: str | None, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._template = template
        self._special = special_token_pattern(tokenizer)
        self._render = partial(render_messages, tokenizer)
        self._last_turn_end = cache(partial(last_turn_end, self._render))  # the same for every observation
        self._forms = self._rendered_forms() if template is None else {}

    def encode(self, observation: str, stop_token: int | None = None) -> tuple[list[int], int]:
        """Return the token ids, and the number of the observation's tokens that were cut off.

        If the model sampled ``stop_token`` at the end of its turn, the turn is not ended again.
        """
        # Cut, because ``split_special_tokens`` would set the tokenizer itself, which other threads use.
        said = encode_pieces(self._tokenizer, cut_special(observation, self._special).split(CUT))
        excess = max(0, len(said) - self._max_tokens)
        if excess:  # the last character may be incomplete
            observation = decode_exactly(self._tokenizer, said[: self._max_tokens]).rstrip("\ufffd")
        said_plainly = cut_special(observation, self._special)
        if self._template is not None:
            text = self._template.replace(PLACE, said_plainly)
        else:
            stop = "" if stop_token is None else decode_exactly(self._tokenizer, [stop_token])
            form = next((form for form, ends in self._forms.items() if stop in ends), next(iter(self._forms)))
            _, end, rest = self._rendered(form, said_plainly)
            # If a turn has no end token, the next message's header ends it. The model may have sampled that header.
            text = end + rest if stop_token is None else rest if end else rest.removeprefix(stop)
        return encode_pieces(self._tokenizer, text.split(CUT)), excess

    def _rendered(self, form: tuple[str, bool], observation: str) -> tuple[str, str, str]:
        role, called = form
        message = {"role": role, "content": observation} | ({"tool_call_id": "abcdefghi"} if called else {})
        return text_after_turn(self._render, [message], self._special, self._last_turn_end(called), called)

    def _rendered_forms(self) -> dict[tuple[str, bool], set[str]]:
        """Return the forms in which the chat template renders an observation, with the tokens that end a turn there."""
        forms = dict[tuple[str, bool], set[str]]()
        problem = "the chat template renders no message of role tool or user after an assistant's turn"
        if self._tokenizer.chat_template is None:
            problem = "the tokenizer has no chat template"
        for form in _FORMS if self._tokenizer.chat_template is not None else ():
            try:
                last, end, rest = self._rendered(form, _PROBE)
            except TemplateFault as fault:
                problem = f"the chat template rejects a message of role {form[0]} ({fault.said})"
                continue
            if _PROBE in rest:
                header = self._special.match(rest)
                forms[form] = {last, end} if end else {header[0]} if header else set()
        if not forms:
            remedy = f"set rollout.environment.template to text that contains {PLACE}"
            raise ConfigError([f"rollout.environment.template=none: {problem}; {remedy}"])
        return forms
