"""What is asked (Call), what a backend offers (Kernel, Backend), and what was decided (Selection)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headmux import requirements
from headmux.errors import UnsupportedCallError

Pairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op without its data. Hashable, so that a decision can be remembered, and printable.

    Attributes:
        op: Name of the op, such as ``"flce"``.
        device: Device of the tensors, not the current one.
        capability: CUDA compute capability of that device, or None elsewhere.
        dtypes: Role and dtype of each tensor given: ``(("input", torch.bfloat16), ...)``. ``"compute"`` is the dtype
            of the matrix products' operands: that of the input or, under autocast, what autocast casts to;
            ``"teacher_compute"`` the same for jsd's teacher.
        sizes: Name and value of each size: ``(("N", 8192), ("H", 4096), ("V", 128256))``.
        options: Name and value of every option that is not a tensor.
        needs: Roles whose gradient is wanted. Empty without gradients.
        defaults: Default of each option, so that the text shows only what differs.
    """

    op: str
    device: torch.device
    capability: tuple[int, int] | None
    dtypes: Pairs
    sizes: Pairs
    options: Pairs
    needs: tuple[str, ...] = ()
    defaults: Pairs = field(default=(), compare=False, repr=False)

    def dtype(self, role: str) -> torch.dtype | None:
        """Dtype of the tensor in that role, or None if the call has no such tensor."""
        found: torch.dtype | None = _lookup(self.dtypes, role)
        return found

    def size(self, name: str) -> int:
        """A size by its letter; KeyError if the op has none of that name."""
        return int(dict(self.sizes)[name])

    def option(self, name: str) -> Any:
        """Value of an option; KeyError if the op has none of that name."""
        return dict(self.options)[name]

    def __str__(self) -> str:
        where = str(self.device) + (f" sm_{self.capability[0]}{self.capability[1]}" if self.capability else "")
        defaults = dict(self.defaults)
        first, compute = self.dtypes[0][1], self.dtype("compute")
        words = [f"{self.op} on {where}", str(first) if compute in (None, first) else f"{first} as {compute}"]
        words += [f"{k}={v}" for k, v in self.sizes]
        words += [f"{k}={v}" for k, v in self.options if k not in defaults or v != defaults[k]]
        if self.needs:
            words.append("gradients of " + ",".join(self.needs))
        return " ".join(words)


def _lookup(pairs: Pairs, key: str) -> Any:
    for k, v in pairs:
        if k == key:
            return v
    return None


Rows = tuple["Tensor | None", ...]

Requirement = Callable[[Call], "str | None"]
"""A cheap, deterministic check of a call: a short reason with the offending value and the bound, or None."""


class Upstream:
    """The gradient that arrives at an op's outputs.

    Attributes:
        scalar: For a reduced loss, the 0-dim gradient of the reduced value, so that
            ``rows[0] == args.row_scale * scalar`` on tokens that count; None for losses per token. A kernel that
            formed its gradients in the forward only multiplies them by this.
    """

    __slots__ = ("_rows", "scalar")

    def __init__(self, rows: Rows | Callable[[], Rows], scalar: Tensor | None) -> None:
        self._rows = rows
        self.scalar = scalar

    @property
    def rows(self) -> Rows:
        """For each output that the forward returned, its gradient per token ([N], fp32; fp64 for fp64 inputs), or None
        where no gradient arrives. Contiguous, and exactly 0 on ignored tokens. Formed when it is first asked for.
        """
        if callable(self._rows):
            self._rows = self._rows()
        return self._rows


@dataclass(frozen=True)
class Kernel:
    """Forward and backward of one op. Checks, reductions, autograd and compile live in headmux.ops.

    Attributes:
        forward: ``forward(args) -> (outputs, residual)``. ``args`` is the op's frozen dataclass (``FLCEArgs``,
            ``JSDArgs``, ``LinearLogpArgs``). Outputs come in the op's order, with None for those not asked for. The
            residual is the backend's own: whatever saves work in the backward, or None. ``args.needs`` is all False
            when no gradient will be asked for: then nothing is kept.
        backward: ``backward(args, residual, upstream) -> gradients`` for input, weight and bias (in the op's order),
            with None where ``args.needs`` is False. It may consume the residual: a repeated backward gets a fresh one
            from another forward.
        requires: Requirements of this op on this backend.
    """

    forward: Callable[[Any], tuple[tuple[Tensor | None, ...], Any]]
    backward: Callable[[Any, Any, Upstream], tuple[Tensor | None, ...]]
    requires: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Backend:
    """A named set of kernels.

    Attributes:
        name: Lower-case name by which it is asked for.
        kernels: Op name to Kernel.
        requires: Requirements of every op of this backend.
        imports: Modules that must import. A missing or broken one is a reason, never an error.
        unavailable: Why nothing of this backend can be used, if so.
        known_failures: Conformance case id to the reason why it is expected to fail (strict).
    """

    name: str
    kernels: Mapping[str, Kernel]
    requires: tuple[Requirement, ...] = ()
    imports: tuple[str, ...] = ()
    unavailable: str | None = None
    known_failures: Mapping[str, str] = field(default_factory=dict)

    def reject(self, call: Call, *, thorough: bool = False) -> tuple[str, ...]:
        """Every reason why this backend cannot run ``call``; empty means that it can.

        A module in ``imports`` is really imported only when nothing else speaks against the call, or when
        ``thorough``: a call on the CPU must not pay for loading a GPU compiler that it cannot use.
        """
        if self.unavailable is not None:
            return (self.unavailable,)
        kernel = self.kernels.get(call.op)
        reasons = [f"has no kernel for {call.op}"] if kernel is None else []
        checks = self.requires if kernel is None else (*self.requires, *kernel.requires)
        reasons += [reason for check in checks if (reason := check(call)) is not None]
        for module in self.imports:
            reason = requirements.import_failure(module, really=thorough or not reasons)
            if reason is not None:
                reasons.append(reason)
        return tuple(reasons)


@dataclass(frozen=True)
class Selection:
    """Which backend runs a call, and why not the others.

    Attributes:
        call: The call.
        source: Where the order of candidates comes from, such as ``"LIGER_KERNEL_IMPL=cutedsl,triton"``.
        candidates: In order, each backend with its reasons against the call.
    """

    call: Call
    source: str
    candidates: tuple[tuple[Backend, tuple[str, ...]], ...]

    @property
    def backend(self) -> Backend | None:
        """The first candidate with no reason against it, or None."""
        return next((b for b, reasons in self.candidates if not reasons), None)

    @property
    def chosen(self) -> str | None:
        """Name of the selected backend, or None if every candidate has a reason against the call."""
        return None if (b := self.backend) is None else b.name

    @property
    def kernel(self) -> Kernel:
        """The selected backend's kernel.

        Raises:
            UnsupportedCallError: Nothing was selected.
        """
        if (b := self.backend) is None:
            raise UnsupportedCallError(self)
        return b.kernels[self.call.op]

    @property
    def reasons(self) -> dict[str, tuple[str, ...]]:
        """Backend name to its reasons against the call."""
        return {b.name: reasons for b, reasons in self.candidates}

    def __str__(self) -> str:
        lines = [str(self.call), f"order from: {self.source}"]
        width = max((len(b.name) for b, _ in self.candidates), default=0)
        for backend, reasons in self.candidates:
            state = "selected" if backend is self.backend else "would run"
            first, *rest = reasons or (state,)
            lines.append(f"  {backend.name:<{width}}  {first}")
            lines += [f"  {'':<{width}}  {reason}" for reason in rest]
        return "\n".join(lines)
