"""What the demo leaves behind: a JSON of every figure, and a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headmux import __version__
from headmux.demo import measure
from headmux.demo.data import Text
from headmux.demo.phases import SIDES, Phase, Result

_COLOUR = {"headmux": "#0072B2", "plain": "#E69F00"}  # blue and orange of Okabe and Ito
_WORD = {"headmux": "#00568A", "plain": "#8A5A00"}  # darker, for words
_NAME = {"headmux": "headmux", "plain": "plain PyTorch"}
_INK, _FAINT, _PAPER = "#1f2328", "#6b7280", "#fbfbf9"  # a sheet of its own, so that it reads in dark pages too


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"


def versions() -> dict[str, str]:
    """Versions of what took part."""
    found = {"python": platform.python_version(), "headmux": __version__, "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found | {name: version(name) for name in ("tokenizers", "matplotlib", "tqdm")}


def write_json(path: Path, about: dict[str, Any], text: Text, result: Result) -> Path:
    """Write every figure, with what is needed to get it again."""
    content = {
        **about,
        "text": {
            "source": "pydoc_data.topics",
            "characters": text.characters,
            "vocabulary": text.vocabulary,
            "train_tokens": text.train.numel(),
            "held_out_tokens": text.held_out.numel(),
        },
        "models": {name: asdict(shape) for name, shape in result.shapes.items()},
        "tokens_per_step": result.tokens,
        "memory_is": measure.HOW[torch.device(about["device"]).type],
        "phases": [asdict(p) | {"largest_difference": p.largest_difference} for p in result.phases],
        "scores": [asdict(s) for s in result.scores],
        "rewards": result.rewards,
        "samples": result.samples,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def draw(path: Path, about: dict[str, Any], result: Result) -> Path:
    """Draw the losses of the three phases, and memory, time and reward below."""
    style: dict[Any, Any] = {
        "font.size": 10,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _FAINT,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(12.5, 7.6), dpi=150, facecolor=_PAPER, layout="constrained")
        top, bottom = figure.subplots(2, 3, height_ratios=(1, 0.9))
        for axes, phase in zip(top, result.phases, strict=True):
            _curves(axes, phase)
        _bars(bottom[0], result.phases, "Memory of the loss, MiB", lambda p, s: p.memory_bytes[s] / 2**20)
        _bars(bottom[1], result.phases, "Time of the loss, ms (best run)", lambda p, s: p.loss_seconds[s] * 1e3)
        _rewards(bottom[2], result.rewards)
        for axes in (*top, *bottom):
            axes.set_facecolor(_PAPER)
        first = result.phases[0]
        figure.suptitle(
            f"Same weights, same tokens: headmux and plain PyTorch losses\n"
            f"{about['device_name']}, {about['dtype']}, {result.tokens} tokens a step, "
            f"{result.shapes['teacher'].vocabulary} vocabulary entries, backend {first.backend}, "
            f"PyTorch {about['versions']['torch']}",
            fontsize=11,
        )
        figure.savefig(path, facecolor=_PAPER)
    return path


def _curves(axes: Axes, phase: Phase) -> None:
    """Both losses over the steps. They lie on each other, so one is wide and the other thin."""
    steps = range(1, len(phase.losses["plain"]) + 1)
    marker = "o" if len(steps) == 1 else ""
    axes.plot(steps, phase.losses["plain"], color=_COLOUR["plain"], linewidth=7, marker=marker, markersize=12)
    axes.plot(steps, phase.losses["headmux"], color=_COLOUR["headmux"], linewidth=1.8, marker=marker)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.35 * (high - low))  # room for the words
    for row, (side, what) in enumerate((("plain", "wide"), ("headmux", "thin"))):
        place = 0.98 - 0.075 * row
        axes.text(
            0.98, place, f"{_NAME[side]} ({what})", color=_WORD[side], transform=axes.transAxes, ha="right", va="top",
            fontweight="bold",
        )
    axes.text(
        0.98, 0.83, f"largest difference {phase.largest_difference:.0e}", color=_INK, transform=axes.transAxes,
        ha="right", va="top",
    )
    axes.set_title(f"{phase.title}: {phase.op}", loc="left", fontweight="bold", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=_FAINT, alpha=0.2)


def _bars(axes: Axes, phases: list[Phase], title: str, value: Callable[[Phase, str], float]) -> None:
    """A pair of bars a phase, each with its name and figure."""
    largest = max(value(p, s) for p in phases for s in SIDES)
    for row, phase in enumerate(phases):
        for side, offset in (("headmux", -0.2), ("plain", 0.2)):
            figure = value(phase, side)
            shown = f"{figure:,.0f}" if figure >= 10 else f"{figure:.2f}"
            axes.barh(row + offset, figure, height=0.36, color=_COLOUR[side])
            axes.text(
                figure + 0.02 * largest, row + offset, f"{shown}  {_NAME[side]}", va="center", color=_WORD[side]
            )
    axes.set_yticks(range(len(phases)), [p.op + "\n" + p.name for p in phases])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * largest)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)


def _rewards(axes: Axes, rewards: list[float]) -> None:
    axes.plot(range(1, len(rewards) + 1), rewards, color=_COLOUR["headmux"], linewidth=1.8, marker="o", markersize=3)
    for step, reward, place, side in ((1, rewards[0], -6, "right"), (len(rewards), rewards[-1], 6, "left")):
        axes.annotate(
            f"{reward:.2f}", (step, reward), xytext=(place, 0), textcoords="offset points", ha=side, va="center",
            fontweight="bold", color=_WORD["headmux"],
        )
    axes.margins(x=0.22)
    axes.margins(y=0.25)
    axes.set_ylabel("share of letters and spaces")
    axes.set_title("Reward of the samples", loc="left", fontweight="bold", fontsize=11)
    axes.set_xlabel("step of the last phase")
    axes.set_xticks(sorted({1, (len(rewards) + 1) // 2, len(rewards)}))
    axes.grid(axis="y", color=_FAINT, alpha=0.2)
