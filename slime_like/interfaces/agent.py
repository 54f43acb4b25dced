"""Interface of agents: one asynchronous function that calls the model through an endpoint and returns a reward."""

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class AgentTask:
    """Task of one rollout, and access to the model.

    Attributes:
        prompt: the row's prompt as text, including special tokens.
        messages: the row's prompt as chat messages; empty if the row has token ids.
        answer: the row's ground truth.
        fields: the row's settings (``data.environment_key``); empty if it has none.
        base_url: ``http://HOST:PORT``. OpenAI clients need ``base_url + "/v1"``, Anthropic clients ``base_url``.
        key: API key for this rollout only.
        model: model name for the calls; any other name works, too.
    """

    prompt: str
    messages: Sequence[Mapping[str, Any]]
    answer: str
    fields: Mapping[str, Any]
    base_url: str
    key: str
    model: str = "policy"


@dataclass(frozen=True, slots=True)
class AgentResult:
    """Result of one rollout.

    Attributes:
        reward: finite; the value of the reward function ``agent``.
        call_rewards: parts of ``reward`` that calls to the model earned, in the order in which they were answered.
            Estimators of turns or tokens credit the rest to the last call.
        success: the rollout counts as solved.
        metadata: anything that explains the reward; small, and JSON-serializable.
    """

    reward: float
    success: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    call_rewards: Sequence[float] = ()

    def __post_init__(self) -> None:
        for one in (self.reward, *self.call_rewards):
            if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
                raise ValueError(f"its reward is {one!r}; give a finite number")
        if not isinstance(self.success, bool) or not isinstance(self.metadata, Mapping):
            raise TypeError("success must be true or false, metadata a mapping")


class Agent(Protocol):
    """Function called once per rollout, in a worker process, with ``rollout.agent.options`` as keyword arguments.

    An exception ends only that rollout (``rollout.agent.on_failure``). When a rollout ends, so do the processes that it
    started. Those that the module started stay.
    """

    def __call__(self, task: AgentTask, /, **options: Any) -> Awaitable[AgentResult]: ...
