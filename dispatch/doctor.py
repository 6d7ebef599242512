"""What this machine can run: versions, devices, environment, and every op on every backend with all reasons."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

import headmux
from headmux import registry, select
from headmux.contract import Call
from headmux.devices import Inventory, inventory

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python")
_PREFIXES = ("HEADMUX_", "LIGER_KERNEL_", "TRITON_", "CUTE_DSL_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
             "NVIDIA_TF32_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK", "RANK", "WORLD_SIZE")
SIZES = {"N": 8192, "H": 4096, "V": 128256, "H_teacher": 4096}
"""The example call of the report: 8192 tokens of a model with 8 billion parameters."""
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One op on one device.

    Attributes:
        op: Name of the op.
        reasons: Backend name to its reasons against the example call; empty where it runs.
        chosen: The backend that would run it now, or None.
        source: Where the order of candidates comes from, or what is wrong with it.
    """

    op: str
    reasons: dict[str, tuple[str, ...]]
    chosen: str | None
    source: str


@dataclass(frozen=True)
class Report:
    """Everything that ``python -m headmux`` prints.

    Attributes:
        versions: What is installed, by name; None where it is not.
        cuda: The CUDA devices.
        environment: The variables that matter and are set.
        devices: Device name to its rows.
    """

    versions: dict[str, str | None]
    cuda: Inventory
    environment: dict[str, str]
    devices: dict[str, list[Row]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "versions": self.versions,
            "driver": self.cuda.driver,
            "cuda_devices": [
                {"name": d.name, "title": d.title, "memory": d.memory,
                 "capability": None if d.capability is None else list(d.capability)}
                for d in self.cuda.devices
            ],
            "cuda_devices_from": self.cuda.source,
            "problems": list(self.cuda.problems),
            "environment": self.environment,
            "support": {
                device: {
                    row.op: {
                        "selected": row.chosen,
                        "order": row.source,
                        "reasons": {name: list(reasons) for name, reasons in row.reasons.items()},
                    }
                    for row in rows
                }
                for device, rows in self.devices.items()
            },
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        width = max(map(len, self.versions))
        for name, version in self.versions.items():
            yield f"{name:<{width}}  {version or 'not installed'}"
        yield ""
        yield from self._device_lines()
        yield ""
        yield "environment"
        for name, value in self.environment.items():
            yield f"  {name}={value}"
        if not self.environment:
            yield "  nothing set that headmux or a backend reads"
        for device, rows in self.devices.items():
            yield ""
            yield from _table(device, rows)

    def _device_lines(self) -> Iterator[str]:
        yield "devices"
        yield f"  cpu     {platform.machine() or 'unknown'}, {torch.get_num_threads()} threads"
        for d in self.cuda.devices:
            facts = [d.title]
            if d.capability is not None:
                facts.append(f"capability {d.capability[0]}.{d.capability[1]}")
            if d.memory is not None:
                facts.append(f"{d.memory / 2**30:.0f} GiB")
            yield f"  {d.name or 'hidden':<7} {', '.join(facts)}"
        if not self.cuda.devices:
            yield "  no CUDA device"
        for problem in self.cuda.problems:
            yield f"  {problem}"


def examine() -> Report:
    """Look at this machine. Never raises for what it finds; a failure becomes the text of its line."""
    found = inventory()
    places: list[tuple[str, tuple[int, int] | None]] = [("cpu", None)]
    places += [(d.name, d.capability) for d in found.devices if d.name is not None]
    devices = {name: [_row(op, torch.device(name), capability) for op in registry.op_names()]
               for name, capability in places}
    return Report(_versions(), found, _environment(), devices)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"headmux": headmux.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
        except Exception as error:  # an installation cut short leaves metadata that does not parse
            versions[package] = f"unreadable: {type(error).__name__}"
    versions["torch"] = f"{torch.__version__} (CUDA {torch.version.cuda or 'no'})"
    return versions


def _environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def _row(op: str, device: torch.device, capability: tuple[int, int] | None) -> Row:
    try:
        call = registry.get_op(op).call_on(device, capability, SIZES, DTYPE)
    except Exception as error:
        return Row(op, {}, None, f"the op is broken: {type(error).__name__}: {error}")
    reasons = {name: _reasons(name, call) for name in registry.names()}
    try:
        found = select.decide(call)
    except Exception as error:  # an unknown name in a variable, or a bug of a backend
        return Row(op, reasons, None, str(error))
    return Row(op, reasons, found.chosen, found.source)


def _reasons(backend: str, call: Call) -> tuple[str, ...]:
    if call.device.type == "cuda" and torch.version.cuda is None:
        return (f"PyTorch {torch.__version__} is built without CUDA",)
    try:
        return registry.get_backend(backend).reject(call, thorough=True)
    except Exception as error:  # a bug of a backend stops a call, but not this report
        return (f"broken: {type(error).__name__}: {error}",)


def _table(device: str, rows: list[Row]) -> Iterator[str]:
    backends = list(dict.fromkeys(name for row in rows for name in row.reasons))
    first = max(len(device), *(len(row.op) + 2 for row in rows))
    columns = {name: max(len(name), len("usable")) for name in backends}
    yield "  ".join([f"{device:<{first}}", *(f"{name:<{w}}" for name, w in columns.items()), "runs on"])
    for row in rows:
        states = {name: "-" if row.reasons.get(name, ("",)) else "usable" for name in backends}
        cells = [f"{states[name]:<{w}}" for name, w in columns.items()]
        yield "  ".join([f"{'  ' + row.op:<{first}}", *cells, f"{row.chosen or 'nothing'} ({row.source})"])
    width = max((len(name) for name in backends), default=0)
    for name in backends:
        head = name
        for text in _told(name, rows):
            yield f"  {head:<{width}}  {text}"
            head = ""


def _told(backend: str, rows: list[Row]) -> list[str]:
    """A backend's reasons: those of every op once, those of some with the op's name."""
    each = {row.op: row.reasons.get(backend, ()) for row in rows}
    common = [r for r in next(iter(each.values()), ()) if all(r in reasons for reasons in each.values())]
    single = [f"{op}: {r}" for op, reasons in each.items() for r in reasons if r not in common]
    return common + single
