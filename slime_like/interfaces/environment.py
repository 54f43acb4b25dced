"""Interface of environments: two functions over a state expressible in JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a conversation.

    Attributes:
        prompt: the prompt's text, special tokens included.
        answer: the row's ground truth.
        fields: the row's own settings (``data.environment_key``), empty where there are none.
    """

    prompt: str
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's word on one turn of the model.

    Attributes:
        state: what the next ``step`` is given; expressible in JSON.
        observation: text that the model reads before its next turn; not looked at where ``done``.
        done: the conversation has ended.
        reward: finite; the sum over a conversation is the reward function ``environment``.
        success: the conversation counts as solved; that of the last step counts.
        metadata: whatever explains the step; small, and expressible in JSON.
    """

    state: Any = None
    observation: str = ""
    done: bool = False
    reward: float = 0.0
    success: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Made once per worker process, with ``rollout.environment.options`` as keyword arguments.

    It keeps nothing of a conversation between two calls: whatever it needs to remember is in the state, and every step
    may be taken by another worker. So a worker that hangs or dies costs the one conversation whose step it took, and a
    group that is sampled again starts over. What cannot be written down (a running program, a browser) lives
    in a service, and its address in the state.

    What ``step`` raises ends that one conversation, which then gets reward 0.
    """

    def reset(self, task: Task) -> Any:
        """The state in which a conversation begins. Tried once before a run starts, for the first row."""

    def step(self, state: Any, response: str) -> Step:
        """Answer the text of one whole turn of the model, special tokens left out.

        With a parameter ``truncated`` the environment is also given a turn that a token limit cut off, with
        ``truncated=True``; it is ``False`` for whole turns. The conversation then ends, and the reward counts. Without
        that parameter a conversation whose turn is cut off ends with the rewards of the turns before.
        """
