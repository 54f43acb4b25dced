"""Panels of a report: curves, and the time by phase."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_like.observability.curve import running_mean, smoothing_window
from slime_like.observability.metrics import current_records
from slime_like.observability.names import (
    ACCURACY,
    LOSS,
    REWARD,
    ROLLOUT_SPEED,
    STEP_TIME,
    function_means,
    phase_seconds,
    source_means,
)
from slime_like.observability.phases import PHASES
from slime_like.observability.report.charts import Line, chart_data, line_chart, stacked_bars
from slime_like.observability.report.data import RunData

_TRAINING = "train_actor_training/"

# Curves are one, or hide one another, where they differ by less than this fraction of a picture's height.
_EQUAL, _CLOSE = 1e-6, 0.05


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """One picture: its title, what it shows, and (metric, label) of each curve.

    ``always``: drawn also if constant. ``computed_where_asked``: 0 throughout is no measurement.
    """

    title: str
    caption: str
    metrics: tuple[tuple[str, str], ...]
    smooth: bool = False
    dots: bool = False
    always: bool = False
    computed_where_asked: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture with its data; ``steps`` are the run's, so that all pictures have the same axis."""

    spec: PanelSpec
    lines: list[Line]
    non_finite_steps: list[int]
    steps: list[int]

    def svg(self) -> str:
        return line_chart(self.lines, self.steps, self.non_finite_steps, self.spec.title)

    def data(self) -> dict[str, Any]:
        return chart_data(self.lines, self.steps)

    @property
    def says_nothing(self) -> bool:
        """Whether every curve is 0, or stays the same for several steps."""
        if self.spec.always or self.non_finite_steps:
            return False
        flat = all(min(line.values) == max(line.values) for line in self.lines)
        return flat and all(len(line.values) > 1 or line.values[0] == 0 for line in self.lines)

    @property
    def values(self) -> str:
        """The title, and the first value of each curve."""
        return f"{self.spec.title} {', '.join(f'{line.values[0]:.4g}' for line in self.lines)}"


@dataclass(frozen=True, slots=True)
class PhasePicture:
    """Seconds of every phase at every step, phases that took no time left out.

    Attributes:
        parts: (phase, seconds per step).
        shares: (phase, percent of the run's step time).
    """

    steps: list[int]
    parts: list[tuple[str, list[float]]]
    shares: list[tuple[str, float]]

    def svg(self) -> str:
        return stacked_bars(self.steps, self.parts, "s", "Seconds of each phase by training step")


_REWARD = PanelSpec(
    "Reward",
    "Weighted sum of the reward functions, mean over a step's responses.",
    ((REWARD, "mean reward"),),
    smooth=True,
    always=True,
)
_SPECS = (
    PanelSpec(
        "Held-out accuracy", "Fraction of held-out prompts solved.", ((ACCURACY, "accuracy"),), dots=True, always=True
    ),
    PanelSpec(
        "Loss", "Total, and its policy-gradient part.", ((LOSS, "loss"), (f"{_TRAINING}policy_loss", "policy loss"))
    ),
    PanelSpec("Responses cut off", "Fraction that reached a limit.", (("rollout/truncated_fraction", "cut off"),)),
    PanelSpec(
        "Out of turns",
        "Fraction of conversations that the last turn ended.",
        (("rollout/turn_limit_fraction", "out of turns"),),
    ),
    PanelSpec("Turns", "Of the model in a conversation.", (("rollout/turns_mean", "mean"),)),
    PanelSpec(
        "Flat groups",
        "Prompts whose samples all have the same reward: they have no gradient.",
        (("rollout/zero_spread_groups", "groups"),),
    ),
    PanelSpec("Importance ratio", "Mean of current over old policy; 1 on-policy.", ((f"{_TRAINING}ratios", "ratio"),)),
    PanelSpec("Clip fraction", "Tokens whose ratio was clipped.", ((f"{_TRAINING}clipfrac", "clip fraction"),)),
    PanelSpec(
        "KL to the reference",
        "Estimates in nats per token.",
        ((f"{_TRAINING}approx_policy_kls", "approximate KL"), (f"{_TRAINING}kl_loss", "KL loss")),
        computed_where_asked=True,
    ),
    PanelSpec("Entropy", "Mean entropy of the policy, nats per token.", ((f"{_TRAINING}entropy", "entropy"),)),
    PanelSpec("Gradient norm", "Global norm before clipping.", ((f"{_TRAINING}grad_norm", "gradient norm"),)),
    PanelSpec(
        "Engine-to-trainer gap",
        "|logprob of the engine - logprob of the trainer|, nats per token.",
        ((f"{_TRAINING}engine_gap_mean", "mean"), (f"{_TRAINING}engine_gap_max", "largest")),
    ),
    PanelSpec(
        "Response length",
        "Sampled tokens per response; tokens of an environment are not counted.",
        ((f"{_TRAINING}response_lengths", "mean"), ("rollout/response_length_max", "longest")),
    ),
    PanelSpec(
        "Throughput",
        "Response tokens per second: while generating, and over the whole step.",
        ((ROLLOUT_SPEED, "generation"), ("train_actor_performance/tokens_per_second", "whole step")),
    ),
    PanelSpec("Learning rate", "Of the step's last update.", ((f"{_TRAINING}learning_rate", "learning rate"),)),
)


def panels(run: RunData) -> tuple[list[Panel], list[Panel], list[str]]:
    """The pictures to draw, those whose values stay the same, and the titles of those without data."""
    drawn, constant, missing = list[Panel](), list[Panel](), list[str]()
    steps = [record["step"] for record in current_records(run.records)]
    for spec in _specs(run):
        bad = sorted({step for name, _ in spec.metrics for step in run.non_finite_steps(name)})
        panel = Panel(spec, _lines(run, spec), bad, steps)
        is_absent = spec.computed_where_asked and not any(any(line.values) for line in panel.lines)
        if bad or (panel.lines and not is_absent):
            (constant if panel.says_nothing else drawn).append(panel)
        else:
            missing.append(spec.title)
    return drawn, constant, missing


def phase_picture(run: RunData) -> PhasePicture | None:
    """Draw the time of every step by phase; ``None`` without recorded phases."""
    seconds = {phase: run.by_step(phase_seconds(phase)) for phase in (*PHASES, "orchestration")}
    steps = sorted(set().union(*seconds.values()))
    every = {phase: [max(0.0, values.get(step, 0.0)) for step in steps] for phase, values in seconds.items()}
    parts = [(phase, values) for phase, values in every.items() if any(values)]
    total = sum(sum(values) for _, values in parts)
    return (
        PhasePicture(steps, parts, [(phase, 100 * sum(values) / total) for phase, values in parts]) if parts else None
    )


def key_metrics(run: RunData, drawn: Sequence[Panel]) -> list[tuple[str, list[float]]]:
    """(name, values) of the step time, and of every metric that a picture of ``drawn`` shows.

    Behind a name that differs from another in its section alone stands the label of its curve.
    """
    shown = [(STEP_TIME, ""), *(curve for panel in drawn for curve in panel.spec.metrics)]
    last = Counter(name.rpartition("/")[2] for name, _ in shown)
    full = {name: f"{name} ({label})" if last[name.rpartition("/")[2]] > 1 else name for name, label in shown}
    return [(full[name], values) for name, _ in shown if (values := run.series(name)[1])]


def _specs(run: RunData) -> list[PanelSpec]:
    names = dict.fromkeys(name for record in run.records for name in record)
    means = tuple(function_means(names))
    functions = PanelSpec("Reward functions", "Mean of each function, unweighted.", means, always=True)
    by_source = tuple(source_means(names))
    sources = PanelSpec("Sources", "Mean reward of each source of the mixture.", by_source, always=True)
    return [_REWARD, *([functions] if means else []), *([sources] if by_source else []), *_SPECS]


def _lines(run: RunData, spec: PanelSpec) -> list[Line]:
    """The curves of one picture. Equal ones are one; one that would hide another is dashed."""
    lines: list[Line] = []
    for colour, (name, label) in enumerate(spec.metrics):
        steps, values = run.series(name)
        distances = [_distance(line, steps, values) for line in lines]
        nearest = min(distances, default=math.inf)
        if nearest < _EQUAL:
            same = distances.index(nearest)
            lines[same] = replace(lines[same], label=f"{lines[same].label} = {label}")
        elif values:
            dashed = nearest < _CLOSE
            lines.append(Line(label, steps, values, colour, dots=spec.dots, faint=spec.smooth, dashed=dashed))
        if values and spec.smooth:
            window = smoothing_window(len(values))
            lines.append(Line(f"running mean over {window} steps", steps, running_mean(values, window), colour))
    return lines


def _distance(line: Line, steps: Sequence[int], values: Sequence[float]) -> float:
    """The largest difference between two curves, as a fraction of the picture's height; infinite at other steps."""
    if list(line.steps) != list(steps):
        return math.inf
    height = max(*line.values, *values) - min(*line.values, *values)
    return max(abs(one - other) for one, other in zip(line.values, values, strict=True)) / (height or 1.0)
