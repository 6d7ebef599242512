"""The choice of a backend: where the order of candidates comes from, and the memo that makes it cheap."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar

from headmux import registry
from headmux.contract import Call, Selection
from headmux.errors import UnsupportedCallError
from headmux.order import default_order

logger = logging.getLogger("headmux")

PREFIXES = ("HEADMUX_IMPL", "LIGER_KERNEL_IMPL")
"""Environment variables, strongest first; ``<PREFIX>_<OP>`` comes before the plain one of the same prefix."""

_MEMO_SIZE = 4096

_override: ContextVar[str] = ContextVar("headmux_backend", default="")
_memo: dict[tuple[object, ...], Selection] = {}
_announced: set[tuple[str, str]] = set()
_variables: dict[str, tuple[str, ...]] = {}
_keys: dict[str, tuple[object, ...]] = {}


def select(call: Call, impl: str | None = None) -> Selection:
    """Decide which backend runs a call. Nothing is read at import, so the environment may change at any time.

    Args:
        call: The call.
        impl: The call's own comma list, or None.

    Raises:
        UnknownNameError: A name in the order is unknown.
        UnsupportedCallError: Every candidate has a reason against the call.
    """
    return select_as(call, call.op, impl, lambda: call)


def select_as(key: Hashable, op: str, impl: str | None, describe: Callable[[], Call]) -> Selection:
    """``select`` for a hot path: the call is described only when no decision is remembered under its key.

    Args:
        key: Stands for the call, with all that a backend may look at.
        op: Name of the op.
        impl: The call's own comma list, or None.
        describe: Makes the call.
    """
    if impl is not None and not isinstance(impl, str):
        _split(impl)  # raises
    memo = (key, impl, _override.get(), registry.generation, *_values(op))
    found = _memo.get(memo)
    if found is None:
        call = describe()
        found = decide(call, impl)
        if found.backend is None:
            raise UnsupportedCallError(decide(call, impl, thorough=True))
        if len(_memo) >= _MEMO_SIZE:
            _memo.clear()
        _memo[memo] = found
        _announce(found)
    return found


def decide(call: Call, impl: str | None = None, *, thorough: bool = False) -> Selection:
    """Like ``select``, but returns a Selection without a choice instead of raising, and remembers nothing.

    Args:
        call: The call.
        impl: The call's own comma list, or None.
        thorough: Import every candidate's modules, so that each reason is named.
    """
    value, source = _order_from(call.op, impl)
    automatic = [*default_order(call), *registry.names()]
    order: dict[str, None] = {}
    for name in _split(value) or ["auto"]:
        order.update(dict.fromkeys(automatic if name == "auto" else [registry.resolve(name)]))
    backends = [registry.get_backend(name) for name in order]
    return Selection(call, source, tuple((b, b.reject(call, thorough=thorough)) for b in backends))


@contextlib.contextmanager
def use_backend(names: str) -> Iterator[None]:
    """Within the block, take backends from this comma list; only a call's own ``impl=`` is stronger.

    Threads started inside do not inherit it, except that a backward always runs on its forward's backend.

    Raises:
        UnknownNameError: A name is unknown (at entry).
    """
    for name in _split(names):
        if name != "auto":
            registry.resolve(name)
    token = _override.set(names)
    try:
        yield
    finally:
        _override.reset(token)


def _order_from(op: str, impl: str | None) -> tuple[str, str]:
    if impl is not None and _split(impl):
        return impl, f"impl={impl}"
    if _split(_override.get()):
        return _override.get(), f"use_backend({_override.get()!r})"
    for variable in _variables_of(op):
        value = os.environ.get(variable, "")
        if _split(value):
            return value, f"{variable}={value}"
    return "auto", "automatic order"


def _values(op: str) -> list[object]:
    """The values of an op's environment variables, in whatever form tells them apart."""
    # os.environ raises and catches twice for each name that is not set, 7 us for four; the dict behind it takes 0.3
    data = getattr(os.environ, "_data", None)
    if data is None:
        return [os.environ.get(v) for v in _variables_of(op)]
    keys = _keys.get(op)
    if keys is None:
        encode = getattr(os.environ, "encodekey", str)
        keys = _keys[op] = tuple(encode(v) for v in _variables_of(op))
    return [data.get(k) for k in keys]


def _variables_of(op: str) -> tuple[str, ...]:
    return _variables.setdefault(op, tuple(v for p in PREFIXES for v in (f"{p}_{op.upper()}", p)))


def _split(value: str) -> list[str]:
    if not isinstance(value, str):
        raise TypeError(f"backend names are a comma-separated string, got {type(value).__name__}")
    return [name for part in value.split(",") if (name := part.strip().lower())]


def _announce(found: Selection) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    logger.debug("%s", found)
    key = (found.call.op, str(found.chosen))
    if key not in _announced:
        _announced.add(key)
        logger.info("%s runs on %s (order from: %s)", found.call.op, found.chosen, found.source)
