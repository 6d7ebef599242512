"""Compile every configuration for Hopper, and what is not a matrix product for Blackwell too, without a GPU, and say
what the kernels take.

``python -m headmux.backends.cutedsl.compile`` fails if one spills or asks for more shared memory than there is. It
needs the cuobjdump that comes with Triton, or one on the path.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from headmux.backends.common import resources as common
from headmux.backends.cutedsl.build import (
    ARCHITECTURE,
    SCALED,
    Adding,
    Comparison,
    Config,
    Kind,
    Scaling,
    Sorting,
    compiled,
)

MOST_SHARED = common.MOST_SHARED[90]
"""Bytes of shared memory that a thread block can have on Hopper."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes.

    Attributes:
        architecture: What for.
        config: Its configuration.
        kernel: ``"guess"``, ``"logits"``, ``"merge"``, ``"settle"``, ``"scale"``, ``"sort"``, ``"diverge"`` or
            ``"accumulate"``.
        registers: Registers of a thread at launch.
        stack: Bytes of stack of a thread. Above 0, registers spill.
        shared: Bytes of shared memory of a thread block.
        products: WGMMA instructions.
    """

    architecture: str
    config: Kind
    kernel: str
    registers: int
    stack: int
    shared: int
    products: int

    def __str__(self) -> str:
        facts = f"registers {self.registers:3}  stack {self.stack}  shared {self.shared:6}  wgmma {self.products}"
        return f"{self.architecture:7}  {self.kernel:7}  {facts}  {self.config}"


def configs() -> Iterator[Kind]:
    """Every configuration."""
    for dtype, *flags in itertools.product((torch.bfloat16, torch.float16), *[(False, True)] * 4):
        yield Config(dtype, *flags)
    for bias, per_token in itertools.product(*[(False, True)] * 2):
        yield Config(torch.bfloat16, bias=bias, per_token=per_token, keep=True)
    for dtype in (torch.bfloat16, torch.float16):
        for bias, softcap in itertools.product(*[(False, True)] * 2):
            yield Config(dtype, bias=bias, softcap=softcap, store=True)
        for beta in (0.0, None, 1.0):
            yield Comparison(beta, beta == 0.0, dtype)
    for beta in (0.0, None, 1.0):
        yield Comparison(beta, True, None)
    for kind, each in itertools.product(SCALED, (False, True)):
        yield Scaling(kind, each)
    for ignores in (False, True):
        yield Sorting(ignores)
    adding = ((False, False, False), (True, False, False), (False, True, False), (False, True, True))
    for dtype, (add, inside, more) in itertools.product((torch.bfloat16, torch.float16), adding):
        yield Adding(dtype, add, inside, more)


def targets() -> Iterator[tuple[Kind, str]]:
    """Every configuration with each architecture that it is to compile for. Products are for exactly one."""
    for config in configs():
        yield config, ARCHITECTURE
        if not isinstance(config, Config | Adding):
            yield config, "sm_100a"


def resources(config: Kind, architecture: str = ARCHITECTURE) -> list[Resources]:
    """Compile a configuration and read its kernels' resources from the machine code.

    Raises:
        FileNotFoundError: There is no cuobjdump.
    """
    from headmux.backends.cutedsl.accumulate import SHARED_BYTES
    from headmux.backends.cutedsl.forward import shared_bytes

    with tempfile.TemporaryDirectory() as folder:
        cubin = compiled(config, f"--keep-cubin --dump-dir {folder}", architecture).__cubin__
    found = []
    for symbol, one in common.usage(cubin, code=True).items():
        kernel = _kernel(symbol)
        shared = one.shared
        if kernel == "accumulate":
            shared = SHARED_BYTES
        elif isinstance(config, Config) and kernel == "logits":
            shared = shared_bytes(config.keep)
        found.append(Resources(architecture, config, kernel, one.registers, one.stack, shared, one.code.count("HGMMA")))
    return found


def _kernel(symbol: str) -> str:
    names = ("guess", "logits", "settle", "scale", "sort", "diverge", "accumulate")
    return next((name for name in names if f"_{name}_" in symbol), "merge")


def main() -> int:
    """Print the resources of every kernel; the number of those that spill or do not fit."""
    bad = 0
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for one in itertools.chain.from_iterable(pool.map(resources, *zip(*targets(), strict=True))):
            wrong = one.stack > 0 or one.shared > MOST_SHARED
            bad += wrong
            print(f"{one}{'  SPILLS OR DOES NOT FIT' if wrong else ''}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(min(main(), 1))
