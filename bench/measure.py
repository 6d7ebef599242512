"""Times in interleaved rounds, peak memory, host synchronisations, and whether a step captures into a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headmux.bench.peers import Forward
from headmux.bench.problem import Problem

MIB = 2**20
WARM_UP_S = 0.5
LEAST_ROUNDS = 30
MOST_ROUNDS = 200
LEAST_SAMPLES = 3
SLOW = 2.0  # times the floor: what a step may take of each round
MOST_STRIDE = 5
FLOOR = "floor"
# products of square matrices before each step, some ten milliseconds on an H200
LAYERS, SIDE = 7, 8192
_CUDA: Any = torch.cuda  # whose classes have no types

Step = Callable[[], object]


class Inputs(Protocol):
    """What steps work on."""

    device: torch.device

    def clear(self) -> None:
        """Undo what a step has left."""


def step(p: Problem, forward: Forward) -> Callable[[], Tensor]:
    """What is measured: the forward and, unless the variant forms no gradients, its backward."""
    upstream = p.upstream

    def with_gradients() -> Tensor:
        out = forward()
        torch.autograd.backward(out, None if upstream is None else upstream.to(out.dtype))
        return out.detach()

    def without() -> Tensor:
        with torch.no_grad():
            return forward()

    return with_gradients if p.variant.gradients else without


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give cached memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------ time


class _Round:
    """Times of one round: events on a GPU, read only after the round.

    There products come first, like a model's layers before its head: every step starts at the clock that the GPU
    sustains, whatever ran before, and finds its launches made.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.device = device
        self.clock = clock
        self.cuda = device.type == "cuda"
        # larger than any second-level cache, so that no step finds its operands there
        self._flush = torch.empty(256 * MIB, dtype=torch.int8, device=device) if self.cuda else None
        if self.cuda:
            self._layer = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device)
            self._product = torch.empty_like(self._layer)
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._times: dict[str, float] = {}

    def run(self, name: str, work: Step) -> None:
        if self._flush is None:
            begin = self.clock()
            work()
            self._times[name] = (self.clock() - begin) * 1e3
            return
        for _ in range(LAYERS):
            torch.mm(self._layer, self._layer, out=self._product)
        self._flush.zero_()
        start, end = _CUDA.Event(enable_timing=True), _CUDA.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        self._events[name] = (start, end)

    def collect(self) -> dict[str, float]:
        synchronize(self.device)
        found = {**self._times, **{n: a.elapsed_time(b) for n, (a, b) in self._events.items()}}
        self._times, self._events = {}, {}
        return found


def rounds(
    p: Inputs,
    steps: dict[str, Step],
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    tick: Callable[[float], object] = lambda share: None,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time steps in rounds, in random order, inputs cleared at entry: for an op, gradients None.

    A warm-up of whole rounds lasts half a second at least. Then rounds follow until there are 30 and two seconds have
    gone, or until the time is up and every step has three samples. A step of more than twice the floor's time takes
    part in every second to fifth round only, in proportion: slow peers leave the time to those whose order is in doubt.

    Args:
        p: The problem, cleared outside of the time.
        steps: Name to step.
        seconds: Time for all rounds.
        clock: Seconds, off a GPU; ``time.process_time`` leaves out what other processes take on a busy machine.
        tick: Told of the share of the work that is done.

    Returns:
        Milliseconds per round of each step, and the reason of each step that failed on the way.
    """
    steps = dict(steps)
    times: dict[str, list[float]] = {n: [] for n in steps}
    failed: dict[str, str] = {}
    order = random.Random(0)
    timer = _Round(p.device, clock)

    def one(names: list[str]) -> dict[str, float]:
        order.shuffle(names)
        for name in names:
            p.clear()
            try:
                timer.run(name, steps[name])
            except Exception as error:
                failed[name] = f"while timed: {reason(error)}"
                del steps[name]
                p.clear()
                release(p.device)
        return timer.collect()

    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        while True:
            last = one(list(steps))
            if time.perf_counter() - began >= min(WARM_UP_S, seconds):
                break
        strides = _strides(last)
        began = time.perf_counter()
        gone = 0.0
        for done in range(1, MOST_ROUNDS + 1):
            short = [n for n in steps if len(times[n]) < LEAST_SAMPLES]
            late = gone >= seconds
            if (late or (done > LEAST_ROUNDS and gone >= 2.0)) and not short:
                break
            for name, ms in one(short if late else [n for n in steps if done % strides[n] == 0]).items():
                times[name].append(ms)
            gone = time.perf_counter() - began
            tick(min(1.0, max(gone / seconds, min(done / LEAST_ROUNDS, gone / 2.0))))
    finally:
        gc.enable()
        p.clear()
    return {n: t for n, t in times.items() if n not in failed}, failed


def _strides(last: dict[str, float]) -> dict[str, int]:
    """In every how many-th round a step takes part, from the times of one round."""
    share = SLOW * last.get(FLOOR, max(last.values(), default=0.0))
    return {n: max(1, min(MOST_STRIDE, math.ceil(ms / share) if share > 0 else 1)) for n, ms in last.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies, between neighbours by proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


# ------------------------------------------------------------------------------------------------ memory


def peak_bytes(p: Problem, work: Step) -> int | None:
    """Peak of allocated memory over what is there at entry, during one step with gradients None at entry.

    On a GPU as the caching allocator counts it; on a CPU from every event of PyTorch's allocator, which libraries below
    PyTorch (MKL, oneDNN) may pass by. None where neither can be told.
    """
    p.clear()
    release(p.device)
    if p.device.type == "cuda":
        torch.cuda.synchronize(p.device)
        torch.cuda.reset_peak_memory_stats(p.device)
        base = torch.cuda.memory_allocated(p.device)
        work()
        torch.cuda.synchronize(p.device)
        return torch.cuda.max_memory_allocated(p.device) - base
    if p.device.type == "cpu":
        return _cpu_peak(work)
    return None


def _cpu_peak(work: Step) -> int | None:
    from torch.profiler import ProfilerActivity, profile

    with silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    results = getattr(found.profiler, "kineto_results", None)
    if results is None:
        return None
    events = sorted(((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"), key=_first)
    return _peak(count for _, count in events)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Nothing to the standard error file, where some builds of the profiler write from C++."""
    sys.stderr.flush()
    kept = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def _first(pair: tuple[int, int]) -> int:
    return pair[0]


def _peak(changes: Iterable[int]) -> int:
    held = top = 0
    for change in changes:
        held += change
        top = max(top, held)
    return top


# ------------------------------------------------------------------------------------------------ host


def footprint(p: Problem, work: Step) -> tuple[int | None, int | None]:
    """Peak bytes of one step (see peak_bytes), and how often it makes the host wait for the GPU; None elsewhere."""
    waits: list[int | None] = []
    return peak_bytes(p, lambda: waits.append(_syncs(p.device, work))), waits[0] if waits else None


def _syncs(device: torch.device, work: Step) -> int | None:
    if device.type != "cuda":
        work()
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize(device)
    return sum("synchroniz" in str(w.message) and "prototype" not in str(w.message) for w in caught)


def graph(p: Problem, work: Callable[[], Tensor]) -> tuple[bool | None, str | None]:
    """Whether one step captures into a CUDA graph that replays to the same loss; else why not. None off a GPU."""
    if p.device.type != "cuda":
        return None, None
    p.clear()
    release(p.device)
    try:
        side = _CUDA.Stream(p.device)
        side.wait_stream(torch.cuda.current_stream(p.device))
        with torch.cuda.stream(side):
            expected = work().clone()
        torch.cuda.current_stream(p.device).wait_stream(side)
        torch.cuda.synchronize(p.device)
        p.clear()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = work()
        with torch.no_grad():
            out.zero_()
        captured.replay()
        torch.cuda.synchronize(p.device)
        same = bool(torch.allclose(out.float(), expected.float(), rtol=1e-3, atol=1e-5))
        return (True, None) if same else (False, "a replay gives another loss")
    except torch.OutOfMemoryError as error:
        return None, reason(error)
    except Exception as error:
        return False, reason(error)
    finally:
        p.clear()
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(p.device)
        release(p.device)


def alive(device: torch.device) -> bool:
    """Whether the device still answers: after an illegal access every later call of the process fails."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).add_(1).item()
    except Exception:
        return False
    return True


def reason(error: BaseException, length: int = 240) -> str:
    """One line about an exception."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory: " + text[:length]
    name = type(error).__name__
    cut = text if len(text) <= length else text[: length - 3] + "..."
    return cut if name == "Unsupported" else f"{name}: {cut}"
