"""Results as JSON: a header that says where and how, and one record per (op, provider, shape, dtype, variant), or per
(kernel, backend, shape, dtype).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, overload

import torch

SCHEMA = 1
Key = tuple[str, str, int, int, int, str, str]
KernelKey = tuple[str, str, int, int, int, str]


@dataclass
class Record:
    """One measured provider, or the reason why it was not.

    Attributes:
        op: Name of the op.
        provider: Name of the provider.
        n: Tokens.
        h: Hidden size.
        v: Vocabulary.
        dtype: dtype of hidden states and weights.
        variant: How it was called, see ``headmux.bench.shapes.Variant``.
        ms: Median over the rounds.
        p20: 20th percentile.
        p80: 80th percentile.
        floor_ms: Median of the matrix products alone in the same rounds.
        ratio: ms over floor_ms.
        extra_mib: Peak memory over the inputs.
        extra_mib_beyond_grads: The same less the gradients.
        err_loss: Relative error of the loss.
        err_input: Relative error of the input's gradient.
        err_weight: Relative error of the weight's gradient.
        err_weight_untargeted: The same on the rows of tokens that are nobody's label.
        syncs: How often the host waited for the GPU.
        graph: Whether it captures into a CUDA graph.
        error: Why there is no time.
        rounds: How many rounds the times are from.
        softcap: Bound of the logits.
        model: Name of the model with such a head.
        config: The provider's configuration in words.
        graph_error: Why it does not capture.
        setup_s: Seconds of the first call: imports, compilation, tuning.
        rss_mib: Peak growth of resident memory over the inputs in a process of its own, gradients included.
    """

    op: str
    provider: str
    n: int
    h: int
    v: int
    dtype: str
    variant: str
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    floor_ms: float | None = None
    ratio: float | None = None
    extra_mib: float | None = None
    extra_mib_beyond_grads: float | None = None
    err_loss: float | None = None
    err_input: float | None = None
    err_weight: float | None = None
    err_weight_untargeted: float | None = None
    syncs: int | None = None
    graph: bool | None = None
    error: str | None = None
    rounds: int | None = None
    softcap: float | None = None
    model: str = ""
    config: str = ""
    graph_error: str | None = None
    setup_s: float | None = None
    rss_mib: float | None = None

    @property
    def key(self) -> Key:
        """What tells records apart."""
        return (self.op, self.provider, self.n, self.h, self.v, self.dtype, self.variant)

    @property
    def case(self) -> tuple[Any, ...]:
        """What records of one table have in common."""
        return (self.op, self.n, self.h, self.v, self.dtype, self.variant)


@dataclass
class KernelRecord:
    """One measured step of a backend, see ``headmux.bench.kernels``.

    Attributes:
        kernel: Name of the step.
        n: Tokens.
        h: Hidden size.
        v: Vocabulary.
        dtype: dtype of hidden states and weights.
        ms: Median over the rounds.
        p20: 20th percentile.
        p80: 80th percentile.
        work: Bytes that it has to read and write, or floating-point operations of a matrix product.
        unit: Of the rates: TB/s or TFLOP/s.
        rate: Its work over its median.
        beside: The same of a copy of as many bytes, or of PyTorch's product, in the same rounds.
        share: The first rate over the second.
        backend: Whose step it is.
    """

    kernel: str
    n: int
    h: int
    v: int
    dtype: str
    ms: float
    p20: float
    p80: float
    work: int
    unit: str
    rate: float
    beside: float
    share: float
    backend: str

    @property
    def key(self) -> KernelKey:
        """What tells records apart."""
        return (self.kernel, self.backend, self.n, self.h, self.v, self.dtype)


def _record(item: dict[str, Any]) -> Record | KernelRecord:
    """A record from its values by name, of which unknown ones are left out."""
    of = KernelRecord if "kernel" in item else Record
    known = {f.name for f in fields(of)}
    return of(**{k: v for k, v in item.items() if k in known})


class Results:
    """A header and records, written to a file after every record, so that an interrupted run keeps what it has."""

    def __init__(self, header: dict[str, Any], path: Path | None = None) -> None:
        self.header = header
        self.path = path
        self._records: dict[Key | KernelKey, Record | KernelRecord] = {}

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file.

        Raises:
            ValueError: Not such a file.
        """
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or "header" not in data or "records" not in data:
            raise ValueError(f"{path} is not a file of results: it needs a header and records")
        found = cls(data["header"])
        for item in data["records"]:
            found.put(_record(item))
        return found

    @property
    def records(self) -> list[Record]:
        """Every provider's record, in the order of their first writing."""
        return [r for r in self._records.values() if isinstance(r, Record)]

    @property
    def kernels(self) -> list[KernelRecord]:
        """Every kernel's record, in the order of their first writing."""
        return [r for r in self._records.values() if isinstance(r, KernelRecord)]

    def put(self, record: Record | KernelRecord) -> None:
        """Add a record, or replace the one with its key."""
        self._records[record.key] = record
        self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join("  " + json.dumps(asdict(r)) for r in self._records.values())
        text = f'{{"header": {json.dumps(self.header, indent=1)},\n"records": [\n{lines}\n]}}\n'
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(text)
        os.replace(part, self.path)


@overload
def rounded(value: float, digits: int = 4) -> float: ...
@overload
def rounded(value: float | None, digits: int = 4) -> float | None: ...
def rounded(value: float | None, digits: int = 4) -> float | None:
    """A number with so many significant digits."""
    return None if value is None else float(f"{value:.{digits}g}")


def header(device: torch.device, argv: list[str]) -> dict[str, Any]:
    """Where and how: device, driver, clocks, versions, commit, command and time."""
    cuda = device.type == "cuda"
    found: dict[str, Any] = {"schema": SCHEMA, "device": _device_name(device)}
    found |= _nvidia(device) if cuda else {"driver": None, "clocks": None}
    found |= {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "cutlass": _version("nvidia-cutlass-dsl"),
        "headmux": _version("headmux"),
        "peers": {n: _version(n) for n in ("liger-kernel", "cut-cross-entropy", "quack-kernels")},
        "python": platform.python_version(),
        "threads": None if cuda else torch.get_num_threads(),
        "fp32_matmul": torch.get_float32_matmul_precision(),
        "commit": _commit(),
        "command": command(shlex.join(["python", "-m", "headmux.bench", *argv])),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return found


def command(line: str) -> str:
    """A command line whose output files have lost their folders, which mean nothing on another machine."""
    words = shlex.split(line)
    for i, word in enumerate(words[1:], 1):
        if words[i - 1] in ("--json", "--plot", "--out"):
            words[i] = Path(word).name
    return shlex.join(words)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or device.type


def _nvidia(device: torch.device) -> dict[str, Any]:
    names = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    which = ["-i", f"GPU-{uuid}"] if uuid else ["-i", str(device.index or 0)]
    for chosen in (which, ["-i", "0"]):  # inside a partition the device's own id may be unknown to the tool
        text = _output(["nvidia-smi", *chosen, "--query-gpu=" + ",".join(names), "--format=csv,noheader"])
        parts = [p.strip() for p in text.splitlines()[0].split(",")] if text else []
        if len(parts) == len(names):
            return {"driver": parts[0], "clocks": dict(zip(names[1:], parts[1:], strict=True))}
    return {"driver": None, "clocks": None}


def _commit() -> str | None:
    if given := os.environ.get("HEADMUX_COMMIT"):
        return given
    folder = Path(__file__).resolve().parent
    commit = _output(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
    if commit is None:
        return None
    changed = _output(["git", "-C", str(folder.parent), "status", "--porcelain", "--untracked-files=no", "backends",
                       "bench", "dispatch", "ops"])
    return commit + ("+changes" if changed else "")


def _output(command: list[str]) -> str | None:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
