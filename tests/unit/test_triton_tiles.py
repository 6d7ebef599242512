"""Triton's kernels, interpreted, on tiles as small as a GPU's: parts of the vocabulary of few classes, or of one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CALLS = """
import sys
import torch
import headmux
from headmux.backends.triton import tuning
from headmux.backends.triton.tuning import Tile, Tuning

tuning._INTERPRETER = Tuning(*[Tile(classes=8, tokens=32, warps=1, programs=64)] * 5)
cut = tuning.tuning(torch.device("cpu")).look.cut(torch.empty(97, 20))
assert (cut.rows, cut.parts, cut.programs) == (32, 4, 8)  # the last has one class

torch.manual_seed(0)
for name, options in (
    ("linear_logp", {"return_entropy": True}),
    ("linear_logp", {"temperature": 0.1}),
    ("flce", {"label_smoothing": 0.1}),
    ("flce", {"bias": True}),
    ("flce", {"return_predicted_tokens": True}),
    ("jsd", {"beta": 0.3}),
    ("jsd", {"beta": 0.0}),
):
    op = headmux.get_op(name)
    x, w = torch.randn(20, 8), torch.randn(97, 8)
    target = torch.randint(0, 97, (20,))
    target[::3] = 96
    rest = (x * 1.1, w + 0.1 * torch.randn(97, 8)) if name == "jsd" else (target,)
    found = []
    for dtype, call in ((torch.float32, lambda *a, **k: op(*a, impl="triton", **k)), (torch.float64, op.reference)):
        given = dict(options)
        if given.get("bias"):
            given["bias"] = torch.linspace(-40.0, 40.0, 97, dtype=dtype)  # what is seen first says nothing of the rest
        leaves = [t.to(dtype).requires_grad_() for t in (x, w)]
        out = call(*leaves, *[t.to(dtype) if t.is_floating_point() else t for t in rest], **given)
        outputs = [out] if isinstance(out, torch.Tensor) else [t for t in out if t is not None]
        total = sum((i + 1) * t.sum() for i, t in enumerate(outputs) if t.is_floating_point())
        found.append([*(t.detach() for t in outputs), *torch.autograd.grad(total, leaves)])
    for got, want in zip(*found, strict=True):
        tell = lambda m: f"{name} {options}: {m}"
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-5, msg=tell)
print("right")
"""


def test_small_tiles() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CALLS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "right\n", done.stderr[-2000:]
