"""Sizes of tiles and numbers of programs: data, with the reasons for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
from torch import Tensor

from headmux.backends.common.budget import MIB

# Bytes by which grad_weight's storage is longer than it, where it holds 16-bit logits: 4224 rows of 4096 tokens, which
# are 33 rows of tiles of a product, and 132 multiprocessors compute those in whole waves if H is a multiple of 1024.
# On an H200 `python -m headmux.bench kernels` finds grad_weight of 4096 tokens at 0.96 of one product's rate, and in
# blocks of 2048 rows at 0.94.
BLOCK = 33 * MIB

# Tokens of a chunk whose 16-bit logits are only looked at, where fewer than twice as many fit. On an H200 linear_logp
# without gradients, 4096 tokens of V = 128256 and H = 4096, takes 1.05 of its product so, and 1.07 in chunks of 1024.
LOOKED_AT = 832

INTERPRETED: bool = triton.knobs.runtime.interpret
# told no bound, ptxas spills a few bytes to fit one more program on a multiprocessor
MOST_REGISTERS = 232


# Triton's own are made for use in kernels too, and cost a call's host ten times as much
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is not below n, for n of 1 or more."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel walks over logits [V, n].

    Attributes:
        classes: Most classes of a tile.
        tokens: Most tokens of a tile; of fp32 logits half as many.
        warps: Warps of a program.
        programs: Programs of a launch; each walks over an equal share of the vocabulary.
        stages: Tiles on their way through shared memory at once; 1 loads a tile when its turn comes.
    """

    classes: int
    tokens: int
    warps: int
    programs: int
    stages: int = 1

    def cut(self, raw: Tensor) -> Cut:
        """The tiles of logits [V, n]."""
        return _cut(self, *raw.shape, raw.dtype == torch.float32)


@lru_cache(maxsize=1024)
def _cut(tile: Tile, vocabulary: int, tokens: int, wide: bool) -> Cut:
    width = min(tile.tokens // 2 if wide else tile.tokens, max(16, next_power_of_2(tokens)))
    height = min(tile.classes, next_power_of_2(vocabulary))
    columns = cdiv(tokens, width)
    parts = max(1, min(tile.programs // columns, cdiv(vocabulary, 4 * height)))
    rows = cdiv(cdiv(vocabulary, parts), height) * height
    parts = cdiv(vocabulary, rows)
    return Cut(height, width, rows, parts, columns * parts, vocabulary % height == 0, tile.warps, tile.stages)


@dataclass(frozen=True, slots=True)
class Cut:
    """Tiles of ``height`` classes and ``width`` tokens; ``rows`` classes a program, in ``parts`` parts."""

    height: int
    width: int
    rows: int
    parts: int
    programs: int
    even: bool
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tiles of each kernel: ``compare`` and ``diverge`` are ``diverge`` without and with a gradient."""

    look: Tile
    exponentiate: Tile
    gradient: Tile
    compare: Tile
    diverge: Tile


# Chosen on an H200 with Triton 3.6; `python -m headmux.bench kernels` measures what they reach of a copy's bandwidth.
# With one warp a program no sum crosses threads on the way. Exponentials are loaded tile by tile: a program that may go
# back over what it has stored is not pipelined.
_GPU = Tuning(
    look=Tile(classes=4, tokens=256, warps=1, programs=132 * 16, stages=4),
    exponentiate=Tile(classes=4, tokens=256, warps=1, programs=132 * 16),
    gradient=Tile(classes=8, tokens=256, warps=4, programs=132 * 64, stages=3),
    compare=Tile(classes=4, tokens=128, warps=1, programs=132 * 16, stages=3),
    diverge=Tile(classes=2, tokens=256, warps=1, programs=132 * 64, stages=3),
)
# the interpreter pays by the tile; two programs walk over the vocabulary so that parts are merged
_INTERPRETER = Tuning(*[Tile(classes=256, tokens=128, warps=1, programs=2)] * 5)


@cache
def tuning(device: torch.device) -> Tuning:
    """The tuning for a device."""
    return _INTERPRETER if INTERPRETED else _GPU
