"""Keys under which files keep a message's thinking, and whether it carries loss."""

from typing import Any

from slime_like.data.messages import Message, Messages
from slime_like.data.rows import Row

THINKING_KEY = "reasoning_content"
"""Key of a message's thinking after reading."""
THINKING_KEYS = (THINKING_KEY, "reasoning", "thinking", "thought", "reasoning_text")
_LOSS_KEY = "loss"
_SWITCHES = (_LOSS_KEY, "loss_mask", "step_loss_mask", "weight", "trainable", "train")
"""Keys that say whether a message carries loss."""


def fold_keys(row: Row, key: str, messages: Messages) -> Messages:
    """Return messages with their thinking, and whether they carry loss, under one key each.

    Raises:
        DataError: two keys differ, a value cannot be used, or no message carries loss.
    """
    folded = [_folded(row, f"{key!r}, message {number}", each) for number, each in enumerate(messages, start=1)]
    if not any(map(is_trained, folded)):
        problem = f"{key!r} has no message of the assistant that carries loss"
        raise row.fault("no-assistant-turn", problem, "correct the switches of its messages, or remove the row")
    return folded


def is_trained(message: Message) -> bool:
    """Return whether a message of a conversation carries loss."""
    return bool(message["role"] == "assistant" and message.get(_LOSS_KEY, True))


def _folded(row: Row, where: str, message: Message) -> Message:
    assistant = message["role"] == "assistant"
    thinking = _agreed(row, where, {key: message[key] for key in THINKING_KEYS if assistant and message.get(key)})
    switch = _agreed(row, where, {key: message[key] for key in _SWITCHES if key in message})
    if not isinstance(thinking, str | None):
        raise row.fault("bad-messages", f"{where} must have text in its thinking")
    if switch not in (None, 0, 1) or (switch and not assistant):
        problem = f"{where} has a loss weight of {switch!r}; it can be 0 or, for the assistant's turns, 1"
        raise row.fault("bad-messages", problem)
    others = {key: value for key, value in message.items() if key not in (*THINKING_KEYS, *_SWITCHES)}
    found = {THINKING_KEY: thinking, _LOSS_KEY: None if switch is None else bool(switch)}
    return others | {key: value for key, value in found.items() if value is not None}


def _agreed(row: Row, where: str, found: dict[str, Any]) -> Any:
    """Return the value that all keys have, or ``None`` if there are none."""
    value = next(iter(found.values()), None)
    if any(other != value for other in found.values()):
        raise row.fault("bad-messages", f"{where}: {' and '.join(map(repr, found))} differ", "keep one of them")
    return value
