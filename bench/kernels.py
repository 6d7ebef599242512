"""What the triton backend does between the matrix products: times, and shares of the bandwidth of a copy.

Each step is a launch function of ``headmux.backends.triton.launch`` as the ops call it, the merging of partial
statistics included. Its bytes are those of the logits or states that it has to read and write, each counted once: what
it moves beside them lowers its share. A copy that moves as many bytes takes its turns in the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headmux import registry
from headmux.backends.common.head import Head
from headmux.backends.common.softmax import Coefficients, Wanted
from headmux.backends.common.storage import padded, rows_of
from headmux.bench import measure
from headmux.bench.problem import BETA, IGNORE
from headmux.bench.records import KernelRecord, Results, rounded
from headmux.bench.shapes import Shape

GPU_SHAPES = (Shape(1024, 4096, 128256), Shape(4096, 4096, 128256))
TINY = Shape(16, 32, 600)
_SEED = 20240
# a millisecond for which the GPU waits, while the host makes all launches of a step
_AHEAD_CYCLES = 2_000_000

Step = tuple[int, Callable[[], object]]
"""Bytes that a step has to move, and the step."""


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot run there with such operands, if so."""
    states, target = torch.empty(1, 1, dtype=dtype, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    found = registry.get_op("flce").explain(states, states, target, impl="triton")
    return "; ".join(found.reasons["triton"]) or None


class Inputs:
    """The tensors of one shape. Logits are N(0, 1), so that exponentials against the label's always fit.

    Attributes:
        device: Where they are.
        steps: Name to step.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        from headmux.backends.triton import launch

        n, h, v = shape.n, shape.h, shape.v
        make = torch.Generator(device).manual_seed(_SEED)

        def logits(dtype: torch.dtype) -> Tensor:
            room = torch.empty(v * padded(n), dtype=dtype, device=device)
            return rows_of(room.normal_(generator=make), v, n)

        self.device = device
        self._logits, self._raw = logits(dtype), logits(dtype)
        states = torch.empty(n, h, dtype=dtype, device=device).normal_(generator=make)
        out, ones = torch.empty_like(states), torch.ones(n, device=device)
        target = torch.randint(v, (n,), device=device, generator=make)
        labels, _ = launch.admit(states, target, IGNORE, v, torch.float32)
        dots = self._logits.gather(0, labels.index[None])[0].float()
        transform = launch.Transform(Head(states, states[:0], None, dtype, 1.0, None, 1.0), slice(0, n))
        found, rest = launch.statistics(self._logits, transform, Wanted(), labels, dots)
        by = Coefficients(ones, ones)
        student, teacher = (
            launch.Side(raw, transform, launch.logsumexp(raw, transform))
            for raw in (logits(torch.float32), logits(torch.float32))
        )
        kl = launch.diverge(student, teacher, BETA, labels.valid, loss=True)[-1]

        held, wide = v * n * dtype.itemsize, v * n * torch.float32.itemsize
        self.steps: dict[str, Step] = {
            "look": (held, lambda: launch.statistics(self._logits, transform, Wanted(), labels, dots)),
            "exponentiate": (2 * held, lambda: launch.exponentials(self._raw, transform, labels, dots)),
            "to_gradient": (
                2 * held,
                lambda: launch.to_gradient(self._raw, transform, labels, dots, rest, found.lse, by),
            ),
            "look_fp32": (wide, lambda: launch.logsumexp(student.raw, transform)),
            "diverge_sums": (2 * wide, lambda: launch.diverge(student, teacher, BETA, labels.valid, loss=True)),
            "diverge_gradient": (
                2 * wide + held,
                lambda: launch.diverge(
                    student, teacher, BETA, labels.valid, loss=False, upstream=ones, kl=kl, into=self._raw
                ),
            ),
            "scale_rows": (2 * n * h * dtype.itemsize, lambda: launch.scale_rows(states, ones, out)),
        }
        if dtype == torch.float16:  # whose logits never become exponentials
            del self.steps["exponentiate"]

    def clear(self) -> None:
        """Logits that a step may have overwritten as they were, and the GPU busy for the while of a step's launches."""
        self._raw.copy_(self._logits)
        if self.device.type == "cuda":
            cuda: Any = torch.cuda
            cuda._sleep(_AHEAD_CYCLES)


def run(
    shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], device: torch.device, results: Results, *, seconds: float
) -> list[str]:
    """Measure every step at every shape.

    Args:
        shapes: Sizes.
        dtypes: Of hidden states, weight, and logits of flce and linear_logp.
        device: Where.
        results: Where records go.
        seconds: Time for the rounds of one shape.

    Returns:
        Why steps have no record, a line each.

    Raises:
        ValueError: The backend cannot run there.
    """
    for dtype in dtypes:
        if reason := refusal(device, dtype):
            raise ValueError(f"kernels: the triton backend cannot run: {reason}")
    failed = []
    for dtype in dtypes:
        for shape in shapes:
            measure.release(device)
            failed += _run(shape, dtype, device, results, seconds)
    return failed


def _run(shape: Shape, dtype: torch.dtype, device: torch.device, results: Results, seconds: float) -> list[str]:
    inputs = Inputs(shape, dtype, device)
    most = max(moved for moved, _ in inputs.steps.values()) // 2
    source, sink = (torch.empty(most, dtype=torch.uint8, device=device).random_() for _ in range(2))

    def copy(moved: int) -> Callable[[], object]:
        into, of = sink[: moved // 2], source[: moved // 2]
        return lambda: into.copy_(of)

    work = {name: step for name, (_, step) in inputs.steps.items()}
    work |= {_copy_of(moved): copy(moved) for moved, _ in inputs.steps.values()}
    for step in work.values():  # compiled before the warm-up
        inputs.clear()
        step()
    times, failed = measure.rounds(inputs, work, seconds)
    for name, (moved, _) in inputs.steps.items():
        beside = _copy_of(moved)
        if name in times and beside in times:
            results.put(_record(name, shape, dtype, moved, times[name], times[beside]))
    return [f"{name} {shape}: {reason}" for name, reason in failed.items()]


def _copy_of(moved: int) -> str:
    return f"copy of {moved // 2} bytes"


def _record(
    name: str, shape: Shape, dtype: torch.dtype, moved: int, times: Sequence[float], copies: Sequence[float]
) -> KernelRecord:
    ms, p20, p80 = (measure.percentile(times, share) for share in (0.5, 0.2, 0.8))
    copy_ms = measure.percentile(copies, 0.5)
    return KernelRecord(
        name, shape.n, shape.h, shape.v, str(dtype).removeprefix("torch."),
        ms=rounded(ms, 5), p20=rounded(p20, 5), p80=rounded(p80, 5), bytes=moved,
        tb_per_s=rounded(moved / ms / 1e9), copy_tb_per_s=rounded(moved / copy_ms / 1e9), share=rounded(copy_ms / ms),
    )
