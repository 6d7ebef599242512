"""How training code calls the ops: gradient accumulation, adapters, sharded weights, several processes."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from headmux import get_op

flce, jsd, linear_logp = get_op("flce"), get_op("jsd"), get_op("linear_logp")


def _draw(n: int = 8, h: int = 6, v: int = 17) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, h, generator=g, dtype=torch.float64)
    w = torch.randn(v, h, generator=g, dtype=torch.float64)
    t = torch.randint(0, v, (n,), generator=g)
    t[::3] = -100
    return x, w, t


@pytest.mark.parametrize("kind", [float, int, torch.tensor])
def test_gradient_accumulation_equals_the_full_batch(kind: type) -> None:
    x, w, t = _draw()
    count = int((t != -100).sum())
    full = w.clone().requires_grad_()
    flce(x, full, t).backward()
    parts = w.clone().requires_grad_()
    for rows in (slice(0, 1), slice(1, 4), slice(4, 8)):  # the first holds no token that counts
        loss = flce(x[rows], parts, t[rows], num_items=kind(count))
        if rows.stop == 1:
            assert loss.item() == 0.0
        loss.backward()
    assert_close(parts.grad, full.grad)
    student = w.clone().requires_grad_()
    jsd(x, student, x, w.flip(0), t).backward()
    parts = w.clone().requires_grad_()
    for rows in (slice(0, 1), slice(1, 4), slice(4, 8)):
        jsd(x[rows], parts, x[rows], w.flip(0), t[rows], num_items=kind(count)).backward()
    assert_close(parts.grad, student.grad)


def test_no_items_at_all_give_zero() -> None:
    x, w, t = _draw()
    for num_items in (0, torch.tensor(0)):
        p = w.clone().requires_grad_()
        loss = flce(x, p, t, num_items=num_items)
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(p.grad, torch.zeros_like(p))


def test_token_weights_and_their_gradient() -> None:
    x, w, t = _draw()
    weight = torch.rand(8, dtype=torch.float64)
    for reduction in ("mean", "sum", "none"):
        found, wanted = weight.clone().requires_grad_(), weight.clone().requires_grad_()
        p, q = w.clone().requires_grad_(), w.clone().requires_grad_()
        flce(x, p, t, token_weight=found, reduction=reduction).sum().backward()
        rows = nn.functional.cross_entropy(x @ q.T, t, reduction="none") * wanted
        (rows.sum() / (t != -100).sum() if reduction == "mean" else rows.sum()).backward()
        assert_close(found.grad, wanted.grad)
        assert_close(p.grad, q.grad)
        assert_close(flce(x, w, t, token_weight=weight, reduction=reduction).sum(),
                     flce(x, w, t, token_weight=found, reduction=reduction).sum().detach())


def test_merged_adapter_gets_its_gradients() -> None:
    x, w, t = _draw()
    a, b = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((2, 6), (17, 2)))
    flce(x, w + b @ a, t).backward()
    found = [a.grad.clone(), b.grad.clone()]
    a.grad = b.grad = None
    nn.functional.cross_entropy(x @ (w + b @ a).T, t).backward()
    assert_close(found, [a.grad, b.grad])


def test_upstream_module_keeps_its_saved_tensors() -> None:
    x, w, t = _draw()
    a = x.clone().requires_grad_()
    h = torch.tanh(a)
    before = h.clone()
    flce(h, w, t).backward()
    assert torch.equal(h, before)
    b = x.clone().requires_grad_()
    nn.functional.cross_entropy(torch.tanh(b) @ w.T, t).backward()
    assert_close(a.grad, b.grad)


def test_token_i_belongs_to_row_i() -> None:
    x, w, t = _draw()
    t = t.clamp(min=0)
    wanted = torch.log_softmax(x @ w.T, 1)[torch.arange(8), t]
    assert_close(linear_logp(x, w, t), wanted)
    assert_close(linear_logp(x.reshape(2, 4, 6), w, t.reshape(2, 4)), wanted.reshape(2, 4))


def test_metrics_of_a_batch_without_tokens_are_defined() -> None:
    x, w, t = _draw()
    out = flce(x, w, torch.full_like(t, -100), return_token_accuracy=True, return_predicted_tokens=True,
               return_z_loss=True, lse_square_scale=0.1)
    assert out.loss.item() == out.z_loss.item() == out.token_accuracy.item() == 0.0
    assert out.predicted_tokens.tolist() == [-1] * 8
    assert not out.z_loss.requires_grad


def test_accuracy_and_predictions() -> None:
    x, w, t = _draw()
    best = (x @ w.T).argmax(1)
    t = torch.where(torch.arange(8) < 3, best, t)
    out = flce(x, w, t, return_token_accuracy=True, return_predicted_tokens=True)
    valid = t != -100
    assert torch.equal(out.predicted_tokens, torch.where(valid, best, -1))
    assert_close(out.token_accuracy, ((best == t) & valid).sum() / valid.sum().double())


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_two_ranks(tmp_path: Path) -> None:
    """DDP around a module that calls the op: unequal shares of tokens, equal gradients on both ranks."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()), "WORLD_SIZE": "2"}
    script = Path(__file__).parent / "two_ranks.py"
    x, w, t = _draw()
    torch.save((x, w, t), tmp_path / "data.pt")
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(tmp_path)], env={**environment, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    grads = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert torch.equal(*grads)
    p = w.clone().requires_grad_()
    flce(x, p, t, reduction="sum").backward()
    assert_close(grads[0], p.grad / 2)  # DDP averages over ranks


def test_ops_copy_and_pickle() -> None:
    for op in (flce, flce.with_impl("torch")):
        for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
            assert repr(twin) == repr(op)
    assert repr(flce) == "<headmux op flce>"


def test_forward_derivative_of_token_weights() -> None:
    x, w, t = _draw()
    weight, move = torch.rand(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    _, found = torch.func.jvp(lambda a: flce(x, w, t, token_weight=a), (weight,), (move,))
    assert_close(found, flce(x, w, t))


def test_bad_num_items_are_not_hidden() -> None:
    x, w, t = _draw()
    for value in (float("nan"), -3.0):
        assert flce(x, w, t, num_items=torch.tensor(value)).isnan()
        with pytest.raises(ValueError, match="num_items"):
            flce(x, w, t, num_items=value)
    with pytest.raises(TypeError, match=r"num_items has dtype torch\.bool"):
        flce(x, w, t, num_items=torch.tensor(True))


def test_masked_classes_have_no_gradient_of_any_order() -> None:
    x, w, t = _draw()
    bias = torch.zeros(17, dtype=torch.float64)
    bias[-1] = -torch.inf
    t = torch.where(t == 16, 0, t)
    for op, given in ((flce, (t, bias)), (linear_logp, (t.clamp(min=0), bias))):
        p = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(op(p, w, *given).sum(), p, create_graph=True)
        q = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(op(q, w[:-1], *given[:1]).sum(), q, create_graph=True)
        assert_close(g, wanted)
        assert_close(torch.autograd.grad(g.square().sum(), p), torch.autograd.grad(wanted.square().sum(), q))
