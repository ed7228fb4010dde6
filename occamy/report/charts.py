"""The charts of a report: intervals per candidate, learning curves, and the plane of cost and quality."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from occamy.contracts.evaluation import Interval, ParetoPoint
from occamy.report.svg import Scale, element, line, picture, polyline, short, text

_WIDTH = 360
"""Every panel is drawn for a phone's width and scales from there."""


def interval_panel(title: str, rows: Sequence[tuple[str, Interval]], best: str) -> Markup:
    """A dot with its interval per candidate, on an axis in percent from 0; `best` is drawn in the accent colour."""
    top, step = 12, 27
    height = top + step * len(rows) + 26
    high = max(0.1, min(1.0, max(i.high for _, i in rows)))
    x = Scale(0, high, 104, _WIDTH - 50)
    bottom = top + step * len(rows)
    marks: list[Markup] = []
    for tick in x.ticks(5):
        marks += [line(x(tick), top, x(tick), bottom, "grid")]
        marks += [text(x(tick), bottom + 17, f"{100 * tick:.0f}%", anchor="middle", class_="tick")]
    for position, (name, interval) in enumerate(rows):
        y = top + step * position + step / 2
        accent = " accent" if name == best else ""
        marks += [
            text(96, y + 4, name, anchor="end", class_=f"label{accent}"),
            line(x(interval.low), y, x(interval.high), y, f"whisker{accent}"),
            element("circle", cx=x(interval.mean), cy=y, r=4.5, class_=f"dot{accent}"),
            text(_WIDTH - 2, y + 4, f"{100 * interval.mean:.1f}", anchor="end", class_=f"value{accent}"),
        ]
    said = ", ".join(f"{n} {100 * i.mean:.1f}%" for n, i in rows)
    return picture(_WIDTH, int(height), f"{title}: {said}", *marks)


def curve_panel(title: str, points: Sequence[tuple[float, float]]) -> Markup:
    """A learning curve over steps; with more than 12 points, a running mean over the raw line."""
    left, right, top, bottom = 44, _WIDTH - 8, 8, 118
    values = [v for _, v in points]
    low, high = min(values), max(values)
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 0.5
    x = Scale(points[0][0], points[-1][0], left, right)
    y = Scale(low - pad, high + pad, bottom, top)
    marks: list[Markup] = []
    for tick in y.ticks(4):
        marks += [line(left, y(tick), right, y(tick), "grid")]
        marks += [text(left - 6, y(tick) + 4, short(tick), anchor="end", class_="tick")]
    for tick in x.ticks(5):
        marks += [text(x(tick), bottom + 17, short(tick), anchor="middle", class_="tick")]
    raw = [(x(s), y(v)) for s, v in points]
    if len(points) > 12:
        marks += [polyline(raw, "curve faint"), polyline([(x(s), y(v)) for s, v in _running_mean(points)], "curve")]
    else:
        marks += [polyline(raw, "curve")]
    end = f"{title}: from {short(values[0])} to {short(values[-1])} over {len(points)} steps"
    return picture(_WIDTH, 140, end, *marks)


def pareto_plane(points: Sequence[ParetoPoint], factor: float, unit: str) -> Markup:
    """Aggregate score over cost on a log axis, with the front as a line and its knee ringed.

    Costs are shown times `factor`, as "USD per `unit`".
    """
    width, height = _WIDTH, 280
    costs = [p.cost * factor for p in points]
    x = Scale(min(costs) / 1.12, max(costs) * 1.12, 48, width - 14, log=True)
    y = Scale(-0.06, 1.06, height - 48, 12)
    marks: list[Markup] = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        marks += [line(x.start, y(tick), x.stop, y(tick), "grid")]
        marks += [text(x.start - 7, y(tick) + 4, f"{tick:g}", anchor="end", class_="tick")]
    for tick in x.ticks(5):
        marks += [line(x(tick), y.start, x(tick), y.stop, "grid")]
        marks += [text(x(tick), y.start + 18, f"{tick:.3g}", anchor="middle", class_="tick")]
    marks += [text((x.start + x.stop) / 2, height - 8, f"USD per {unit} (log)", anchor="middle", class_="tick")]
    front = sorted((p for p in points if p.on_front), key=lambda p: p.cost)
    marks += [polyline([(x(p.cost * factor), y(p.score)) for p in front], "front")]
    spots = [(p.candidate, x(p.cost * factor), y(p.score)) for p in points]
    for point, (_, px, py) in zip(points, spots, strict=True):
        if point.knee:
            marks += [element("circle", cx=px, cy=py, r=10.0, class_="knee")]
        marks += [element("circle", cx=px, cy=py, r=5.0, class_="dot accent" if point.on_front else "dot")]
    boxes = _placed(spots, width)
    for point, (lx, ly, anchor) in zip(points, boxes, strict=True):
        words = f"{point.candidate} (knee)" if point.knee else point.candidate
        marks += [text(lx, ly, words, anchor=anchor, class_="label accent" if point.on_front else "label")]
    said = ", ".join(f"{p.candidate} {p.score:.2f} at {p.cost * factor:.3g}" for p in points)
    return picture(width, height, f"Aggregate score and USD per {unit}: {said}", *marks)


def _running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Mean over a window of about a tenth of the points, centred, narrower at the ends."""
    half = max(1, len(points) // 20)
    smooth = []
    for i, (step, _) in enumerate(points):
        window = points[max(0, i - half) : i + half + 1]
        smooth.append((step, sum(v for _, v in window) / len(window)))
    return smooth


def _placed(spots: Sequence[tuple[str, float, float]], width: int) -> list[tuple[float, float, str]]:
    """Label positions (x, y, anchor) that cover neither each other nor a dot, greedily, first free place wins."""
    taken = [(px - 6, py - 6, px + 6, py + 6) for _, px, py in spots]
    placed = []
    for name, px, py in spots:
        size = 7.2 * len(name) + 8
        tries = [
            (px + 10, py + 4, "start"),
            (px - 10, py + 4, "end"),
            (px, py - 12, "middle"),
            (px, py + 20, "middle"),
            (px + 8, py - 10, "start"),
            (px - 8, py + 18, "end"),
            (px + 8, py + 18, "start"),
            (px - 8, py - 10, "end"),
        ]
        boxes = [_box(lx, ly, anchor, size) for lx, ly, anchor in tries]
        inside = [i for i, b in enumerate(boxes) if b[0] >= 0 and b[2] <= width]
        best = min(inside or [0], key=lambda i: (sum(_overlap(boxes[i], t) for t in taken), i))
        taken.append(boxes[best])
        placed.append(tries[best])
    return placed


def _box(x: float, y: float, anchor: str, size: float) -> tuple[float, float, float, float]:
    left = {"start": x, "end": x - size, "middle": x - size / 2}[anchor]
    return (left, y - 11, left + size, y + 3)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, wide) * max(0.0, high)
