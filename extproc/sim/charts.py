"""Charts as inline SVG. Colours are CSS classes of the page: series i has `s{i}` (line) or `f{i}` (area)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 12
"""How many series colours the page must define; more series repeat them, dashed."""

_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44

Point = tuple[float, float]


_SMALLEST = 1e-9  # less than this is nothing, for a reader and for a logarithm


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from values to pixels.

    Attributes:
        label: shown beside it, with the unit.
        low: value at the origin; above 0 where `log`.
        high: value at the far end.
        log: logarithmic.
    """

    label: str
    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where `value` lies between the ends, 0..1, clipped."""
        if self.log:
            value = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            value = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, value))

    def ticks(self) -> list[float]:
        """Round values along the axis."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            marks = [step * 10.0**decade for decade in decades for step in steps]
        else:
            span = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(span))
            step = next(step for step in (1, 2, 5, 10) if step * power >= span) * power
            first = math.ceil(self.low / step)
            marks = [at * step for at in range(first, first + 12)]
        slack = 1e-9 * abs(self.high)
        return [mark for mark in marks if self.low - slack <= mark <= self.high + slack]


def axis(label: str, values: Sequence[float], *, log: bool = False, zero: bool = True) -> Axis:
    """An axis that holds `values`; it begins at 0 unless `log`, or `zero` is False."""
    finite = [value for value in values if math.isfinite(value) and (value > _SMALLEST or not log)]
    high = max(finite, default=1.0)
    low = min(finite, default=0.1) if log or not zero else 0.0
    if log:
        low = min(low, high / 10)
    elif high - low <= _SMALLEST:
        high = low + 1.0
    return Axis(label, low, high, log)


def lines(
    title: str, x: Axis, y: Axis, series: Sequence[tuple[str, Sequence[Point]]], *, dots: bool = False
) -> str:
    """A line for each named series; the first has colour 0."""
    body: list[str] = []
    for at, (name, points) in enumerate(series):
        if not points:
            continue
        path = " ".join(f"{_x(x, px)},{_y(y, py)}" for px, py in points)
        dash = ' stroke-dasharray="6 3"' if at >= COLOURS else ""
        body.append(
            f'<polyline class="line s{at % COLOURS}"{dash} points="{path}"><title>{escape(name)}</title>'
            "</polyline>"
        )
        if dots:
            body += [
                f'<circle class="f{at % COLOURS}" cx="{_x(x, px)}" cy="{_y(y, py)}" r="3.5">'
                f"<title>{escape(name)}: {number(px)}, {number(py)}</title></circle>"
                for px, py in points
            ]
    return _frame(title, x, y, body)


def band(
    title: str, x: Axis, y: Axis, low: Sequence[Point], mean: Sequence[Point], high: Sequence[Point]
) -> str:
    """The range between two lines, and a line in it."""
    outline = " ".join(f"{_x(x, px)},{_y(y, py)}" for px, py in (*high, *reversed(low)))
    path = " ".join(f"{_x(x, px)},{_y(y, py)}" for px, py in mean)
    return _frame(
        title,
        x,
        y,
        [
            f'<polygon class="f0 band" points="{outline}"><title>least to most loaded</title></polygon>',
            f'<polyline class="line s0" points="{path}"><title>mean</title></polyline>',
        ],
    )


def bars(title: str, label: str, values: Sequence[tuple[str, float]], high: float) -> str:
    """Horizontal bars with their values."""
    row, left = 26, 190
    height = row * len(values) + 30
    width = _WIDTH - left - 90
    body: list[str] = []
    for at, (name, value) in enumerate(values):
        top = 6 + at * row
        length = width * min(1.0, value / high) if high > 0 else 0.0
        middle = top + row / 2 + 1
        body.append(
            f'<text class="tick" x="{left - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="f{at % COLOURS}" x="{left}" y="{top}" width="{length:.1f}" height="{row - 8}">'
            f"<title>{escape(name)}: {number(value)}</title></rect>"
            f'<text class="tick" x="{left + length + 6:.1f}" y="{middle:.1f}">{number(value)}</text>'
        )
    body.append(f'<text class="label" x="{left}" y="{height - 6}">{escape(label)}</text>')
    return _svg(title, height, body)


def number(value: float) -> str:
    """A value in few characters."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _frame(title: str, x: Axis, y: Axis, body: Sequence[str]) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts: list[str] = []
    for mark in y.ticks():
        at = _y(y, mark)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
            f'<text class="tick" x="{_LEFT - 6}" y="{at}" dy="0.32em" text-anchor="end">{number(mark)}</text>'
        )
    for mark in x.ticks():
        at = _x(x, mark)
        parts.append(
            f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>'
            f'<text class="tick" x="{at}" y="{bottom + 16}" text-anchor="middle">{number(mark)}</text>'
        )
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    foot = _HEIGHT - 6
    parts.append(
        f'<text class="label" x="{middle_x:.0f}" y="{foot}" text-anchor="middle">{escape(x.label)}</text>'
        f'<text class="label" x="14" y="{middle_y:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle_y:.0f})">{escape(y.label)}</text>'
    )
    return _svg(title, _HEIGHT, [*parts, *body])


def _svg(title: str, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(body)}</svg>"
    )


def _x(scale: Axis, value: float) -> str:
    return f"{_LEFT + scale.share(value) * (_WIDTH - _LEFT - _RIGHT):.1f}"


def _y(scale: Axis, value: float) -> str:
    return f"{_HEIGHT - _BOTTOM - scale.share(value) * (_HEIGHT - _TOP - _BOTTOM):.1f}"
