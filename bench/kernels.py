"""What backends launch: steps between matrix products beside copies, and products of their own beside PyTorch's.

Each step is a launch function of a backend as the ops call it, the merging of partial statistics included. Its bytes
are those of the logits or states that it has to read and write, each counted once: what it moves beside them lowers its
share. A copy that moves as many bytes takes its turns in the same rounds. Products stand beside one ``torch.mm`` of the
same operands, into 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headmux import registry
from headmux.backends.common.head import Head
from headmux.backends.common.labels import Labels
from headmux.backends.common.softmax import Coefficients, Softmax, Wanted
from headmux.backends.common.storage import padded, rows_of
from headmux.bench import measure
from headmux.bench.problem import BETA, IGNORE
from headmux.bench.records import KernelRecord, Results, rounded
from headmux.bench.shapes import Shape

GPU_SHAPES = (Shape(1024, 4096, 128256), Shape(4096, 4096, 128256))
TINY = Shape(16, 32, 600)
_SEED = 20240


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        work: Bytes that it has to move, or floating-point operations of a product.
        run: The step.
        product: PyTorch's product that it stands beside; None for a step beside a copy.
        entry: What is to be done before each run.
    """

    work: int
    run: Callable[[], object]
    product: Callable[[], object] | None = None
    entry: Callable[[], object] = lambda: None


def refusal(impl: str, dtype: torch.dtype, device: torch.device, hidden: int = TINY.h) -> str | None:
    """Why a backend cannot run there with such operands, if so."""
    states = torch.empty(1, hidden, dtype=dtype, device=device)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    found = registry.get_op("flce").explain(states, states, target, impl=impl)
    return "; ".join(found.reasons[impl]) or None


class Inputs:
    """Tensors of one shape, and a backend's steps over them.

    Logits are N(0, 1), so that exponentials against the label's always fit.

    Attributes:
        shape: Their sizes.
        dtype: That of states and narrow logits.
        device: Where they are.
        kept: [V, N] logits.
        raw: The same, which a step may overwrite.
        states: [N, H].
        head: Of those states and a [V, H] weight.
        ones: [N] fp32.
        steps: Name to step.
    """

    def __init__(self, impl: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.make = torch.Generator(device).manual_seed(_SEED)
        self.kept, self.raw = self.logits(dtype), self.logits(dtype)
        self.states = torch.empty(shape.n, shape.h, dtype=dtype, device=device).normal_(generator=self.make)
        weight = torch.empty(shape.v, shape.h, dtype=dtype, device=device).normal_(generator=self.make)
        self.head = Head(self.states, weight.mul_(shape.h**-0.5), None, dtype, 1.0, None, 1.0)
        self.ones = torch.ones(shape.n, device=device)
        self.steps = _STEPS[impl](self)

    def logits(self, dtype: torch.dtype) -> Tensor:
        """New ones."""
        n, v = self.shape.n, self.shape.v
        room = torch.empty(v * padded(n), dtype=dtype, device=self.device)
        return rows_of(room.normal_(generator=self.make), v, n)

    def moved(self, narrow: int = 0, wide: int = 0) -> int:
        """Bytes of so many passes over logits in ``dtype``, and in fp32."""
        return self.shape.v * self.shape.n * (narrow * self.dtype.itemsize + wide * torch.float32.itemsize)

    def clear(self) -> None:
        """What a step may have overwritten as it was."""
        self.raw.copy_(self.kept)
        for step in self.steps.values():
            step.entry()


def _triton(x: Inputs) -> dict[str, Step]:
    from headmux.backends.triton import launch
    from headmux.backends.triton.softmax import TritonSoftmax

    labels = _labels(x, launch.admit)
    dots = x.kept.gather(0, labels.index[None])[0].float()
    transform = launch.Transform(x.head, slice(0, x.shape.n))
    _, rest_lse = launch.statistics(x.kept, transform, Wanted(), labels, dots)
    by = Coefficients(x.ones, x.ones)
    student, teacher = (
        launch.Side(raw, transform, launch.logsumexp(raw, transform))
        for raw in (x.logits(torch.float32), x.logits(torch.float32))
    )
    steps = {
        "look": Step(x.moved(1), lambda: launch.statistics(x.kept, transform, Wanted(), labels, dots)),
        "exponentiate": Step(x.moved(2), lambda: launch.exponentials(x.raw, transform, labels, dots)),
        "to_gradient": Step(x.moved(2), lambda: launch.to_gradient(x.raw, transform, labels, dots, rest_lse, by)),
        "look_fp32": Step(x.moved(wide=1), lambda: launch.logsumexp(student.raw, transform)),
    }
    if x.dtype != torch.bfloat16:  # no others become exponentials
        del steps["exponentiate"]
    steps |= _shared(x, partial(launch.diverge, student, teacher, valid=labels.valid), launch.scale_rows)
    return steps | {"grad_weight": _grad_weight(x, _softmax(TritonSoftmax, x, labels))}


def _cutedsl(x: Inputs) -> dict[str, Step]:
    from headmux.backends.cutedsl import divergence, launch
    from headmux.backends.cutedsl.softmax import CuteSoftmax
    from headmux.backends.cutedsl.statistics import logits

    def side() -> tuple[Tensor, Tensor]:
        logits = x.logits(torch.float32)  # in units of log 2
        top = logits.amax(0)
        return logits, torch.stack([top, (logits - top).exp2_().sum(0).log2_()])

    student, teacher = side(), side()
    steps = _shared(x, partial(divergence.diverge, student, teacher, chain=1.0), launch.scale_rows)
    softmax = _softmax(CuteSoftmax, x, _labels(x, launch.admit))
    held = x.logits(torch.float32)
    products: dict[str, Callable[[], object]] = {
        "logits_statistics": softmax.statistics,
        "logits_exponentials": lambda: softmax.look(slice(0, x.shape.n), x.raw),
        "logits_fp32": lambda: logits(x.states, x.head.weight, None, held, scale=1.0, softcap=None),
    }
    if x.dtype == torch.float16:
        del products["logits_exponentials"]
    out = torch.empty_like(x.kept)
    beside = partial(torch.mm, x.head.weight, x.states.t(), out=out)
    work = 2 * x.shape.n * x.shape.h * x.shape.v
    steps |= {name: Step(work, run, beside) for name, run in products.items()}
    return steps | {"grad_weight": _grad_weight(x, softmax)}


def _labels(x: Inputs, admit: Callable[..., tuple[Labels, Tensor]]) -> Labels:
    target = torch.randint(x.shape.v, (x.shape.n,), device=x.device, generator=x.make)
    return admit(x.states, target, IGNORE, x.shape.v, torch.float32)[0]


def _softmax(of: Callable[..., Softmax], x: Inputs, labels: Labels) -> Softmax:
    return of(x.head, labels, Wanted(proportional=True), (True, True, False), (x.dtype,) * 3, None)


def _grad_weight(x: Inputs, softmax: Softmax) -> Step:
    """The product of logits' gradients that lie inside grad_weight with their states."""
    count = softmax.places.inside
    total, held = softmax.places.workspace()
    states, beside = x.states[:count], torch.empty_like(total)
    rows = softmax.plan.rows(count)
    return Step(
        2 * count * x.shape.h * x.shape.v,
        lambda: softmax.steps.accumulate(total, [(held, states)], x.dtype, first=True, rows=rows, inside=True),
        partial(torch.mm, x.kept[:, :count], states, out=beside),
        lambda: held.copy_(x.kept[:, :count]),
    )


def _shared(x: Inputs, diverge: Callable[..., Any], scale_rows: Callable[..., Tensor]) -> dict[str, Step]:
    """What both backends have: a pair of logits compared, and states scaled."""
    kl, out = diverge(BETA, loss=True)[-1], torch.empty_like(x.states)
    return {
        "diverge_sums": Step(x.moved(wide=2), lambda: diverge(BETA, loss=True)),
        "diverge_gradient": Step(
            x.moved(1, wide=2), lambda: diverge(BETA, loss=False, upstream=x.ones, kl=kl, into=x.raw)
        ),
        "diverge_both": Step(x.moved(1, wide=2), lambda: diverge(0.0, loss=True, upstream=x.ones, into=x.raw)),
        "scale_rows": Step(2 * x.states.nbytes, lambda: scale_rows(x.states, x.ones, out)),
    }


_STEPS: dict[str, Callable[[Inputs], dict[str, Step]]] = {"triton": _triton, "cutedsl": _cutedsl}
BACKENDS = tuple(_STEPS)


def run(
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    results: Results,
    *,
    seconds: float,
    impls: Sequence[str] = BACKENDS,
    report: Callable[[str], object] = lambda text: None,
) -> list[str]:
    """Measure every step at every shape.

    Args:
        shapes: Sizes.
        dtypes: Of hidden states, weight, and logits of flce and linear_logp.
        device: Where.
        results: Where records go.
        seconds: Time for the rounds of one shape on one backend.
        impls: Backends.
        report: Told of each backend that cannot run there, and why.

    Returns:
        Why steps have no record, a line each.

    Raises:
        ValueError: No backend can run there.
    """
    cases = [
        (impl, shape, dtype, refusal(impl, dtype, device, shape.h))
        for dtype in dtypes for shape in shapes for impl in impls
    ]
    refused = dict.fromkeys(f"the {impl} backend cannot run: {reason}" for impl, _, _, reason in cases if reason)
    if all(reason for *_, reason in cases):
        raise ValueError("; ".join(refused))
    for line in refused:
        report(line)
    failed = []
    for impl, shape, dtype, reason in cases:
        if reason is None:
            measure.release(device)
            failed += _run(impl, shape, dtype, device, results, seconds)
    return failed


def _run(
    impl: str, shape: Shape, dtype: torch.dtype, device: torch.device, results: Results, seconds: float
) -> list[str]:
    inputs = Inputs(impl, shape, dtype, device)
    steps = inputs.steps
    most = max(step.work for step in steps.values() if step.product is None) // 2
    source, sink = (torch.empty(most, dtype=torch.uint8, device=device).random_() for _ in range(2))

    def beside(step: Step) -> Callable[[], object]:
        half = step.work // 2
        return step.product or (lambda: sink[:half].copy_(source[:half]))

    work = {name: step.run for name, step in steps.items()}
    work |= {f"beside {name}": beside(step) for name, step in steps.items()}
    for run in work.values():  # compiled before the warm-up
        inputs.clear()
        run()
    times, failed = measure.rounds(inputs, work, seconds)
    for name, step in steps.items():
        if name in times and f"beside {name}" in times:
            results.put(_record(impl, name, shape, dtype, step, times[name], times[f"beside {name}"]))
    return [f"{impl} {name} {shape}: {reason}" for name, reason in failed.items()]


def _record(
    impl: str, name: str, shape: Shape, dtype: torch.dtype, step: Step, times: Sequence[float],
    others: Sequence[float],
) -> KernelRecord:
    ms, p20, p80 = (measure.percentile(times, share) for share in (0.5, 0.2, 0.8))
    other = measure.percentile(others, 0.5)
    return KernelRecord(
        name, shape.n, shape.h, shape.v, str(dtype).removeprefix("torch."),
        ms=rounded(ms, 5), p20=rounded(p20, 5), p80=rounded(p80, 5), work=step.work,
        unit="TB/s" if step.product is None else "TFLOP/s", rate=rounded(step.work / ms / 1e9),
        beside=rounded(step.work / other / 1e9), share=rounded(other / ms), backend=impl,
    )
