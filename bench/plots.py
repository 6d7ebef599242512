"""Pictures of results: time, time over the floor and memory against tokens, and time against memory.

Each picture is drawn twice, for light and for dark pages. Colour tells the family of a provider (the Okabe-Ito colours,
which the colour-blind can tell apart), marker and line style the member, and every line is labelled at its end.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headmux.bench.records import Record, Results

_WIDTH = 8.6
_DPI = 200
_LABEL = 9.0


@dataclass(frozen=True)
class _Theme:
    name: str
    page: str
    ink: str
    faint: str
    colours: dict[str, str]


# Okabe and Ito; on dark pages blue and grey are lightened, the others stand as they are
_OKABE = {
    "headmux-triton": "#D55E00", "headmux-cutedsl": "#E69F00", "headmux-torch": "#CC79A7", "headmux": "#D55E00",
    "pytorch": "#6E7781", "torch-lce": "#24292F", "liger": "#0072B2", "cce": "#009E73", "quack": "#56B4E9",
}
_THEMES = (
    _Theme("light", "#FFFFFF", "#24292F", "#D0D7DE", _OKABE),
    _Theme("dark", "#0D1117", "#E6EDF3", "#30363D",
           {**_OKABE, "pytorch": "#9DA7B3", "torch-lce": "#F0F6FC", "liger": "#4C9BE8"}),
)
_MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 2)))


def draw(results: Sequence[Results], folder: Path) -> list[Path]:
    """Draw every picture that the records allow.

    Args:
        results: Files of results, later ones winning over earlier.
        folder: Where the pictures go.

    Returns:
        The files written.

    Raises:
        ValueError: Matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install 'headmux[bench]'") from error
    merged = {r.key: r for found in results for r in found.records}
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for r in merged.values():
        if r.ms is not None and r.floor_ms is not None:
            groups.setdefault((r.op, r.h, r.v, r.dtype, r.variant), []).append(r)
    where = results[-1].header if results else {}
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context({"font.size": 10, "font.family": "sans-serif", "svg.fonttype": "none"}):
        for (op, h, v, dtype, variant), records in groups.items():
            stem = f"{op}-v{v}-h{h}-{dtype}" + ("" if variant == "default" else f"-{variant.replace('+', '-')}")
            title = f"{op}, {_SHORT.get(dtype, dtype)}, V={v:,} H={h:,}" + _WORDS.get(variant, f", {variant}")
            for theme in _THEMES:
                for kind, picture in _pictures(records).items():
                    path = folder / f"{stem}-{kind}-{theme.name}.png"
                    with _figure(theme, records, kind) as (figure, axes):
                        picture(axes, theme, records)
                        axes.set_title(f"{title}: {_TITLES[kind]}", loc="left", color=theme.ink, fontsize=11.5)
                        foot = f"{where.get('device')}, torch {where.get('torch')}, headmux {where.get('commit')}"
                        figure.text(0.012, 0.012, foot, color=theme.ink, fontsize=7.5, alpha=0.75)
                        figure.savefig(path, dpi=_DPI, facecolor=theme.page)
                    written.append(path)
    return written


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_WORDS = {"default": ", forward and backward", "nograd": ", forward without gradients"}
_TITLES = {
    "time": "time", "ratio": "time over its matrix products alone", "memory": "peak memory over the inputs",
    "pareto": "time against memory",
}

_Picture = Callable[[Any, _Theme, list[Record]], None]


def _pictures(records: list[Record]) -> dict[str, _Picture]:
    found: dict[str, _Picture] = {}
    if len({r.n for r in records}) > 1:
        found |= {"time": _time, "ratio": _ratio}
        if any(r.extra_mib is not None for r in records):
            found["memory"] = _memory
    if any(r.extra_mib is not None for r in records):
        found["pareto"] = _pareto
    return found


@contextlib.contextmanager
def _figure(theme: _Theme, records: list[Record], kind: str) -> Iterator[tuple[Any, Any]]:
    from matplotlib.figure import Figure

    lines = len({r.provider for r in records})
    height = 4.8 if kind == "pareto" else max(4.4, 1.2 + 0.225 * (lines + 1))
    figure = Figure(figsize=(_WIDTH, height))
    right = 0.97 if kind == "pareto" else 0.76
    bottom, top = 0.72 / height, 1 - 0.45 / height
    axes = figure.add_axes((0.1, bottom, right - 0.1, top - bottom))
    axes.set_facecolor(theme.page)
    axes.tick_params(colors=theme.ink, which="both", length=3)
    axes.grid(True, which="major", color=theme.faint, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_color(theme.faint)
        spine.set_visible(side in ("left", "bottom"))
    yield figure, axes


def _family(provider: str) -> str:
    for name in sorted(_OKABE, key=len, reverse=True):
        if provider.startswith(name):
            return name
    return "pytorch"


def _look(theme: _Theme, records: list[Record]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each provider: the first of a family is drawn solid."""
    looks: dict[str, dict[str, Any]] = {}
    members: dict[str, int] = {}
    for name in sorted({r.provider for r in records}, key=lambda n: (len(n), n)):
        family = _family(name)
        place = members.get(family, 0)
        members[family] = place + 1
        ours = name.startswith("headmux")
        looks[name] = {
            "color": theme.colours[family],
            "marker": _MARKERS[place % len(_MARKERS)],
            "linestyle": _STYLES[place % len(_STYLES)],
            "linewidth": (2.6 if place == 0 else 1.7) if ours else 1.3,
            "markersize": (6.5 if place == 0 else 5.0) if ours else 4.5,
            "zorder": 4 if ours else 3,
        }
    return looks


def _lines(
    axes: Any, theme: _Theme, records: list[Record], value: Callable[[Record], float | None], floor: dict[int, float],
    floor_name: str, *, log: bool, cap: float | None = None,
) -> None:
    looks = _look(theme, records)
    tokens = sorted({r.n for r in records})
    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    ends: list[tuple[float, float, str, str, bool]] = []
    highest = 0.0
    for name, look in looks.items():
        points = sorted((r.n, y) for r in records if r.provider == name and (y := value(r)) is not None)
        if not points:
            continue
        inside = [(n, y) for n, y in points if cap is None or y <= cap]
        highest = max(highest, *[y for _, y in inside] or [0.0])
        if not inside:
            continue
        axes.plot(*zip(*inside, strict=True), **look)
        note = name if len(inside) == len(points) else f"{name} (>{cap:g} at {_n(points[0][0])})"
        ends.append((*inside[-1], note, look["color"], name.startswith("headmux")))
    xs = sorted(floor)
    ys = [floor[n] for n in xs]
    axes.plot(xs, ys, color=theme.ink, linewidth=1.2, linestyle=(0, (2, 1.5)), zorder=2)
    axes.fill_between(xs, ys, [0 if not log else min(ys) / 50] * len(xs), color=theme.ink, alpha=0.07, linewidth=0)
    ends.append((xs[-1], ys[-1], floor_name, theme.ink, False))
    axes.set_xlim(tokens[0] / 1.08, tokens[-1] * 1.04)
    low = min([y for _, y, *_ in ends] + ys + [p for r in records if (p := value(r)) is not None])
    axes.set_ylim(low / 1.25 if log else max(0.0, min(low, 1.0) - 0.06), highest * (1.25 if log else 1.04))
    _ticks(axes, tokens, log)
    axes.set_xlabel("tokens N", color=theme.ink)
    _label_ends(axes, ends)


def _ticks(axes: Any, tokens: Sequence[int], log: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.xaxis.set_major_locator(FixedLocator(list(tokens)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _n(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    if log:
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _n(value: float) -> str:
    return f"{value:,.0f}"


def _label_ends(axes: Any, ends: list[tuple[float, float, str, str, bool]]) -> None:
    """Names beside the last points, moved apart where they would cover each other, with a thin leader."""
    figure = axes.figure
    box = axes.get_window_extent()
    gap = (_LABEL + 2.6) * figure.dpi / 72
    low, high = box.y0 + gap / 3, box.y1 + gap / 2
    placed = sorted(
        ((axes.transData.transform((x, y)), text, colour, ours) for x, y, text, colour, ours in ends),
        key=lambda item: float(item[0][1]),
    )
    heights = [float(min(max(point[1], low), high)) for point, *_ in placed]
    gap = min(gap, (high - low) / max(1, len(heights) - 1))
    for _ in range(2000):  # neighbours push each other away until nothing overlaps, within the height of the axes
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
    invert = figure.transFigure.inverted().transform
    for (point, text, colour, ours), y in zip(placed, heights, strict=True):
        start, knee = box.x1 + 4, box.x1 + 0.018 * figure.bbox.width
        (x0, y0), (x1, y1), (x2, y2) = (invert(p) for p in ((point[0], point[1]), (start, y), (knee, y)))
        from matplotlib.lines import Line2D

        figure.add_artist(Line2D([x0, x1, x2], [y0, y1, y2], color=colour, linewidth=0.6, alpha=0.7))
        figure.text(x2 + 0.004, y2, text, color=colour, fontsize=_LABEL, va="center", ha="left",
                    fontweight="bold" if ours else "normal")


def _time(axes: Any, theme: _Theme, records: list[Record]) -> None:
    axes.set_ylabel("milliseconds (log)", color=theme.ink)
    _lines(axes, theme, records, lambda r: r.ms, _floor(records), "floor: products alone", log=True)


def _ratio(axes: Any, theme: _Theme, records: list[Record]) -> None:
    axes.set_ylabel("times the floor", color=theme.ink)
    _lines(axes, theme, records, lambda r: r.ratio, dict.fromkeys(_floor(records), 1.0), "floor: products alone",
           log=False, cap=3.0)


def _memory(axes: Any, theme: _Theme, records: list[Record]) -> None:
    axes.set_ylabel("MiB (log)", color=theme.ink)
    gradients = {
        r.n: max(r.extra_mib - r.extra_mib_beyond_grads, 1e-2)
        for r in records if r.extra_mib is not None and r.extra_mib_beyond_grads is not None
    }
    if max(gradients.values()) <= 1e-2:  # without gradients there is nothing that all must hold
        gradients = {n: max(0.05, min(r.extra_mib or 1.0 for r in records) / 2) for n in gradients}
        name = "inputs alone"
    else:
        name = "gradients alone"
    _lines(axes, theme, records, lambda r: None if r.extra_mib is None else max(r.extra_mib, 0.05), gradients, name,
           log=True)


def _floor(records: list[Record]) -> dict[int, float]:
    found: dict[int, float] = {}
    for r in records:
        if r.floor_ms is not None:
            found[r.n] = min(r.floor_ms, found.get(r.n, math.inf))
    return found


def _pareto(axes: Any, theme: _Theme, records: list[Record]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    counts = {n: sum(r.n == n and r.extra_mib is not None for r in records) for n in {r.n for r in records}}
    n = max(counts, key=lambda k: (counts[k], k == 4096, k))
    points = [r for r in records if r.n == n and r.extra_mib is not None and r.ms is not None]
    looks = _look(theme, records)

    def memory(r: Record) -> float:
        return max(0.5, r.extra_mib_beyond_grads or 0.0)

    axes.set_xscale("log")
    axes.set_yscale("log")
    xs, ys = [memory(r) for r in points], [r.ms or 0.0 for r in points]
    floor = _floor(points)[n]
    axes.set_xlim(min(xs) / 1.7, max(xs) * 3.2)
    axes.set_ylim(min([*ys, floor]) / 1.22, max(ys) * 1.3)
    front: list[tuple[float, float]] = []
    for x, y in sorted(zip(xs, ys, strict=True)):
        if not front or y < front[-1][1]:
            front.append((x, y))
    axes.step([*[x for x, _ in front], axes.get_xlim()[1]], [*[y for _, y in front], front[-1][1]], where="post",
              color=theme.ink, alpha=0.35, linewidth=1.0, zorder=2)
    axes.axhline(floor, color=theme.ink, linewidth=1.2, linestyle=(0, (2, 1.5)), zorder=2)
    axes.axhspan(axes.get_ylim()[0], floor, color=theme.ink, alpha=0.07, linewidth=0)
    axes.text(0.995, floor, "floor: products alone ", transform=axes.get_yaxis_transform(), color=theme.ink,
              fontsize=_LABEL, ha="right", va="top")
    for r in points:
        look = looks[r.provider]
        axes.plot([memory(r)], [r.ms], linestyle="none", marker=look["marker"], color=look["color"],
                  markersize=9 if r.provider.startswith("headmux") else 6.5, zorder=look["zorder"])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if axis is axes.yaxis else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
        axis.set_minor_formatter(NullFormatter())
    _label_points(
        axes, [(memory(r), r.ms or 0.0, r.provider, looks[r.provider]["color"]) for r in points], floor, theme.page
    )
    axes.set_xlabel(f"MiB beside the gradients at N={n:,} (log); left and down is better", color=theme.ink)
    axes.set_ylabel("milliseconds (log)", color=theme.ink)


def _label_points(axes: Any, points: list[tuple[float, float, str, str]], floor: float, page: str) -> None:
    """Names beside points: for each the nearest free place of a few."""
    figure = axes.figure
    scale = figure.dpi / 72
    box = axes.get_window_extent()
    where = [axes.transData.transform((x, y)) for x, y, *_ in points]
    taken = [(px - 5 * scale, py - 5 * scale, px + 5 * scale, py + 5 * scale) for px, py in where]
    line = float(axes.transData.transform((1.0, floor))[1])
    taken += [(box.x1 - 130 * scale, line - 14 * scale, box.x1, line), (box.x0, line - scale, box.x1, line + scale)]
    invert = figure.transFigure.inverted().transform
    order = sorted(range(len(points)), key=lambda i: -where[i][1])
    for i in order:
        _, _, text, colour = points[i]
        px, py = where[i]
        bold = text.startswith("headmux")
        width, height = len(text) * _LABEL * (0.66 if bold else 0.6) * scale, (_LABEL + 2) * scale
        best = None
        for distance in (8, 14, 22, 32, 44, 58, 74, 92):
            for angle in (0, 180, 35, -35, 145, -145, 90, -90, 60, -60, 120, -120):
                dx = math.cos(math.radians(angle)) * distance * scale
                dy = math.sin(math.radians(angle)) * distance * scale
                x0 = px + dx if abs(angle) < 90 else (px + dx - width if abs(angle) > 90 else px - width / 2)
                spot = (x0, py + dy - height / 2, x0 + width, py + dy + height / 2)
                inside = box.x0 < spot[0] and spot[2] < box.x1 and box.y0 < spot[1] and spot[3] < box.y1
                if inside and not any(_overlap(spot, t) for t in taken):
                    best = spot
                    break
            if best:
                break
        spot = best or (px + 8 * scale, py - height / 2, px + 8 * scale + width, py + height / 2)
        taken.append(spot)
        near = min(max(px, spot[0]), spot[2]), min(max(py, spot[1]), spot[3])
        if math.hypot(near[0] - px, near[1] - py) > 12 * scale:
            from matplotlib.lines import Line2D

            (x0, y0), (x1, y1) = invert((px, py)), invert(near)
            figure.add_artist(Line2D([x0, x1], [y0, y1], color=colour, linewidth=0.6, alpha=0.7))
        tx, ty = invert((spot[0], (spot[1] + spot[3]) / 2))
        figure.text(tx, ty, text, color=colour, fontsize=_LABEL, va="center", ha="left",
                    fontweight="bold" if bold else "normal",
                    bbox={"facecolor": page, "edgecolor": "none", "pad": 0.8, "alpha": 0.85})


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
