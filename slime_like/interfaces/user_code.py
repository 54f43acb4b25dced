"""Interfaces of code that users write: reward functions, environments and agents. None needs torch."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

GROUP_MARK = "__group_reward__"

GroupFunction = TypeVar("GroupFunction", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RewardResult:
    """One reward function's result for one response.

    Attributes:
        reward: finite number, unweighted.
        success: the function counts the sample as solved.
        metadata: anything that explains the reward; small, and JSON-serializable.

    Raises:
        TypeError: a field has another type. Raised here, so the traceback shows the line that made the result.
    """

    reward: float
    success: bool
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, wanted in (("reward", self.reward, "a number"), ("success", self.success, "true or false")):
            try:
                math.isfinite(value)  # also accepts other libraries' numbers and bools
            except TypeError as error:
                raise TypeError(_of_another_kind(name, value, wanted)) from error
        if not isinstance(self.metadata, dict):
            raise TypeError(_of_another_kind("metadata", self.metadata, "a dict"))


def as_result(value: Any) -> RewardResult:
    """Convert a reward function's return value to a result.

    Args:
        value: a ``RewardResult``; a number (success: above 0) or a bool; ``(reward, success)``; a mapping with
            ``reward`` or ``score``, and ``success`` if it is not "above 0", whose other entries are metadata.

    Raises:
        TypeError: ``value`` is anything else.
    """
    if isinstance(value, RewardResult):
        return value
    if isinstance(value, Mapping) and (given := [key for key in ("reward", "score") if key in value]):
        rest = {str(key): item for key, item in value.items() if key not in (given[0], "success")}
        reward = value[given[0]]
        return replace(as_result((reward, value.get("success", _is_positive(reward)))), metadata=rest)
    if isinstance(value, tuple) and len(value) == 2:  # a list holds the rewards of several responses
        return RewardResult(*value)
    if isinstance(value, str | bytes | list | tuple | Mapping) or value is None:
        remedy = "return a number, (reward, success), a mapping with reward or score, or a RewardResult"
        raise TypeError(f"it returned {str(value)[:40]!r}, a {type(value).__name__}; {remedy}")
    return RewardResult(value, _is_positive(value))


def _is_positive(value: Any) -> bool:
    try:
        return bool(value > 0)
    except (TypeError, ValueError, RuntimeError):
        return False  # not a number: RewardResult reports it


def _of_another_kind(name: str, value: Any, wanted: str) -> str:
    return f"RewardResult.{name} is a {type(value).__name__} ({str(value)[:40]!r}); give {wanted}"


def group_reward(function: GroupFunction) -> GroupFunction:
    """Declare a reward function that receives all responses to one prompt together.

    Its signature is ``reward(prompt: str, responses: Sequence[str], answer: str, **options) -> list``. It returns one
    result per response, in order, of any kind that ``as_result`` accepts. If it raises, or takes longer than
    ``reward.timeout_s``, all rollouts of the group have failed.
    """
    setattr(function, GROUP_MARK, True)
    return function


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
        answer: text that reward functions get instead of the judged turn; ``None``: the turn.
    """

    reward: float
    success: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    call_rewards: Sequence[float] = ()
    answer: str | None = None

    def __post_init__(self) -> None:
        for one in (self.reward, *self.call_rewards):
            if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
                raise ValueError(f"its reward is {one!r}; give a finite number")
        if not isinstance(self.success, bool) or not isinstance(self.metadata, Mapping):
            raise TypeError("success must be true or false, metadata a mapping")
        if not isinstance(self.answer, str | None):
            raise TypeError(f"its answer is a {type(self.answer).__name__}; give text")


class Agent(Protocol):
    """Function called once per rollout, in a worker process, with ``rollout.agent.options`` as keyword arguments.

    An exception ends only that rollout (``rollout.agent.on_failure``). When a rollout ends, so do the processes that it
    started. Those that the module started stay.
    """

    def __call__(self, task: AgentTask, /, **options: Any) -> Awaitable[AgentResult]: ...
