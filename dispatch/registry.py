"""Names of ops and backends: the built-in tables, plug-ins through entry points, and what they load."""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import threading
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, overload

from headmux.contract import Backend
from headmux.errors import UnknownNameError

if TYPE_CHECKING:
    from headmux.ops._op import Op
    from headmux.ops.flce import FLCE
    from headmux.ops.jsd import JSD
    from headmux.ops.linear_logp import LinearLogp

logger = logging.getLogger("headmux")

ENTRY_POINT_GROUP = "headmux.backends"

_BACKENDS = {
    "cutedsl": "headmux.backends.cutedsl:backend",
    "triton": "headmux.backends.triton:backend",
    "torch": "headmux.backends.torch:backend",
}
_BACKEND_ALIASES = {
    # Liger-Kernel's spellings of the same things
    "nvidia-triton": "triton",
    "nvidia-cutedsl": "cutedsl",
    "cute": "cutedsl",
    "pytorch": "torch",
}
_OPS = {
    "flce": "headmux.ops.flce:flce",
    "jsd": "headmux.ops.jsd:jsd",
    "linear_logp": "headmux.ops.linear_logp:linear_logp",
}
_OP_ALIASES = {
    "fused_linear_cross_entropy": "flce",
    "linear_cross_entropy": "flce",
    "fused_linear_jsd": "jsd",
    "linear_jsd": "jsd",
    "fused_linear_logp": "linear_logp",
    "linear_log_prob": "linear_logp",
}

_ops: dict[str, Op] = {}
_loaded: dict[str, Backend] = {}
_lock = threading.RLock()
generation = 0
"""Grows whenever the set of backends changes, so that remembered decisions can be told to be stale."""


def _changed() -> None:
    global generation
    generation += 1


def op_names() -> tuple[str, ...]:
    """The ops, in the order of the documentation."""
    return tuple(_OPS)


@overload
def get_op(name: Literal["flce"]) -> FLCE: ...
@overload
def get_op(name: Literal["jsd"]) -> JSD: ...
@overload
def get_op(name: Literal["linear_logp"]) -> LinearLogp: ...
@overload
def get_op(name: str) -> Op: ...


def get_op(name: str) -> Op:
    """The op of that name or alias, in any case. It selects a backend at each call, so it may be kept.

    Raises:
        UnknownNameError: No op has that name.
    """
    key = _normal(name)
    key = _OP_ALIASES.get(key, key)
    if key not in _OPS:
        raise UnknownNameError(unknown("op", name, (*_OPS, *_OP_ALIASES)))
    if key not in _ops:
        _ops[key] = _load(_OPS[key])
    return _ops[key]


def names() -> tuple[str, ...]:
    """Every backend that can be named: built in, registered, and installed plug-ins, in the automatic order."""
    return tuple(dict.fromkeys((*_BACKENDS, *_loaded, *_plugins())))


def resolve(name: str) -> str:
    """The canonical name of a backend, from a name or an alias in any case.

    Raises:
        UnknownNameError: No backend has that name.
    """
    key = _normal(name)
    key = _BACKEND_ALIASES.get(key, key)
    if key not in names():
        raise UnknownNameError(unknown("backend", name, (*names(), *_BACKEND_ALIASES)))
    return key


def get_backend(name: str) -> Backend:
    """The backend of that name. One that cannot be imported is returned too, with the reason in ``unavailable``.

    Raises:
        UnknownNameError: No backend has that name.
    """
    key = resolve(name)
    with _lock:
        if key not in _loaded:
            _loaded[key] = _load(_BACKENDS[key]) if key in _BACKENDS else _load_plugin(_plugins()[key])
        return _loaded[key]


def register(backend: Backend) -> None:
    """Add a backend to this process, to be named, and tried after the built-in ones otherwise.

    Raises:
        TypeError: Not a Backend.
        ValueError: Its name is taken or is not a plain lower-case word.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"register takes a headmux.contract.Backend, got {type(backend).__name__}")
    if backend.name != _normal(backend.name) or _misnamed(backend.name):
        raise ValueError(f"backend name {backend.name!r} must be lower-case, not empty, not 'auto', without commas")
    with _lock:
        if backend.name in (*names(), *_BACKEND_ALIASES):
            raise ValueError(f"a backend named {backend.name!r} is there already; known: {', '.join(names())}")
        _loaded[backend.name] = backend
        _changed()


def unregister(name: str) -> None:
    """Take a backend that ``register`` added out again.

    Raises:
        ValueError: It is built in, a plug-in, or unknown.
    """
    with _lock:
        if name not in _loaded or name in _BACKENDS or name in _plugins():
            raise ValueError(f"{name!r} was not added by register")
        del _loaded[name]
        _changed()


def _misnamed(name: str) -> bool:
    return not name or "," in name or name == "auto"


def _normal(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name is a string, got {type(name).__name__}")
    return name.strip().lower()


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not known, with the known ones and a close match."""
    known = tuple(known)
    near = difflib.get_close_matches(_normal(name), known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no {kind} is named {name!r}; known: {', '.join(known)}{hint}"


def _load(target: str) -> Any:
    module, attribute = target.split(":")
    return getattr(importlib.import_module(module), attribute)


@functools.cache
def _plugins() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        name = _normal(entry.name)
        taken = name in _BACKENDS or name in _BACKEND_ALIASES or name in found
        if taken or _misnamed(name):
            why = "that name is taken" if taken else "that is no name of a backend"
            logger.warning("plug-in %r (%s) is ignored: %s", entry.name, entry.value, why)
        else:
            found[name] = entry
    return found


def _load_plugin(entry: EntryPoint) -> Backend:
    name = _normal(entry.name)
    try:
        backend = entry.load()
    except Exception as error:  # a broken driver or library raises anything at import
        reason = f"entry point {entry.value} does not import: {type(error).__name__}: {error}"
        return Backend(name, {}, unavailable=reason)
    if not isinstance(backend, Backend) or backend.name != name:
        what = f"Backend {backend.name!r}" if isinstance(backend, Backend) else type(backend).__name__
        return Backend(name, {}, unavailable=f"entry point {entry.value} gives {what}, not Backend {name!r}")
    return backend
