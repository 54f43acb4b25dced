"""Figures shown during a run, and the phases' shares of a step."""

from collections.abc import Mapping

from slime_like.observability.names import (
    ACCURACY,
    CONVERSION_SPEED,
    LOSS,
    MEAN_REWARD,
    ROLLOUT_SPEED,
    SCORING_SPEED,
    STEP_TIME,
    phase_seconds,
)
from slime_like.observability.phases import PHASES

# Metric, label, format. Figures that a run does not have (rewards in supervised mode) are not shown.
FIGURES = (
    (STEP_TIME, "step time", "{:.2f} s"),
    (LOSS, "loss", "{:.4g}"),
    (MEAN_REWARD, "reward", "{:.3f}"),
    (ACCURACY, "accuracy", "{:.3f}"),
    (ROLLOUT_SPEED, "rollout tokens/s", "{:,.0f}"),
    (SCORING_SPEED, "tokens/s", "{:,.0f}"),
    (CONVERSION_SPEED, "GB/s", "{:.2f}"),
)


def shown_figures(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, formatted value) of every figure that ``values`` has, in the order of ``FIGURES``."""
    return [(label, form.format(values[name])) for name, label, form in FIGURES if name in values]


def phase_shares(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """(phase, percent of the phases' total) of every phase that took any time, orchestration last."""
    seconds = {phase: values.get(phase_seconds(phase), 0.0) for phase in (*PHASES, "orchestration")}
    total = sum(seconds.values())
    return [(phase, 100 * value / total) for phase, value in seconds.items() if value > 0]
