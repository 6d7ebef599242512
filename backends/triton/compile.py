"""Compile the kernels for GPUs that need not be there, and say what they take.

``python -m headmux.backends.triton.compile [--arch 80,90,100] [--every] [--strength 2] [--verbose]`` fails if one
spills, asks for more shared memory than there is, or does not compile.

What is compiled is what the ops launch: they run on tensors without data, and their launches are noted in place of
being made. All combinations of the options are some hundred thousand calls; of them, as many are made as it takes for
any two options (``--strength``) to have all combinations of their values. A kernel's launches are compiled for the
architectures in turn, or with ``--every`` each for every one, which takes three times as long.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from headmux.backends.common.resources import MOST_SHARED, usage
from headmux.backends.triton import backend, kernels
from headmux.backends.triton.tuning import INTERPRETED
from headmux.contract import Upstream
from headmux.ops.flce import FLCEArgs
from headmux.ops.jsd import JSDArgs
from headmux.ops.linear_logp import LinearLogpArgs

Options = dict[str, Any]

# tokens: wide tiles and the narrowest; classes: whole tiles or not; hidden: the logits fit inside grad_weight, or are
# cut into pieces, of which the last is not a multiple of 16 tokens
_COMMON: dict[str, Sequence[Any]] = {
    "tokens": (2048, 10),
    "classes": (12288, 5003),
    "hidden": (2048, 64),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "autocast": (False, True),
    "bias": ("same", torch.float32, None),
}
_SOFTCAP = {"softcap": (30.0, None)}
_NEEDS = {"needs": ((True, True, True), (True, True, False), (False, False, False))}
_REDUCED = {"reduced": (True, False)}
_TEMPERATURE = {"token_temperature": (True, False), "ignore_index": (-100, None)}

# the gradient of some calls is a multiple of p - 1 at the label, which has kernels of its own: only they are a space
SPACES: dict[str, tuple[str, dict[str, Sequence[Any]]]] = {
    "flce": (
        "flce",
        {
            **_COMMON, **_SOFTCAP, **_NEEDS, **_REDUCED, "label_smoothing": (0.1, 0.0), "ce_weight": (True, False),
            "return_predicted": (True, False), "lse_square_scale": (1e-4, 0.0),
        },
    ),
    "flce, p - 1": ("flce", {**_COMMON, **_REDUCED, "needs": ((True, True, False),)}),
    "linear_logp": (
        "linear_logp",
        {**_COMMON, **_SOFTCAP, **_NEEDS, **_TEMPERATURE, "return_entropy": (True, False), "return_lse": (True, False)},
    ),
    "linear_logp, p - 1": ("linear_logp", {**_COMMON, **_TEMPERATURE, "needs": ((True, True, False),)}),
    "jsd": (
        "jsd",
        {
            **_COMMON, **_SOFTCAP, **_NEEDS, **_REDUCED, "teacher_bias": ("same", torch.float32, None),
            "teacher_softcap": (20.0, None), "beta": (0.5, 0.0, 1.0), "target": (True, False),
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A launch, as far as its machine code depends on it.

    Attributes:
        kernel: Its name in ``headmux.backends.triton.kernels``.
        arguments: Names and values, a dtype in place of a tensor.
        settings: Triton's own keywords.
    """

    kernel: str
    arguments: tuple[tuple[str, Any], ...]
    settings: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        def short(value: Any) -> str:
            return str(value).removeprefix("torch.")

        return f"{self.kernel}({', '.join(f'{n}={short(v)}' for n, v in (*self.arguments, *self.settings))})"


@dataclass(frozen=True)
class Result:
    """What became of a launch on an architecture: what it takes, or why it did not compile."""

    arch: int
    launch: Launch
    registers: int = 0
    stack: int = 0
    shared: int = 0
    error: str | None = None

    @property
    def wrong(self) -> str | None:
        """Why it cannot be accepted."""
        if self.error is not None:
            return f"DOES NOT COMPILE: {self.error}"
        if self.stack > 0:
            return "SPILLS"
        return "HAS TOO MUCH SHARED MEMORY" if self.shared > MOST_SHARED[self.arch] else None

    def __str__(self) -> str:
        facts = f"registers {self.registers:3}  stack {self.stack:3}  shared {self.shared:6}"
        return f"sm_{self.arch:<3}  {facts}  {self.launch}{f'  {self.wrong}' if self.wrong else ''}"


def covering(options: Mapping[str, Sequence[Any]], strength: int) -> Iterator[Options]:
    """The first values, the last values, and what else it takes that any ``strength`` options have every combination
    of their values.
    """
    names, values = list(options), list(options.values())
    groups = list(itertools.combinations(range(len(names)), strength))
    left = {(g, v) for g in groups for v in itertools.product(*(range(len(values[i])) for i in g))}
    chance = random.Random(0)

    def covered(row: Sequence[int]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        return {(g, tuple(row[i] for i in g)) for g in groups}

    def completed() -> list[int]:
        row = [chance.randrange(len(v)) for v in values]
        for i, choice in zip(*needed, strict=True):
            row[i] = choice
        return row

    rows = [[0] * len(names), [len(v) - 1 for v in values]]
    for row in rows:
        left -= covered(row)
    while left:
        needed = min(left)
        rows.append(max((completed() for _ in range(50)), key=lambda row: len(covered(row) & left)))
        left -= covered(rows[-1])
    for row in rows:
        yield {n: v[i] for n, v, i in zip(names, values, row, strict=True)}


def launches(strength: int = 2) -> list[Launch]:
    """Every launch of the calls that ``SPACES`` describe, once."""
    found: dict[Any, Launch] = {}

    def note(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        names = list(kernel.arg_names)
        bound = {**dict(zip(names, args, strict=False)), **keywords}
        arguments = tuple((n, _described(bound.pop(n))) for n in names)
        launch = Launch(kernel.__name__, arguments, tuple(sorted(bound.items())))
        constants = {p.name for p in kernel.params if p.is_constexpr}
        free = {p.name for p in kernel.params if p.do_not_specialize}
        key = tuple(v if n in constants else _specialized(v, n in free) for n, v in arguments)
        found.setdefault((launch.kernel, key, launch.settings), launch)

    with mock.patch.object(JITFunction, "run", note), FakeTensorMode():
        for op, space in SPACES.values():
            for options in covering(space, strength):
                _call(op, options)
    return list(found.values())


def _described(value: Any) -> Any:
    return value.dtype if isinstance(value, Tensor) else value


def _specialized(value: Any, free: bool) -> Any:
    """What of an argument Triton compiles for."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, float):
        return float
    width = 32 if -(2**31) <= value < 2**31 else 64
    return (width,) if free else (width, value == 1, value % 16 == 0)


def _call(op: str, options: Options) -> None:
    """One forward, and one backward if any gradient is needed, without data."""
    o = dict(options)
    tokens, classes, hidden = o.pop("tokens"), o.pop("classes"), o.pop("hidden")
    dtype = o.pop("dtype")
    kept = torch.float32 if o.pop("autocast") else dtype
    needs = o["needs"] if o["bias"] else (*o["needs"][:2], False)

    def vector(kind: torch.dtype | str | None, size: int) -> Tensor | None:
        return None if kind is None else torch.empty(size, dtype=kept if kind == "same" else kind)

    def weight() -> Tensor:
        return torch.empty(classes, hidden, dtype=kept)

    states, rows = torch.empty(tokens, hidden, dtype=kept), torch.empty(tokens)
    target = torch.empty(tokens, dtype=torch.int64)
    o["needs"] = needs
    o["bias"] = vector(o["bias"], classes)
    reduced = o.pop("reduced", False)
    scale, scalar = (rows, torch.empty(())) if reduced else (None, None)
    args: Any
    if op == "flce":
        o["ce_weight"] = torch.empty(classes) if o.get("ce_weight") else None
        args = FLCEArgs(states, weight(), target=target, row_scale=scale, compute_dtype=dtype, **o)
        arriving: tuple[Tensor | None, ...] = (rows, None, None)
    elif op == "linear_logp":
        o["token_temperature"] = rows if o["token_temperature"] else None
        args = LinearLogpArgs(states, weight(), target=target, compute_dtype=dtype, **o)
        arriving = (rows, rows if o.get("return_entropy") else None, rows if o.get("return_lse") else None)
    else:
        o["student_bias"], o["student_softcap"] = o.pop("bias"), o.pop("softcap")
        o["teacher_bias"] = vector(o["teacher_bias"], classes)
        o["target"] = target if o["target"] else None
        args = JSDArgs(
            states, weight(), teacher_input=states, teacher_weight=weight(), row_scale=scale, compute_dtype=dtype,
            teacher_compute_dtype=dtype, **o,
        )  # fmt: skip
        arriving = (rows,)
    kernel = backend.kernels[op]
    _, residual = kernel.forward(args)
    if any(needs):
        kernel.backward(args, residual, Upstream(arriving, scalar))


class _Driver:
    """Stands in for a GPU's driver where kernels are only compiled; a device's index is its architecture."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    @classmethod
    def is_active(cls) -> bool:
        return True


def compiled(job: tuple[int, Launch]) -> Result:
    """Compile a launch for an architecture."""
    arch, launch = job
    triton.runtime.driver.set_active(_Driver(arch))
    kernel = getattr(kernels, launch.kernel)
    arguments = {n: MockTensor(v) if isinstance(v, torch.dtype) else v for n, v in launch.arguments}
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION")
    try:
        made = kernel.warmup(**arguments, **dict(launch.settings), grid=(1,))
        (found,) = usage(made.asm["cubin"]).values()
    except Exception as error:
        return Result(arch, launch, error=f"{type(error).__name__}: {error}")
    return Result(arch, launch, found.registers, found.stack, max(found.shared, made.metadata.shared))


def jobs_of(launches: Sequence[Launch], archs: Sequence[int], *, every: bool) -> Iterator[tuple[int, Launch]]:
    """Launches with architectures: each with every one, or those of a kernel with them in turn."""
    turns: dict[str, Iterator[int]] = {}
    for launch in launches:
        turn = turns.setdefault(launch.kernel, itertools.cycle(archs))
        for arch in archs if every else (next(turn),):
            yield arch, launch


def results(jobs: Sequence[tuple[int, Launch]], workers: int) -> Iterator[Result]:
    """What became of each, in order, compiled anew by so many processes."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
                yield from pool.map(compiled, jobs, chunksize=4)
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


def main(argv: list[str] | None = None) -> int:
    """Print what every kernel takes at most and what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m headmux.backends.triton.compile", description=__doc__)
    parser.add_argument("--arch", default="80,90,100", help="architectures, a comma list of %(default)s")
    parser.add_argument("--every", action="store_true", help="compile each launch for every architecture")
    parser.add_argument("--strength", type=int, default=2, help="options of which all combinations are compiled")
    parser.add_argument("--verbose", action="store_true", help="print every launch")
    options = parser.parse_args(argv)
    if INTERPRETED:
        parser.error("nothing is compiled while TRITON_INTERPRET is set")
    archs = [int(word) for word in options.arch.split(",")]
    if unknown := set(archs) - set(MOST_SHARED):
        parser.error(f"--arch: {sorted(unknown)} are not among {sorted(MOST_SHARED)}")
    begun = time.monotonic()
    jobs = list(jobs_of(launches(options.strength), archs, every=options.every))
    bad = 0
    most: dict[tuple[str, int], list[Result]] = {}
    for one in results(jobs, os.cpu_count() or 1):
        most.setdefault((one.launch.kernel, one.arch), []).append(one)
        bad += one.wrong is not None
        if one.wrong or options.verbose:
            print(one, flush=True)
    for (kernel, arch), found in sorted(most.items()):
        registers, stack, shared = (max(getattr(r, f) for r in found) for f in ("registers", "stack", "shared"))
        facts = f"registers {registers:3}  stack {stack:3}  shared {shared:6}"
        print(f"{kernel:15} sm_{arch:<3}  {len(found):3} launches, at most {facts}")
    seconds = time.monotonic() - begun
    print(f"triton {triton.__version__}: {len(jobs)} compiled in {seconds:.0f} s, {bad} not accepted")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
