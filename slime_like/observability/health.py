"""Health of a run: rules that compare a step's metrics with thresholds and with the steps before."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from statistics import fmean, median
from typing import Literal, NamedTuple

import numpy as np

from slime_like.config.health import MOST_STEPS, HealthConfig
from slime_like.observability import names
from slime_like.observability.timing import ORCHESTRATION, PHASES

EVENTS_FILE = "events.jsonl"
CHECKPOINT_SHARE = "checkpoint_share"
"""Name of a checkpoint's size over the free space. It is measured for a rule, and not logged."""

STEPS_KEPT = MOST_STEPS + 50
"""Number of steps that the rules look back at."""
_BEFORE, _LEAST, _NOW = 50, 10, 3
"""A change is between the median of 10 to 50 steps and the median of the 3 steps after them."""
_SMOOTHED = 20
_CLEARED_BELOW, _CLEARED_AFTER = 0.8, 5
"""A rule is cleared after so many steps in a row with less than this share of its threshold."""
_LOOP_TOKENS, _LOOPS, _LONGEST_LOOP = 64, 3, 128

Severity = Literal["cleared", "warning", "alarm"]
_SEVERITIES: tuple[Severity, ...] = ("cleared", "warning", "alarm")
Values = Sequence[float]
"""A metric's values in the last steps, the newest last."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A change of a rule's state. ``time`` is in seconds since the epoch; ``value`` and ``threshold`` have the unit of
    the rule's field in ``HealthConfig``; ``text`` is a sentence with the likely cause and what to look at."""

    step: int
    time: float
    rule: str
    severity: Severity
    value: float
    threshold: float
    text: str


class Rule(NamedTuple):
    """A rule. Its name is the field of ``HealthConfig`` with its threshold; several rules may share one.

    Attributes:
        measure: computes the value from the values of ``metrics``; the higher, the worse.
        text: sentence about ``{value}``.
        alarm: multiple of the threshold that makes a warning an alarm.
        needs: least number of values.
    """

    name: str
    metrics: tuple[str, ...]
    measure: Callable[..., float]
    text: str
    alarm: float = math.inf
    needs: int = 1


class Health:
    """State of the rules. A rule is raised once, and again if its warning becomes an alarm or after it was cleared.

    Args:
        history: metrics of the steps before, if the run resumes.
    """

    def __init__(self, config: HealthConfig, history: Iterable[Mapping[str, float]] = ()) -> None:
        self._thresholds = {rule: float(limit) for rule in RULES if (limit := getattr(config, rule.name)) is not None}
        self._past = {metric: list[float]() for rule in RULES for metric in rule.metrics}
        self._levels, self._good = dict.fromkeys(self._thresholds, 0), dict.fromkeys(self._thresholds, 0)
        for metrics in history:
            self._remember(metrics)

    @property
    def metrics(self) -> dict[str, float]:
        """State of each rule that is not switched off: 0, 1 (warning) or 2 (alarm)."""
        levels = sorted((rule.name, float(level)) for rule, level in self._levels.items())
        return {f"health/{name}": level for name, level in levels}  # the highest, if rules share a name

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Return what ``step`` raised or cleared."""
        self._remember(metrics)
        found = list[Alarm]()
        for rule, threshold in self._thresholds.items():
            values = [self._past[metric] for metric in rule.metrics]
            if not metrics.keys() >= {*rule.metrics} or min(map(len, values)) < rule.needs:
                continue
            value, before = rule.measure(*values), self._levels[rule]
            level = int(value >= threshold) + int(value >= rule.alarm * threshold)
            self._good[rule] = self._good[rule] + 1 if value < _CLEARED_BELOW * threshold else 0
            is_cleared = before > 0 and self._good[rule] >= _CLEARED_AFTER
            if level <= before and not is_cleared:
                continue
            self._levels[rule] = level
            limit = threshold * (rule.alarm if level == 2 else 1.0)
            text = (rule.text if level else "the value is {value}").format(value=f"{value:.3g}")
            found.append(Alarm(step, time.time(), rule.name, _SEVERITIES[level], value, limit, text))
        return found

    def _remember(self, metrics: Mapping[str, float]) -> None:
        for metric, values in self._past.items():
            if math.isfinite(value := metrics.get(metric, math.nan)):
                values.append(value)
                del values[:-STEPS_KEPT]


def ends_in_a_loop(tokens: np.ndarray) -> bool:
    """Return whether a response, ids of (response_len,), ends with the same tokens three times or more, at least 64
    tokens in all. Its last token is ignored: it may have ended the loop."""
    body = tokens[:-1]
    recent = body[-_LONGEST_LOOP - 1 : -1]
    for period in len(recent) - np.flatnonzero(recent == body[-1:]):
        length = max(_LOOP_TOKENS, _LOOPS * period)
        if len(body) >= length and np.array_equal(body[-length:-period], body[-length + period :]):
            return True
    return False


def _sum(*metrics: Values) -> float:
    return sum(values[-1] for values in metrics)


def _typical(*metrics: Values) -> float:
    """Return the median over some steps of the smallest metric in each."""
    return median(map(min, zip(*(values[-_LEAST:] for values in metrics), strict=True)))


def _in_a_row(is_bad: Callable[[float], bool], values: Values) -> float:
    """Count the newest steps in a row that are bad."""
    return sum(1 for _ in takewhile(is_bad, reversed(values)))


def _before(values: Values) -> float:
    return median(values[-_BEFORE - _NOW : -_NOW])


def _now(values: Values) -> float:
    return median(values[-_NOW:])


def _factor(least: float, values: Values) -> float:
    """Return the factor, at least 1, of a change up or down. Smaller values count as ``least``."""
    low, high = sorted((max(least, _before(values)), max(least, _now(values))))
    return high / low


def _entropy_cliff(entropy: Values, reward: Values) -> float:
    """Return the factor of a change, or 1 if the entropy fell and the reward rose: the policy has learned."""
    has_learned = _now(entropy) < _before(entropy) and _now(reward) > _before(reward)
    return 1.0 if has_learned else _factor(0.02, entropy)


def _slowness(phase: Values, step: Values) -> float:
    """Return a phase's seconds over its seconds before, or over a fifth of the step before if that is more."""
    return names.ratio(_now(phase), max(_before(phase), 0.2 * _before(step)))


def _since_best(rewards: Values) -> float:
    """Return the number of steps since the running mean was highest."""
    means = [fmean(rewards[end - _SMOOTHED : end]) for end in range(_SMOOTHED, len(rewards) + 1)]
    return len(means) - 1 - means.index(max(means))


def _engine_gap(trainer: Values, engine: Values) -> float:
    """Return the geometric mean of the ratio of a token's probabilities, or its inverse if that is more."""
    low, high = sorted((trainer[-1], engine[-1]))
    return names.ratio(high, low)  # 0 without logprobs of an engine


_PHASE = "the phase {} takes {{value}} times as long as before; see worker_logs, and the load and network of its nodes"
_READ = "read the samples in tables/"
RULES = (
    *(Rule("slow_phase", (names.phase_seconds(phase), names.STEP_TIME), _slowness, _PHASE.format(phase),
           needs=_LEAST + _NOW) for phase in (*PHASES, ORCHESTRATION)),
    Rule("idle_trainers", (names.WAITING_SHARE, names.IDLE_SHARE), _typical,
         "trainers wait for samples in {value} % of a step; add engines, or find out what holds groups back",
         needs=_LEAST),
    Rule("idle_engines", (names.IDLE_ENGINES,), _typical,
         "engines have nothing to sample in {value} % of a step; rewards hold groups back, or trainers need devices",
         needs=_LEAST),
    Rule("failed_samples", (names.FAILED, names.ABORTED), _sum,
         "{value} of the responses failed or were aborted; see the reasons in driver.log and worker_logs", 4),
    Rule("engine_gap", (names.PERPLEXITY, names.ENGINE_PERPLEXITY), _engine_gap,
         "trainer and engine differ by a factor of {value} per token: the engine computes other logprobs, or has old "
         "weights; see weights/probe_gap and rollout/staleness_max, and run slime-like explain-gap", 5),
    Rule("entropy_cliff", (names.ENTROPY, names.REWARD), _entropy_cliff,
         f"the entropy changed by a factor of {{value}}: the policy collapses or breaks; {_READ}, and lower the "
         "learning rate", needs=_LEAST + _NOW),
    Rule("length_cliff", (names.LENGTH,), partial(_factor, 1.0),
         f"the mean length changed by a factor of {{value}}: the reward favors it, or the policy breaks; {_READ}",
         needs=_LEAST + _NOW),
    Rule("truncated", (names.TRUNCATED,), _typical,
         f"{{value}} of the responses reach a token limit; {_READ}, and see rollout.max_new_tokens", 1.8, _LEAST),
    Rule("no_gradient", (names.ZERO_ADVANTAGES,), partial(_in_a_row, lambda share: share == 1),
         "in {value} steps in a row, every advantage was 0, so there was no policy gradient; check the reward, and use "
         "prompts that are sometimes solved", 4),
    Rule("reward_flat", (names.REWARD,), _since_best,
         "the mean reward was highest {value} steps ago; the run may be finished, the learning rate wrong, or the data "
         "too hard", needs=_SMOOTHED),
    Rule("repeated_text", (names.REPEATED,), _sum,
         f"{{value}} of the responses end in a loop of the same tokens: the policy degenerates; {_READ}, and lower the "
         "learning rate", 3),
    Rule("explained_variance", (names.EXPLAINED_VARIANCE,), partial(_in_a_row, lambda share: share < 0),
         "the critic was worse than a constant in {value} steps in a row; see critic.optimizer.lr and .warmup_steps"),
    Rule("disk", (CHECKPOINT_SHARE,), _sum,
         "a checkpoint takes {value} of the space that is free for run_dir; free space, or lower checkpoint.keep", 2),
)  # fmt: skip
"""All rules. docs/troubleshooting.md has a row for each name."""
