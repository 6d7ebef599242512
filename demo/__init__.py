"""The three ops on real text: train a teacher, distil it, score with it and follow a reward, beside plain PyTorch.

    python -m headmux demo --out demo-out

The text is the help of Python itself (``pydoc_data.topics``), so nothing is downloaded. Every step runs twice from the
same weights on the same tokens, once with headmux and once with the losses as one writes them by hand, and the run
reports how far the losses are apart and what each took in memory and time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from headmux import get_op
from headmux.errors import UnknownNameError, UnsupportedCallError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NEEDED = ("matplotlib", "tokenizers", "tqdm")


class _BadFlag(Exception):
    """A flag, or this installation, that the demo cannot run with; its text is the error message."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0, or 2 for flags or an installation that it cannot run with.

    Args:
        argv: The flags; those of the process if None.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    try:
        flags = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message, or the help
        return int(stop.code or 0)
    try:
        device = _check(flags)
        with _threads(device):
            _run(flags, device, argv)
    except (_BadFlag, UnknownNameError, UnsupportedCallError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headmux demo",
        description="Train, distil, score and follow a reward on real text, each step beside plain PyTorch losses.",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument("--impl", help="comma list of backends to try in order (default: environment, else automatic)")
    parser.add_argument("--steps", type=int, default=16, help="steps of each of the three phases (default: 16)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="bfloat16: float32 weights under autocast (default: float32)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights, batches and samples (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder to write to (default: demo-out)")
    return parser


def _check(flags: argparse.Namespace) -> torch.device:
    """The device, once everything that can be wrong with the flags is known not to be."""
    if flags.steps < 1:
        raise _BadFlag(f"--steps {flags.steps} must be at least 1")
    if not 0 <= flags.seed < 2**63:
        raise _BadFlag(f"--seed {flags.seed} must be at least 0 and under 2**63")
    if flags.impl is not None:
        get_op("flce").with_impl(flags.impl)
    device = _device(flags.device)
    for module in (*_NEEDED, "pydoc_data.topics"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            how = "pip install 'headmux[demo]'" if module in _NEEDED else "this Python ships without its help topics"
            raise _BadFlag(f"the demo needs {module}, which does not import ({error}): {how}") from error
    try:
        flags.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _BadFlag(f"--out {flags.out}: {error}") from error
    return device


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _BadFlag(f"--device {name} is no device: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise _BadFlag(f"--device {name}: the demo measures memory on cpu and cuda only")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise _BadFlag(f"--device {name}: PyTorch {torch.__version__} sees {count} CUDA devices")
    return device


@contextlib.contextmanager
def _threads(device: torch.device) -> Iterator[None]:
    """On a busy CPU, one thread for the block: two that wait for each other took three times as long."""
    before, cores = torch.get_num_threads(), os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = device.type == "cpu" and before > 1 and load >= cores and "OMP_NUM_THREADS" not in os.environ
    if busy:
        print(f"busy    load {load:.1f} on {cores} CPUs: one thread (OMP_NUM_THREADS={before} for more)")
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if busy:
            torch.set_num_threads(before)


def _run(flags: argparse.Namespace, device: torch.device, argv: list[str]) -> None:
    from headmux.demo import data, phases, report

    started = time.perf_counter()
    text = data.load()
    settings = phases.Settings(device, DTYPES[flags.dtype], flags.impl, flags.steps, flags.seed)
    print(f"text    {text}")
    print(f"device  {report.device_name(device)}, {flags.dtype}, PyTorch {torch.__version__}", flush=True)
    result = phases.run(settings, text)
    seconds = time.perf_counter() - started
    about = {
        "command": shlex.join(["python", "-m", "headmux", "demo", *argv]),
        "seed": flags.seed,
        "steps": flags.steps,
        "dtype": flags.dtype,
        "impl": flags.impl,
        "device": str(device),
        "device_name": report.device_name(device),
        "cpu_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": report.versions(),
        "seconds": seconds,
    }
    numbers = report.write_json(flags.out / "demo.json", about, text, result)
    picture = report.draw(flags.out / "demo.png", about, result)
    print(f"\n{seconds:.0f} s in all; wrote {numbers} and {picture}")
