"""Turns of one rollout as a tree of token ids, and the rows to train on.

An agent sends the whole history with every call. If the history starts with the messages of a recorded turn, that
turn's ids are reused unchanged and only the rest is encoded. Otherwise the call forks: its whole prompt is encoded, as
the prompt of another row. Sampled ids are never encoded again.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime_like.agents.rendering import ChatFormat, Message, Rendering, Tool
from slime_like.interfaces import Generation, PromptInput, Segment, Supports
from slime_like.models.tokenization import EndlessRendering, TemplateFault

_BLOCK = 2048
"""Bytes or characters."""


@dataclass(frozen=True, slots=True)
class SharedIds(Sequence[int]):
    """Token ids of 4 bytes each, in blocks that sequences with the same beginning share."""

    blocks: tuple[bytes, ...]

    def __len__(self) -> int:
        return sum(map(len, self.blocks)) // 4

    def __getitem__(self, index: Any) -> Any:
        return np.frombuffer(b"".join(self.blocks), np.int32).tolist()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])


def _blocks(whole: Any, stored: dict[Any, Any]) -> tuple[Any, ...]:
    parts = (whole[start : start + _BLOCK] for start in range(0, len(whole), _BLOCK))
    return tuple(stored.setdefault(part, part) for part in parts)


def _shared(tokens: Sequence[int], stored: dict[Any, Any]) -> SharedIds:
    return SharedIds(_blocks(np.asarray(tokens, np.int32).tobytes(), stored))


@dataclass(frozen=True, slots=True)
class CallPrompt:
    """Input of one call.

    Attributes:
        pieces: text that the input's ids decode to.
        messages: messages as rendered.
        keys: keys of the messages that the client sent.
        written: the template's text of the messages, in pieces. Sampled turns may be written otherwise in ``pieces``.
        parent: turn whose ids the prompt starts with.
    """

    input: PromptInput
    pieces: Sequence[str]
    messages: tuple[Message, ...]
    keys: tuple[bytes, ...]
    written: Sequence[str]
    parent: "Turn | None" = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def rendered(self) -> str:
        return "".join(self.written)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One sampled turn.

    Attributes:
        generation: the model's answer. Its fields cover only tokens that the parent does not have.
        token_ids: prompt ids followed by sampled ids.
        pieces: text that the ids decode to.
        keys: keys of all messages up to and including the reply.
        tools: names of the call's tools.
        forms: the reply as sent to the client, and as sampled.
        number: index of the turn in its rollout.
    """

    prompt: CallPrompt
    generation: Generation
    token_ids: Sequence[int]
    pieces: Sequence[str]
    keys: tuple[bytes, ...]
    forms: tuple[Message, ...]
    number: int = 0
    tools: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of the tree, from its root to a leaf.

    Attributes:
        turns: ``[start, end)`` of every sampled turn in the segment's ``token_ids``.
        calls: number of the turn that starts each of the row's runs of tokens that carry loss.
        numbers: number of every turn.
    """

    segment: Segment
    turns: tuple[tuple[int, int], ...]
    calls: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()


class TurnTree:
    """All turns of one rollout, in sampling order. ``stops`` end a turn, besides EOS; ``None``: every special token.

    Each call sends and renders the whole history, so ids, texts and messages that turns have in common are stored once.
    """

    def __init__(self, chat: ChatFormat, stops: Collection[int] | None = None) -> None:
        self._chat = chat
        self._stops = stops
        self._stored: dict[Any, Any] = {}
        self.turns: list[Turn] = []

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any] | None = None
    ) -> CallPrompt:
        """Build the prompt of a call. Raises ``TemplateFault`` if the messages cannot be rendered."""
        chat = self._chat.with_variables(variables or {})
        messages = [self._known(message) for message in messages]
        keys = tuple(message.key for message in messages)
        found = [turn for turn in reversed(self.turns) if keys[: len(turn.keys)] == turn.keys]
        longest = max((len(turn.keys) for turn in found), default=0)
        for turn in (turn for turn in found if len(turn.keys) == longest):  # the longest matching history, latest first
            sent, sampled = turn.forms
            for reply, is_rewritten in ((sent, False), (sent, True), (sampled, False)):
                shown = (*turn.prompt.messages, reply, *messages[len(turn.keys) :])
                try:
                    if (extended := self._extend(chat, turn, shown, keys, tools, is_rewritten)) is not None:
                        return extended
                except EndlessRendering:
                    raise
                except TemplateFault:  # only in this form; the client's own messages are rendered in any case
                    pass
        rendering = chat.render(messages, tools)
        text = (rendering.text,)
        return CallPrompt(PromptInput(chat.encode(rendering)), text, tuple(messages), keys, text)

    def record(self, prompt: CallPrompt, generation: Generation, reply: Message, tools: Sequence[Tool] = ()) -> Turn:
        given, tokens, stored = prompt.input.token_ids, generation.token_ids.tolist(), self._stored
        sampled, added = self.sampled_text(prompt, generation), self._chat.continuation(given, tokens)
        pieces, written = _blocks(prompt.text, stored), _blocks(prompt.rendered, stored)
        shared = replace(prompt.input, token_ids=_shared(given, stored))
        turn = Turn(
            replace(prompt, input=shared, pieces=pieces, written=written),
            replace(generation, fields=_new_fields(generation, prompt.parent)),
            _shared([*given, *tokens], stored),
            _blocks(prompt.text + added, stored),
            (*prompt.keys, reply.key),
            (self._known(reply), Message("assistant", sampled, is_sampled=True)),
            len(self.turns),
            frozenset(tool["function"]["name"] for tool in tools),
        )
        self.turns.append(turn)
        return turn

    def _known(self, message: Message) -> Message:
        """Return the equal message of an earlier call, if there is one."""
        known: Message = self._stored.setdefault((Message, message.key), message)
        return known if known == message else message

    def sampled_text(self, prompt: CallPrompt, generation: Generation) -> str:
        """Decode a turn without the stop token that ended it, if one did."""
        stops = self._stops if generation.finish_reason == "stop" else ()
        return self._chat.turn_text(prompt.input.token_ids, generation.token_ids.tolist(), stops)

    def rows(self, untrained: Collection[Turn] = ()) -> list[Branch]:
        """Return one row per leaf, in sampling order. A shared turn carries loss only in the first row.

        Turns in ``untrained`` carry none, and no row ends with one.
        """
        kept = [turn for turn in self.turns if turn not in untrained]
        parents = {parent for turn in kept for parent in _branch(turn.prompt.parent)}
        trained = set(untrained)
        return [_row(leaf, trained) for leaf in kept if leaf not in parents]

    def _extend(
        self,
        chat: ChatFormat,
        turn: Turn,
        shown: tuple[Message, ...],
        keys: tuple[bytes, ...],
        tools: Sequence[Tool],
        is_rewritten: bool,
    ) -> CallPrompt | None:
        """Extend a turn's ids. If the template writes the turn in other words, extend by what it writes after it."""
        if is_rewritten:
            ended = len(turn.prompt.messages) + 1
            stop = turn.text.removeprefix(turn.prompt.text)[len(turn.forms[1].content) :]
            found = chat.after_turn(shown[:ended], turn.prompt.rendered, stop, shown[ended:], tools)
            if found is None:
                return None
            rendering, written = Rendering([turn.text, *found[0].pieces]), found[1]
        else:
            rendering = chat.render(shown, tools)
            written = rendering.text
        tokens = chat.extend([*turn.token_ids], turn.text, rendering)
        if tokens is None:
            return None
        given = replace(turn.prompt.input, token_ids=tokens)
        return CallPrompt(given, (rendering.text,), shown, keys, (written,), turn)


def _new_fields(generation: Generation, parent: Turn | None) -> dict[str, np.ndarray]:
    """Return the fields without the part that the parent's branch has. Engines return fields of whole prompts."""
    return {
        name: values[sum(len(turn.generation.fields[name]) for turn in _branch(parent)) :].copy()
        for name, values in generation.fields.items()
    }


def _row(leaf: Turn, trained: set[Turn]) -> Branch:
    """Build the branch that ends with a leaf, and add its turns to ``trained``."""
    branch = list(_branch(leaf))[::-1]
    start = len(branch[0].prompt.input.token_ids)
    tokens = np.array(leaf.token_ids[start:], np.int64)
    logprobs, mask = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), bool)
    versions, turns, calls = np.zeros(len(tokens), np.int64), [], list[int]()
    supports, covered = list[Supports](), 0
    fields = {
        name: np.concatenate([turn.generation.fields[name] for turn in branch]) for name in leaf.generation.fields
    }
    for turn in branch:
        first, end = len(turn.prompt.input.token_ids) - start, len(turn.token_ids) - start
        versions[first:end] = turn.generation.weight_versions
        versions[end:] = turn.generation.weight_versions[-1]  # tokens up to the next turn
        turns.append((first, end))
        if turn not in trained:
            calls += [] if first and mask[first - 1] else [turn.number]
            logprobs[first:end], mask[first:end] = turn.generation.logprobs, True
            if turn.generation.supports is not None:
                supports += [Supports.whole(first - covered), turn.generation.supports]
                covered = end
    trained.update(branch)
    prompt, joined = branch[0].prompt.input, None
    if leaf.generation.supports is not None:
        joined = Supports.concatenate([*supports, Supports.whole(len(tokens) - covered)])
    reason = leaf.generation.finish_reason
    segment = Segment(prompt, tokens, logprobs, versions, mask, joined, reason, fields)
    return Branch(segment, tuple(turns), tuple(calls), tuple(turn.number for turn in branch))


def _branch(turn: Turn | None) -> Iterator[Turn]:
    while turn is not None:
        yield turn
        turn = turn.prompt.parent
