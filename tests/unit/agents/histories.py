"""Agents that treat their history badly, models that say anything, and templates that forget: drawn at random."""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime_like.agents.rendering import ChatFormat, Message, Tool
from slime_like.agents.responses import response_form
from slime_like.agents.turns import CallPrompt, TurnTree
from slime_like.interfaces import Generation, Supports
from tests.support.templates import tokenizer_of

_MERGES = [("a", "b"), ("ab", "c"), ("\u0120", "a"), ("\u010a", "\u010a"), ("<", "/"), ("t", "o"), ("to", "o")]

_CALLS = (
    "{% if m.tool_calls %}{% for c in m.tool_calls %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}{% endif %}"
)
_ONE = "<{{ m.role }}>{{ m.content }}" + _CALLS + "{% if m.role == 'assistant' %}<eos>\n{% endif %}"
_EACH = "{% for m in messages %}" + _ONE + "{% endfor %}"
_NEXT = "{% if add_generation_prompt %}<assistant>{% endif %}"

PLAIN = _EACH + _NEXT
TEMPLATES = {
    "plain": PLAIN,
    "drops earlier thoughts": "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
    "<assistant>{{ m.content.split('</think>')[-1] }}" + _CALLS + "<eos>\n{% else %}" + _ONE + "{% endif %}{% endfor %}"
    + _NEXT,
    "merges tool messages": "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<tool>{% endif %}[{{ m.content }}]"
    "{% else %}" + _ONE + "{% endif %}{% endfor %}" + _NEXT,
    "strips": _EACH.replace("{{ m.content }}", "{{ m.content | trim }}") + _NEXT,
    "bos": "<bos>" + _EACH + _NEXT,
    "other generation prompt": _EACH + "{% if add_generation_prompt %}<assistant>answer: {% endif %}",
    "header of the whole": "<system>{{ messages | length }} messages\n" + _EACH + _NEXT,
    "header of the hour": "<system>{{ hour() }}{% if tools %}{{ tools | tojson }}{% endif %}\n" + _EACH + _NEXT,
    "trims a newline": _EACH.replace(
        "{{ m.content }}", "{{ m.content[:-1] if m.content[-1:] == '\\n' else m.content }}"
    ) + _NEXT,
}  # fmt: skip

TOOL: Tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}
_TEXTS = ("abc", " a", "x\n", "<eos>", "\u00e9t\u00e9", "\n\nab", "", "<assistant>too", "\ud800", "<think>a</think>b")
_SAMPLED = (
    *_TEXTS[:-2], "<think>ab</think>", '<tool_call>{"name":"add","arguments":{"b":1,"a":[2]}}</tool_call>', "\n",
    "<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>", "<tool_call>no</tool_call>",
)  # fmt: skip


def tokenizer(template: str) -> Any:
    """Bytes with a few merges, so that one text has several token sequences."""
    return tokenizer_of(template, eos="<eos>", control=(), merges=_MERGES)


def generation(tokens: Sequence[int], reason: Any = "stop") -> Generation:
    count = len(tokens)
    return Generation(np.array(tokens), np.full(count, -1.0, np.float32), np.zeros(count, np.int64), reason)


@dataclass
class Model:
    """Samples any ids, and keeps what it was asked and what it sampled, as the engine's own account."""

    tokenizer: Any
    draw: random.Random
    calls: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._vocabulary = len(self.tokenizer)

    def sample(self, prompt: Sequence[int]) -> Generation:
        tokens: list[int] = []
        for _ in range(self.draw.randint(1, 3)):
            if self.draw.random() < 0.3:
                tokens += self.draw.choices(range(self._vocabulary), k=self.draw.randint(1, 3))
            else:  # text that the agent understands, byte by byte as often as merged
                text = self.draw.choice(_SAMPLED)
                parts = list(text) if self.draw.random() < 0.5 else [text]
                tokens += itertools.chain(*(self._ids(part) for part in parts))
        ended = self.draw.random() < 0.8
        tokens = (tokens or self._ids("a")) + ([self.tokenizer.eos_token_id] if ended else [])
        self.calls.append((list(prompt), tokens))
        number = float(len(self.calls))
        return Generation(
            np.array(tokens, np.int64),
            np.full(len(tokens), -number, np.float32),
            np.full(len(tokens), len(self.calls), np.int64),
            "stop" if ended else "length",
            supports=Supports.of([np.array([token, len(self.calls)]) for token in tokens]),
        )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids


@dataclass
class Rollout:
    """One random rollout: its tree, the model's account, and the prompts with the history that each was made for."""

    tree: TurnTree
    model: Model
    prompts: list[tuple[CallPrompt, list[Message]]]


def random_rollout(draw: random.Random, template: str, chat_tokenizer: Any) -> Rollout:
    """Some calls by an agent that appends, retries, forgets, edits, compacts, and talks with itself."""
    clock = itertools.count(1)
    hours = [next(clock)]
    chat_tokenizer.chat_template = template.replace("hour()", "'HOUR'")
    chat, form = ChatFormat(chat_tokenizer), response_form(chat_tokenizer, "hermes")
    rollout = Rollout(TurnTree(chat), Model(chat_tokenizer, draw), [])
    histories: list[list[Message]] = [[Message("user", draw.choice(_TEXTS))]]
    for _ in range(draw.randint(1, 7)):
        if draw.random() < 0.15:
            hours.append(next(clock))
        chat_tokenizer.chat_template = template.replace("hour()", f"'{hours[-1]}'")
        history = _next_history(draw, histories)
        tools = [TOOL] if draw.random() < 0.9 else []
        prompt = rollout.tree.prompt(history, tools)
        generation = rollout.model.sample(prompt.input.token_ids)
        text = chat.turn_text(prompt.input.token_ids, generation.token_ids.tolist())
        reply = form.message(prompt.text, text, tools)
        rollout.tree.record(prompt, generation, reply)
        rollout.prompts.append((prompt, history))
        histories.append([*history, reply])
    return rollout


def _next_history(draw: random.Random, histories: list[list[Message]]) -> list[Message]:
    history = list(histories[-1] if draw.random() < 0.7 else draw.choice(histories))
    kind = draw.random()
    if kind < 0.08 and len(histories) > 1:
        return list(draw.choice(histories[:-1]))  # a retry, or a history that was had before
    if kind < 0.16:
        return [Message("system", draw.choice(_TEXTS)), *history[-2:], Message("user", "abc")]  # compaction
    if kind < 0.24:
        return [Message("user", draw.choice(_TEXTS))]  # a subagent
    if kind < 0.34 and history[-1].role == "assistant":  # edits what the model said
        history[-1] = Message("assistant", history[-1].content.strip() + draw.choice(("", "a")), history[-1].tool_calls)
    if history[-1].tool_calls:  # over the wire and back, in another order
        calls = [
            type(call)(call.name, json.loads(json.dumps(dict(reversed(list(dict(call.arguments).items()))))))
            for call in history[-1].tool_calls
        ]
        history[-1] = Message("assistant", history[-1].content, tuple(calls))
        return [*history, *(Message("tool", draw.choice(_TEXTS)) for _ in calls)]
    return [*history, *(Message(draw.choice(("user", "tool")), draw.choice(_TEXTS)) for _ in range(draw.randint(1, 2)))]
