"""What a call costs the host: selection, the whole of a warm eager call, and one launch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headmux import registry
from headmux.bench import kernels, measure
from headmux.bench.problem import IGNORE, Problem
from headmux.bench.providers import Provider, named, providers
from headmux.bench.records import Record, rounded
from headmux.bench.shapes import OPS, Shape, Variant
from headmux.ops import _autograd

TINY = Shape(4, 8, 16)
SMALL = Shape(64, 64, 512)


@dataclass(frozen=True)
class HostCost:
    """Microseconds of host time.

    Attributes:
        op: Name of the op, or "launch".
        what: What was timed.
        us: Median over batches.
        p20: 20th percentile.
        p80: 80th percentile.
        best: Least of the batches: what the machine can do when nobody else uses it.
        note: What else is known.
    """

    op: str
    what: str
    us: float
    p20: float
    p80: float
    best: float
    note: str = ""

    def record(self, shape: Shape, dtype: torch.dtype) -> Record:
        """The same as a record, in milliseconds."""
        return Record(
            self.op, self.what, shape.n, shape.h, shape.v, str(dtype).removeprefix("torch."), "host",
            ms=rounded(self.us / 1e3), p20=rounded(self.p20 / 1e3), p80=rounded(self.p80 / 1e3),
            config=f"{self.note}; best {self.best:.1f} us".lstrip("; "),
        )


def _time(
    work: Callable[[], object], device: torch.device, *, batches: int = 40, batch_s: float = 0.005
) -> tuple[float, float, float, float]:
    """Median, 20th and 80th percentile and least of microseconds a call, over batches, the device idle before each."""
    for _ in range(5):
        work()
    measure.synchronize(device)
    began = time.perf_counter()
    work()
    once = time.perf_counter() - began
    count = max(1, min(1000, int(batch_s / max(once, 1e-7))))
    if device.type == "cuda":
        count = min(count, 20)  # no more than the launch queue takes without making the host wait
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(batches):
            measure.synchronize(device)
            began = time.perf_counter()
            for _ in range(count):
                work()
            found.append((time.perf_counter() - began) / count * 1e6)
    finally:
        gc.enable()
    measure.synchronize(device)
    return measure.percentile(found, 0.5), measure.percentile(found, 0.2), measure.percentile(found, 0.8), min(found)


def selection(device: torch.device, dtype: torch.dtype, names: tuple[str, ...] = OPS) -> list[HostCost]:
    """Warm selection of each op: building the Call and looking it up, and what stands beside it in an eager call."""
    found = []
    for name in names:
        p = Problem(name, TINY, dtype, device, Variant())
        op = registry.get_op(name)
        args, options = _arguments(p)
        request = _autograd.with_needs(op, op.request(*args, **options).args)

        def select_once(op: Any = op, request: Any = request) -> object:
            return op.select(request, None)

        def check_once(op: Any = op, args: Any = args, options: Any = options) -> object:
            return op.request(*args, **options)

        def call_once(op: Any = op, args: Any = args, options: Any = options) -> object:
            with torch.no_grad():
                return op(*args, **options)

        def both_once(op: Any = op, args: Any = args, options: Any = options, p: Problem = p) -> object:
            p.clear()
            out = op(*args, **options)
            torch.autograd.backward(out, None if p.upstream is None else p.upstream)
            return out

        chosen = select_once().chosen  # type: ignore[attr-defined]
        found += [
            HostCost(name, "selection", *_time(select_once, device), note="Call building and select, warm; goal 10"),
            HostCost(name, "checks", *_time(check_once, device), note="argument checks"),
            HostCost(name, "call", *_time(call_once, device), note=f"one tiny call without gradients on {chosen}"),
            HostCost(name, "call+backward", *_time(both_once, device), note=f"one tiny call and backward on {chosen}"),
        ]
    return found


def _arguments(p: Problem) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if p.op == "jsd":
        return (p.input, p.weight, p.teacher_input, p.teacher_weight, p.target), {}
    return (p.input, p.weight, p.target), {}


def host(
    device: torch.device, dtype: torch.dtype, shape: Shape, impl: str | None, peer_names: str,
    names: tuple[str, ...] = OPS,
) -> tuple[list[HostCost], list[Record]]:
    """Host time of one warm forward and backward of each provider at a small shape.

    On a GPU also that of one launch, the launches of one call, and the host's time beyond what bare launches of that
    number take.

    Returns:
        The costs, and a record with the reason for each provider, or launch, that has none.
    """
    costs: list[HostCost] = []
    failed: list[Record] = []
    bare = None
    if device.type == "cuda":
        costs, failed = launches(device, dtype, shape, impl)
        bare = costs[0].us
    for name in names:
        p = Problem(name, shape, dtype, device, Variant())
        for provider in providers(name, impl, peer_names):
            try:
                step = measure.step(p, provider.build(p))

                def clean(step: Callable[[], object] = step, p: Problem = p) -> object:
                    p.clear()
                    return step()

                clean()
                us = _time(clean, device)
                note = ""
                if bare is not None:
                    count = _launched(clean)
                    note = f"{count} launches of {bare:.1f} us, {us[0] - count * bare:.0f} us beyond them"
                costs.append(HostCost(name, provider.name, *us, note=note))
            except Exception as error:
                failed.append(_failure(provider, p, error))
    return costs, failed


def _failure(provider: Provider, p: Problem, error: Exception) -> Record:
    s = p.shape
    dtype = str(p.dtype).removeprefix("torch.")
    return Record(p.op, provider.name, s.n, s.h, s.v, dtype, "host", error=measure.reason(error))


def launches(
    device: torch.device, dtype: torch.dtype, shape: Shape, impl: str | None = None
) -> tuple[list[HostCost], list[Record]]:
    """Host time of one warm launch: first a bare one, then of each backend that of its smallest kernel, which sorts
    labels, with nothing around it.

    Returns:
        The costs, and a record with the reason for each backend that has none.
    """
    cuda: Any = torch.cuda
    costs = [HostCost("launch", "bare", *_time(lambda: cuda._sleep(1), device), note="torch.cuda._sleep")]
    failed = []
    target = torch.zeros(shape.n, dtype=torch.int64, device=device)
    index, valid, counts = (torch.empty_like(target, dtype=t) for t in (torch.int64, torch.bool, torch.float32))
    for name in (n for n in _SORTS if n in named(impl)):
        sort, note = _SORTS[name]
        reason = kernels.refusal(name, torch.bfloat16, device)  # labels are the same for any dtype
        if reason is None:
            try:
                us = _time(sort(target, index, valid, counts, shape.v), device)
                costs.append(HostCost("launch", name, *us, note=note))
            except Exception as error:
                reason = measure.reason(error)
        if reason is not None:
            kind = str(dtype).removeprefix("torch.")
            failed.append(Record("launch", name, shape.n, shape.h, shape.v, kind, "host", error=reason))
    return costs, failed


def _triton_sort(
    target: Tensor, index: Tensor, valid: Tensor, counts: Tensor, classes: int
) -> Callable[[], object]:
    from headmux.backends.triton.kernels import sort_labels

    count, width = target.shape[0], 256
    grid = (-(-count // width),)
    return lambda: sort_labels[grid](target, IGNORE, count, classes, index, valid, counts, BN=width, num_warps=4)


def _cutedsl_sort(
    target: Tensor, index: Tensor, valid: Tensor, counts: Tensor, classes: int
) -> Callable[[], object]:
    from headmux.backends.cutedsl.build import Sorting, kernel

    return lambda: kernel(Sorting(True))(target, index, valid, counts, IGNORE, classes)


_SORTS = {
    "triton": (_triton_sort, "sort_labels, warm"),
    "cutedsl": (_cutedsl_sort, "kernel(Sorting) through tvm-ffi, warm; goal 10"),
}


def _launched(work: Callable[[], object]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with measure.silent(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    names = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
    return sum(e.name.startswith(names) for e in found.events() or ())


def table(costs: list[HostCost]) -> str:
    """The costs as lines."""
    lines = [f"{'op':<12} {'what':<24} {'us':>8}  {'p20-p80':<16} {'best':>8}"]
    lines += [
        f"{c.op:<12} {c.what:<24} {c.us:>8.1f}  {f'{c.p20:.1f}-{c.p80:.1f}':<16} {c.best:>8.1f}  {c.note}".rstrip()
        for c in costs
    ]
    return "\n".join(lines) + "\n"
