"""Softmax over the vocabulary with Triton between cuBLAS's products: each logit is read twice and written once."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

from headmux.backends.common.gemm import is_native, operand, product
from headmux.backends.common.softmax import Coefficients, Softmax, Statistics
from headmux.backends.triton import kernels
from headmux.contract import Upstream

INTERPRETED = triton.knobs.runtime.interpret


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Launch on the device of the tensors, whatever the current one is."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class TritonSoftmax(Softmax):
    """Raw logits are kept in the operands' dtype, as cuBLAS writes them, and read by kernels that work in fp32."""

    def prepare(self) -> None:
        """Keep raw logits; the one block held is a copy of stored rows."""
        head = self.head
        self.held_dtype = head.dtype
        self.copies = 1
        weights = self.wanted.smoothed
        self._weights = weights if isinstance(weights, Tensor) else None
        self._bias = None if head.bias is None else head.bias.to(torch.float32).clamp(min=-1e30)

    def statistics(self) -> Statistics:
        """Statistics of every token, one chunk's logits at a time."""
        return Statistics.joined([self.look(tokens, held)[0] for tokens, held, _ in self.chunks(None)])

    def look(self, tokens: slice, held: Tensor | None) -> tuple[Statistics, None]:
        """One product and one read of the logits."""
        assert held is not None
        self._product(tokens, held)
        wanted, device = self.wanted, held.device
        count = held.shape[1]
        block_n, block_v = _tile(count)
        columns = triton.cdiv(count, block_n)
        parts = 1 if INTERPRETED else max(1, min(_PROGRAMS // columns, self.vocabulary // (4 * block_v)))
        rows = triton.cdiv(triton.cdiv(self.vocabulary, parts), block_v) * block_v
        parts = triton.cdiv(self.vocabulary, rows)

        def per_token(shape: tuple[int, ...], there: bool = True, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return torch.empty(shape, dtype=dtype, device=device) if there else None

        smoothed = wanted.smoothed is not None
        top, total = per_token((parts, count)), per_token((parts, count))
        moment = per_token((parts, count), wanted.entropy)
        smooth = per_token((parts, count), smoothed)
        index = per_token((parts, count), wanted.best, torch.int32)
        shared = self._transform(tokens)
        flags = {
            "HAS_BIAS": self._bias is not None,
            "HAS_SOFTCAP": self.head.softcap is not None,
            "HAS_DIVISORS": isinstance(self.head.temperature, Tensor),
            "ENTROPY": wanted.entropy,
            "SMOOTHED": smoothed,
            "BEST": wanted.best,
        }
        with on_device(device):
            kernels.look[(columns * parts,)](
                held, held.stride(0), count, self.vocabulary, self._bias, shared[0], self._weights, *shared[1:],
                top, total, moment, smooth, index, rows,
                **flags, HAS_WEIGHTS=self._weights is not None, BV=block_v, BN=block_n, num_warps=4,
            )  # fmt: skip
            lse, at_label = per_token((count,)), per_token((count,))
            entropy = per_token((count,), wanted.entropy)
            smoothed_sum = per_token((count,), smoothed)
            best = per_token((count,), wanted.best, torch.int64)
            few = min(block_n, 32)
            kernels.combine[(triton.cdiv(count, few),)](
                held, held.stride(0), count, self.labels.index[tokens], self._bias, shared[0], *shared[1:],
                top, total, moment, smooth, index, parts,
                lse, at_label, entropy, smoothed_sum, best,
                **flags, BP=min(128, triton.next_power_of_2(parts)), BN=few, num_warps=4,
            )  # fmt: skip
        assert lse is not None and at_label is not None
        return Statistics(lse, at_label, entropy, best, smoothed_sum), None

    def to_gradient(self, held: Tensor, state: None, statistics: Statistics, tokens: slice, by: Coefficients) -> None:
        """One read and one write of the logits."""
        count = held.shape[1]
        block_n, block_v = _tile(count)
        shared = self._transform(tokens)
        with on_device(held.device):
            kernels.to_gradient[(triton.cdiv(count, block_n) * triton.cdiv(self.vocabulary, block_v),)](
                held, held.stride(0), count, self.vocabulary, self.labels.index[tokens], self._bias, shared[0],
                self._weights, *shared[1:],
                statistics.lse, by.softmax.contiguous(), by.label.contiguous(), by.entropy, by.smoothing,
                HAS_BIAS=self._bias is not None, HAS_SOFTCAP=self.head.softcap is not None,
                HAS_DIVISORS=isinstance(self.head.temperature, Tensor), HAS_WEIGHTS=self._weights is not None,
                ENTROPY=by.entropy is not None, SMOOTHED=by.smoothing is not None,
                BV=block_v, BN=block_n, num_warps=4,
            )  # fmt: skip

    def scaled(self, gradients: tuple[Tensor | None, ...], upstream: Upstream) -> tuple[Tensor | None, ...]:
        """Gradients that a forward formed, times a scalar that the host never sees."""
        scalar = upstream.scalar
        assert scalar is not None
        wanted = tuple(g if need else None for g, need in zip(gradients, self.needs, strict=True))
        with on_device(scalar.device):
            for g in wanted:
                if g is not None:
                    programs = min(_PROGRAMS, triton.cdiv(g.numel(), 4096))
                    kernels.scale_in_place[(programs,)](g, g.numel(), scalar, programs, B=4096, num_warps=8)
        return wanted

    def _product(self, tokens: slice, held: Tensor) -> None:
        head = self.head
        right = head.right(tokens)
        if is_native(head.dtype, held.device):
            torch.mm(head.weight.to(head.dtype), right, out=held)
            return
        for rows in self.plan.blocks(held.shape[1]):
            held[rows].copy_(product(operand(head.weight[rows], head.dtype), right))

    def _transform(self, tokens: slice) -> tuple[Tensor | None, float, float, float]:
        head = self.head
        divisor = head.divisor(tokens)
        softcap = 0.0 if head.softcap is None else head.softcap
        if isinstance(divisor, Tensor):
            return divisor.to(torch.float32), head.scale, softcap, 1.0
        return None, head.scale, softcap, divisor


# eight programs on each of Hopper's 132 multiprocessors
_PROGRAMS = 1056


def _tile(tokens: int) -> tuple[int, int]:
    """Tokens and vocabulary rows of a tile: 16 bytes a thread along a row; the interpreter pays by the tile."""
    block_n = min(256, max(16, triton.next_power_of_2(tokens)))
    return block_n, max(16, (65536 if INTERPRETED else 4096) // block_n)
