"""Kernels built once a configuration: kept in memory, and on disk for later processes.

The folder is ``$HEADMUX_CACHE_DIR``, or ``headmux`` in the user's cache folder. An entry's name is a digest of
everything that changes the machine code: these sources, the compiler's and the loader's versions, the architecture
and the configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import platform
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headmux.backends.cutedsl.schedule import COLUMN, RING

ARCHITECTURE = "sm_90a"
VARIABLE = "HEADMUX_CACHE_DIR"
_NAME = "headmux_forward"

_kernels: dict[Kind, Callable[..., None]] = {}
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """What the machine code depends on.

    Attributes:
        dtype: torch.bfloat16 or torch.float16, of states and weight.
        bias: Add a bias.
        softcap: Bound the logits.
        entropy: Also return the entropy.
        per_token: The factor of the logits is one per token.
        keep: Leave exponentials of the logits, in torch.bfloat16, without softcap and entropy.
        store: Leave the logits, without labels, entropy and factors per token.
    """

    dtype: torch.dtype
    bias: bool = False
    softcap: bool = False
    entropy: bool = False
    per_token: bool = False
    keep: bool = False
    store: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Scaling:
    """What the machine code of ``headmux.backends.cutedsl.scale`` depends on.

    Attributes:
        dtype: One of ``SCALED``.
        each: A factor for each row.
    """

    dtype: torch.dtype
    each: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What the machine code of ``headmux.backends.cutedsl.diverge`` depends on.

    Attributes:
        beta: 0, 1, or None for what lies between.
        loss: Sum the divergence.
        gradient: dtype of the gradient, or None. Both at once only where beta is 0.
    """

    beta: float | None
    loss: bool
    gradient: torch.dtype | None


@dataclasses.dataclass(frozen=True, slots=True)
class Sorting:
    """What the machine code of ``headmux.backends.cutedsl.labels`` depends on.

    Attributes:
        ignores: Some labels may be ignored.
    """

    ignores: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Adding:
    """What the machine code of ``headmux.backends.cutedsl.accumulate`` depends on.

    Attributes:
        dtype: torch.bfloat16 or torch.float16, of everything.
        add: Add to what the sum holds.
        inside: The left operand lies inside the storage of the sum.
        more: There are two products.
    """

    dtype: torch.dtype
    add: bool
    inside: bool
    more: bool


Kind = Config | Scaling | Comparison | Sorting | Adding

SCALED = (torch.bfloat16, torch.float16, torch.float32)


def kernel(config: Kind) -> Callable[..., None]:
    """The compiled kernels of a configuration.

    Raises:
        RuntimeError: It would have to be built or loaded while a CUDA graph is captured.
    """
    found = _kernels.get(config)
    if found is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the cutedsl kernel of {config} is not loaded yet, and cannot be while a CUDA graph is captured: "
                "make the same call once before the capture"
            )
        with _lock:
            found = _kernels.get(config)
            if found is None:
                found = _kernels[config] = _loaded(config)
    return found


def compiled(config: Kind, options: str = "", architecture: str = ARCHITECTURE) -> Any:
    """Trace and compile a configuration, for a GPU that need not be there."""
    options = f"--gpu-arch {architecture} --enable-tvm-ffi {options}"
    if isinstance(config, Comparison):
        return _compare(config, options)
    if isinstance(config, Sorting):
        return _sort(config, options)
    if isinstance(config, Adding):
        return _accumulate(config, options)
    return _forward(config, options) if isinstance(config, Config) else _scale(config, options)


def _accumulate(config: Adding, options: str) -> Any:
    from cutlass import Int32, cute

    from headmux.backends.cutedsl.accumulate import Accumulate

    dtype, hidden, classes = _dtype(config.dtype), cute.sym_int(divisibility=8), cute.sym_int()

    def matrix(rows: Any, columns: Any) -> Any:
        stride = (cute.sym_int64(divisibility=8), 1)
        return cute.runtime.make_fake_tensor(dtype, (rows, columns), stride, assumed_align=16)

    ring = cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int(), RING), stride_order=(1, 0), assumed_align=4)
    read = None
    if config.inside:
        read = cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)

    def pair(given: bool = True) -> tuple[Any, Any]:
        tokens = cute.sym_int()
        return (matrix(tokens, hidden), matrix(classes, tokens)) if given else (None, None)

    return cute.compile(
        Accumulate(dtype, add=config.add, inside=config.inside, more=config.more), *pair(), *pair(config.more),
        matrix(classes, hidden), ring, read, Int32(1), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )  # fmt: skip


def _scale(config: Scaling, options: str) -> Any:
    from cutlass import Float32, Int32, cute

    from headmux.backends.cutedsl.scale import Scale

    dtype, count, hidden = _dtype(config.dtype), cute.sym_int(), cute.sym_int(divisibility=8)

    def matrix() -> Any:
        stride = (cute.sym_int64(divisibility=8), 1)
        return cute.runtime.make_fake_tensor(dtype, (count, hidden), stride, assumed_align=16)

    factors = cute.runtime.make_fake_compact_tensor(Float32, (count if config.each else 1,), assumed_align=4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        Scale(dtype, each=config.each), matrix(), factors, matrix(), Int32(1), stream, options=options
    )


def _compare(config: Comparison, options: str) -> Any:
    from cutlass import Float32, Int32, cute

    from headmux.backends.cutedsl.diverge import Diverge

    gradient = None if config.gradient is None else _dtype(config.gradient)
    classes, tokens = cute.sym_int(), cute.sym_int()

    def vector(given: bool) -> Any:
        return cute.runtime.make_fake_compact_tensor(Float32, (tokens,), assumed_align=4) if given else None

    stride = (cute.sym_int64(divisibility=8), 1)
    student, teacher = (
        cute.runtime.make_fake_tensor(Float32, (classes, tokens), stride, assumed_align=16) for _ in range(2)
    )
    out, partials = None, None
    if gradient is not None:
        stride = (cute.sym_int64(divisibility=4), 1)
        out = cute.runtime.make_fake_tensor(gradient, (classes, tokens), stride, assumed_align=8)
    diverge = Diverge(config.beta, loss=config.loss, gradient=gradient)
    if config.loss:
        shape = (diverge.planes, cute.sym_int(), tokens)
        partials = cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=(2, 1, 0))
    lses = [cute.runtime.make_fake_compact_tensor(Float32, (2, tokens), stride_order=(1, 0)) for _ in range(2)]
    return cute.compile(
        diverge, student, teacher, *lses, partials, vector(gradient is not None),
        vector(gradient is not None and not config.loss), out, *[Float32(1.0)] * 3, *[Int32(1)] * 3,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=options,
    )  # fmt: skip


def _sort(config: Sorting, options: str) -> Any:
    from cutlass import Boolean, Float32, Int32, Int64, cute

    from headmux.backends.cutedsl.labels import Sort

    tokens = cute.sym_int()

    def vector(kind: Any, align: int) -> Any:
        return cute.runtime.make_fake_compact_tensor(kind, (tokens,), assumed_align=align)

    return cute.compile(
        Sort(), vector(Int64, 8), vector(Int64, 8), vector(Boolean, 1) if config.ignores else None, vector(Float32, 4),
        Int64(0), Int32(1), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=options,
    )  # fmt: skip


def _dtype(dtype: torch.dtype) -> Any:
    import cutlass

    names = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}
    return getattr(cutlass, names[dtype])


def _forward(config: Config, options: str) -> Any:
    from cutlass import Float32, Int32, Int64, cute

    from headmux.backends.cutedsl.forward import Forward

    dtype = _dtype(config.dtype)
    tokens, classes, hidden = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)

    def matrix(rows: Any) -> Any:
        stride = (cute.sym_int64(divisibility=8), 1)
        return cute.runtime.make_fake_tensor(dtype, (rows, hidden), stride, assumed_align=16)

    def vector(kind: type, size: Any, given: bool = True) -> Any:
        return cute.runtime.make_fake_compact_tensor(kind, (size,), assumed_align=kind.width // 8) if given else None

    def planes(count: Any, size: Any, given: bool = True) -> Any:
        shape = (count, size)
        return cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=(1, 0)) if given else None

    held = None
    if config.keep or config.store:
        stride = (cute.sym_int64(divisibility=8), 1)
        kind = dtype if config.keep else Float32
        held = cute.runtime.make_fake_tensor(kind, (classes, tokens), stride, assumed_align=16)
    options_of = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "dtype"}
    return cute.compile(
        Forward(dtype, **options_of),
        matrix(tokens),
        matrix(classes),
        vector(Float32, cute.sym_int(divisibility=COLUMN), config.bias),
        vector(Int64, tokens, not config.store),
        vector(Float32, tokens, config.per_token),
        planes(3 if config.entropy else 2, cute.sym_int()),
        vector(Float32, tokens, not config.store),
        planes(2, tokens) if config.store else vector(Float32, tokens),
        vector(Float32, tokens, config.entropy),
        held,
        vector(Float32, tokens, config.keep),
        vector(Float32, tokens, config.keep),
        planes(cute.sym_int(), tokens, config.keep),
        planes(3, tokens, config.keep),
        *[Float32(1.0)] * 2,
        Int64(1),
        *[Int32(1)] * 6,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )


def _loaded(config: Kind) -> Callable[..., None]:
    try:
        path = _folder() / f"{_digest(config)}.o"
        if path.exists():
            with contextlib.suppress(Exception):  # a damaged entry is built anew
                return _load(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, config)
    except OSError:  # no folder to write to
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.o"
            _write(path, config)
            return _load(path)
    return _load(path)


def _write(path: Path, config: Kind) -> None:
    """Build into a file that appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        compiled(config).export_to_c(str(part), function_name=_NAME)
        os.replace(part, path)


def _load(path: Path) -> Callable[..., None]:
    from cutlass import cute

    found: Callable[..., None] = getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), _NAME)
    return found


def _folder() -> Path:
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headmux"
    except RuntimeError as error:  # the user has no home
        raise OSError(str(error)) from error


def _digest(config: Kind) -> str:
    return hashlib.sha256(f"{_fingerprint()} {config}".encode()).hexdigest()[:32]


@functools.cache
def _fingerprint() -> str:
    import cutlass
    import tvm_ffi

    sources = [p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py"))]
    facts = (ARCHITECTURE, platform.machine(), str(cutlass.CUDA_VERSION), cutlass.__version__, tvm_ffi.__version__)
    return hashlib.sha256(b"\0".join([*sources, repr(facts).encode()])).hexdigest()
