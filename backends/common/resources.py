"""What kernels take, read from their machine code without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path

MOST_SHARED = {80: 166912, 90: 232448, 100: 232448}
"""Bytes of shared memory that a thread block can have, by 10 times the compute capability."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes.

    Attributes:
        registers: Registers of a thread at launch.
        stack: Bytes of stack and local memory of a thread. Above 0, registers spill.
        shared: Bytes of shared memory of a thread block that are known at compile time.
        code: Its machine code, empty if it was not asked for.
    """

    registers: int
    stack: int
    shared: int
    code: str = ""


def usage(cubin: bytes, *, code: bool = False) -> dict[str, Usage]:
    """For each kernel of a cubin, by its symbol, what it takes.

    Raises:
        FileNotFoundError: There is no cuobjdump.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        facts = _dump("--dump-resource-usage", file.name)
        listing = _dump("-sass", file.name) if code else ""
    bodies = dict(part.split(maxsplit=1) for part in listing.split("Function : ")[1:])
    found = {}
    for symbol, line in re.findall(r"Function (\S+):\s*(REG:.*)", facts):
        count = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line)}
        stack = count["STACK"] + count["LOCAL"]
        found[symbol] = Usage(count["REG"], stack, count["SHARED"], bodies.get(symbol, ""))
    return found


def _dump(what: str, path: str) -> str:
    return subprocess.run([_cuobjdump(), what, path], capture_output=True, text=True, check=True).stdout


@cache
def _cuobjdump() -> str:
    """The one in Triton's package, or one on the path."""
    spec = util.find_spec("triton")
    folders = [] if spec is None else spec.submodule_search_locations or []
    inside = [Path(folder) / "backends/nvidia/bin/cuobjdump" for folder in folders]
    found = next((str(path) for path in inside if path.exists()), None) or shutil.which("cuobjdump")
    if found is None:
        raise FileNotFoundError("cuobjdump is neither in Triton's package nor on the path")
    return found
