"""Ignored tokens stay out of the products: on the CPU by themselves, elsewhere where ``max_valid_tokens`` is given."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.testing import assert_close

from headmux import get_op, registry
from headmux.contract import Backend, Kernel
from headmux.ops import _checks
from headmux.ops._picked import without_looking
from headmux.testing.modes import Watch

flce, jsd, linear_logp = get_op("flce"), get_op("jsd"), get_op("linear_logp")
N, H, V, IGNORED = 12, 16, 23, -100
IGNORED_AT = [0, 3, 4, 7, 11]
VALID = N - len(IGNORED_AT)


def _data() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    target = torch.randint(0, V, (N,), generator=g)
    target[IGNORED_AT] = IGNORED
    return {
        "x": draw(N, H), "w": draw(V, H), "b": draw(V), "t": target, "tx": draw(N, 5), "tw": draw(V, 5),
        "rows": 0.5 + torch.rand(N, generator=g, dtype=torch.float64),
    }  # fmt: skip


D = _data()
D["x"][IGNORED_AT[:2]] = math.nan
D["x"][IGNORED_AT[2:]] = math.inf
D["tx"][IGNORED_AT] = math.nan

# each returns (what is differentiated, everything that comes back)
Run = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


def _flce(**fixed: Any) -> Run:
    def run(x: Tensor, w: Tensor, b: Tensor, t: Tensor | None = None, **options: Any) -> Any:
        found = flce(x, w, D["t"] if t is None else t, b, **fixed, **options)
        every = (found,) if isinstance(found, Tensor) else tuple(found)
        return every[0], every

    return run


def _jsd(**fixed: Any) -> Run:
    def run(x: Tensor, w: Tensor, b: Tensor, t: Tensor | None = None, **options: Any) -> Any:
        found = jsd(x, w, D["tx"], D["tw"], D["t"] if t is None else t, b, **fixed, **options)
        return found, (found,)

    return run


def _logp(**fixed: Any) -> Run:
    def run(x: Tensor, w: Tensor, b: Tensor, t: Tensor | None = None, **options: Any) -> Any:
        found = linear_logp(x, w, D["t"] if t is None else t, b, ignore_index=IGNORED, return_entropy=True,
                            return_lse=True, **fixed, **options)
        return found.logp - 0.3 * found.entropy + 0.1 * found.lse, tuple(found)

    return run


_ALL = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
RUNS: dict[str, Run] = {
    "flce-mean": _flce(),
    "flce-sum": _flce(reduction="sum", token_weight=D["rows"], label_smoothing=0.1),
    "flce-none": _flce(reduction="none", lse_square_scale=1e-2, **_ALL),
    "flce-all": _flce(lse_square_scale=1e-2, ce_weight=D["b"].abs(), **_ALL),
    "flce-num-items": _flce(num_items=torch.tensor(20), use_token_scaling=True),
    "jsd-mean": _jsd(),
    "jsd-sum": _jsd(beta=0.0, reduction="sum"),
    "jsd-none": _jsd(beta=0.2, reduction="none"),
    "linear_logp": _logp(),
    "linear_logp-temperature": _logp(temperature=D["rows"]),
}
every_run = pytest.mark.parametrize("name", RUNS)


def _leaves() -> list[Tensor]:
    return [D[k].clone().requires_grad_() for k in ("x", "w", "b")]


def _upstream(like: Tensor) -> Tensor:
    return torch.linspace(-1.0, 2.0, like.numel(), dtype=like.dtype).reshape(like.shape)


def _results(run: Run, **options: Any) -> list[Tensor]:
    leaves = _leaves()
    loss, outputs = run(*leaves, **options)
    return [*outputs, *torch.autograd.grad(loss, leaves, _upstream(loss))]


@contextlib.contextmanager
def _as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing looks at labels."""
    monkeypatch.setattr(_checks, "_may_look", lambda values: False)
    with without_looking():
        yield


@every_run
@pytest.mark.parametrize("bound", [VALID, VALID + 2, N, N + 5])
def test_as_without(name: str, bound: int) -> None:
    """The same within rounding, with nothing of an ignored token's states, and integers the same."""
    with without_looking():
        wanted = _results(RUNS[name])
        found = _results(RUNS[name], max_valid_tokens=bound)
    for computed in (found, _results(RUNS[name]), _results(RUNS[name], max_valid_tokens=bound)):
        for a, b in zip(computed, wanted, strict=True):
            assert torch.isfinite(b).all()
            assert_close(a, b)
        for value in computed:
            assert value.is_contiguous()
            if value.shape[:1] == (N,):
                at = -1 if value.dtype == torch.int64 else 0
                assert (value[IGNORED_AT] == at).all()


@every_run
def test_products_shrink(name: str) -> None:
    def work(**options: Any) -> int:
        with Watch() as seen:
            _results(RUNS[name], **options)
        return seen.flops

    with without_looking():
        one, rest = divmod(work(), N)
        assert one > 0
        assert rest == 0
        assert work(max_valid_tokens=VALID + 1) == (VALID + 1) * one
    assert work() == work(max_valid_tokens=VALID + 1) == VALID * one


@every_run
@pytest.mark.parametrize("bound", [None, 1, 3])
def test_nothing_counts(name: str, bound: int | None) -> None:
    nothing = torch.full((N,), IGNORED)
    for context in (contextlib.nullcontext(), without_looking()):
        with context:
            for value in _results(RUNS[name], t=nothing, max_valid_tokens=bound):
                assert (value == (-1 if value.dtype == torch.int64 else 0)).all()


@every_run
def test_too_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ValueError where the labels can be looked at; elsewhere NaN wherever a token that counts was left out."""
    with pytest.raises(ValueError, match=rf"max_valid_tokens={VALID - 2} is too small: {VALID} of {N} tokens"):
        RUNS[name](*_leaves(), max_valid_tokens=VALID - 2)
    with _as_on_gpu(monkeypatch):
        leaves = _leaves()
        loss, outputs = RUNS[name](*leaves, max_valid_tokens=VALID - 2)
        gradients = torch.autograd.grad(loss, leaves, _upstream(loss))
    lost = (D["t"] != IGNORED).nonzero()[-2:, 0]
    for value in outputs:
        if value.dtype == torch.int64:
            assert (value[lost] == -1).all()
        elif value.dim():
            kept = torch.ones(N, dtype=torch.bool).index_fill_(0, lost, False)
            assert value[lost].isnan().all()
            assert value[kept].isfinite().all()
            assert (value[IGNORED_AT] == 0).all()
        else:
            assert value.isnan()
    for g in gradients:
        assert g.isnan().all()


@every_run
@pytest.mark.parametrize("looking", [True, False])
def test_repeated_backward(name: str, looking: bool) -> None:
    with contextlib.nullcontext() if looking else without_looking():
        leaves = _leaves()
        loss, _ = RUNS[name](*leaves, max_valid_tokens=VALID + 1)
        up = _upstream(loss)
        first = torch.autograd.grad(loss, leaves, up, retain_graph=True)
        kept = [g.clone() for g in first]
        second = torch.autograd.grad(loss, leaves[:2], -2 * up, retain_graph=True)
        third = torch.autograd.grad(loss, leaves, up)
    for a, c, b in zip(first, third, kept, strict=True):
        assert torch.equal(a, b)
        assert_close(c, b)
    for a, b in zip(second, kept, strict=False):
        assert_close(a, -2 * b)


@every_run
def test_functional_grad_and_vmap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batched targets too, of which other tokens are ignored."""
    monkeypatch.setitem(D, "tx", D["tx"].nan_to_num(0.0))
    t = torch.stack([D["t"], D["t"].roll(1)])
    x = D["x"].nan_to_num(0.5, 0.5).expand(2, -1, -1)

    def loss(x: Tensor, t: Tensor, bound: int | None = VALID + 1) -> Tensor:
        found = RUNS[name](x, D["w"], D["b"], t, max_valid_tokens=bound)[0]
        return found.square().sum()

    with without_looking():
        found = torch.func.vmap(torch.func.grad(loss))(x, t)
        for i in range(2):
            assert_close(found[i], torch.func.grad(lambda x, t: loss(x, t, None))(x[i], t[i]))


@every_run
def test_double_backward(name: str) -> None:
    if "token-scaling" in name:
        pytest.skip("has a constant factor")

    def second(**options: Any) -> tuple[Tensor, ...]:
        x = torch.where(D["x"].isfinite(), D["x"], 0.5).requires_grad_()
        w = D["w"].clone().requires_grad_()
        loss, _ = RUNS[name](x, w, D["b"], **options)
        (g,) = torch.autograd.grad(loss.square().sum(), w, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (x, w))

    with without_looking():
        for a, b in zip(second(max_valid_tokens=VALID), second(), strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("name", ["flce-all", "jsd-none", "linear_logp"])
def test_compiled(name: str) -> None:
    torch._dynamo.reset()
    step = torch.compile(RUNS[name], fullgraph=True, backend="aot_eager")
    with without_looking():
        wanted = _results(RUNS[name])
        for a, b in zip(_results(step, max_valid_tokens=VALID + 1), wanted, strict=True):
            assert_close(a, b)
    with pytest.raises(ValueError, match="is too small"):
        _results(step, max_valid_tokens=VALID - 1)


def test_a_changing_bound_is_compiled_twice_at_most() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(RUNS["flce-mean"], fullgraph=True, backend=counter)
    for bound in range(VALID, N + 4):
        assert_close(_results(step, max_valid_tokens=bound), _results(RUNS["flce-mean"]))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("op", [flce, jsd, linear_logp])
def test_without_a_bound_no_device_is_asked_which_tokens_count(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    states = (D["x"].nan_to_num(0.0, 0.0, 0.0), D["w"])
    given = (*states, *states, D["t"]) if op is jsd else (*states, D["t"].clamp(min=0))

    def asked(args: Any) -> Tensor:
        raise AssertionError("a launch on the way of every call")

    with without_looking(), torch.no_grad():
        wanted = op(*given)
        monkeypatch.setattr(type(op), "valid", lambda self, args: asked(args))
        assert_close(op(*given), wanted)


@pytest.mark.parametrize("strict", [True, False])
def test_a_bound_is_exported_as_an_input(strict: bool) -> None:
    class Loss(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor, t: Tensor, most: int) -> Tensor:
            return flce(x, w, t, max_valid_tokens=most)

    given, any_int = (D["x"].nan_to_num(0.0, 0.0, 0.0), D["w"], D["t"]), torch.export.Dim.DYNAMIC
    shapes = (None, None, None, any_int)
    found = torch.export.export(Loss(), (*given, N), dynamic_shapes=shapes, strict=strict).module()
    assert_close(found(*given, VALID), flce(*given))


def test_nothing_is_kept_for_a_backward_that_only_scales_gradients() -> None:
    """A copy of the states would be, and in one that ignores a token nearly all of them."""
    def kept(ignored: int) -> int:
        x, w = torch.randn(256, 32, requires_grad=True), torch.randn(64, 32)
        target = torch.zeros(256, dtype=torch.int64)
        target[:ignored] = -100
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
            loss = jsd(x, w, x.detach(), w, target)
            gc.collect()
        assert loss.requires_grad
        return sum(e.nbytes() for e in found.profiler.kineto_results.events() if e.name() == "[memory]")

    kept(1)
    assert kept(1) < kept(0) + 256 * 32


def test_gradient_of_token_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sum over tokens is autograd's."""
    def gradient(bound: int | None) -> Tensor:
        weight = D["rows"].clone().requires_grad_()
        loss = flce(D["x"], D["w"], D["t"], token_weight=weight, max_valid_tokens=bound)
        (g,) = torch.autograd.grad(loss, weight)
        return g

    with _as_on_gpu(monkeypatch):
        assert_close(gradient(VALID), gradient(None))
        assert gradient(VALID - 1).isnan().any()


def _given(op: Any) -> tuple[Tensor, ...]:
    return tuple(D[k] for k in (("x", "w", "tx", "tw", "t") if op is jsd else ("x", "w", "t")))


@pytest.mark.parametrize("op", [flce, jsd, linear_logp])
def test_decides_nothing(op: Any) -> None:
    """No backend is told of the bound, or refuses because of it."""
    given, options = _given(op), {"ignore_index": IGNORED}
    assert op.explain(*given, **options, max_valid_tokens=3).call == op.explain(*given, **options).call


@pytest.mark.parametrize("op", [flce, jsd, linear_logp])
def test_kernels_never_see_the_bound(op: Any) -> None:
    seen: list[Any] = []
    real = registry.get_backend("torch").kernels[op.name]

    def forward(args: Any) -> Any:
        seen.append(args)
        return real.forward(args)

    registry.register(Backend("spy", {op.name: Kernel(forward, real.backward)}))
    try:
        for bound in (VALID + 1, N, N + 1):
            with without_looking(), torch.no_grad():
                op(*_given(op), ignore_index=IGNORED, max_valid_tokens=bound, impl="spy")
    finally:
        registry.unregister("spy")
    assert [a.max_valid_tokens for a in seen] == [None] * 3
    assert [getattr(a, op.gradients[0]).shape[0] for a in seen] == [VALID + 1, N, N]
