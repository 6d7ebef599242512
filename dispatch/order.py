"""Which built-in backends the automatic choice tries, in which order.

The order follows measurements of the same call on the same device (bench/results/h200-*-seeds.json, shown in
docs/performance.md); a backend earns an earlier place only by being faster there at no more memory. ``torch`` requires
nothing and always ends the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headmux.contract import Call


# Where cutedsl runs at all it is first: its time over triton's on an H200, V=128256 H=4096, N = 1024, 2048, 4096, 8192,
# 16384. It was below 1 in every case measured, at no more memory; see tests/unit/test_docs.py.
#
#   flce                              0.92  0.93  0.94  0.89  0.92
#   jsd                               0.90  0.92  0.96  0.92  0.96
#   linear_logp                       0.93  0.93  0.98  0.90  1.00
#   linear_logp without gradients     0.91  0.90  0.91  0.91
_ORDER = ("cutedsl", "triton", "torch")


def default_order(call: Call) -> tuple[str, ...]:
    """Names of the built-in backends for this call, best first."""
    del call  # the same for every op and size
    return _ORDER
