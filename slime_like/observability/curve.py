"""Plot of a run: reward and held-out accuracy by training step."""

from itertools import accumulate
from pathlib import Path

from slime_like.observability.metrics import read_metrics, series
from slime_like.observability.names import ACCURACY, REWARD

_REWARD_COLOR = "#0072B2"  # color-blind readers can tell blue and vermilion apart
_ACCURACY_COLOR = "#D55E00"


def plot_reward_curve(metrics_path: Path, png_path: Path) -> None:
    """Plot mean reward per step, its running mean, and held-out accuracy, as a PNG of 1280 x 720 pixels."""
    records = read_metrics(metrics_path)
    rewards, accuracy = series(records, REWARD), series(records, ACCURACY)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, values = rewards
    window = smoothing_window(len(values))
    axes.plot(steps, values, color=_REWARD_COLOR, alpha=0.4, linewidth=1, label="mean reward of a step")
    smooth = running_mean(values, window)
    axes.plot(steps, smooth, color=_REWARD_COLOR, linewidth=2.5, label=f"running mean over {window} steps")
    if accuracy[0]:
        axes.plot(*accuracy, "o--", color=_ACCURACY_COLOR, markersize=8, linewidth=1.2, label="held-out accuracy")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training step", fontsize=13)
    axes.set_ylabel("mean reward, held-out accuracy" if accuracy[0] else "mean reward", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=12, loc="best", frameon=False)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, format="png")


def running_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window - 1`` values before it."""
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - window) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]


def smoothing_window(num_steps: int) -> int:
    """Return the steps in the running mean: a tenth of the run, at least 3."""
    return max(3, num_steps // 10)
