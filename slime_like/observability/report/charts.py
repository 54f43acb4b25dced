"""Curves and stacked bars as inline SVG; the page's style sheet colours the classes ``series-N`` and ``part-NAME``."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import fmean
from typing import Any

WIDTH, HEIGHT = 560, 220
BARS_WIDTH = 1180
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 30
FLOOR = HEIGHT - BOTTOM
# More points than this on a line cannot be distinguished at this width, and make the page slow.
MAX_POINTS = 1_000
MAX_BARS = 250
# Classes series-0, series-1, ... of the style sheet.
COLOURS = 6
# The first steps compile and warm up; bars above this many medians are cut, or they would flatten all others.
CUT_AT_MEDIANS = 3.0
# A curve whose values differ by less than this fraction is drawn flat, not as float noise.
_FLAT = 1e-9
# Smaller values count as 0: a tick's distance could not be calculated.
_ZERO = 1e-300


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: values at rising steps, drawn with dots where ``dots``, and pale or dashed."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    colour: int = 0
    dots: bool = False
    faint: bool = False
    dashed: bool = False

    @property
    def kind(self) -> str:
        """Classes of the style sheet."""
        return f"series-{self.colour % COLOURS}" + " faint" * self.faint + " dashed" * self.dashed


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear map of ``[low, high]`` onto ``[start, end]`` in SVG units."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)


def _step_scale(steps: Sequence[int], width: int = WIDTH) -> Scale:
    """Scale of the horizontal axis, half a step of room on either side."""
    return Scale(min(steps) - 0.5, max(steps) + 0.5, LEFT, width - RIGHT)


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside ``[low, high]``."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / spacing - 1e-9)
    last = math.floor(high / spacing + 1e-9)
    return [round(index * spacing, 12) for index in range(first, last + 1)]


def thinned(line: Line, limit: int = MAX_POINTS) -> Line:
    """``line`` with at most about ``limit`` points: the lowest and highest of every run of them, so peaks stay."""
    count = len(line.values)
    if count <= limit:
        return line
    size = math.ceil(2 * count / limit)
    kept: list[int] = []
    for start in range(0, count, size):
        indices = range(start, min(start + size, count))
        ends = {min(indices, key=line.values.__getitem__), max(indices, key=line.values.__getitem__)}
        kept += sorted(ends)
    return replace(line, steps=[line.steps[index] for index in kept], values=[line.values[index] for index in kept])


def chart_data(lines: Sequence[Line], steps: Sequence[int]) -> dict[str, Any]:
    """Values of the curves for the page's script, with the horizontal scale of ``line_chart``."""
    x = _step_scale(steps)
    rounded = [
        {"label": line.label, "steps": list(line.steps), "values": [float(f"{value:.6g}") for value in line.values]}
        for line in map(thinned, lines)
    ]
    return {"left": LEFT, "right": WIDTH - RIGHT, "low": x.low, "high": x.high, "lines": rounded}


def line_chart(
    lines: Sequence[Line], steps: Sequence[int], non_finite_steps: Sequence[int] = (), label: str = ""
) -> str:
    """SVG of curves over training steps; steps whose value was NaN or infinite get a mark on the axis.

    The axis is that of ``steps``, at least one, which hold those of all curves; ``label`` is for screen readers.
    """
    x = _step_scale(steps)
    y = _value_scale([value for line in lines for value in line.values] or [0.0])
    marks = [
        f'<path class="non-finite" d="M{x(step)} {FLOOR}l-4 -9h8z"><title>step {step}: not finite</title></path>'
        for step in non_finite_steps
    ]
    return _svg(label, [*_axes(x, y), *(_curve(line, x, y) for line in lines), *marks])


def stacked_bars(steps: Sequence[int], parts: Sequence[tuple[str, Sequence[float]]], unit: str, label: str) -> str:
    """SVG of one bar a step, cut into ``parts`` (name, value per step); long runs show means over runs of steps."""
    x = _step_scale(steps, BARS_WIDTH)
    size = math.ceil(len(steps) / MAX_BARS)
    starts = range(0, len(steps), size)
    means = [[fmean(values[start : start + size]) for _, values in parts] for start in starts]
    totals = sorted(sum(values) for values in means)
    ceiling = min(totals[-1], CUT_AT_MEDIANS * totals[len(totals) // 2]) or 1.0
    y = Scale(0.0, ceiling * 1.04, FLOOR, TOP)
    names = [name for name, _ in parts]
    spans = [steps[start : start + size] for start in starts]
    bars = [_bar(span, zip(names, values, strict=True), x, y, unit) for span, values in zip(spans, means, strict=True)]
    return _svg(label, [*_axes(x, y), *bars], BARS_WIDTH)


# --------------------------------------------------------------------------------------------------------------- pieces
def _bar(span: Sequence[int], parts: Iterable[tuple[str, float]], x: Scale, y: Scale, unit: str) -> str:
    left, right = x(span[0] - 0.5), x(span[-1] + 0.5)
    gap = min(1.0, (right - left) * 0.15)
    when = f"step {span[0]}" if len(span) == 1 else f"steps {span[0]} to {span[-1]}, mean"
    base, pieces = 0.0, []
    for name, value in parts:
        bottom, top = y(min(base, y.high)), y(min(base + value, y.high))
        base += value
        if bottom - top > 0.02:
            title = f"{when}: {escape(name)} {value:.3g} {unit}"
            pieces.append(
                f'<rect class="part-{escape(name)}" x="{left:.2f}" y="{top:.2f}" width="{right - left - gap:.2f}" '
                f'height="{bottom - top:.2f}"><title>{title}</title></rect>'
            )
    if base > y.high:
        pieces.append(
            f'<path class="cut" d="M{(left + right) / 2:.2f} {TOP - 8}l4 7h-8z">'
            f"<title>{when}: {base:.3g} {unit} in all, more than is drawn</title></path>"
        )
    return "".join(pieces)


def _curve(line: Line, x: Scale, y: Scale) -> str:
    line = thinned(line)
    points = [(x(step), y(value)) for step, value in zip(line.steps, line.values, strict=True)]
    kind = line.kind
    path = " ".join(f"{across:g},{down:g}" for across, down in points)
    shapes = [f'<polyline class="{kind}" points="{path}"/>']
    if line.dots or len(points) == 1:
        shapes += [f'<circle class="{kind}" cx="{across:g}" cy="{down:g}" r="3.5"/>' for across, down in points]
    return "".join(shapes)


def _value_scale(values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    flat = high - low <= max(_FLAT * size, _ZERO)
    room = (0.1 * size if size > _ZERO else 1.0) if flat else 0.06 * (high - low)
    bottom = max(0.0, low - room) if low >= 0 else low - room  # what is never negative has no room below 0
    return Scale(bottom, high + room, FLOOR, TOP)


def _axes(x: Scale, y: Scale) -> list[str]:
    rows = [
        f'<line class="grid" x1="{LEFT}" x2="{x.end}" y1="{y(tick)}" y2="{y(tick)}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y(tick) + 3.5:g}" text-anchor="end">{tick:.6g}</text>'
        for tick in nice_ticks(y.low, y.high)
    ]
    whole = [tick for tick in nice_ticks(x.low, x.high, wanted=8) if tick == int(tick)]
    columns = [
        f'<text class="tick" x="{x(tick)}" y="{FLOOR + 15}" text-anchor="middle">{int(tick)}</text>' for tick in whole
    ]
    return [*rows, f'<line class="axis" x1="{LEFT}" x2="{x.end}" y1="{FLOOR}" y2="{FLOOR}"/>', *columns]


def _svg(label: str, shapes: Sequence[str], width: int = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'{"".join(shapes)}<line class="cursor" y1="{TOP}" y2="{FLOOR}" x1="-9" x2="-9"/></svg>'
    )
