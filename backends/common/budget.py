"""How many bytes of temporaries that grow with tokens times vocabulary may be held at once.

The budget is a setting, never a reading of free memory: the same call always takes the same path.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from contextvars import ContextVar

VARIABLE = "HEADMUX_BUDGET_MB"
MIB = 2**20

# 56 MiB keep the whole CPU call under 64; on a GPU 289 MiB are 1024 tokens of a vocabulary of 128256 and a block
_DEFAULTS = {"cpu": 56 * MIB, "cuda": 289 * MIB}

_override: ContextVar[int | None] = ContextVar("headmux_budget", default=None)


@contextlib.contextmanager
def budget(mb: float) -> Iterator[None]:
    """Within the block, hold at most ``mb`` MiB of logits and their temporaries. Stronger than HEADMUX_BUDGET_MB.

    A backward runs under its forward's budget. Gradients, and fp32 running sums of gradients, are not counted.

    Raises:
        TypeError: Not a number.
        ValueError: Not above 0 and finite.
    """
    if isinstance(mb, bool) or not isinstance(mb, (int, float)):
        raise TypeError(f"budget takes a number of MiB, got {mb!r}")
    with budget_bytes(_bytes(mb, "budget")):
        yield


@contextlib.contextmanager
def budget_bytes(count: int | None) -> Iterator[None]:
    """Within the block, use this budget in bytes; None leaves things as they are."""
    if count is None:
        yield
        return
    token = _override.set(count)
    try:
        yield
    finally:
        _override.reset(token)


def current() -> int | None:
    """The budget in bytes that was asked for, by ``budget`` or HEADMUX_BUDGET_MB; None if neither."""
    if (found := _override.get()) is not None:
        return found
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        return _bytes(float(text), VARIABLE)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r} must be a number of MiB above 0") from error


def budget_for(device_type: str, share: int = 1) -> int:
    """The budget in bytes on a kind of device: what was asked for, or else ``share`` times the default."""
    asked = current()
    return share * _DEFAULTS.get(device_type, _DEFAULTS["cuda"]) if asked is None else asked


def _bytes(mb: float, name: str) -> int:
    if not math.isfinite(mb * MIB) or mb <= 0:
        raise ValueError(f"{name}={mb} must be a number of MiB above 0")
    return max(1, int(mb * MIB))
