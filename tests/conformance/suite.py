"""The tests. A third party's test module needs one line: ``from headmux.testing.suite import *``.

``test_backend`` says for each backend whether it can be used here, ``test_check`` runs each check on each backend and
device, and ``test_mutant`` sees that the checks catch backends that are wrong on purpose. Backends are those of
``--backend`` (see ``headmux.testing.plugin``), else of the environment variable ``HEADMUX_TEST_BACKEND``, else all that
are known.
"""

from __future__ import annotations

import os

import pytest

from headmux import registry
from headmux.contract import Backend
from headmux.testing import gpu as gpu  # adds checks for CUDA to PROBES
from headmux.testing.mutants import MUTANTS, Mutant, missed
from headmux.testing.plugin import BACKENDS, REQUIRED, keep
from headmux.testing.probes import PROBES
from headmux.testing.properties import PROPERTIES
from headmux.testing.runner import (
    Check,
    CheckFailed,
    Record,
    applicable,
    run_check,
    unknown_ids,
    usable_devices,
    value_checks,
)

__all__ = ["pytest_generate_tests", "test_backend", "test_check", "test_mutant"]

CHECKS: tuple[Check, ...] = (*value_checks(), *PROBES, *PROPERTIES)
"""Everything that a backend is tested for, in order."""

VARIABLE = "HEADMUX_TEST_BACKEND"


def _names(config: pytest.Config) -> list[str]:
    given = config.getoption(BACKENDS, None) or os.environ.get(VARIABLE, "")
    required = config.getoption(REQUIRED, None) or ""
    names = [n.strip() for part in (given, required) for n in part.split(",") if n.strip()]
    return list(dict.fromkeys(registry.resolve(n) for n in names)) or list(registry.names())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the tests by backend, device and check."""
    if "headmux_mutant" in metafunc.fixturenames:
        metafunc.parametrize("headmux_mutant", MUTANTS, ids=[m.name for m in MUTANTS])
        return
    names = _names(metafunc.config)
    if "headmux_check" in metafunc.fixturenames:
        rows = []
        for name in names:
            backend = registry.get_backend(name)
            for device in usable_devices(backend)[0]:
                rows += [(backend, device, c) for c in CHECKS if applicable(c, backend, device)]
        metafunc.parametrize(
            ("headmux_backend", "headmux_device", "headmux_check"),
            rows,
            ids=[f"{b.name}-{device}-{c.id}" for b, device, c in rows],
        )
    elif "headmux_backend" in metafunc.fixturenames:
        metafunc.parametrize("headmux_backend", [registry.get_backend(n) for n in names], ids=names)


def test_backend(headmux_backend: Backend, request: pytest.FixtureRequest) -> None:
    """The backend can be used here, or says why not; with ``--require`` it must be."""
    usable, against = usable_devices(headmux_backend)
    for device, reasons in against.items():
        outcome = "unavailable" if not usable else "not on this device"
        keep(request.node, Record("", headmux_backend.name, device, outcome, reasons))
    required = [registry.resolve(n) for n in (request.config.getoption(REQUIRED, None) or "").split(",") if n.strip()]
    if not usable and headmux_backend.name in required:
        raise CheckFailed(f"{headmux_backend.name} is required, but unavailable: {against}")
    if unknown := unknown_ids(headmux_backend, CHECKS):
        raise CheckFailed(f"known failures of {headmux_backend.name} that are no checks: {', '.join(unknown)}")


def test_check(
    headmux_backend: Backend, headmux_device: str, headmux_check: Check, request: pytest.FixtureRequest
) -> None:
    """One check on one backend and device."""
    record, error = run_check(headmux_check, headmux_backend, headmux_device)
    keep(request.node, record)
    if record.outcome == "known failure":
        pytest.xfail(record.reasons[0])
    if error is not None:
        raise error


def test_mutant(headmux_mutant: Mutant) -> None:
    """A backend that is wrong on purpose fails each of the checks that are there to catch it."""
    if passed := missed(headmux_mutant, CHECKS):
        raise CheckFailed(f"mutant {headmux_mutant.name} gets through {', '.join(passed)}")
