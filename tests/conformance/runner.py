"""Checks, the backend and device they run on, and what became of each: an outcome for every one, none left out.

Outcomes:

- ``matched``: every error within its budget and every property held.
- ``refused``: ``Backend.reject`` gave reasons, and the call raised ``UnsupportedCallError`` with exactly those. Where
  they speak against gradients alone, or a bias's alone, the rest is compared without.
- ``known failure``: it failed, and the backend lists its id in ``known_failures``. If it does not fail, that is a
  failure.
- ``failed``: anything else.
- ``unavailable``: nothing of the backend can be used here; said once for the backend, in place of its checks.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headmux import registry, requirements
from headmux.contract import Backend
from headmux.errors import UnsupportedCallError
from headmux.ops._picked import without_looking
from headmux.testing import oracle as oracles
from headmux.testing.cases import CASES, Case, Problem, build, call_of
from headmux.testing.oracle import Measure, Result

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CheckFailed(AssertionError):
    """A backend does not do what it must."""


class Refused(Exception):
    """A backend refused a call as it should.

    Attributes:
        reasons: Its reasons.
    """

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class Check:
    """One thing that a backend is tested for.

    Attributes:
        id: ``"op/name"``, unique.
        op: Name of the op.
        run: Raises CheckFailed, or any other exception, if the backend fails, and Refused if it refuses.
        devices: Kinds of device it makes sense on.
        interpreted: Whether it is small enough for an interpreter of kernels.
    """

    id: str
    op: str
    run: Callable[[Context], None]
    devices: tuple[str, ...] = ("cpu", "cuda")
    interpreted: bool = True


@dataclass
class Record:
    """What became of a check.

    Attributes:
        check: Its id; ``""`` for a backend as a whole.
        backend: Name of the backend.
        device: Kind of device.
        outcome: ``"matched"``, ``"refused"``, ``"known failure"``, ``"failed"`` or ``"unavailable"``.
        reasons: Why, unless matched.
        measures: Errors and budgets.
    """

    check: str
    backend: str
    device: str
    outcome: str
    reasons: tuple[str, ...] = ()
    measures: list[Measure] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "case": self.check,
            "backend": self.backend,
            "device": self.device,
            "outcome": self.outcome,
            "reasons": list(self.reasons),
            "errors": {m.name: {"error": m.error, "budget": m.budget} for m in self.measures},
        }


class Context:
    """A backend on a device, for one check."""

    def __init__(self, check: Check, backend: Backend, device: str) -> None:
        self.check, self.backend, self.device = check, backend, device
        self.op = registry.get_op(check.op)
        self.measures: list[Measure] = []
        self.refusals = 0

    def case(self, **fields: Any) -> Case:
        """A case of this check's op, in the first dtype of fp32, bf16 and fp16 that the backend takes, if not named."""
        made = Case(self.check.id, self.check.op, **{"H": 64, "V": 200, "N": 24, **fields})
        if "dtype" in fields:
            return made
        where = _device(self.device)
        for dtype in DTYPES:
            candidate = replace(made, dtype=dtype)
            if not _reasons(self.backend, candidate, where):
                return candidate
        return made

    def problem(self, case: Case | None = None, *, forward: bool = False, **fields: Any) -> Problem:
        """The tensors of a case on this device.

        A backend that refuses the gradient of a bias alone is not asked for that, and with ``forward`` one that refuses
        gradients alone for none, once it is seen to refuse as it should.
        """
        problem = build(self.case(**fields) if case is None else case, self.device)
        roles = self._roles(problem, forward)
        if roles != problem.roles:
            with contextlib.suppress(Refused):
                self.admit(problem)
            problem.roles = roles
        return problem

    def _roles(self, problem: Problem, forward: bool) -> tuple[str, ...]:
        """All roles, those but the bias's, or with ``forward`` none: what the backend accepts first, or else all."""
        fewer = tuple(r for r in problem.roles if not r.endswith("bias"))
        with oracles.context(problem):
            for roles in (problem.roles, fewer, *([()] if forward else [])):
                leaves = oracles.leaves(problem, roles)
                if self.op.explain(**leaves, **problem.options, impl=self.backend.name).chosen is not None:
                    return roles
        return problem.roles

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The op on this backend alone."""
        return self.op(*args, **kwargs, impl=self.backend.name)

    def admit(self, problem: Problem, tensors: Mapping[str, Tensor | None] | None = None) -> None:
        """Raise Refused if the backend has reasons against the problem, once the call is seen to raise just those."""
        given = dict(oracles.leaves(problem) if tensors is None else tensors)
        with oracles.context(problem):
            selection = self.op.explain(**given, **problem.options, impl=self.backend.name)
            reasons = selection.reasons[self.backend.name]
            again = self.backend.reject(selection.call, thorough=True)
            self.expect(reasons == again, f"reject is not deterministic: {reasons}, then {again}")
            if not reasons:
                return
            self.expect(all(isinstance(r, str) and r.strip() for r in reasons), f"empty reasons: {reasons}")
            try:
                self.call(**given, **problem.options)
            except UnsupportedCallError as error:
                told = error.selection.reasons[self.backend.name]
                self.expect(told == reasons, f"reject gives {reasons}, but the call raises {told}")
                self.expect(all(r in str(error) for r in reasons), f"the error does not tell {reasons}: {error}")
            else:
                raise CheckFailed(f"reject gives {reasons}, but the call runs")
        raise Refused(reasons)

    def run(
        self,
        problem: Problem,
        *,
        roles: tuple[str, ...] | None = None,
        upstream: dict[str, Tensor] | None = None,
        tensors: dict[str, Tensor | None] | None = None,
    ) -> Result:
        """Run the problem on the backend; nothing that it was given may have changed."""
        given = oracles.leaves(problem, roles) if tensors is None else tensors
        self.admit(problem, given)
        arrives = problem.upstream if upstream is None else upstream
        watched = {**problem.tensors, **{f"upstream of {n}": t for n, t in arrives.items()}}
        before = {n: _bytes(t) for n, t in watched.items() if t is not None}
        result = oracles.evaluate(self.call, problem, given, roles=roles, upstream=upstream)
        for name, content in before.items():
            value = watched[name]
            assert value is not None
            self.expect(torch.equal(_bytes(value), content), f"{name} was written")
        return result

    def compare(
        self,
        problem: Problem,
        result: Result | None = None,
        *,
        roles: tuple[str, ...] | None = None,
        upstream: dict[str, Tensor] | None = None,
        note: str = "",
    ) -> Result:
        """Run the problem, unless a result is given, and hold its errors against their budgets."""
        got = self.run(problem, roles=roles, upstream=upstream) if result is None else result
        want = oracles.oracle(problem, roles=roles, upstream=upstream)
        by = oracles.peer(problem, roles=roles, upstream=upstream)
        found = oracles.judge(problem, got, want, by, upstream=upstream)
        for m in found:
            self.measure(f"{note}{m.name}", m.error, m.budget)
        return got

    def measure(self, name: str, error: float, budget: float) -> None:
        """Hold an error against its budget.

        Raises:
            CheckFailed: The error is larger, or NaN.
        """
        found = Measure(name, error, budget)
        self.measures.append(found)
        self.expect(found.passed, f"{name}: error {error:.3g} is over the budget of {budget:.3g}")

    def expect(self, condition: bool | Tensor, message: str) -> None:
        """Raise CheckFailed unless the condition holds."""
        if not bool(condition):
            raise CheckFailed(f"{self.check.id} on {self.backend.name}, {self.device}: {message}")


def _bytes(value: Tensor) -> Tensor:
    """A copy of everything in a tensor's storage, gaps between its elements included."""
    flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
    return flat.clone()


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _reasons(backend: Backend, case: Case, where: torch.device, *, thorough: bool = False) -> tuple[str, ...]:
    """Reasons against a case with its gradients and, if there are any, against it without."""
    call = call_of(case, where, _capability(where))
    return backend.reject(call, thorough=thorough) and backend.reject(replace(call, needs=()), thorough=thorough)


def is_interpreted(backend: Backend) -> bool:
    """Whether the backend's kernels run in Triton's interpreter."""
    return backend.name == "triton" and os.environ.get("TRITON_INTERPRET", "0") == "1"


def devices_here() -> tuple[str, ...]:
    """Kinds of device that PyTorch can use here, of those that the suite knows."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def usable_devices(backend: Backend) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The kinds of device on which a backend runs the plain call of any op in any dtype, if without gradients, and why
    not on the others.
    """
    usable, against = [], {}
    broken = [r for m in backend.imports if (r := requirements.import_failure(m, really=True)) is not None]
    for kind in devices_here():
        where = _device(kind)
        first: tuple[str, ...] = ()
        runs = False
        for op in (op for op in registry.op_names() if op in backend.kernels or not backend.kernels):
            for dtype in DTYPES:
                case = Case(f"{op}/plain", op, N=64, H=64, V=256, dtype=dtype)
                reasons = _reasons(backend, case, where, thorough=True)
                first, runs = first or reasons, runs or not reasons
        if runs and not broken:
            usable.append(kind)
        else:
            against[kind] = first or tuple(broken)
    return tuple(usable), against


def applicable(check: Check, backend: Backend, device: str) -> bool:
    """Whether a check makes sense on that device."""
    return device in check.devices and (check.interpreted or not is_interpreted(backend))


def value_checks(cases: Iterable[Case] = CASES) -> list[Check]:
    """For each case, the check that compares it with the oracle."""

    def check(case: Case) -> Check:
        return Check(case.id, case.op, lambda context: _compare(context, case))

    return [check(case) for case in cases]


def _compare(context: Context, case: Case) -> None:
    context.compare(context.problem(case, forward=True))


def known_failure(backend: Backend, check: Check, device: str) -> str | None:
    """Why this check is known to fail: ``known_failures`` under ``"id"`` or ``"id@device"``."""
    return backend.known_failures.get(f"{check.id}@{device}", backend.known_failures.get(check.id))


def run_check(check: Check, backend: Backend, device: str) -> tuple[Record, Exception | None]:
    """Run a check on a backend that the registry knows, and say what became of it.

    Returns:
        The record, and the exception behind it if it failed (also where that was known).
    """
    context = Context(check, backend, device)
    known = known_failure(backend, check, device)
    error: Exception | None = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        with without_looking():  # or no kernel would meet an ignored token here
            check.run(context)
        outcome, reasons = "matched", ()
    except Refused as refused:
        outcome, reasons = "refused", refused.reasons
    except Exception as found:
        error = found
        outcome, reasons = "failed", ("".join(traceback.format_exception_only(found)).strip(),)
    finally:
        torch.set_num_threads(threads)
    if known is not None and error is None:
        error = CheckFailed(f"{check.id} is listed as a known failure ({known}), but it {outcome}")
        outcome, reasons = "failed", (str(error),)
    elif known is not None:
        outcome, reasons = "known failure", (known, *reasons)
    return Record(check.id, backend.name, device, outcome, reasons, context.measures), error


def unknown_ids(backend: Backend, checks: Iterable[Check]) -> list[str]:
    """Known failures of a backend whose id belongs to no check."""
    ids = {c.id for c in checks}
    return [i for i in backend.known_failures if i.split("@")[0] not in ids]
