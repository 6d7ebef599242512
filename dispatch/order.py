"""Which built-in backends the automatic choice tries, in which order.

The order follows measurements of the same call on the same device (bench/results/h200-*-seeds.json, shown in
docs/performance.md); a backend earns an earlier place only by being faster there at no more memory. ``torch`` requires
nothing and always ends the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headmux.contract import Call


def default_order(call: Call) -> tuple[str, ...]:
    """Names of the built-in backends for this call, best first."""
    del call  # where cutedsl runs at all, it was at least as fast as triton for every op and size measured
    return ("cutedsl", "triton", "torch")
