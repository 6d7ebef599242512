"""Reusable requirements. Each factory returns a check of a call: a short reason, or None when the call meets it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headmux.contract import Call, Requirement


def device(*types: str) -> Requirement:
    """The tensors lie on one of these device types."""

    def check(call: Call) -> str | None:
        return None if call.device.type in types else f"device {call.device.type} is not one of {', '.join(types)}"

    return check


def capability(low: tuple[int, int], below: tuple[int, int] | None = None) -> Requirement:
    """The device's CUDA compute capability is at least ``low`` and, if given, under ``below``. Other devices fail."""
    bound = f"at least {low[0]}.{low[1]}" + (f" and below {below[0]}.{below[1]}" if below else "")

    def check(call: Call) -> str | None:
        have = call.capability
        if have is None:
            return f"no CUDA compute capability ({call.device.type}), needs {bound}"
        if have < low or (below is not None and have >= below):
            return f"compute capability {have[0]}.{have[1]}, needs {bound}"
        return None

    return check


def dtypes(*allowed: torch.dtype, role: str = "compute") -> Requirement:
    """The tensor in that role, if there is one, has one of these dtypes."""

    def check(call: Call) -> str | None:
        have = call.dtype(role)
        if have is None or have in allowed:
            return None
        return f"{role} dtype {have} is not one of {', '.join(map(str, allowed))}"

    return check


def option(name: str, *allowed: object) -> Requirement:
    """An option has one of these values. Ops without that option pass."""

    def check(call: Call) -> str | None:
        options = dict(call.options)
        if name not in options or any(options[name] is a or options[name] == a for a in allowed):
            return None
        return f"{name}={options[name]} is not one of {', '.join(map(str, allowed))}"

    return check


def multiple(size: str, of: int) -> Requirement:
    """A size is a multiple of ``of``."""

    def check(call: Call) -> str | None:
        have = call.size(size)
        return None if have % of == 0 else f"{size}={have} is not a multiple of {of}"

    return check


def no_gradients() -> Requirement:
    """No gradient is wanted."""

    def check(call: Call) -> str | None:
        return f"gradients of {', '.join(call.needs)} are not supported" if call.needs else None

    return check


def import_failure(module: str, *, really: bool) -> str | None:
    """Why a module cannot be used, or None. Without ``really`` it is only looked for, not imported."""
    return _import(module) if really else _find(module)


@functools.cache
def _find(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its package is missing
        return f"module {module} is not installed"
    except Exception as error:  # looking for a submodule imports its package
        return f"module {module} cannot be found: {type(error).__name__}: {error}"
    return None if spec is not None else f"module {module} is not installed"


@functools.cache
def _import(module: str) -> str | None:
    if (missing := _find(module)) is not None:
        return missing
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken driver or library raises anything here: OSError, RuntimeError, ...
        return f"module {module} does not import: {type(error).__name__}: {error}"
    return None
