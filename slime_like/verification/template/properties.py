"""Properties of a chat template that training depends on."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from slime_like.data.spans import SpanFault
from slime_like.verification.template.histories import History
from slime_like.verification.template.subject import AGENTS, SUPERVISED, Property, Subject


# ------------------------------------------------------------------------------------------------------- renderings
def _takes_conversations(subject: Subject, history: History) -> Iterator[str]:
    first = history.messages[0]["role"] == "system"
    yield from _takes(subject, History(history.messages[first:], history.tools))


def _takes_system_messages(subject: Subject, history: History) -> Iterator[str]:
    if history.messages[0]["role"] == "system":
        yield from _takes(subject, history)


def _takes(subject: Subject, history: History) -> Iterator[str]:
    try:
        subject.whole(history)
    except SpanFault as fault:
        yield fault.problem
    else:
        yield ""


def _keeps(role: str, subject: Subject, history: History) -> Iterator[str]:
    """What ends with a message of ``role`` is rendered the same when others follow. See ``_keeps_tools_apart`` for what
    stands between messages of tools."""
    whole = subject.whole(history)
    for index, (message, following) in enumerate(pairwise(history.messages)):
        if message["role"] == role and (role, following["role"]) != ("tool", "tool"):
            rendered = subject.render(history.messages[: index + 1], history)
            yield "" if whole.startswith(rendered) else _difference(rendered, whole)


def _keeps_tools_apart(subject: Subject, history: History) -> Iterator[str]:
    for index, (message, following) in enumerate(pairwise(history.messages)):
        if message["role"] == following["role"] == "tool":
            rendered = subject.render(history.messages[: index + 1], history)
            longer = subject.render(history.messages[: index + 2], history)
            yield "" if longer.startswith(rendered) else _difference(rendered, longer)


def _prompts_as_history(subject: Subject, history: History) -> Iterator[str]:
    for index in history.turns():
        rendered = subject.render(history.messages[: index + 1], history)
        plain = subject.render(history.messages[:index], history)
        if not rendered.startswith(plain):
            continue  # a prefix that changes: another property
        prompt = subject.render(history.messages[:index], history, prompt=True)
        content = history.messages[index]["content"].strip()
        if not rendered.startswith(prompt):
            yield _difference(prompt, rendered)
        elif prompt == plain and content and not rendered[len(prompt) :].lstrip().startswith(content):
            yield f"there is no generation prompt: the turn begins with {rendered[len(prompt) :]!r:.40}"
        else:
            yield ""


def _keeps_thinking(subject: Subject, history: History) -> Iterator[str]:
    whole = subject.whole(history)
    for index in history.turns():
        message = history.messages[index]
        inside, separator, _ = message["content"].partition("</think>")
        thought = (inside.removeprefix("<think>") if separator else message.get("reasoning_content", "")).strip()
        alone = subject.render(history.messages[: index + 1], history)
        if not thought or (not separator and thought not in alone):
            continue  # a key that the template does not read
        yield "" if thought in whole else f"the thinking of message {index + 1} ({thought!r:.40}) is left out"


def _keeps_white_space(roles: Sequence[str], subject: Subject, history: History) -> Iterator[str]:
    whole = subject.whole(history)
    for message in history.messages:
        content = message["content"]
        if message["role"] in roles and content and _stands_in(content.strip(), whole):
            yield "" if _stands_in(content, whole) else f"{content!r:.40} of the {message['role']} loses white space"


def _adds_no_system_message(subject: Subject, history: History) -> Iterator[str]:
    if history.messages[0]["role"] != "system":
        return
    content, whole = history.messages[0]["content"], subject.whole(history)
    head, found, tail = whole.partition(content)
    without = subject.render(history.messages[1:], history)
    added = without[len(head) : len(without) - len(tail)]
    encloses = found and without.startswith(head) and without.endswith(tail) and len(without) >= len(head) + len(tail)
    bos = subject.tokenizer.bos_token or ""
    if encloses and (added.strip() or head.replace(bos, "").strip()):
        yield f"without one, a conversation begins with {without[: len(head) + len(added)]!r:.60}"
    else:
        yield ""


def _is_independent_of_the_date(subject: Subject, history: History) -> Iterator[str]:
    days = (lambda form: f"1 Jan 2001 {form}", lambda form: f"31 Dec 2031 {form}")
    first, second = (subject.template.render(history.messages, history.tools, strftime_now=day) for day in days)
    yield "" if first == second else _difference(first, second)


def _renders_tools(subject: Subject, history: History) -> Iterator[str]:
    whole = subject.whole(history)
    parts = ["add"] * bool(history.tools)
    for message in history.messages:
        parts += [message["content"]] * (message["role"] == "tool") + ["add"] * ("tool_calls" in message)
    for part in parts:
        yield "" if _stands_in(part, whole) else f"{part!r:.40} is left out"


# ----------------------------------------------------------------------------------------------------------- tokens
def _finds_spans(subject: Subject, history: History) -> Iterator[str]:
    """What happens to such a row of ``data.messages_key``."""
    if not history.turns():
        return
    try:
        subject.encoder.encode(history.messages, history.tools)
    except SpanFault as fault:
        if fault.code == "template-failed":
            raise
        yield f"[{fault.code}] {fault.problem}"
    else:
        yield ""


def _ends_turns(subject: Subject, history: History) -> Iterator[str]:
    for index in history.turns():
        prompt = subject.render(history.messages[:index], history, prompt=True)
        text = subject.render(history.messages[: index + 1], history)
        if not text.startswith(prompt):
            continue
        behind = subject.encoder.tokenize(text[len(prompt) :])
        stops = [place for place, token in enumerate(behind) if token in subject.encoder.stops]
        if not stops:
            yield f"no stop token of the model stands behind {text[-30:]!r}"
        elif subject.tokenizer.decode(behind[stops[0] + 1 :]).strip():
            yield "a turn goes on behind a stop token"
        else:
            yield ""


def _begins_once(subject: Subject, history: History) -> Iterator[str]:
    tokens, bos = subject.encoder.tokenize(subject.whole(history)), subject.tokenizer.bos_token_id
    if bos is not None and bos not in subject.encoder.stops:
        yield "" if tokens[:2] != [bos, bos] else f"{subject.tokenizer.bos_token!r} stands twice at the beginning"


def _splits_at_turns(subject: Subject, history: History) -> Iterator[str]:
    """The prompt has the same tokens alone, as an engine receives it, and in the whole conversation."""
    whole = subject.whole(history)
    tokens = subject.encoder.tokenize(whole)
    for index in history.turns():
        prompt = subject.render(history.messages[:index], history, prompt=True)
        if whole.startswith(prompt):
            alone = subject.encoder.tokenize(prompt)
            same = tokens[: len(alone)] == alone
            yield "" if same else f"the tokens of {prompt[-20:]!r} depend on what follows"


def _decodes(subject: Subject, history: History) -> Iterator[str]:
    whole = subject.whole(history)
    decoded = subject.tokenizer.decode(subject.encoder.tokenize(whole), clean_up_tokenization_spaces=False)
    yield "" if decoded == whole else _difference(whole, decoded)


def _cannot_be_forged(subject: Subject, history: History) -> Iterator[str]:
    encode, tokens = subject.encoder.tokenize, set(subject.encoder.tokenize(subject.whole(history)))
    written = [token for token in subject.encoder.stops | set(subject.tokenizer.all_special_ids) if token in tokens]
    for token in sorted(written):
        name, first = subject.tokenizer.convert_ids_to_tokens(token), history.messages[0]
        forged = [first | {"content": first["content"] + name}, *history.messages[1:]]
        count = encode(subject.render(forged, history)).count(token)
        more = count > encode(subject.whole(history)).count(token)
        yield f"{name!r} in a message of the {first['role']} becomes the control token" if more else ""


def _agrees_with_marks(subject: Subject, history: History) -> Iterator[str]:
    if subject.template.marks(history.messages, history.tools) is None:
        return
    yield from (each for each in _finds_spans(subject, history) if not each or each.startswith("[marks-differ]"))


def _stands_in(part: str, whole: str) -> bool:
    """As it is, or as it stands in JSON: some templates write answers of tools so."""
    return any(text in whole for text in (part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]))


def _difference(expected: str, found: str) -> str:
    """Where two texts part, in a few words."""
    place = next((place for place, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    place = min(len(expected), len(found)) if place is None else place
    begin = max(0, place - 15)
    return f"{expected[begin : place + 25]!r} becomes {found[begin : place + 25]!r}"


_BOTH, _PLAIN, _TOOLS = (SUPERVISED, AGENTS), {"tools": False}, {"tools": True}
_OTHERS = ("system", "user", "tool")
PROPERTIES = (
    Property("conversations", "takes conversations of several turns", _BOTH, _takes_conversations, _PLAIN),
    Property("user-prefix", "history up to a user's message stays as it was", _BOTH, partial(_keeps, "user"),
             _TOOLS),
    Property("tool-prefix", "history up to a tool's message stays as it was", _BOTH, partial(_keeps, "tool"),
             _TOOLS),
    Property("assistant-prefix", "history up to an answer stays as it was", _BOTH, partial(_keeps, "assistant"),
             _TOOLS),
    Property("generation-prompt", "the generation prompt is how answers begin in history", _BOTH, _prompts_as_history,
             _TOOLS),
    Property("thinking", "thinking of earlier turns stays", _BOTH, _keeps_thinking, {"tools": True, "thinking": True}),
    Property("end-of-turn", "a stop token of the model ends every answer", _BOTH, _ends_turns, _TOOLS),
    Property("one-bos", "the conversation begins with one BOS token at most", _BOTH, _begins_once, _PLAIN),
    Property("spans", "spans of answers are found", (SUPERVISED,), _finds_spans, _PLAIN),
    Property("marks", "generation markers agree with the spans", (SUPERVISED,), _agrees_with_marks, _TOOLS),
    Property("token-borders", "no token straddles the beginning of an answer", (SUPERVISED,), _splits_at_turns, _TOOLS),
    Property("answer-space", "answers keep their white space", (AGENTS,), partial(_keeps_white_space, ("assistant",)),
             {"edges": True}),
    Property("decoding", "tokens decode to the text they come from", (AGENTS,), _decodes, _TOOLS),
    Property("date", "the date changes nothing", (AGENTS,), _is_independent_of_the_date, _PLAIN),
    Property("system", "takes system messages", (), _takes_system_messages, _PLAIN),
    Property("tools", "tools, their calls and answers are rendered", (), _renders_tools, _TOOLS),
    Property("tools-apart", "consecutive messages of tools stay apart", (), _keeps_tools_apart, _TOOLS),
    Property("other-space", "other messages keep their white space", (), partial(_keeps_white_space, _OTHERS),
             {"edges": True, "tools": True}),
    Property("no-default-system", "adds no system message", (), _adds_no_system_message, _PLAIN),
    Property("no-forging", "data cannot spell control tokens", (), _cannot_be_forged, _PLAIN),
)  # fmt: skip
