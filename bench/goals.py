"""What the project aims at, in time over the floor and memory beside the gradients, and what was measured of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headmux.bench.records import Record

HEAD = (4096, 128256)
"""H and V."""


@dataclass(frozen=True)
class Goal:
    """Bounds of one backend at ``HEAD``.

    Attributes:
        op: Name of the op.
        provider: Name of the provider.
        tokens: Every N that must keep the bounds.
        ratio: Largest time over the floor.
        mib: Largest memory beside the gradients.
        variant: How it is called.
        dtype: dtype of hidden states and weights.
    """

    op: str
    provider: str
    tokens: tuple[int, ...]
    ratio: float
    mib: float
    variant: str = "default"
    dtype: str = "bfloat16"

    def of(self, records: Iterable[Record]) -> list[Record]:
        """The records that tell about this goal, by N."""
        found = [
            r for r in records
            if (r.op, r.provider, r.variant, r.dtype, r.h, r.v) == (*self._call, *HEAD)
            and r.n in self.tokens and r.ratio is not None and r.extra_mib_beyond_grads is not None
        ]
        return sorted(found, key=lambda r: r.n)

    @property
    def _call(self) -> tuple[str, str, str, str]:
        return self.op, self.provider, self.variant, self.dtype

    def missed(self, r: Record) -> list[str]:
        """Which bounds a record is past: time, memory."""
        slow = r.ratio is not None and r.ratio > self.ratio
        large = r.extra_mib_beyond_grads is not None and r.extra_mib_beyond_grads > self.mib
        return ["time"] * slow + ["memory"] * large


_TO_4096, _TO_8192 = (1024, 2048, 4096), (1024, 2048, 4096, 8192)
GOALS = (
    Goal("flce", "headmux-triton", _TO_4096, 1.03, 64),
    Goal("flce", "headmux-triton", (8192, 16384), 1.05, 320),
    Goal("flce", "headmux-cutedsl", _TO_4096, 1.02, 64),
    Goal("flce", "headmux-torch", _TO_4096, 1.15, 128),
    Goal("flce", "headmux-triton", (4096,), 1.06, 64, variant="rows"),
    Goal("jsd", "headmux-triton", _TO_8192, 1.20, 560),
    Goal("jsd", "headmux-cutedsl", _TO_8192, 1.12, 560),
    Goal("linear_logp", "headmux-triton", (4096,), 1.06, 64),
    Goal("linear_logp", "headmux-cutedsl", _TO_4096, 1.05, 64),
    Goal("linear_logp", "headmux-triton", _TO_8192, 1.06, 512, variant="nograd"),
    Goal("linear_logp", "headmux-cutedsl", _TO_8192, 1.06, 8, variant="nograd"),
    Goal("flce", "headmux-triton", (1024, 4096), 1.03, 64, dtype="float32"),
    Goal("jsd", "headmux-triton", (1024, 4096), 1.03, 560, dtype="float32"),
    Goal("linear_logp", "headmux-triton", (1024, 4096), 1.03, 64, dtype="float32"),
)
"""Every goal."""


def table(records: Iterable[Record]) -> list[str]:
    """The goals as lines of a Markdown table, with what was measured, met or not."""
    known = list(records)
    lines = ["| op | provider | N | time over the floor | MiB beside the gradients | |", "|---|---|---|---|---|---|"]
    for goal in GOALS:
        found = goal.of(known)
        name = f"`{goal.op}`" + (f" {goal.variant}" if goal.variant != "default" else "")
        name += f", {goal.dtype}" if goal.dtype != "bfloat16" else ""
        lines.append(
            f"| {name} | `{goal.provider}` | {_list(goal.tokens)} "
            f"| at most {goal.ratio:.2f}{_measured([f'{r.ratio:.3f}' for r in found])} "
            f"| at most {goal.mib:g}{_measured([f'{r.extra_mib_beyond_grads:.0f}' for r in found])} "
            f"| {_verdict(goal, found)} |"
        )
    return lines


def _verdict(goal: Goal, found: list[Record]) -> str:
    words = []
    for what in ("time", "memory"):
        if at := [r.n for r in found if what in goal.missed(r)]:
            words.append(f"**{what} missed** at {_list(at)}")
    if found and not words:
        words.append("met")
    if absent := sorted(set(goal.tokens) - {r.n for r in found}):
        words.append("not measured" + (f" at {_list(absent)}" if found else ""))
    return "; ".join(words)


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _measured(values: list[str]) -> str:
    return f": {', '.join(values)}" if values else ""
