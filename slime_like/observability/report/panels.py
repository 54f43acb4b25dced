"""Panels of a report: curves, and the time by phase."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime_like.observability.curve import running_mean, smoothing_window
from slime_like.observability.names import (
    ACCURACY,
    LOSS,
    REWARD,
    ROLLOUT_SPEED,
    STEP_TIME,
    function_means,
    phase_seconds,
)
from slime_like.observability.phases import PHASES
from slime_like.observability.report.charts import Line, chart_data, line_chart, stacked_bars
from slime_like.observability.report.data import RunData

_TRAINING = "train_actor_training/"


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """One picture: its title, what it shows, and (metric, label) of each curve."""

    title: str
    caption: str
    metrics: tuple[tuple[str, str], ...]
    smooth: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture with its data."""

    spec: PanelSpec
    lines: list[Line]
    non_finite_steps: list[int]

    def svg(self) -> str:
        return line_chart(self.lines, self.non_finite_steps, self.spec.title)

    def data(self) -> dict[str, Any]:
        return chart_data(self.lines, self.non_finite_steps)


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
    "Weighted sum of the reward functions, mean over a step's responses, and its running mean.",
    ((REWARD, "mean reward"),),
    smooth=True,
)
_SPECS = (
    PanelSpec("Held-out accuracy", "Fraction of held-out prompts solved.", ((ACCURACY, "accuracy"),), dots=True),
    PanelSpec(
        "Loss", "Total, and its policy-gradient part.", ((LOSS, "loss"), (f"{_TRAINING}policy_loss", "policy loss"))
    ),
    PanelSpec("Importance ratio", "Mean of current over old policy; 1 on-policy.", ((f"{_TRAINING}ratios", "ratio"),)),
    PanelSpec("Clip fraction", "Tokens whose ratio was clipped.", ((f"{_TRAINING}clipfrac", "clip fraction"),)),
    PanelSpec(
        "KL to the reference",
        "Estimates in nats per token; 0 without a reference.",
        ((f"{_TRAINING}approx_policy_kls", "approximate KL"), (f"{_TRAINING}kl_loss", "KL loss")),
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
        "Tokens per response.",
        ((f"{_TRAINING}response_lengths", "mean"), ("rollout/response_length_max", "longest")),
    ),
    PanelSpec(
        "Throughput",
        "Response tokens per second: while generating, and over the whole step.",
        ((ROLLOUT_SPEED, "rollout"), ("train_actor_performance/tokens_per_second", "whole step")),
    ),
    PanelSpec("Learning rate", "Of the step's last update.", ((f"{_TRAINING}learning_rate", "learning rate"),)),
)


def panels(run: RunData) -> tuple[list[Panel], list[str]]:
    """The pictures this run has data for, and the titles of those it has none for."""
    drawn, missing = [], []
    for spec in _specs(run):
        lines = list(_lines(run, spec))
        bad = sorted({step for name, _ in spec.metrics for step in run.non_finite_steps(name)})
        if lines or bad:
            drawn.append(Panel(spec, lines, bad))
        else:
            missing.append(spec.title)
    return drawn, missing


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


def key_metrics(run: RunData) -> list[tuple[str, list[float]]]:
    """(name, values) of every metric a picture is drawn from, and of the step time."""
    names = [STEP_TIME, *(name for spec in _specs(run) for name, _ in spec.metrics)]
    return [(name, values) for name in names if (values := run.series(name)[1])]


def _specs(run: RunData) -> list[PanelSpec]:
    names = dict.fromkeys(name for record in run.records for name in record)
    means = tuple(function_means(names))
    functions = [PanelSpec("Reward functions", "Mean of each function, unweighted.", means)] if means else []
    return [_REWARD, *functions, *_SPECS]


def _lines(run: RunData, spec: PanelSpec) -> Iterator[Line]:
    for colour, (name, label) in enumerate(spec.metrics):
        steps, values = run.series(name)
        if not values:
            continue
        yield Line(label, steps, values, colour, dots=spec.dots, faint=spec.smooth)
        if spec.smooth:
            window = smoothing_window(len(values))
            yield Line(f"running mean over {window} steps", steps, running_mean(values, window), colour)
