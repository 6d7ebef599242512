"""Triton's kernels, interpreted: on tiles as small as a GPU's, where parts of the vocabulary have few classes or one,
and on rows of logits that have more places than there are tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

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


PLACES = """
import torch
from headmux.backends.common.head import Head
from headmux.backends.common.labels import Labels
from headmux.backends.common.softmax import Coefficients, Wanted
from headmux.backends.common import storage
from headmux.backends.common.storage import padded, rows_of
from headmux.backends.triton import launch
from headmux.backends.triton.launch import Side, Transform

n, v = 37, 301
torch.manual_seed(0)
states, weight = torch.randn(n, 8), torch.randn(v, 8)
target = torch.randint(0, v, (n,))
target[::5] = -100
ones = torch.ones(n)


def rows(values, poison):
    if poison is None:
        found = values.contiguous()
        assert storage.places(found) == 37
        return found.clone()
    found = rows_of(torch.full((v * padded(n),), poison, dtype=values.dtype), v, n)
    assert storage.places(found) == 48
    return found.copy_(values)


def run(dtype, poison):
    head = Head(states.to(dtype), weight.to(dtype), None, dtype, 1.0, None, 1.0)
    t = Transform(head, slice(0, n))
    z = (states @ weight.t()).t()
    labels, _ = launch.admit(states, target, -100, v, torch.float32)
    dots = launch.dots_at_labels(head, labels.index)
    raw, found = rows(z.to(dtype), poison), []
    for wanted in (Wanted(), Wanted(entropy=True, best=True, smoothed=True)):
        statistics, rest_lse = launch.statistics(raw, t, wanted, labels, dots)
        found += [statistics.lse, statistics.target_logit, statistics.entropy, statistics.best, statistics.smoothed]
    by = Coefficients(ones, ones, entropy=ones * 0.1, smoothing=ones * 1e-3)
    launch.to_gradient(raw, t, labels, dots, rest_lse, by)
    found.append(raw.clone())
    if dtype == torch.bfloat16:
        raw = rows(z.to(dtype) * 30.0, poison)  # some are far above their labels
        statistics, factors = launch.exponentials(raw, t, labels, dots)
        return [*found, statistics.lse, factors, raw.clone()]
    q, p = (rows(x, poison) for x in (z, z * 1.1))
    q, p = (Side(x, t, launch.logsumexp(x, t)) for x in (q, p))
    kl = launch.diverge(q, p, 0.5, labels.valid, loss=True)
    out = torch.full((v, padded(n) + 16), 7.0, dtype=torch.bfloat16)
    launch.diverge(q, p, 0.5, labels.valid, loss=False, upstream=ones, kl=kl[-1], into=out[:, :n])
    assert (out[:, n:] == 7.0).all()
    return [*found, q.lse, kl, out]


for dtype in (torch.bfloat16, torch.float16, torch.float32):
    want = run(dtype, None)
    for poison in (float("nan"), float("inf"), -float("inf"), 6.0e4):
        for a, b in zip(run(dtype, poison), want, strict=True):
            assert (a is b is None) or torch.equal(a, b), (dtype, poison)
print("right")
"""


@pytest.mark.parametrize("calls", [CALLS, PLACES], ids=["small-tiles", "places-that-are-nobodys"])
def test_interpreted(calls: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", calls],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "right\n", done.stderr[-2000:]
