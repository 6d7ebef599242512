"""A process with nothing set and nothing remembered for each test, and backends made up for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headmux import registry, select
from headmux.contract import Backend, Kernel, Requirement


def _forget() -> None:
    select._memo.clear()
    select._announced.clear()
    registry._plugins.cache_clear()


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("HEADMUX_", "LIGER_KERNEL_", "TRITON_INTERPRET", "RANK")):
            monkeypatch.delenv(name)
    _forget()
    yield
    _forget()


class Maker:
    """Registers backends that run what torch runs and note it in ``ran``."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str, str]] = []
        self._names: list[str] = []

    def __call__(self, name: str, *requires: Requirement, ops: tuple[str, ...] | None = None, **facts: Any) -> Backend:
        kernels = {op: self._kernel(name, op) for op in (registry.op_names() if ops is None else ops)}
        backend = Backend(name, kernels, requires=requires, **facts)
        registry.register(backend)
        self._names.append(name)
        return backend

    def _kernel(self, name: str, op: str) -> Kernel:
        real = registry.get_backend("torch").kernels[op]

        def forward(args: Any) -> Any:
            self.ran.append((name, op, "forward"))
            return real.forward(args)

        def backward(args: Any, residual: Any, upstream: Any) -> Any:
            self.ran.append((name, op, "backward"))
            return real.backward(args, residual, upstream)

        return Kernel(forward, backward)

    def clear(self) -> None:
        for name in self._names:
            registry.unregister(name)


@pytest.fixture
def make() -> Iterator[Maker]:
    maker = Maker()
    yield maker
    maker.clear()


@pytest.fixture
def refuse() -> Callable[[str], Requirement]:
    """A requirement that every call fails, with this text."""
    return lambda text: lambda call: text
