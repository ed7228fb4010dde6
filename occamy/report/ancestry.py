"""What was made from what, as a drawing: data in the left lane, checkpoints to the right, a row per generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from occamy.contracts.lineage import LineageCard
from occamy.contracts.manifest import Manifest
from occamy.report.svg import element, picture, text

_BOX, _TALL, _GAP_X, _GAP_Y, _GUTTER = 110, 40, 12, 26, 44.0


@dataclass(frozen=True)
class Node:
    """A data set or a checkpoint."""

    key: str
    """Digest: of the manifest, or of the weights."""
    name: str
    kind: str
    """Second line: the kind of data or the stage."""
    data: bool
    parents: tuple[str, ...]
    """Keys of the nodes it was made from, as far as they are in the drawing."""


def nodes(cards: Sequence[LineageCard], manifests: Mapping[str, Manifest], evaluated: Iterable[str] = ()) -> list[Node]:
    """Nodes of all manifests and cards. `evaluated` are the weights digests that an evaluation looked at; of these only
    checkpoints that nothing else was made from count as its parents, or lines would cover the drawing.
    """
    made: list[Node] = []
    known = {m.digest() for m in manifests.values()} | {c.weights_digest for c in cards}
    inner = {p for c in cards for p in c.parents}
    for name, manifest in manifests.items():
        looked_at = [d for d in evaluated if d not in inner] if manifest.kind == "evaluation" else []
        parents = tuple(p for p in (*manifest.parents.values(), *looked_at) if p in known)
        made.append(Node(manifest.digest(), name, manifest.kind.replace("_", " "), True, parents))
    for card in cards:
        parents = tuple(p for p in (*card.parents, *card.data.values()) if p in known)
        made.append(Node(card.weights_digest, card.name, card.stage, False, parents))
    return list({n.key: n for n in made}.values())


def depths(made: Sequence[Node]) -> dict[str, int]:
    """Row of each node: one below its lowest parent; what has no parent stands right above its first child."""
    by_key = {n.key: n for n in made}
    depth: dict[str, int] = {}

    def measure(key: str, seen: frozenset[str]) -> int:
        if key not in depth:
            above = [p for p in by_key[key].parents if p in by_key and p not in seen]
            depth[key] = 1 + max((measure(p, seen | {key}) for p in above), default=-1)
        return depth[key]

    for node in made:
        measure(node.key, frozenset())
    for node in made:
        below = [depth[n.key] for n in made if node.key in n.parents]
        if not node.parents and below:
            depth[node.key] = min(below) - 1
    return depth


def drawing(made: Sequence[Node]) -> Markup:
    """The graph as inline SVG, top to bottom."""
    depth = depths(made)
    place: dict[str, tuple[float, float]] = {}
    columns = max((sum(not n.data and depth[n.key] == d for n in made) for d in depth.values()), default=1)
    gutter = (_BOX + 1.0, _GUTTER) if any(n.data for n in made) else (0.0, 2.0)
    left = sum(gutter)
    width = left + columns * (_BOX + _GAP_X) - _GAP_X + 2
    for row in range(max(depth.values(), default=0) + 1):
        y = 2.0 + row * (_TALL + _GAP_Y)
        here = [n for n in made if depth[n.key] == row]
        spots = _spread([(n.key, _wanted(n, place, (left + width - _BOX) / 2)) for n in here if not n.data])
        place |= {key: (min(max(x, left), width - _BOX - 1), y) for key, x in spots.items()}
        place |= {n.key: (1.0, y) for n in here if n.data}
    height = (max(depth.values(), default=0) + 1) * (_TALL + _GAP_Y) - _GAP_Y + 4
    names = {n.key: n for n in made}
    pairs = [(names[p], n) for n in made for p in n.parents if p in place]
    across = [pair for pair in pairs if pair[0].data != pair[1].data]
    lanes = {pair: gutter[0] + (i + 1) * gutter[1] / (len(across) + 1) for i, pair in enumerate(across)}
    links = [_link(a, b, place, lanes.get((a, b))) for a, b in pairs]
    boxes = [_boxed(n, *place[n.key]) for n in made]
    said = "; ".join(f"{n.name} from {', '.join(names[p].name for p in n.parents) or 'nothing'}" for n in made)
    return picture(int(width), int(height), f"Lineage: {said}", *links, *boxes)


def _wanted(node: Node, place: Mapping[str, tuple[float, float]], middle: float) -> float:
    """Mean position of the parents, so that links cross little; the middle for a checkpoint without any."""
    above = [place[p][0] for p in node.parents if p in place and place[p][0] > _BOX]
    return sum(above) / len(above) if above else middle


def _spread(wanted: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Positions near the wanted ones that leave a gap between boxes."""
    ordered = sorted(wanted, key=lambda pair: pair[1])
    spots: list[float] = []
    for _, x in ordered:
        spots.append(max(x, spots[-1] + _BOX + _GAP_X) if spots else x)
    shift = sum(x - spot for (_, x), spot in zip(ordered, spots, strict=True)) / max(1, len(spots))
    return {key: spot + shift for (key, _), spot in zip(ordered, spots, strict=True)}


def _link(start: Node, end: Node, place: Mapping[str, tuple[float, float]], lane: float | None) -> Markup:
    """A curve from box to box below, or a dashed line through the gutter between data and checkpoints."""
    (x1, y1), (x2, y2) = place[start.key], place[end.key]
    if lane is None:
        a, b, c, d = x1 + _BOX / 2, y1 + _TALL, x2 + _BOX / 2, y2
        path = f"M{a:.0f},{b:.0f} C{a:.0f},{b + _GAP_Y:.0f} {c:.0f},{d - _GAP_Y:.0f} {c:.0f},{d:.0f}"
        return element("path", d=path, class_="link")
    # Leave above the middle and arrive below it, so that lines of one box stay apart.
    a, b, d = (x1 + _BOX if start.data else x1), y1 + _TALL * 0.62, y2 + _TALL * 0.38
    beside = [x for x, y in place.values() if y == y2 and lane < x < x2]
    if start.data and beside:  # another checkpoint stands in between: come in from above
        path = f"M{a:.0f},{b:.0f} H{lane:.1f} V{y2 - _GAP_Y / 2:.0f} H{x2 + _BOX * 0.8:.0f} V{y2:.0f}"
    else:
        path = f"M{a:.0f},{b:.0f} H{lane:.1f} V{d:.0f} H{x2 if start.data else x2 + _BOX:.0f}"
    return element("path", d=path, class_="link across")


def _boxed(node: Node, x: float, y: float) -> Markup:
    shape = element(
        "rect", x=x, y=y, width=_BOX, height=_TALL, rx=4 if node.data else 12, class_="data" if node.data else "model"
    )
    middle = x + _BOX / 2
    words = [text(middle, y + 17, node.name, anchor="middle", class_="label strong")]
    words.append(text(middle, y + 32, node.kind, anchor="middle", class_="tick"))
    return element("g", shape, *words)
