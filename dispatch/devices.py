"""Facts about devices that selection and backends ask for."""

from __future__ import annotations

import functools

import torch


def capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability of a device; None for other kinds."""
    if device.type != "cuda":
        return None
    return _cuda_capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
