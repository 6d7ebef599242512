"""Names beside the ends of lines and beside points of a picture, placed so that they cover nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SIZE = 9.0  # of letters, in points
Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in pixels."""
Point = tuple[float, float]


@dataclass(frozen=True)
class End:
    """The end of a line, and its label.

    Attributes:
        points: Its last two points, as data.
        text: The name.
        colour: Its colour.
        ours: Whether it stands in bold.
    """

    points: Sequence[tuple[float, float]]
    text: str
    colour: str
    ours: bool


def label_ends(axes: Any, ends: list[End]) -> None:
    """Names beside the ends of lines, moved apart where they would cover each other, with a thin leader.

    A line that ends early is labelled where it would arrive at the edge, so that its leader crosses no others.
    """
    from matplotlib.lines import Line2D

    figure = axes.figure
    box = axes.get_window_extent()
    gap = (SIZE + 2.6) * figure.dpi / 72
    low, high = box.y0 + gap / 3, box.y1 - gap / 4
    edge = float(axes.transData.transform((axes.get_lines()[-1].get_xdata()[-1], 1.0))[0])
    placed = []
    for end in ends:
        *before, (x, y) = [tuple(map(float, axes.transData.transform(p))) for p in end.points]
        slope = (y - before[0][1]) / (x - before[0][0]) if before else 0.0
        placed.append((min(max(y + slope * (edge - x), low), high), (x, y), end))
    placed.sort(key=lambda item: item[0])
    heights = _apart([height for height, *_ in placed], gap, low, high)
    invert = figure.transFigure.inverted().transform
    for (_, point, end), y in zip(placed, heights, strict=True):
        knee = box.x1 + 0.018 * figure.bbox.width
        corners = [invert(p) for p in (point, (box.x1 + 4, y), (knee, y))]
        early = point[0] < edge - 1
        figure.add_artist(Line2D(*zip(*corners, strict=True), color=end.colour, linewidth=0.6, alpha=0.7,
                                 linestyle=(0, (1, 3)) if early else "-"))
        figure.text(corners[-1][0] + 0.004, corners[-1][1], end.text, color=end.colour, fontsize=SIZE, va="center",
                    ha="left", fontweight="bold" if end.ours else "normal")


def _apart(heights: list[float], gap: float, low: float, high: float) -> list[float]:
    """Ordered heights, pushed away from each other until none is nearer than the gap, if there is room."""
    gap = min(gap, (high - low) / max(1, len(heights) - 1))
    for _ in range(2000):
        moved = False
        for i in range(len(heights) - 1):
            lack = gap - (heights[i + 1] - heights[i])
            if lack > 0.05:
                heights[i] -= lack / 2
                heights[i + 1] += lack / 2
                moved = True
        heights[0], heights[-1] = max(heights[0], low), min(heights[-1], high)
        if not moved:
            break
    return heights


def label_points(
    axes: Any, points: list[tuple[float, float, str, str]], lines: Sequence[Box], texts: Sequence[Box]
) -> None:
    """Names beside points: for each the cheapest place of many, near its point and clear of names, points and leaders.

    Members of a family whose points lie on each other share a label.

    Args:
        axes: Where the points are drawn.
        points: x, y, name and colour of each.
        lines: Lines that names had better not cover.
        texts: What they must not cover.
    """
    from matplotlib.lines import Line2D

    figure = axes.figure
    scale = figure.dpi / 72
    box = axes.get_window_extent()
    where = [axes.transData.transform((x, y)) for x, y, *_ in points]
    groups = _groups([((float(px), float(py)), name, colour)
                      for (px, py), (_, _, name, colour) in zip(where, points, strict=True)], 8 * scale)
    taken = [(px - 5 * scale, py - 5 * scale, px + 5 * scale, py + 5 * scale) for (px, py), *_ in groups]
    taken += texts
    leaders: list[tuple[Point, Point]] = []
    invert = figure.transFigure.inverted().transform
    for (px, py), text, colour in sorted(groups, key=lambda group: -group[0][1]):
        bold = text.startswith("headmux")
        width, height = _width(figure, text, bold) + 3 * scale, (SIZE + 2) * scale
        cheapest, spot, near = math.inf, (0.0, 0.0, 0.0, 0.0), (px, py)
        for distance in (9, 14, 20, 28, 38, 50, 64, 80, 98, 120):
            for angle in range(0, 360, 15):
                dx = math.cos(math.radians(angle)) * distance * scale
                dy = math.sin(math.radians(angle)) * distance * scale
                x0 = px + dx - (0 if abs(dx) > 5 * scale else width / 2) - (width if dx < -5 * scale else 0)
                trial = (x0, py + dy - height / 2, x0 + width, py + dy + height / 2)
                if not (box.x0 < trial[0] and trial[2] < box.x1 and box.y0 < trial[1] and trial[3] < box.y1):
                    continue
                foot = min(max(px, trial[0]), trial[2]), min(max(py, trial[1]), trial[3])
                cost = distance + 1000 * sum(_overlap(trial, t) for t in taken)
                cost += 100 * sum(_overlap(trial, t) for t in lines)
                cost += 300 * sum(_crosses(a, b, trial) for a, b in leaders)
                cost += 300 * sum(_crosses((px, py), foot, t) for t in taken if not _within((px, py), t))
                if cost < cheapest:
                    cheapest, spot, near = cost, trial, foot
        taken.append(spot)
        if math.hypot(near[0] - px, near[1] - py) > 11 * scale:
            leaders.append(((px, py), near))
            (x0, y0), (x1, y1) = invert((px, py)), invert(near)
            figure.add_artist(Line2D([x0, x1], [y0, y1], color=colour, linewidth=0.7, alpha=0.8))
        tx, ty = invert((spot[0], (spot[1] + spot[3]) / 2))
        figure.text(tx, ty, text, color=colour, fontsize=SIZE, va="center", ha="left",
                    fontweight="bold" if bold else "normal")


def _width(figure: Any, text: str, bold: bool) -> float:
    """Width of a name, in pixels."""
    drawn = figure.text(0, 0, text, fontsize=SIZE, fontweight="bold" if bold else "normal")
    width = float(drawn.get_window_extent().width)
    drawn.remove()
    return width


def _groups(points: list[tuple[Point, str, str]], reach: float) -> list[tuple[Point, str, str]]:
    """Points with their labels and colours; those of one family within reach of each other as one."""
    found: list[tuple[Point, str, str]] = []
    for where, name, colour in sorted(points, key=lambda point: (len(point[1]), point[1])):
        for i, (other, text, c) in enumerate(found):
            first = text.split(", ")[0]
            if c == colour and math.dist(where, other) < reach and name.startswith(first):
                found[i] = (other, f"{text}, {name.removeprefix(first)}", c)
                break
        else:
            found.append((where, name, colour))
    return found


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _within(point: Point, box: Box) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def _crosses(a: Point, b: Point, box: Box) -> bool:
    """Whether the straight line between two points touches a box, by small steps."""
    steps = max(2, int(math.dist(a, b) / 3))
    return any(
        _within((a[0] + (b[0] - a[0]) * i / steps, a[1] + (b[1] - a[1]) * i / steps), box) for i in range(steps + 1)
    )
