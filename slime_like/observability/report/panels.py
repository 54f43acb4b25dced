"""Panels of a report: curves, and the time by phase. Each is a plotly figure, as plain values for JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from slime_like.observability.metrics import current_records, running_mean, smoothing_window
from slime_like.observability.names import (
    ACCURACY,
    REWARD,
    ROLLOUT_SPEED,
    STEP_TIME,
    function_means,
    phase_seconds,
    source_means,
)
from slime_like.observability.report.data import RunData
from slime_like.observability.timing import ORCHESTRATION, PHASES

_COLORS = ("#3f8fc9", "#d55e00", "#0a8a63", "#a5579a", "#b58900", "#8d9299", "#6b7178")
_MARK = {"yref": "paper", "y0": 0, "y1": 0.08, "line": {"color": "#d55e00"}}
_CUT_AT_MEDIANS = 3.0
"""Bars are drawn up to this many medians. The first steps, which compile and warm up, would flatten the rest."""


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """Title and caption of a panel, and (metric, label) of each curve.

    Attributes:
        smooth: also draw a running mean.
        dots: mark every value.
    """

    title: str
    caption: str
    metrics: tuple[tuple[str, str], ...]
    smooth: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel, with traces and layout for ``Plotly.newPlot``. Marks on the axis show values that are not finite."""

    spec: PanelSpec
    figure: dict[str, Any]
    non_finite_steps: list[int]


@dataclass(frozen=True, slots=True)
class PhasePicture:
    """Seconds of every phase at every step, without phases that took no time.

    Attributes:
        parts: phase, seconds at each step, percent of the run's step time.
    """

    steps: list[int]
    parts: list[tuple[str, list[float], float]]

    def figure(self) -> dict[str, Any]:
        """Return stacked bars for ``Plotly.newPlot``, one per step."""
        bars = [
            {
                "type": "bar",
                "x": self.steps,
                "y": seconds,
                "name": f"{phase} {share:.1f}%",
                "marker": {"color": color, "line": {"width": 0}},
            }
            for (phase, seconds, share), color in zip(self.parts, _COLORS, strict=False)
        ]
        totals = [sum(each) for each in zip(*(seconds for _, seconds, _ in self.parts), strict=True)]
        top = 1.04 * min(max(totals), _CUT_AT_MEDIANS * median(totals)) or 1.0
        return {"data": bars, "layout": {"barmode": "stack", "bargap": 0.1, "yaxis": {"range": [0, top]}}}


def _training(title: str, caption: str, **labels: str) -> PanelSpec:
    """Return a panel of the trainer's metrics, given the label of each."""
    return PanelSpec(title, caption, tuple((f"train_actor_training/{name}", label) for name, label in labels.items()))


def _rollout(title: str, caption: str, **labels: str) -> PanelSpec:
    """Return a panel of metrics of sampling."""
    return PanelSpec(title, caption, tuple((f"rollout/{name}", label) for name, label in labels.items()))


_MEAN_OF_REWARDS = "Weighted sum of the reward functions, mean over a step's responses."
_REWARD = PanelSpec("Reward", _MEAN_OF_REWARDS, ((REWARD, "mean reward"),), smooth=True)
_LENGTHS = (("train_actor_training/response_lengths", "mean"), ("rollout/response_length_max", "longest"))
_SPEEDS = ((ROLLOUT_SPEED, "generation"), ("train_actor_performance/tokens_per_second", "whole step"))
_FLAT = "Prompts without a gradient, because all samples have the same reward."
_GAP = "|logprob of the engine - logprob of the trainer|, nats per token."
_SPECS = (
    PanelSpec("Held-out accuracy", "Fraction of held-out prompts solved.", ((ACCURACY, "accuracy"),), dots=True),
    _training("Loss", "Total, and its policy-gradient part.", loss="loss", policy_loss="policy loss"),
    _rollout("Responses cut off", "Fraction that reached a limit.", truncated_fraction="cut off"),
    _rollout("Out of turns", "Conversations that used up their turns.", turn_limit_fraction="out of turns"),
    _rollout("Turns", "The model's turns in a conversation.", turns_mean="mean"),
    _rollout("Flat groups", _FLAT, zero_spread_groups="groups"),
    _training("Importance ratio", "Mean of current over old policy; 1 on-policy.", ratios="ratio"),
    _training("Clip fraction", "Tokens whose ratio was clipped.", clipfrac="clip fraction"),
    _training("KL to the reference", "In nats per token.", approx_policy_kls="approximate KL", kl_loss="KL loss"),
    _training("Entropy", "Mean entropy of the policy, nats per token.", entropy="entropy"),
    _training("Gradient norm", "Global norm before clipping.", grad_norm="gradient norm"),
    _training("Engine-to-trainer gap", _GAP, engine_gap_mean="mean", engine_gap_max="largest"),
    PanelSpec("Response length", "Sampled tokens per response, without observations.", _LENGTHS),
    PanelSpec("Throughput", "Response tokens per second of generation, and of the whole step.", _SPEEDS),
    _training("Learning rate", "In the step's last update.", learning_rate="learning rate"),
)


def panels(run: RunData) -> list[Panel]:
    drawn: list[Panel] = []
    steps = [record["step"] for record in current_records(run.records)]
    names = dict.fromkeys(name for record in run.records for name in record)
    functions, sources = tuple(function_means(names)), tuple(source_means(names))
    specs = [_REWARD, *_SPECS]
    if sources:
        specs.insert(1, PanelSpec("Sources", "Mean reward of each source of the mixture.", sources))
    if functions:
        specs.insert(1, PanelSpec("Reward functions", "Mean of each function, unweighted.", functions))
    for spec in specs:
        bad = sorted({step for name, _ in spec.metrics for step in run.non_finite_steps(name)})
        traces: list[dict[str, Any]] = []
        for (name, label), color in zip(spec.metrics, _COLORS * len(spec.metrics), strict=False):
            at, values = run.series(name)
            if values:
                traces.append(_trace(spec, label, at, values, color, 0.4 if spec.smooth else 1.0))
            if values and spec.smooth:
                window = smoothing_window(len(values))
                label = f"running mean over {window} steps"
                traces.append(_trace(spec, label, at, running_mean(values, window), color))
        if bad or traces:
            marks = [{"type": "line", "x0": step, "x1": step, **_MARK} for step in bad]
            # All panels have the same axis.
            layout = {"shapes": marks, "xaxis": {"range": [min(steps) - 0.5, max(steps) + 0.5]}}
            drawn.append(Panel(spec, {"data": traces, "layout": layout}, bad))
    return drawn


def _trace(
    spec: PanelSpec, label: str, steps: Sequence[int], values: Sequence[float], color: str, opacity: float = 1.0
) -> dict[str, Any]:
    return {
        "x": steps,
        "y": [float(f"{value:.6g}") for value in values],
        "name": escape(label),  # plotly interprets markup
        "mode": "lines+markers" if spec.dots or len(values) == 1 else "lines",
        "opacity": opacity,
        "line": {"color": color},
    }


def phase_picture(run: RunData) -> PhasePicture | None:
    """Return the time of every step by phase; ``None`` without recorded phases."""
    seconds = {phase: run.by_step(phase_seconds(phase)) for phase in (*PHASES, ORCHESTRATION)}
    steps = sorted(set().union(*seconds.values()))
    every = {phase: [max(0.0, values.get(step, 0.0)) for step in steps] for phase, values in seconds.items()}
    total = sum(map(sum, every.values()))
    parts = [(phase, values, 100 * sum(values) / total) for phase, values in every.items() if any(values)]
    return PhasePicture(steps, parts) if parts else None


def key_metrics(run: RunData, drawn: Sequence[Panel]) -> list[tuple[str, list[float]]]:
    shown = [STEP_TIME, *(name for panel in drawn for name, _ in panel.spec.metrics)]
    return [(name, values) for name in shown if (values := run.series(name)[1])]
