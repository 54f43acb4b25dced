"""Interface of environments: two functions over a JSON-serializable state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a conversation.

    Attributes:
        prompt: the prompt's text, including special tokens.
        answer: the row's ground truth.
        fields: the row's settings (``data.environment_key``); empty if it has none.
    """

    prompt: str
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's reply to one turn of the model.

    Attributes:
        state: passed to the next ``step``; JSON-serializable.
        observation: text that the model reads before its next turn; ignored if ``done``.
        done: the conversation has ended.
        reward: finite; the sum over a conversation is the value of the reward function ``environment``.
        success: the conversation counts as solved; the last step decides.
        metadata: anything that explains the step; small, and JSON-serializable.
    """

    state: Any = None
    observation: str = ""
    done: bool = False
    reward: float = 0.0
    success: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Created once per worker process, with ``rollout.environment.options`` as keyword arguments.

    It stores nothing about a conversation between calls: everything to remember is in the state, and each step may run
    in a different worker. A worker that hangs or dies therefore costs only the current step's conversation, and a group
    that is sampled again starts over. Keep anything that can't be serialized (a running program, a browser) in a
    service, and the service's address in the state.

    An exception in ``step`` ends only that conversation (``rollout.environment.on_failure``).
    """

    def reset(self, task: Task) -> Any:
        """Return a conversation's initial state. Tried once before a run starts, with the first row."""

    def step(self, state: Any, response: str) -> Step:
        """Answer one whole turn of the model: text without its stop token, with thinking in ``<think>...</think>``.

        If it has a parameter ``truncated``, the environment also receives turns cut off by a token limit, with
        ``truncated=True``; whole turns get ``False``. The conversation then ends, and the reward counts. Without the
        parameter, a conversation with a cut-off turn ends with the rewards of the earlier turns.
        """
