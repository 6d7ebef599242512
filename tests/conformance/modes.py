"""Dispatch modes that look into what a backend asks of PyTorch while it runs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_UNINITIALISED = (
    _aten.empty,
    _aten.new_empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty_strided,
)
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.mv: 0, _aten.addmm: 1, _aten.baddbmm: 1, _aten.addmv: 1}


class Poisoned(TorchDispatchMode):
    """Fills fresh uninitialised memory with NaN, or with garbage in integers, so that a read of it shows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNINITIALISED and isinstance(found, Tensor) and found.numel():
            if found.is_floating_point():
                found.fill_(math.nan)
            elif found.dtype != torch.bool:
                found.fill_(torch.iinfo(found.dtype).max // 3)
        return found


class Watch(TorchDispatchMode):
    """Records the storages that come into being and the work of matrix products.

    Attributes:
        largest: Bytes of the largest storage behind any result.
        elements: Number of elements of the largest floating-point result that is a storage of its own.
        flops: Floating-point operations of matrix products that PyTorch made.
    """

    def __init__(self, *known: Tensor | None) -> None:
        super().__init__()
        self._known = {t.untyped_storage().data_ptr() for t in known if t is not None}
        self.largest = 0
        self.elements = 0
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        first = _PRODUCTS.get(func.overloadpacket)
        if first is not None:
            left, right = args[first], args[first + 1]
            self.flops += 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)
        for t in tree_leaves(found):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self._known:
                size = t.untyped_storage().nbytes()
                self.largest = max(self.largest, size)
                if t.is_floating_point():
                    self.elements = max(self.elements, size // t.element_size())
        return found
