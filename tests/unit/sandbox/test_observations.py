"""What the model reads between two of its turns."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slime_like.errors import ConfigError
from slime_like.sandbox.observations import ObservationEncoder
from tests.support import templates
from tests.support.rejections import Rejects
from tests.support.templates import END, tokenizer_of

ASKED = {"role": "user", "content": "a"}
REPLY = {"role": "assistant", "content": "so"}
NO_TOOLS = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}" + templates.SOUND
NEEDS_A_CALL = (
    "{% for m in messages %}{% if m.role == 'tool' and not loop.previtem.tool_calls %}"
    "{{ raise_exception('no call') }}{% endif %}{% endfor %}" + templates.SOUND
)
AS_JSON = templates.chatml(
    content="{% if message.role == 'tool' %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}"
)


def after(template: str, stop: str | None, observation: str = "7", **others: Any) -> str:
    tokenizer = tokenizer_of(template, **others)
    token = None if stop is None else tokenizer.convert_tokens_to_ids(stop)
    text: str = tokenizer.decode(ObservationEncoder(tokenizer, None, 99).encode(observation, token)[0])
    return text


def rendered(template: str, role: str, observation: str = "7") -> str:
    """What the template itself writes after a turn and its end."""
    messages = [ASKED, REPLY, {"role": role, "content": observation}]
    text: str = tokenizer_of(template).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text.split(f"so{END}")[1]


@pytest.mark.parametrize(
    ("template", "role"), [(templates.SOUND, "tool"), (templates.MERGES_TOOLS, "tool"), (NO_TOOLS, "user")]
)
def test_a_turn_is_ended_once(template: str, role: str) -> None:
    """By whichever stop token was sampled, or by the template if a stop text ended the turn."""
    between = rendered(template, role)
    assert after(template, END) == after(template, "<eos>") == after(template, END, eos="<eos>") == between
    assert after(template, None) == END + between


def test_an_observation_is_rendered_by_the_template() -> None:
    said = 'a "b"\nc'
    assert after(AS_JSON, END, said) == rendered(AS_JSON, "tool", said)
    assert '"a \\"b\\"\\nc"' in rendered(AS_JSON, "tool", said)
    assert after(NEEDS_A_CALL, END) == rendered(templates.SOUND, "tool")


def test_headers_follow_what_the_model_sampled() -> None:
    """Another stop token leaves the header as it is."""
    header = "<|im_start|>tool\n7<|im_start|>assistant\n"
    assert after(templates.NO_END_BUT_HEADERS, "<|im_start|>") == header.removeprefix("<|im_start|>")
    assert after(templates.NO_END_BUT_HEADERS, END) == header
    by_role = "{% if message.role == 'tool' %}<|im_start|>{% else %}<|im_end|>{% endif %}"
    template = "{% for message in messages %}{% if message.role != 'assistant' %}" + by_role + (
        "{% endif %}{{ message.role + message.content }}{% endfor %}"
    )  # fmt: skip
    assert (after(template, "<|im_start|>"), after(template, END)) == ("tool7", "user7")


def test_special_tokens_stay_text_and_cuts_whole_characters() -> None:
    tokenizer, said = tokenizer_of(AS_JSON), f'"{END}<|im_start|>'
    tokens, cut = ObservationEncoder(tokenizer, None, 99).encode(said, tokenizer.convert_tokens_to_ids(END))
    control = [tokenizer.convert_tokens_to_ids(each) for each in (END, "<|im_start|>")]
    assert (tokenizer.decode(tokens), cut) == (rendered(AS_JSON, "tool", said), 0)
    assert [token for token in tokens if token in control] == [control[1], control[0], control[1]]
    tokenizer = tokenizer_of(templates.SOUND)
    tokens, cut = ObservationEncoder(tokenizer, None, 4).encode("abéé", tokenizer.convert_tokens_to_ids(END))
    assert (tokenizer.decode(tokens), cut) == (rendered(templates.SOUND, "tool", "abé"), 2)
    tokens, cut = ObservationEncoder(tokenizer, None, 5).encode("abéé", tokenizer.convert_tokens_to_ids(END))
    assert (tokenizer.decode(tokens), cut) == (rendered(templates.SOUND, "tool", "abé"), 1)


def test_a_template_may_be_given(rejects: Rejects) -> None:
    tokenizer = tokenizer_of(None)
    given = ObservationEncoder(tokenizer, "|{observation}>", 10)
    assert tokenizer.decode(given.encode("x", tokenizer.convert_tokens_to_ids(END))[0]) == "|x>"
    silent = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    for template in (silent, "{{ raise_exception('no') }}", None):
        with rejects(ConfigError, "config"):
            ObservationEncoder(tokenizer_of(template), None, 10)


def test_observations_are_encoded_at_the_same_time() -> None:
    """Threads share the tokenizer, so encoding must not set how it treats special tokens."""
    encoder = ObservationEncoder(tokenizer_of(templates.SOUND), None, 9_999)
    said = ["7", "<eos>" * 40, "8 " * 300]
    expected = [encoder.encode(one) for one in said]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(encoder.encode, said * 400)) == expected * 400
