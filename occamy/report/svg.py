"""Small pieces of inline SVG: elements, scales and ticks. Colours come from the page's style sheet, by class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape


def element(tag: str, *children: str, **attributes: str | float) -> Markup:
    """An SVG element; ``class_`` stands for class, underscores for hyphens, numbers are rounded to a tenth."""
    parts = []
    for name, value in attributes.items():
        text = f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        parts.append(f' {name.rstrip("_").replace("_", "-")}="{escape(text)}"')
    return Markup(f"<{tag}{''.join(parts)}>{''.join(str(escape(c)) for c in children)}</{tag}>")


def picture(width: int, height: int, label: str, *children: str) -> Markup:
    """An SVG that fills its box's width, with a text alternative."""
    return element(
        "svg", element("title", label), *children, viewBox=f"0 0 {width} {height}", role="img", aria_label=label
    )


def text(x: float, y: float, content: str, *, anchor: str = "start", class_: str = "label") -> Markup:
    """A line of text with its baseline at y."""
    return element("text", content, x=float(x), y=float(y), text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def polyline(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    """An open line through points."""
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


@dataclass(frozen=True)
class Scale:
    """Maps data in [low, high] to pixels in [start, stop], linearly or by logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        low, high = self._transform(self.low), self._transform(self.high)
        share = (self._transform(value) - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.stop - self.start)

    def ticks(self, count: int) -> list[float]:
        """About `count` round values inside the range."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [m * 10.0**d for d in decades for m in (1, 2, 5)]
            inside = [v for v in values if self.low <= v <= self.high]
            if len(inside) >= 3:
                return inside[:: max(1, math.ceil(len(inside) / count))]
        return _round_ticks(self.low, self.high, count)

    def _transform(self, value: float) -> float:
        return math.log(value) if self.log else value


def _round_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, in the step that comes closest to `count` ticks, at least 3."""
    if high <= low:
        return [low]
    unit = 10.0 ** math.floor(math.log10(high - low))
    choices = []
    for step in (m * unit for m in (5.0, 2.0, 1.0, 0.5, 0.2, 0.1)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        choices.append([round(i * step, 12) for i in range(first, last + 1)])
    return min((c for c in choices if len(c) >= 3), key=lambda c: abs(len(c) - count))


def short(value: float) -> str:
    """A number in at most six characters or so, for axes: 0.25, 12, 3.4k, 1e-05."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e3:
        return f"{value / 1e3:.3g}k"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.0e}"
