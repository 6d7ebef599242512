"""Checks of arguments, the same for every op and made before any backend is considered."""

from __future__ import annotations

import math
import numbers
import os
import sys
from typing import Any, cast

import torch
from torch import Tensor

_LARGEST = 3.4028234e38  # of fp32: a larger factor makes every logit infinite

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def number(
    name: str, value: object, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> float:
    """A finite number within bounds, as a float.

    Raises:
        TypeError: Not an int or float (a bool is neither).
        ValueError: Not finite or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
        value = float(value)  # a NumPy scalar
    # comparisons alone, which torch.compile can trace for a number that it takes as dynamic; NaN fails the first
    if not (low <= value <= high) or abs(value) > _LARGEST or (open_low and value == low):
        raise ValueError(f"{name}={value} must be finite and {_bounds(low, high, open_low)}")
    return float(value)


def _bounds(low: float, high: float, open_low: bool) -> str:
    words = []
    if low != -math.inf:
        words.append(f"{'above' if open_low else 'at least'} {low:g}")
    if high != math.inf:
        words.append(f"at most {high:g}")
    return " and ".join(words) or "a real number"


def nonzero(name: str, value: object) -> float:
    """A finite number other than 0."""
    found = number(name, value)
    if found == 0.0:
        raise ValueError(f"{name}=0 makes every logit equal: pass another factor")
    return found


def softcap(name: str, value: object) -> float | None:
    """A bound of logits above 0, or None."""
    return None if value is None else number(name, value, low=0.0, open_low=True)


def flag(name: str, value: object) -> bool:
    """A bool; TypeError for anything else."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def integer(name: str, value: object) -> int:
    """An int that is not a bool; TypeError for anything else."""
    if isinstance(value, torch.SymInt):  # of a traced call
        return cast("int", value)
    if isinstance(value, bool) or not isinstance(value, int):
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        value = int(value)  # a NumPy scalar
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}={value} does not fit in 64 bits")
    return value


def most_tokens(name: str, value: object) -> int | None:
    """None, or an int of at least 1.

    Raises:
        TypeError: Not an int (a bool is none).
        ValueError: Below 1.
    """
    if value is None:
        return None
    found = integer(name, value)
    if found < 1:
        raise ValueError(f"{name}={found} must be at least 1, or None")
    return found


def one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    """ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def tensor(name: str, value: object, like: Tensor | None = None) -> Tensor:
    """A plain tensor, on the device of ``like``.

    Raises:
        TypeError: Not a tensor, or a DTensor.
        ValueError: On another device.
    """
    if not isinstance(value, Tensor):
        hint = f"; pass {name}.weight" if isinstance(value, torch.nn.Module) else ""
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}{hint}")
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise TypeError(f"{name} is a {kind} tensor: pass a dense one")
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(value, distributed.DTensor):
        raise TypeError(
            f"{name} is a DTensor of shape {tuple(value.shape)} with placements {value.placements}: "
            f"pass {name}.full_tensor(), or call inside the module that gathers it"
        )
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} is on {value.device}, but the input is on {like.device}")
    return value


def floating(name: str, value: object, like: Tensor | None = None) -> Tensor:
    """A floating-point tensor of a supported dtype; TypeError otherwise."""
    checked = tensor(name, value, like)
    if checked.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {checked.dtype}, which is not one of {', '.join(map(str, FLOATS))}")
    return checked


def hidden(name: str, value: object, like: Tensor | None = None) -> Tensor:
    """Hidden states of shape [..., H] with H >= 1."""
    checked = floating(name, value, like)
    if checked.dim() < 1 or checked.shape[-1] < 1:
        raise ValueError(f"{name} has shape {tuple(checked.shape)}, needs [..., H] with H >= 1")
    return checked


def vocabulary(name: str, value: object, states_name: str, states: Tensor) -> Tensor:
    """A vocabulary weight of shape [V, H] that fits the hidden states.

    Raises:
        TypeError: Its dtype differs from the hidden states' outside autocast.
        ValueError: Wrong shape, as when a sharded weight has not been gathered.
    """
    weight = floating(name, value, states)
    shape = tuple(weight.shape)
    if weight.dim() != 2 or weight.shape[0] < 1:
        raise ValueError(
            f"{name} has shape {shape}, needs [V, H] with V >= 1: a flat or empty weight is usually sharded (ZeRO-3, "
            "FSDP) and un-gathered; gather it around this call"
        )
    if weight.shape[1] != states.shape[-1]:
        raise ValueError(f"{name} has shape {shape}, but {states_name} of shape {tuple(states.shape)} needs [V, "
                         f"{states.shape[-1]}]")
    return weight


def compute_dtype(states_name: str, states: Tensor, weight_name: str, weight: Tensor) -> torch.dtype:
    """The dtype of the matrix products' operands: the common one, or autocast's if it is on (never for float64).

    Raises:
        TypeError: The dtypes differ and autocast is off or does not apply.
    """
    double = torch.float64 in (states.dtype, weight.dtype)
    # PyTorch raises when asked about autocast on meta tensors
    if not double and not states.is_meta and torch.is_autocast_enabled(states.device.type):
        return torch.get_autocast_dtype(states.device.type)
    if states.dtype != weight.dtype:
        raise TypeError(
            f"{states_name} has dtype {states.dtype} and {weight_name} {weight.dtype}: cast one of them, or use "
            "torch.autocast"
        )
    return states.dtype


def vector(name: str, value: object, weight_name: str, weight: Tensor, compute: torch.dtype) -> Tensor:
    """A tensor of shape [V] in fp32 or the dtype of the weight or of the products, such as a bias."""
    checked = floating(name, value, weight)
    if tuple(checked.shape) != (weight.shape[0],):
        raise ValueError(
            f"{name} has shape {tuple(checked.shape)}, but {weight_name} of shape {tuple(weight.shape)} needs "
            f"[{weight.shape[0]}]"
        )
    if checked.dtype not in (torch.float32, weight.dtype, compute):
        raise TypeError(f"{name} has dtype {checked.dtype}, needs torch.float32 or {weight.dtype}")
    return checked


def target(value: object, states: Tensor, *, name: str = "target") -> Tensor:
    """Integer labels of the hidden states' leading shape, flattened to [N] int64.

    A uint64 label past int64's range becomes int64's largest value, which is out of range too.
    """
    checked = tensor(name, value, states)
    if checked.dtype.is_floating_point or checked.dtype.is_complex or checked.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {checked.dtype}, needs an integer dtype")
    if checked.shape != states.shape[:-1]:
        raise ValueError(
            f"{name} has shape {tuple(checked.shape)}, but an input of shape {tuple(states.shape)} needs "
            f"{tuple(states.shape[:-1])}"
        )
    flat = checked.reshape(-1)
    if flat.dtype == torch.uint64:
        wide = flat.view(torch.int64)
        return torch.where(wide < 0, torch.iinfo(torch.int64).max, wide)
    return flat.to(torch.int64)


def labels_in_range(flat: Tensor, ignore_index: int | None, classes: int) -> None:
    """ValueError if a label that counts is outside [0, classes).

    Always made on the CPU. On other devices a look at the labels would stop the host, so there it is made only under
    ``HEADMUX_CHECK=1``; without it the kernels turn such rows into NaN.
    """
    if flat.numel() == 0 or not _may_look(flat):
        return
    bad = (flat < 0) | (flat >= classes)
    if ignore_index is not None:
        bad &= flat != ignore_index
    if bool(bad.any()):
        worst = flat[bad]
        raise ValueError(
            f"target is out of range: {int(bad.sum())} of {flat.numel()} labels lie outside [0, {classes}) and are not "
            f"ignore_index={ignore_index} (smallest {int(worst.min())}, largest {int(worst.max())}, V={classes})"
        )


def valid_tokens_within(valid: Tensor | None, most: int) -> None:
    """ValueError if more tokens count than ``max_valid_tokens`` says; looks as labels_in_range."""
    if valid is None or valid.numel() <= most or not _may_look(valid):
        return
    count = int(valid.sum())
    if count > most:
        raise ValueError(
            f"max_valid_tokens={most} is too small: {count} of {valid.numel()} tokens have a target other than "
            "ignore_index"
        )


def temperatures_in_range(flat: Tensor, valid: Tensor | None) -> None:
    """ValueError if a temperature of a token that counts is not a finite number above 0; looks as labels_in_range."""
    if flat.numel() == 0 or not _may_look(flat):
        return
    bad = ~(torch.isfinite(flat) & (flat > 0))
    if valid is not None:
        bad &= valid
    if bool(bad.any()):
        raise ValueError(
            f"temperature must be finite and above 0: {int(bad.sum())} of {flat.numel()} tokens have others, such as "
            f"{float(flat[bad][0])}"
        )


def _may_look(values: Tensor) -> bool:
    return values.device.type == "cpu" or os.environ.get("HEADMUX_CHECK", "0") == "1"


def no_gradient(name: str, value: object) -> None:
    """ValueError if a tensor that the op does not differentiate asks for a gradient."""
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which this op does not compute: pass {name}.detach()")


def accumulation(value: object) -> torch.dtype | None:
    """None or torch.float32; ValueError otherwise."""
    one_of("accum_dtype", value, (None, torch.float32))
    return value  # type: ignore[return-value]
