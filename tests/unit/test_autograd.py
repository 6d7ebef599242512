"""Autograd, torch.compile, torch.export and torch.func, for every op, against its plain PyTorch reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from headmux import errors, get_op
from headmux.ops import _autograd

flce, jsd, linear_logp = get_op("flce"), get_op("jsd"), get_op("linear_logp")
N, H, V = 6, 4, 9

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _data() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    target = torch.randint(0, V, (N,), generator=g)
    target[2] = -100
    return {
        "x": draw(N, H), "w": draw(V, H), "b": draw(V), "t": target, "tx": draw(N, 3), "tw": draw(V, 3)
    }  # fmt: skip


D = _data()


def _losses(run: Callable[..., Any]) -> dict[str, Loss]:
    """Every shape of result: reduced, per token, several outputs. ``run`` calls the op or its reference."""
    t, tx, tw = D["t"], D["tx"], D["tw"]
    return {
        "flce-mean": lambda x, w, b: run(flce, x, w, t, b),
        "flce-sum": lambda x, w, b: run(flce, x, w, t, b, reduction="sum", label_smoothing=0.1, softcap=3.0),
        "flce-none": lambda x, w, b: run(flce, x, w, t, b, reduction="none").sin().sum(),
        "jsd-mean": lambda x, w, b: run(jsd, x, w, tx, tw, t, b),
        "jsd-none": lambda x, w, b: run(jsd, x, w, tx, tw, t, b, beta=0.2, reduction="none").sin().sum(),
        "linear_logp": lambda x, w, b: sum(
            o.sin().sum()
            for o in run(linear_logp, x, w, t, b, ignore_index=-100, return_entropy=True, return_lse=True)
        ),
    }


CALLS = _losses(lambda op, *a, **k: op(*a, **k))
REFERENCES = _losses(lambda op, *a, **k: op.reference(*a, **k))
every_loss = pytest.mark.parametrize("name", CALLS)


def _leaves() -> list[Tensor]:
    return [D[k].clone().requires_grad_() for k in ("x", "w", "b")]


def _pair(name: str) -> tuple[Loss, Loss]:
    return CALLS[name], REFERENCES[name]


def _compare_gradients(f: Loss, g: Loss) -> None:
    p, q = _leaves(), _leaves()
    a, b = f(*p), g(*q)
    assert_close(a, b)
    a.backward()
    b.backward()
    for i, j in zip(p, q, strict=True):
        assert_close(i.grad, j.grad)


@every_loss
def test_first_order(name: str) -> None:
    assert gradcheck(CALLS[name], _leaves())
    _compare_gradients(*_pair(name))


@every_loss
def test_double_backward(name: str) -> None:
    assert gradgradcheck(CALLS[name], _leaves())


@every_loss
def test_forward_mode_without_functorch(name: str) -> None:
    assert gradcheck(CALLS[name], _leaves(), check_forward_ad=True)
    assert gradgradcheck(CALLS[name], _leaves(), check_fwd_over_rev=True)


@every_loss
def test_batches_of_gradients(name: str) -> None:
    """``is_grads_batched=True``, which ``torch.autograd.functional`` takes for ``vectorize=True``."""
    x, w, b = _leaves()
    found = torch.autograd.functional.hessian(lambda w: CALLS[name](x, w, b), w, vectorize=True)
    assert_close(found, torch.autograd.functional.hessian(lambda w: REFERENCES[name](x, w, b), w))


def test_a_batch_of_gradients_of_each_output() -> None:
    x, w, _ = _leaves()
    out = linear_logp(x, w, D["t"], ignore_index=-100, return_entropy=True)
    given = [torch.randn(4, N, dtype=torch.float64), torch.randn(4, N, dtype=torch.float64)]
    found = torch.autograd.grad(out[:2], (x, w), given, is_grads_batched=True, retain_graph=True)
    for i in range(4):
        one = torch.autograd.grad(out[:2], (x, w), [g[i] for g in given], retain_graph=True)
        assert_close([f[i] for f in found], list(one))


def test_a_batch_of_gradients_through_a_checkpoint() -> None:
    x, w, _ = _leaves()

    def out(op: Any) -> Any:
        return checkpoint(lambda x, w: op(x, w, D["t"], reduction="none"), x, w, use_reentrant=False)

    flce, given = get_op("flce"), torch.eye(N, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad(out(op), (x, w), given, is_grads_batched=True) for op in (flce, flce.reference)
    )
    assert_close(found, wanted)


def test_batches_of_batches_are_refused() -> None:
    x, w, _ = _leaves()
    out = get_op("flce")(x, w, D["t"], reduction="none")

    def batch(given: Tensor) -> Any:
        return torch.autograd.grad(out, (x, w), given, retain_graph=True, is_grads_batched=True)

    given = torch.randn(2, 3, N, dtype=torch.float64)
    for nested in (lambda: torch.func.vmap(batch)(given),
                   lambda: torch._vmap_internals._vmap(lambda s: tuple(s * g for g in batch(given[0])))(torch.ones(2))):
        with pytest.raises(NotImplementedError, match=r"nest torch\.func\.vmap over torch\.func\.vjp"):
            nested()


@every_loss
def test_create_graph_is_never_detached(name: str) -> None:
    x, w, b = _leaves()
    (g,) = torch.autograd.grad(CALLS[name](x, w, b) ** 2, x, create_graph=True)
    assert g.requires_grad
    second = torch.autograd.grad(g.sum(), (x, w))
    x, w, b = _leaves()
    (g,) = torch.autograd.grad(REFERENCES[name](x, w, b) ** 2, x, create_graph=True)
    for found, wanted in zip(second, torch.autograd.grad(g.sum(), (x, w)), strict=True):
        assert_close(found, wanted)


@every_loss
def test_functorch_grad(name: str) -> None:
    f, r = _pair(name)
    given = (D["x"], D["w"], D["b"])
    assert_close(torch.func.grad(f, (0, 1, 2))(*given), torch.func.grad(r, (0, 1, 2))(*given))


@every_loss
def test_vmap_of_grad(name: str) -> None:
    f, r = _pair(name)
    x = D["x"] * torch.arange(1.0, 4.0, dtype=torch.float64)[:, None, None]
    dims = (0, None, None)
    found = torch.func.vmap(torch.func.grad(f, (0, 1)), dims)(x, D["w"], D["b"])
    assert_close(found, torch.func.vmap(torch.func.grad(r, (0, 1)), dims)(x, D["w"], D["b"]))


@every_loss
def test_vmap_over_weights(name: str) -> None:
    f, r = _pair(name)
    w = torch.stack([D["w"], 2 * D["w"]])
    assert_close(torch.func.vmap(f, (None, 0, None))(D["x"], w, D["b"]),
                 torch.func.vmap(r, (None, 0, None))(D["x"], w, D["b"]))


@every_loss
def test_jvp(name: str) -> None:
    f, r = _pair(name)
    primals, tangents = (D["x"], D["w"], D["b"]), (D["w"][:N], D["w"].flip(0), D["b"] + 1)
    assert_close(torch.func.jvp(f, primals, tangents), torch.func.jvp(r, primals, tangents))


def test_hessian_of_an_expanded_upstream() -> None:
    def total(op: Any) -> Any:
        return torch.func.hessian(lambda w: op(D["x"], w, D["t"], reduction="none").sum())(D["w"])

    flce = get_op("flce")
    assert_close(total(flce), total(flce.reference))


@every_loss
def test_hessian_forward_over_reverse(name: str) -> None:
    f, r = _pair(name)
    given = (D["x"], D["w"], D["b"])
    assert_close(torch.func.hessian(f)(*given), torch.func.hessian(r)(*given))


@every_loss
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(name: str, backend: str) -> None:
    torch._dynamo.reset()
    _compare_gradients(torch.compile(CALLS[name], fullgraph=True, backend=backend), REFERENCES[name])


@every_loss
def test_checkpoint(name: str) -> None:
    def f(*leaves: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(CALLS[name], *leaves, use_reentrant=False)
        return found

    _compare_gradients(f, REFERENCES[name])


@every_loss
def test_inference_mode_and_no_grad(name: str) -> None:
    leaves = _leaves()
    wanted = REFERENCES[name](D["x"], D["w"], D["b"])
    with torch.inference_mode():
        assert_close(CALLS[name](D["x"], D["w"], D["b"]), wanted)
    with torch.no_grad():
        found = CALLS[name](*leaves)
    assert_close(found, wanted)
    assert not found.requires_grad


@every_loss
def test_retain_graph_with_different_upstreams(name: str) -> None:
    leaves = _leaves()
    loss = CALLS[name](*leaves)
    two = torch.autograd.grad(loss, leaves, loss.new_tensor(2.0), retain_graph=True)
    kept = [g.clone() for g in two]
    three = torch.autograd.grad(loss, leaves, loss.new_tensor(3.0), retain_graph=True)
    again = torch.autograd.grad(loss, leaves, loss.new_tensor(-1.0))
    wanted = torch.autograd.grad(REFERENCES[name](*leaves), leaves)
    for first, second, third, copy, right in zip(two, three, again, kept, wanted, strict=True):
        assert torch.equal(first, copy)
        assert_close(first, 2 * right)
        assert_close(second, 3 * right)
        assert_close(third, -right)


def test_compiled_double_backward_is_refused() -> None:
    torch._dynamo.reset()
    x, w, b = _leaves()
    loss = torch.compile(CALLS["flce-mean"], fullgraph=True, backend="aot_eager")(x, w, b)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(g.sum(), x)


def test_dynamic_tokens_and_the_environment_need_no_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x, w, t: flce(x, w, t), fullgraph=True, backend=counter, dynamic=True)

    def draw(n: int) -> tuple[Tensor, Tensor, Tensor]:
        x, w = torch.randn(n, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
        return x, w, torch.randint(0, V, (n,))

    first = draw(5)
    assert_close(step(*first), flce(*first))
    compiled = counter.frame_count
    for n in (7, 11, 64):
        given = draw(n)
        assert_close(step(*given), flce(*given))
    monkeypatch.setenv("HEADMUX_IMPL", "torch")
    step(*given)
    monkeypatch.setenv("HEADMUX_IMPL", "cutedsl")
    with pytest.raises(errors.UnsupportedCallError, match="HEADMUX_IMPL=cutedsl"):
        step(*given)
    assert counter.frame_count == compiled


def test_export_with_dynamic_tokens() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(V, H))

        def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            return flce(x, self.weight, t), linear_logp(x, self.weight, t)

    model, n = Model(), torch.export.Dim("n", min=2, max=100)
    given = (torch.randn(5, H), torch.randint(0, V, (5,)))
    exported = torch.export.export(model, given, dynamic_shapes=({0: n}, {0: n}))
    x, t = torch.randn(9, H), torch.randint(0, V, (9,))
    assert_close(exported.module()(x, t), model(x, t))
    calls = [node for node in exported.graph.nodes if "headmux" in str(node.target)]
    assert [str(c.target) for c in calls] == ["headmux.flce.default", "headmux.linear_logp.default"]


def test_meta_and_fake_tensors() -> None:
    x, w, b = (D[k].to("meta").requires_grad_() for k in ("x", "w", "b"))
    t = D["t"].to("meta")
    loss = flce(x, w, t, b)
    loss.backward()
    assert loss.shape == ()
    assert [p.grad.shape for p in (x, w, b)] == [p.shape for p in (x, w, b)]
    assert linear_logp(x, w, t).shape == t.shape
    assert jsd(x, w, x.detach(), w.detach(), reduction="none").shape == (N,)
    with FakeTensorMode():
        assert flce(torch.randn(4, H), torch.randn(V, H), torch.zeros(4, dtype=torch.long)).shape == ()


@pytest.mark.parametrize("name", ["flce", "jsd", "linear_logp"])
def test_opcheck(name: str) -> None:
    op = get_op(name)
    x, w = D["x"].float().requires_grad_(), D["w"].float().requires_grad_()
    t = D["t"].clamp(min=0)
    request = op.request(x, w, x, w, t) if name == "jsd" else op.request(x, w, t)
    args = _autograd.with_needs(op, request.args)
    flat = [getattr(args, f) for f in (*op.tensor_fields, *op.static_fields)]
    torch.library.opcheck(op.raw, (*flat, ""))
    rows = torch.ones(()) if getattr(args, "row_scale", None) is not None else torch.ones(N)
    flat = [v.detach() if isinstance(v, Tensor) else v for v in flat]  # it has no derivative of its own
    torch.library.opcheck(getattr(torch.ops.headmux, f"{name}_backward").default, ([rows], *flat, ""))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_keeps_gradients_in_the_parameters_dtype(compiled: bool) -> None:
    torch._dynamo.reset()
    x, w, b = (D[k].float().requires_grad_() for k in ("x", "w", "b"))

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return flce(x.bfloat16(), w, D["t"], b)

    step = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(x, w, b)
    loss.backward()
    assert loss.dtype == torch.float32
    assert [p.grad.dtype for p in (x, w, b)] == [torch.float32] * 3
    p, q = (v.detach().bfloat16().double().requires_grad_() for v in (x, w))
    flce.reference(p, q, D["t"], b.detach().double()).backward()
    # unrounded: only the operands were rounded, and the logits' gradient (2^-9 relative)
    assert_close(w.grad, q.grad.float(), rtol=2**-8, atol=2**-8 * float(q.grad.abs().max()))
    assert not torch.equal(w.grad, w.grad.bfloat16().float())


def test_backward_runs_on_the_forwards_backend_and_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = _leaves()
    loss = CALLS["flce-mean"](x, w, b)
    monkeypatch.setitem(os.environ, "HEADMUX_IMPL", "cutedsl")
    loss.backward()
    assert x.grad is not None
