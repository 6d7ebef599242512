"""Pictures of results: time, time over the floor and memory against tokens, and time against memory.

Each picture is drawn twice, for light and for dark pages. Colour tells the family of a provider, after Okabe and Ito,
whose colours the colour-blind can tell apart: warm for headmux, cool for peers. Marker and line style tell the member,
and each line is labelled at its end.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headmux.bench import labels
from headmux.bench.labels import End, Point, label_ends, label_points
from headmux.bench.records import Record

_WIDTH = 8.6
_DPI = 140
_CAP = 3.0  # times the floor: what is drawn of slow peers
_COLOURS = 128  # of the palette of a file, at most, which keeps it small
_NEIGHBOURS = 12.0  # colours that are no farther apart share one

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class _Theme:
    name: str
    page: str
    ink: str
    faint: str
    colours: dict[str, str]


# darkened a little for light pages and lightened for dark ones, so that names in these colours can be read
_THEMES = (
    _Theme("light", "#FFFFFF", "#24292F", "#D8DEE4", {
        "headmux-triton": "#C94F00", "headmux-cutedsl": "#B07A00", "headmux-torch": "#7A3E12", "headmux": "#C94F00",
        "pytorch": "#6E7781", "torch-lce": "#24292F", "liger": "#0072B2", "cce": "#008A64", "quack": "#A64D86",
    }),
    _Theme("dark", "#0D1117", "#E6EDF3", "#30363D", {
        "headmux-triton": "#FF7B2E", "headmux-cutedsl": "#FFC53D", "headmux-torch": "#D99A6C", "headmux": "#FF7B2E",
        "pytorch": "#9DA7B3", "torch-lce": "#F0F6FC", "liger": "#58A6FF", "cce": "#2BC79B", "quack": "#E58CC2",
    }),
)
_FAMILIES = tuple(_THEMES[0].colours)
_MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 2)))


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_WORDS = {"default": ", forward and backward", "nograd": ", forward without gradients"}
_TITLES = {
    "time": "time", "ratio": "time over the floor", "memory": "peak memory over the inputs",
    "pareto": "time against memory",
}


@dataclass(frozen=True)
class Sheet:
    """One picture.

    Attributes:
        stem: Name of its files, up to the theme.
        kind: ``time``, ``ratio``, ``memory`` or ``pareto``.
        title: What stands above it.
        records: What it shows.
    """

    stem: str
    kind: str
    title: str
    records: list[Record]

    def file(self, theme: str) -> str:
        """Name of the file for ``light`` or ``dark`` pages."""
        return f"{self.stem}-{self.kind}-{theme}.png"


def sheets(records: Iterable[Record], prefix: str = "") -> list[Sheet]:
    """The pictures that the records of one device allow; the names of their files begin with the prefix."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        if r.ms is not None and r.floor_ms is not None:
            groups.setdefault((r.op, r.h, r.v, r.dtype, r.variant), []).append(r)
    found = []
    for (op, h, v, dtype, variant), group in groups.items():
        stem = f"{prefix}{op}-v{v}-h{h}-{dtype}" + ("" if variant == "default" else f"-{variant.replace('+', '-')}")
        title = f"{op}, {_SHORT.get(dtype, dtype)}, V={v:,} H={h:,}" + _WORDS.get(variant, f", {variant}")
        found += [Sheet(stem, kind, f"{title}: {_TITLES[kind]}", group) for kind in _kinds(group)]
    return found


def draw(pictures: Iterable[Sheet], header: dict[str, Any], folder: Path) -> list[Path]:
    """Draw pictures.

    Args:
        pictures: What to draw.
        header: Where their records are from.
        folder: Where the files go.

    Returns:
        The files written.

    Raises:
        ValueError: Matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install 'headmux[bench]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    foot = f"{header.get('device')}, torch {header.get('torch')}, headmux {header.get('commit')}"
    with matplotlib.rc_context({"font.size": 10, "font.family": "sans-serif"}):
        for sheet in pictures:
            for theme in _THEMES:
                path = folder / sheet.file(theme.name)
                with _figure(theme, sheet.records, sheet.kind) as (figure, axes):
                    _DRAW[sheet.kind](axes, theme, sheet.records)
                    axes.set_title(sheet.title, loc="left", color=theme.ink, fontsize=11.5)
                    figure.text(0.012, 0.012, foot, color=theme.ink, fontsize=7.5, alpha=0.75)
                    _save(figure, path, theme.page)
                written.append(path)
    return written


def _save(figure: Any, path: Path, page: str) -> None:
    from PIL import Image

    with io.BytesIO() as whole:
        figure.savefig(whole, dpi=_DPI, facecolor=page)
        image = Image.open(whole).convert("RGB")
        palette = Image.new("P", (1, 1))
        palette.putpalette([*itertools.chain(*_palette(image.getcolors(image.width * image.height)))])
        image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


def _palette(counts: Iterable[tuple[int, Colour]]) -> list[Colour]:
    """The most frequent colours that are no neighbours of each other: what is drawn keeps its own, unlike in a palette
    of averages. Only shades at the edges of letters and lines change.
    """
    found: list[Colour] = []
    for _, colour in sorted(counts, key=lambda pair: (-pair[0], pair[1])):
        if all(math.dist(colour, other) > _NEIGHBOURS for other in found):
            found.append(colour)
            if len(found) == _COLOURS:
                break
    return found


def _kinds(records: list[Record]) -> list[str]:
    memory = [r for r in records if r.extra_mib is not None]
    found = []
    if len({r.n for r in records}) > 1:
        found = ["time", "ratio", *["memory"] * bool(memory)]
    return found + ["pareto"] * (len({r.provider for r in memory}) > 2)


@contextlib.contextmanager
def _figure(theme: _Theme, records: list[Record], kind: str) -> Iterator[tuple[Any, Any]]:
    from matplotlib.figure import Figure

    lines = len({r.provider for r in records})
    height = 5.6 if kind == "pareto" else max(4.4, 1.2 + 0.225 * (lines + 1))
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
    for name in sorted(_FAMILIES, key=len, reverse=True):
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
    ends: list[End] = []
    highest = 0.0
    for name, look in looks.items():
        points = sorted((r.n, y) for r in records if r.provider == name and (y := value(r)) is not None)
        if not points:
            continue
        inside = [(n, y) for n, y in points if cap is None or y <= cap]
        if len(points) < 2 or not inside:  # a single size makes no line; it is in the tables
            continue
        highest = max(highest, *[y for _, y in inside])
        axes.plot(*zip(*inside, strict=True), **look)
        ends.append(End(inside[-2:], name, look["color"], name.startswith("headmux")))
    xs = sorted(floor)
    ys = [floor[n] for n in xs]
    axes.plot(xs, ys, color=theme.ink, linewidth=1.2, linestyle=(0, (2, 1.5)), zorder=2)
    axes.fill_between(xs, ys, [0 if not log else min(ys) / 50] * len(xs), color=theme.ink, alpha=0.07, linewidth=0)
    ends.append(End(list(zip(xs[-2:], ys[-2:], strict=True)), floor_name, theme.ink, False))
    axes.set_xlim(tokens[0] / 1.08, tokens[-1] * 1.04)
    low = min(ys + [p for r in records if (p := value(r)) is not None])
    axes.set_ylim(low / 1.25 if log else max(0.0, min(low, 1.0) - 0.06), highest * (1.25 if log else 1.04))
    _ticks(axes, tokens, log)
    axes.set_xlabel("tokens N", color=theme.ink)
    label_ends(axes, ends)


def _ticks(axes: Any, tokens: Sequence[int], log: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.xaxis.set_major_locator(FixedLocator(list(tokens)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _n(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    if log:
        _log_ticks(axes.yaxis)


def _log_ticks(axis: Any) -> None:
    """Plain numbers at a logarithmic axis, as many as its range calls for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1.0,) if high / low > 500 else (1.0, 2.0, 5.0) if high / low > 8 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _n(value: float) -> str:
    return f"{value:,.0f}"


def _time(axes: Any, theme: _Theme, records: list[Record]) -> None:
    axes.set_ylabel("milliseconds (log)", color=theme.ink)
    _lines(axes, theme, records, lambda r: r.ms, _floor(records), "floor: products alone", log=True)


def _ratio(axes: Any, theme: _Theme, records: list[Record]) -> None:
    axes.set_ylabel(f"times the floor, drawn up to {_CAP:g}", color=theme.ink)
    _lines(axes, theme, records, lambda r: r.ratio, dict.fromkeys(_floor(records), 1.0), "floor: products alone",
           log=False, cap=_CAP)


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
    corners = _front(zip(xs, ys, strict=True), axes.get_xlim()[1])
    axes.plot(*zip(*corners, strict=True), color=theme.ink, alpha=0.35, linewidth=1.0, zorder=2)
    axes.axhline(floor, color=theme.ink, linewidth=1.2, linestyle=(0, (2, 1.5)), zorder=2)
    axes.axhspan(axes.get_ylim()[0], floor, color=theme.ink, alpha=0.07, linewidth=0)
    axes.text(0.008, axes.get_ylim()[0] ** 0.5 * floor ** 0.5, "floor: products alone", color=theme.ink, va="center",
              transform=axes.get_yaxis_transform(), fontsize=labels.SIZE)
    for r in points:
        look = looks[r.provider]
        axes.plot([memory(r)], [r.ms], linestyle="none", marker=look["marker"], color=look["color"],
                  markersize=9 if r.provider.startswith("headmux") else 6.5, zorder=look["zorder"])
    for axis in (axes.xaxis, axes.yaxis):
        _log_ticks(axis)
    pixels = [tuple(map(float, axes.transData.transform(p))) for p in corners]
    lines = [(min(a[0], b[0]) - 1, min(a[1], b[1]) - 1, max(a[0], b[0]) + 1, max(a[1], b[1]) + 1)
             for a, b in itertools.pairwise(pixels)]
    box, level = axes.get_window_extent(), float(axes.transData.transform((1.0, floor))[1])
    lines.append((box.x0, level - 1, box.x1, level + 1))
    names = [(memory(r), r.ms or 0.0, r.provider, looks[r.provider]["color"]) for r in points]
    label_points(axes, names, lines, [(box.x0, box.y0, box.x0 + 0.25 * box.width, level)])
    axes.set_xlabel(f"MiB beside the gradients at N={n:,} (log); left and down is better", color=theme.ink)
    axes.set_ylabel("milliseconds (log)", color=theme.ink)


def _front(points: Iterable[Point], right: float) -> list[Point]:
    """Corners of the line below and left of which no point lies, drawn on to the right."""
    corners: list[Point] = []
    for x, y in sorted(points):
        if not corners:
            corners.append((x, y))
        elif y < corners[-1][1]:
            corners += [(x, corners[-1][1]), (x, y)]
    return [*corners, (right, corners[-1][1])]


_DRAW: dict[str, Callable[[Any, _Theme, list[Record]], None]] = {
    "time": _time, "ratio": _ratio, "memory": _memory, "pareto": _pareto
}
