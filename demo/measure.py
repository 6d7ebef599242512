"""What a loss takes: the peak of memory over its forward and backward, and their time."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

HOW = {
    "cuda": "torch.cuda.max_memory_allocated over forward and backward of the loss, less what was allocated before",
    "cpu": "peak of the sum of all allocations and frees of PyTorch's CPU allocator over forward and backward of the "
    "loss, from torch.profiler(profile_memory=True); buffers inside the matrix library are not seen",
}
"""How memory is measured, by kind of device. The gradients that the loss returns are counted."""


def memory(work: Callable[[], object], device: torch.device) -> int:
    """Largest number of bytes held at once by ``work`` beyond what was held before. Run it once before this."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes its own lines between ours
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: float(e["ts"]))
    return max(0, *itertools.accumulate(int(e["args"]["Bytes"]) for e in events))


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Best time of ``work`` over five runs, or fewer once they take two seconds. Run it once before this."""
    times: list[float] = []
    while len(times) < 5 and sum(times) < 2.0:
        start = clock(device)
        work()
        times.append(clock(device) - start)
    return min(times)


def clock(device: torch.device) -> float:
    """Now, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
