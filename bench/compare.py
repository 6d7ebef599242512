"""Two files of results against each other, with the confidence that the rounds allow."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headmux.bench.gate import ERRORS
from headmux.bench.records import Record, Results

_Z95 = 1.96
# between the 20th and the 80th percentile of a normal distribution lie 1.683 deviations; a median of k values deviates
# by 1.253 / sqrt(k) of one
_SPREAD, _MEDIAN = 1.683, 1.253


@dataclass(frozen=True)
class Change:
    """What became of one record.

    Attributes:
        old: The record before.
        new: The record after.
        ratio: Time after over time before, each relative to its floor where both have one; None without times.
        low: Lower end of the 95% interval of that ratio.
        high: Upper end.
        regressions: What got worse past the bound.
    """

    old: Record
    new: Record
    ratio: float | None
    low: float | None
    high: float | None
    regressions: tuple[str, ...]


def changes(
    old: Results, new: Results, *, bound: float = 1.05, memory_bound: float = 1.10, absolute: bool = False
) -> list[Change]:
    """The change of every record that both files have.

    A slowdown counts when the ratio is past the bound and the 95% interval lies above 1: noise that wide is no proof.

    Args:
        old: Before.
        new: After.
        bound: Largest ratio of times that is no regression.
        memory_bound: Largest ratio of extra memory that is none, beside 8 MiB that always pass.
        absolute: Compare milliseconds as they are, not relative to the floor of their run.
    """
    after = {r.key: r for r in new.records}
    return [_change(r, after[r.key], bound, memory_bound, absolute) for r in old.records if r.key in after]


def _change(old: Record, new: Record, bound: float, memory_bound: float, absolute: bool) -> Change:
    worse = []
    ratio = low = high = None
    before, now = _value(old, absolute, new), _value(new, absolute, old)
    if before is not None and now is not None:
        ratio = now / before
        width = _Z95 * math.hypot(_deviation(old), _deviation(new))
        low, high = ratio * math.exp(-width), ratio * math.exp(width)
        if ratio > bound and low > 1.0:
            worse.append(f"{ratio:.3f} times as slow")
    elif old.ms is not None and new.ms is None:
        worse.append(f"no time any more: {new.error}")
    held, holds = old.extra_mib, new.extra_mib
    if held is not None and holds is not None and holds > max(held * memory_bound, held + 8):
        worse.append(f"{holds:.0f} MiB instead of {held:.0f}")
    for name in ERRORS:
        a, b = getattr(old, name), getattr(new, name)
        if a is not None and b is not None and b > 2 * a + 1e-6:
            worse.append(f"{name} {b:.1e} instead of {a:.1e}")
    if old.syncs is not None and new.syncs is not None and new.syncs > old.syncs:
        worse.append(f"{new.syncs} host synchronisations instead of {old.syncs}")
    if old.graph and new.graph is False:
        worse.append(f"no CUDA graph any more: {new.graph_error}")
    return Change(old, new, ratio, low, high, tuple(worse))


def _value(r: Record, absolute: bool, other: Record) -> float | None:
    if r.ms is None or other.ms is None:
        return None
    return r.ratio if not absolute and r.ratio and other.ratio else r.ms


def _deviation(r: Record) -> float:
    """Deviation of the logarithm of the median."""
    if r.ms is None or r.p20 is None or r.p80 is None or not r.rounds or r.p20 <= 0:
        return 0.0
    return _MEDIAN * math.log(r.p80 / r.p20) / _SPREAD / math.sqrt(r.rounds)


def text(found: list[Change]) -> str:
    """The changes as lines, those that got worse last, so that they stand above the prompt."""
    if not found:
        return "the files have no record in common\n"
    width = max(len(_label(c)) for c in found)
    lines = []
    for c in sorted(found, key=lambda c: (bool(c.regressions), -(c.ratio or 0.0))):
        what = "no time" if c.ratio is None else f"x{c.ratio:.3f}  [{c.low:.3f}, {c.high:.3f}]"
        lines.append(f"{_label(c):<{width}}  {what:<24}  " + ("REGRESSION: " + "; ".join(c.regressions)
                                                             if c.regressions else "ok"))
    worse = sum(bool(c.regressions) for c in found)
    return "\n".join([*lines, f"{len(found)} compared, {worse} regressed"]) + "\n"


def _label(c: Change) -> str:
    r = c.new
    return f"{r.op} {r.provider} N={r.n} H={r.h} V={r.v} {r.dtype} {r.variant}"
