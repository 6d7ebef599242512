"""Peak resident memory of one step in a fresh process: a second opinion that also sees what libraries allocate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from headmux.bench import measure
from headmux.bench.problem import Problem
from headmux.bench.providers import providers
from headmux.bench.shapes import Shape, Variant


def peak_mib(op: str, provider: str, shape: Shape, dtype: torch.dtype, variant: Variant) -> float | None:
    """Growth of the peak resident memory over the inputs, in MiB; None where Linux's /proc does not tell."""
    task = [op, provider, [shape.n, shape.h, shape.v, shape.softcap], str(dtype).removeprefix("torch."), str(variant)]
    done = subprocess.run(
        [sys.executable, "-m", "headmux.bench.rss", json.dumps(task)], capture_output=True, text=True, check=False
    )
    try:
        return float(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None


def _resident(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {key}")


def _measure(task: str) -> float:
    op, name, (n, h, v, softcap), dtype, variant = json.loads(task)

    def step_at(shape: Shape) -> measure.Step:
        problem = Problem(op, shape, getattr(torch, dtype), torch.device("cpu"), Variant.parse(variant))
        (provider,) = [p for p in providers(op, half=True) if p.name == name]
        return measure.step(problem, provider.build(problem))

    step_at(Shape(64, 64, 512, softcap))()  # what the libraries load and keep for good
    work = step_at(Shape(n, h, v, softcap))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


if __name__ == "__main__":
    print(_measure(sys.argv[1]))
