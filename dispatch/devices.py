"""Facts about devices that selection, backends and the command line ask for."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """A device of this machine, as far as it can be told without opening it.

    Attributes:
        name: How PyTorch calls it, such as ``"cuda:0"``; None for one that ``CUDA_VISIBLE_DEVICES`` hides.
        title: Its maker's name for it.
        capability: CUDA compute capability, or None.
        memory: Bytes of memory, or None if unknown.
    """

    name: str | None
    title: str
    capability: tuple[int, int] | None
    memory: int | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """The CUDA devices of this machine and how they were found.

    Attributes:
        devices: The devices; empty if there is none, or none can be asked.
        source: ``"nvml"``, ``"torch"`` or ``"none"``.
        driver: Version of the NVIDIA driver, if known.
        problems: Why a source that was tried said nothing.
    """

    devices: tuple[Device, ...]
    source: str
    driver: str | None
    problems: tuple[str, ...]


def capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability of a device; None for other kinds, AMD GPUs among them."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _cuda_capability(_index(device))


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU of CUDA; 1 for other kinds of devices."""
    if device.type != "cuda":
        return 1
    return _cuda_multiprocessors(_index(device))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _cuda_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _cuda_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def inventory() -> Inventory:
    """The CUDA devices, from NVML where cuda-python is installed, else from PyTorch. Never raises.

    NVML creates no CUDA context, so asking it stays safe before a fork. It lists devices in the order of their bus
    addresses; CUDA's own order is the same where the devices are equal or ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` is set.
    """
    problems: list[str] = []
    try:
        devices, driver = _from_nvml()
        return Inventory(devices, "nvml", driver, ())
    except Exception as error:  # a missing package or driver, or one that does not match the other
        problems.append(f"nvml: {_told(error)}")
    try:
        devices = _from_torch()
    except Exception as error:  # a driver too old for this PyTorch, a device in a bad state
        problems.append(f"torch: {_told(error)}")
        devices = ()
    return Inventory(devices, "torch" if devices else "none", None, tuple(problems))


def _told(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _from_nvml() -> tuple[tuple[Device, ...], str]:
    from cuda.bindings import nvml

    nvml.init_v2()
    try:
        handles = [nvml.device_get_handle_by_index_v2(i) for i in range(nvml.device_get_count_v2())]
        names = visible_names([nvml.device_get_uuid(h) for h in handles], os.environ.get("CUDA_VISIBLE_DEVICES"))
        found = []
        for handle, name in zip(handles, names, strict=True):
            major, minor = nvml.device_get_cuda_compute_capability(handle)
            memory = int(nvml.device_get_memory_info_v2(handle).total)
            found.append(Device(name, nvml.device_get_name(handle), (int(major), int(minor)), memory))
        return tuple(found), str(nvml.system_get_driver_version())
    finally:
        nvml.shutdown()


def visible_names(uuids: list[str], setting: str | None) -> list[str | None]:
    """PyTorch's name of each device in bus order, under a value of ``CUDA_VISIBLE_DEVICES``; None where hidden.

    As in CUDA, the list ends at its first entry that names no device, and an entry given twice hides everything.
    """
    if setting is None:
        return [f"cuda:{i}" for i in range(len(uuids))]
    order: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        order += matches
    if len(set(order)) != len(order):
        order = []
    return [f"cuda:{order.index(i)}" if i in order else None for i in range(len(uuids))]


def _from_torch() -> tuple[Device, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        found.append(Device(f"cuda:{i}", facts.name, capability(torch.device("cuda", i)), facts.total_memory))
    return tuple(found)
