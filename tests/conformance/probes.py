"""Checks that look at one property each: what a comparison of one call with the oracle cannot show."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headmux.contract import Kernel, Upstream
from headmux.ops import _autograd
from headmux.testing import oracle as oracles
from headmux.testing.cases import Case, Problem, gradient_roles, upstreams
from headmux.testing.modes import Poisoned, Watch
from headmux.testing.runner import Check, CheckFailed, Context, Refused, is_interpreted

OPS = ("flce", "jsd", "linear_logp")
REDUCED = ("flce", "jsd")
CHUNKED_MB = 0.02

PROBES: list[Check] = []


def probe(
    name: str, ops: tuple[str, ...] = OPS, devices: tuple[str, ...] = ("cpu", "cuda"), *, interpreted: bool = True
) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """Add a function to PROBES, once for each op, as ``"op/name"``."""

    def add(run: Callable[[Context], None]) -> Callable[[Context], None]:
        PROBES.extend(Check(f"{op}/{name}", op, run, devices, interpreted) for op in ops)
        return run

    return add


def _options(context: Context, **options: Any) -> dict[str, Any]:
    """Options without those that the op does not have."""
    if context.check.op == "linear_logp":
        options.pop("reduction", None)
        if "ignore_index" not in options:
            options["ignore_index"] = -100
    return options


def _reductions(context: Context) -> tuple[str, ...]:
    return ("none",) if context.check.op == "linear_logp" else ("mean", "sum", "none")


def _roles(context: Context) -> tuple[str, ...]:
    return gradient_roles(context.check.op)


def _forward(context: Context, problem: Problem, tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    context.admit(problem, tensors)
    with oracles.context(problem):
        return oracles.outputs(problem, context.call(**tensors, **problem.options))


def _gradients(
    problem: Problem,
    found: dict[str, Tensor],
    tensors: dict[str, Tensor | None],
    upstream: dict[str, Tensor],
    *,
    retain: bool = False,
) -> dict[str, Tensor | None]:
    names = problem.differentiable
    inputs = [t for r in problem.roles if (t := tensors[r]) is not None]
    gradients = torch.autograd.grad(
        [found[n] for n in names], inputs, [upstream[n] for n in names], retain_graph=retain, allow_unused=True
    )
    return dict(zip(problem.roles, gradients, strict=True))


# ---------------------------------------------------------------------------------------------- fixed numbers

_X = [[1.0, 0.0], [0.0, 1.0], [1.0, -1.0], [2.0, 1.0]]
_W = [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.5]]
_B = [0.0, 0.1, -0.2, 0.3, 0.0]
_TEACHER_W = [[0.5, 0.5], [1.0, -1.0], [0.0, 0.0], [2.0, 0.0], [0.0, 1.0]]
_TARGET = [1, 2, 4, 3]
_NONE = [1.0546931995, 1.2066560638, 3.1694583856, 0.4473174768]
_GX = [-0.2883147428, 0.5273057233, 0.0, 0.0, -3.4054607946, 0.4003016702, -0.0474056310, -0.1197823227]
_GB = [-0.2144549559, -1.5776130587, 0.0186643493, -0.1950822222, 1.9684858876]


def _small(context: Context) -> tuple[dict[str, Tensor], torch.dtype]:
    dtype = context.case(N=4, H=2, V=5).dtype

    def tensor(values: Any, kind: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=kind, device=context.device)

    return {
        "x": tensor(_X, dtype),
        "w": tensor(_W, dtype),
        "b": tensor(_B, torch.float32),
        "tw": tensor(_TEACHER_W, dtype),
        "t": tensor(_TARGET, torch.int64),
    }, dtype


def _is(context: Context, name: str, value: Tensor, wanted: Any, *, relative: float = 2e-6) -> None:
    """fp32 numbers of order 1 after some ten operations: 2e-6 is 16 ulps of 1."""
    want = torch.tensor(wanted, dtype=torch.float64, device=value.device).reshape(value.shape)
    error = (value.detach().double() - want).abs().max()
    context.measure(name, float(error), relative * max(1.0, float(want.abs().max())))


def _admitted(context: Context, **arguments: Any) -> Any:
    """A direct call, once the backend is seen to take it or to refuse it as it should."""
    selection = context.op.explain(**arguments, impl=context.backend.name)
    if selection.reasons[context.backend.name]:
        tensors = {n: v for n, v in arguments.items() if isinstance(v, Tensor)}
        options = {n: v for n, v in arguments.items() if n not in tensors}
        context.admit(Problem(Case(context.check.id, context.check.op), dict(tensors), options, {}, ()), tensors)
    return context.call(**arguments)


@probe("fixture", ("flce",))
def _flce_fixture(context: Context) -> None:
    s, _ = _small(context)
    base = {"input": s["x"], "weight": s["w"], "target": s["t"]}
    one_ignored = {**base, "target": s["t"].clone().index_fill_(0, torch.tensor([1], device=context.device), -100)}
    classes = {"ce_weight": torch.arange(1.0, 6.0, device=context.device)}
    _is(context, "none", _admitted(context, **base, reduction="none"), _NONE)
    _is(context, "mean", _admitted(context, **base), 1.4695312814)
    _is(context, "sum", _admitted(context, **base, reduction="sum"), 5.8781251257)
    _is(context, "mean, one ignored", _admitted(context, **one_ignored), 1.5571563540)
    _is(context, "sum, one ignored", _admitted(context, **one_ignored, reduction="sum"), 4.6714690619)
    for name, options, want in (
        ("label smoothing", {"label_smoothing": 0.1}, 1.5245312814),
        ("class weights", classes, 1.6689940304),
        ("smoothed class weights", {**classes, "label_smoothing": 0.1}, 1.6837687372),
        ("z-loss", {"lse_square_scale": 1e-2}, 1.4695312814 + 0.0594054605),
        ("softcap", {"softcap": 2.0}, 1.5250917995),
    ):
        arguments = {**base, **options}
        if not context.op.explain(**arguments, impl=context.backend.name).reasons[context.backend.name]:
            _is(context, name, context.call(**arguments), want)


@probe("fixture-gradients", ("flce",))
def _flce_fixture_gradients(context: Context) -> None:
    s, dtype = _small(context)
    x, w, b = (s[n].requires_grad_() for n in ("x", "w", "b"))
    loss = _admitted(context, input=x, weight=w, bias=b, target=s["t"], reduction="none")
    upstream = torch.tensor([1.0, 0.0, -2.0, 0.5], device=context.device)
    gx, gb = torch.autograd.grad(loss, (x, b), upstream)
    relative = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    _is(context, "grad_input", gx, _GX, relative=relative)
    _is(context, "grad_bias", gb, _GB, relative=relative)


@probe("fixture", ("linear_logp",))
def _logp_fixture(context: Context) -> None:
    s, _ = _small(context)
    base = {"input": s["x"], "weight": s["w"], "target": s["t"]}
    _is(context, "logp", _admitted(context, **base), [-v for v in _NONE])
    for temperature, want in (
        (0.5, [-0.8281090145, -0.9702295267, -5.2590697299, -0.1451846772]),
        (2.0, [-1.2756255482, -1.3842578144, -2.3034215838, -0.8341863442]),
    ):
        _is(context, f"temperature {temperature}", _admitted(context, **base, temperature=temperature), want)
    found = _admitted(context, **base, return_entropy=True, return_lse=True)
    _is(context, "entropy", found.entropy, [1.4052318411, 1.5175280571, 1.2898018583, 0.9830223021])
    _is(context, "lse", found.lse, [2.0546931995, 2.2066560638, 1.6694583856, 3.4473174768])


@probe("fixture", ("jsd",))
def _jsd_fixture(context: Context) -> None:
    s, _ = _small(context)
    base = {"student_input": s["x"], "student_weight": s["w"], "teacher_input": s["x"], "teacher_weight": s["tw"]}
    table = {
        1.0: (0.2031263420, 0.0181966807, 0.0513093559, 0.0198931742, 0.2289507753),
        2.0: (0.0742710474, 0.0066627494, 0.0185132316, 0.0068011934, 0.0762194943),
    }
    for temperature, row in table.items():
        for beta, want in zip((0.0, 0.1, 0.5, 0.9, 1.0), row, strict=True):
            found = _admitted(context, **base, beta=beta, temperature=temperature)
            _is(context, f"beta {beta}, temperature {temperature}", found, want)
    _is(context, "near the end", context.call(**base, beta=1e-6), 2.031e-7)
    swapped = {**base, "student_weight": s["tw"], "teacher_weight": s["w"]}
    one, other = context.call(**base, beta=0.1), context.call(**swapped, beta=0.1)
    context.expect(
        (one - other).abs() > 1e-3, "student and teacher are interchangeable, which only beta=0.5 makes them"
    )


@probe("phantom-columns", ("linear_logp",))
def _phantom_columns(context: Context) -> None:
    """Padding of the vocabulary that counts as logit 0, or that a softcap revives."""
    dtype = context.case(N=3, H=64, V=129).dtype
    x = torch.zeros(3, 64, dtype=dtype, device=context.device)
    x[:, 0] = 1.0
    target = torch.zeros(3, dtype=torch.int64, device=context.device)
    for classes in (2, 3, 17, 127, 129, 257, 1000):
        w = torch.zeros(classes, 64, dtype=dtype, device=context.device)
        w[:, 0] = -30.0
        w[-1, 0] = -20.0
        found = _admitted(context, input=x, weight=w, target=target, return_lse=True)
        lse = -20.0 + math.log1p((classes - 1) * math.exp(-10.0))
        # an ulp of 30 in fp32 is 2e-6
        _is(context, f"lse of {classes}", found.lse, [lse] * 3, relative=2e-7)
        _is(context, f"logp of {classes}", found.logp, [-30.0 - lse] * 3, relative=4e-7)
    w = torch.full((3, 64), 0.0, dtype=dtype, device=context.device)
    w[:, 0] = -60.0
    capped = {"input": x, "weight": w, "target": target, "softcap": 30.0, "return_lse": True}
    if not context.op.explain(**capped, impl=context.backend.name).reasons[context.backend.name]:
        _is(context, "lse of a softcap", context.call(**capped).lse, [-27.8222151136] * 3, relative=2e-7)


@probe("likely-target", ("flce", "linear_logp"))
def _likely_target(context: Context) -> None:
    """p_y - 1 is formed before it is rounded: in bf16 it would be off by 2% at p_y = 0.9, and be 0 at 0.999."""
    for p in (0.9, 0.99, 0.999):
        case = context.case(N=16, H=64, V=64, dtype=torch.bfloat16, options=_options(context, reduction="none"))
        problem = context.problem(case)
        gap = math.log(p / (1 - p) * 63)
        x = torch.zeros(16, 64, dtype=torch.bfloat16, device=context.device)
        target = torch.arange(16, device=context.device)
        x[torch.arange(16), target] = gap / 8
        w = 8 * torch.eye(64, dtype=torch.bfloat16, device=context.device)
        problem.tensors.update(input=x, weight=w, target=target)
        problem.upstream = upstreams(problem, "negative")
        got = context.compare(problem, note=f"p_y={p}: ")
        want = oracles.oracle(problem).gradients["input"]
        found = got.gradients["input"]
        assert want is not None
        assert found is not None
        context.measure(f"p_y={p}: relative", float((found.double() - want).norm() / want.norm()), 0.01)


@probe("offset-logits", ("jsd",))
def _offset_logits(context: Context) -> None:
    """An offset of all logits rounds those and nothing else: a logsumexp rounded with it shifts all log-probabilities
    of a token by up to 1e-4, which is more than near models' divergence, and leaves gradients whose sum is not 0.
    """
    for beta in (0.0, 0.5, 1.0):
        options = {"beta": beta, "reduction": "none"}
        case = context.case(teacher=2e-3, bias=torch.float32, ignored=0.0, upstream="ones", options=options)
        problem = context.problem(case, forward=True)
        for model in ("student", "teacher"):
            bias, weight = (problem.tensors[f"{model}_{name}"] for name in ("bias", "weight"))
            assert bias is not None
            assert weight is not None
            bias.fill_(2500.0)
            weight[:, 0] = 1.0  # where grad_input is the sum of the logits' gradient
        got, want, by = context.run(problem), oracles.oracle(problem), oracles.peer(problem)
        assert want.probabilities is not None
        # beyond what any fp32 logits give, a few ulps of the log-probabilities, which are not large
        floor = oracles.FLOOR_ULPS * torch.finfo(torch.float32).eps * (1 - float(want.probabilities.log().min()))

        def errors(found: oracles.Result, want: oracles.Result = want) -> dict[str, float]:
            off = {"loss": found.outputs["loss"].double() - want.outputs["loss"]}
            if (g := found.gradients.get("student_input")) is not None:
                off["sum of the gradient"] = g[:, 0].double()
            return {name: float(values.abs().max()) for name, values in off.items()}

        of_peer = errors(by)
        for name, error in errors(got).items():
            context.measure(f"{name}, beta {beta:g}", error, 2 * of_peer[name] + floor)


# ---------------------------------------------------------------------------------------------- autograd


@probe("repeated-backward")
def _repeated_backward(context: Context) -> None:
    """A second and third backward are right, and leave the first one's gradients alone."""
    for reduction, mb in itertools.product(_reductions(context), (None, CHUNKED_MB)):
        options = _options(context, reduction=reduction, accum_dtype=torch.float32)
        problem = context.problem(N=70, options=options, bias=torch.float32, budget_mb=mb)
        tensors = oracles.leaves(problem)
        found = _forward(context, problem, tensors)
        kept: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        for i, kind in enumerate(("random", "negative", "random", "ones")):
            arrives = upstreams(problem, kind)
            gradients = _gradients(problem, found, tensors, arrives, retain=i < 3)
            for earlier, copies in kept:
                for role, g in earlier.items():
                    same = _same(g, copies[role])
                    context.expect(same, f"backward {i + 1} changed grad_{role} of an earlier one ({reduction})")
            kept.append((gradients, {r: None if g is None else g.clone() for r, g in gradients.items()}))
            result = oracles.Result({n: t.detach() for n, t in found.items()}, gradients)
            context.compare(problem, result, upstream=arrives, note=f"{reduction}, backward {i + 1}: ")


@probe("written-outputs")
def _written_outputs(context: Context) -> None:
    """Outputs are the caller's: what is written to them leaves the gradients alone."""
    asked: dict[str, Any] = {"ignore_index": None} if context.check.op == "linear_logp" else {"reduction": "none"}
    more = {"return_entropy": True, "return_lse": True} if context.check.op == "linear_logp" else {}
    for options, mb in itertools.product((asked, {**asked, **more}) if more else (asked,), (None, CHUNKED_MB)):
        problem = context.problem(N=40, options=options, ignored=0.0, budget_mb=mb)
        if options != asked and context.backend.reject(context.op.explain(**problem.tensors, **problem.options).call):
            continue
        tensors = oracles.leaves(problem)
        found = _forward(context, problem, tensors)
        result = oracles.Result({n: t.detach().clone() for n, t in found.items()})
        for t in found.values():
            t.detach().fill_(7)
        result.gradients = _gradients(problem, found, tensors, problem.upstream)
        context.compare(problem, result, note=f"{', '.join(options)}, {mb} MiB: ")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))


@probe("requested-gradients")
def _requested_gradients(context: Context) -> None:
    """Each subset of gradients: those asked for are right, the others stay None."""
    roles = _roles(context)
    for reduction in _reductions(context):
        problem = context.problem(options=_options(context, reduction=reduction), bias=torch.float32)
        for size in range(len(roles) + 1):
            for wanted in itertools.combinations(roles, size):
                context.compare(problem, roles=wanted, note=f"{reduction}, {'+'.join(wanted) or 'nothing'}: ")
                tensors = oracles.leaves(problem, wanted)
                with oracles.context(problem):
                    found = oracles.outputs(problem, context.call(**tensors, **problem.options))
                first = found[problem.differentiable[0]]
                context.expect(first.requires_grad == bool(wanted), f"requires_grad is {first.requires_grad}")
                if wanted:
                    first.sum().backward()
                for role, t in tensors.items():
                    if t is not None:
                        has = t.grad is not None
                        context.expect(
                            has == (role in wanted), f"{role}.grad is {'set' if has else 'None'} for {wanted}"
                        )


@probe("teacher", ("jsd",))
def _teacher(context: Context) -> None:
    """A teacher that requires a gradient gets none, and the student's gradients do not change."""
    problem = context.problem(bias=torch.float32)
    context.run(problem)
    tensors = oracles.leaves(problem, (*problem.roles, "teacher_input", "teacher_weight", "teacher_bias"))
    found = _forward(context, problem, tensors)["loss"]
    found.backward()
    for role in ("teacher_input", "teacher_weight", "teacher_bias"):
        t = tensors[role]
        context.expect(t is not None and t.grad is None, f"{role} got a gradient")
    result = oracles.Result({"loss": found.detach()}, {r: _grad(tensors[r]) for r in problem.roles})
    context.compare(problem, result, upstream={"loss": torch.ones_like(found)})


def _grad(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.grad


@probe("second-order")
def _second_order(context: Context) -> None:
    """create_graph gives right second-order gradients, or raises: never a result that is silently detached."""
    problem = context.problem(N=12, V=72, options=_options(context, reduction="none"), ignored=0.0)
    if problem.case.dtype != torch.float32:
        return _second_order_is_attached(context, problem)
    role = problem.roles[0]
    values = []
    for f, dtype in ((context.call, torch.float32), (problem.op.reference, torch.float64)):
        tensors = {
            n: t if t is None or not t.is_floating_point() else t.detach().to(dtype).requires_grad_(n == role)
            for n, t in problem.tensors.items()
        }
        if dtype == torch.float32:
            context.admit(problem, tensors)
        first = oracles.outputs(problem, f(**tensors, **problem.options))[problem.differentiable[0]]
        leaf = tensors[role]
        assert leaf is not None
        (g,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
        context.expect(g.requires_grad, "the gradient of create_graph=True is detached")
        (second,) = torch.autograd.grad(g.square().sum(), leaf)
        values.append(second.double())
    # three products in fp32, each relative to the largest of its terms
    error = (values[0] - values[1]).norm() / values[1].norm()
    context.measure("second order, relative", float(error), 1e-4)


def _second_order_is_attached(context: Context, problem: Problem) -> None:
    tensors = oracles.leaves(problem)
    found = _forward(context, problem, tensors)
    leaf = tensors[problem.roles[0]]
    assert leaf is not None
    (g,) = torch.autograd.grad(found[problem.differentiable[0]].square().sum(), leaf, create_graph=True)
    context.expect(g.requires_grad, "the gradient of create_graph=True is detached")


@probe("activations")
def _activations(context: Context) -> None:
    """Hidden states that an earlier op saved for its own backward stay whole."""
    problem = context.problem(options=_options(context, reduction="none"), ignored=0.0)
    states = problem.roles[0]
    context.admit(problem)
    x = problem.tensors[states]
    assert x is not None
    pre = x.detach().clone().requires_grad_()
    tensors = {**oracles.leaves(problem), states: torch.tanh(pre)}
    found = _forward(context, problem, tensors)
    name = problem.differentiable[0]
    (g,) = torch.autograd.grad(found[name], pre, problem.upstream[name])
    inner = Problem(
        problem.case, {**problem.tensors, states: torch.tanh(x)}, problem.options, problem.upstream, (states,)
    )
    want = oracles.oracle(inner).gradients[states]
    by = oracles.peer(inner).gradients[states]
    assert want is not None
    assert by is not None
    slope = 1 - torch.tanh(x).double().square()
    want, rival = want * slope, by.double() * slope
    # tanh's own backward rounds once more, by half an ulp
    rounding = torch.finfo(x.dtype).eps * float(want.norm())
    context.measure("grad before tanh", float((g.double() - want).norm()), 2 * float((rival - want).norm()) + rounding)


@probe("no-gradients")
def _no_gradients(context: Context) -> None:
    """Under no_grad and inference_mode: the same outputs, no graph, no gradient-sized buffer, one matrix product."""
    for bias in (None, torch.float32):
        # N < H, so that only a buffer of weight's size reaches V * H elements
        problem = context.problem(
            N=32, H=64, V=2048, options=_options(context, reduction="none"), bias=bias, budget_mb=0.25, forward=True
        )
        want = context.run(problem).outputs
        tensors = oracles.leaves(problem)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found = _forward(context, problem, tensors)
            for name, t in found.items():
                context.expect(not t.requires_grad, f"{name} requires a gradient under {mode.__name__}")
                context.expect(
                    torch.allclose(t, want[name], rtol=1e-5, atol=1e-5), f"{name} differs under {mode.__name__}"
                )
        with torch.no_grad(), oracles.context(problem), Watch(*tensors.values()) as watch:
            context.call(**tensors, **problem.options)
        size = 2048 * 64
        context.measure("elements of the largest buffer", watch.elements, size - 1)
        products = 2 if context.check.op == "jsd" else 1
        context.measure("matrix products", watch.flops / (2 * 32 * size), products * 1.01)


@probe("no-waste")
def _no_waste(context: Context) -> None:
    """Nothing of weight's size is made for gradients of the input and bias alone; no product is made in vain."""
    prefix = "student_" if context.check.op == "jsd" else ""
    forwards = 2 if context.check.op == "jsd" else 1
    for reduction in _reductions(context)[-2:]:
        problem = context.problem(
            N=32, H=64, V=2048, options=_options(context, reduction=reduction), bias=torch.float32, budget_mb=0.25
        )
        context.admit(problem)
        size = 2048 * 64
        for wanted, products in (
            (("input", "bias"), 2 * forwards + 1),
            (("bias",), 2 * forwards),
            (("weight",), 2 * forwards + 1),
        ):
            roles = tuple(prefix + r for r in wanted if prefix + r in problem.roles)
            if not roles:
                continue
            tensors = oracles.leaves(problem, roles)
            with Watch(*tensors.values()) as watch:
                oracles.evaluate(context.call, problem, tensors, roles=roles)
            what = f"{reduction}, {'+'.join(wanted)}"
            context.measure(f"matrix products, {what}", watch.flops / (2 * 32 * size), products * 1.01)
            if "weight" not in wanted:
                context.measure(f"elements of the largest buffer, {what}", watch.elements, size - 1)


# ---------------------------------------------------------------------------------------------- the contract


@probe("contract")
def _contract(context: Context) -> None:
    """What the kernels themselves return, before headmux.ops touches it."""
    extra: dict[str, Any] = {"return_predicted_tokens": True} if context.check.op == "flce" else {}
    for reduction, dtype in itertools.product(_reductions(context), (None, torch.bfloat16)):
        fields: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        options = _options(context, reduction=reduction)
        problem = context.problem(options={**options, **extra}, bias=torch.float32, **fields)
        if extra and context.backend.reject(context.op.explain(**problem.tensors, **problem.options).call):
            problem = context.problem(options=options, bias=torch.float32, **fields)
        context.admit(problem)
        present = [i for i, r in enumerate(_roles(context)) if r in problem.roles]
        for size in range(len(present) + 1):
            for wanted in itertools.combinations(present, size):
                _kernel(context, problem, wanted, reduction)


def _kernel(context: Context, problem: Problem, wanted: tuple[int, ...], reduction: str) -> None:
    roles = _roles(context)
    needs = tuple(i in wanted for i in range(len(roles)))
    tensors = oracles.leaves(problem, tuple(roles[i] for i in wanted))
    args = _autograd.with_needs(context.op, context.op.request(**tensors, **problem.options).args)
    kernel: Kernel = context.backend.kernels[context.check.op]
    count = problem.valid.numel()
    wide = torch.float64 if problem.compute == torch.float64 else torch.float32
    with torch.no_grad():
        outputs, residual = kernel.forward(args)
        context.expect(len(outputs) == len(context.op.outputs), f"forward gives {len(outputs)} outputs")
        for out, there, value in zip(context.op.outputs, context.op.present(args), outputs, strict=True):
            context.expect(
                (value is not None) == there, f"forward's {out.name} is {'there' if value is not None else 'None'}"
            )
            if value is not None:
                dtype = torch.int64 if out.integer else wide
                context.expect(value.dtype == dtype, f"forward's {out.name} has dtype {value.dtype}, should be {dtype}")
                context.expect(tuple(value.shape) == (count,), f"forward's {out.name} has shape {tuple(value.shape)}")
                ignored = value[~problem.valid]
                at = -1 if out.integer else 0
                context.expect((ignored == at).all(), f"forward's {out.name} is not {at} on ignored tokens")
        if not wanted:
            context.expect(residual is None, "forward keeps a residual although no gradient is wanted")
            return
        scalar = None if reduction == "none" else torch.tensor(-1.5, dtype=wide, device=context.device)
        g = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(wide).to(context.device)
        g = torch.where(problem.valid, g if scalar is None else args.row_scale * scalar, 0.0)
        rows = (g, *[None] * (len(outputs) - 1))
        found = kernel.backward(args, residual, Upstream(rows, scalar))
        context.expect(len(found) == len(roles), f"backward gives {len(found)} gradients")
        for role, need, value in zip(roles, needs, found, strict=True):
            context.expect(
                (value is not None) == need,
                f"backward's grad_{role} is "
                f"{'there, although not needed' if value is not None else 'missing'} ({needs})",
            )
            parameter = getattr(args, role)
            if value is not None:
                context.expect(value.dtype == parameter.dtype, f"backward's grad_{role} has dtype {value.dtype}")
                context.expect(value.shape == parameter.shape, f"backward's grad_{role} has shape {tuple(value.shape)}")
                context.expect(value.is_contiguous(), f"backward's grad_{role} has strides {value.stride()}")


@probe("bad-target", ("flce", "linear_logp"))
def _bad_target(context: Context) -> None:
    """Kernels give NaN for a target out of range and use it as no index; other rows are as without it."""
    for bad in (-1, 200, 10**6, 2**32 + 3, -(2**63), 2**63 - 1):
        problem = context.problem(N=12, options=_options(context, reduction="none"), ignored=0.0)
        context.admit(problem)
        good = problem.tensors["target"]
        assert good is not None
        tensors = oracles.leaves(problem)
        args = _autograd.with_needs(context.op, context.op.request(**tensors, **problem.options).args)
        wide = torch.float64 if problem.compute == torch.float64 else torch.float32
        g = torch.linspace(-1.0, 2.0, 12, device=context.device).to(wide)
        results = []
        for target in (good, good.clone().index_fill_(0, torch.tensor([5], device=context.device), bad)):
            called = dataclasses.replace(args, target=target.reshape(-1))
            with torch.no_grad():
                kernel = context.backend.kernels[context.check.op]
                outputs, residual = kernel.forward(called)
                rows = (g, *[None] * (len(outputs) - 1))
                results.append((outputs[0], kernel.backward(called, residual, Upstream(rows, None))))
        (loss, gradients), (bad_loss, bad_gradients) = results
        context.expect(torch.isnan(bad_loss[5]), f"target {bad} of V=200 gives {float(bad_loss[5])}, not NaN")
        context.expect(torch.isnan(bad_gradients[0][5]).all(), f"target {bad}: grad_input's row is not NaN")
        keep = torch.arange(12, device=context.device) != 5
        context.expect(_same(bad_loss[keep], loss[keep]), f"target {bad} changes other rows' losses")
        context.expect(
            _same(bad_gradients[0][keep], gradients[0][keep]), f"target {bad} changes other rows of grad_input"
        )


@probe("bad-target-call", ("flce", "linear_logp"))
def _bad_target_call(context: Context) -> None:
    """An op's call with a target out of range: ValueError on the CPU, NaN elsewhere."""
    for bad in (-1, 200, 2**32 + 3):
        problem = context.problem(N=12, options=_options(context, reduction="none"), ignored=0.0)
        context.admit(problem)
        good = problem.tensors["target"]
        assert good is not None
        problem.tensors["target"] = good.clone().index_fill_(0, torch.tensor([5], device=context.device), bad)
        if context.device == "cpu":
            try:
                context.call(**problem.tensors, **problem.options)
            except ValueError as error:
                context.expect(str(bad) in str(error) and "V=200" in str(error), f"the message hides values: {error}")
            else:
                raise CheckFailed(f"target {bad} of V=200 raises nothing")
        else:
            found = oracles.outputs(problem, context.call(**problem.tensors, **problem.options))
            for value in (found[problem.differentiable[0]],):
                lost = torch.isnan(value)
                context.expect(lost[5] and int(lost.sum()) == 1, f"target {bad}: NaN at {lost.nonzero().tolist()}")


@probe("bad-arguments")
def _bad_arguments(context: Context) -> None:
    """Bad arguments raise before selection, the same on every backend."""
    problem = context.problem()
    prefix = "student_" if context.check.op == "jsd" else ""
    x, w, t = (problem.tensors[n] for n in (f"{prefix}input", f"{prefix}weight", "target"))
    assert x is not None
    assert w is not None
    assert t is not None
    softcap = f"{prefix}softcap"
    for change, kind in (
        ({f"{prefix}weight": w[:, :-1]}, ValueError),
        ({f"{prefix}weight": w[:0]}, ValueError),
        ({f"{prefix}weight": w.reshape(-1)}, ValueError),
        ({f"{prefix}weight": w.to(torch.float64)}, TypeError),
        ({"target": t[:-1]}, ValueError),
        ({"target": t.float()}, TypeError),
        ({f"{prefix}bias": torch.zeros(201, device=context.device)}, ValueError),
        ({softcap: 0.0}, ValueError),
        ({softcap: math.nan}, ValueError),
        ({softcap: True}, TypeError),
        ({"accum_dtype": torch.bfloat16}, ValueError),
        ({"no_such_option": 1}, TypeError),
    ):
        try:
            context.call(**{**problem.tensors, **problem.options, **change})
        except kind:
            continue
        raise CheckFailed(f"{change} raises no {kind.__name__}")


# ---------------------------------------------------------------------------------------------- ignored tokens


@probe("ignored-rows")
def _ignored_rows(context: Context) -> None:
    """Hidden states of ignored tokens may be NaN: nothing of them reaches losses or gradients, which are exactly 0."""
    prefixes = ("student_", "teacher_") if context.check.op == "jsd" else ("",)
    for reduction, mb, bias in itertools.product(_reductions(context), (None, CHUNKED_MB), (None, torch.float32)):
        options = _options(context, reduction=reduction, accum_dtype=torch.float32)
        problem = context.problem(N=33, options=options, bias=bias, ignored=0.4, budget_mb=mb)
        clean = context.run(problem)
        for prefix in prefixes:
            x = problem.tensors[f"{prefix}input"]
            assert x is not None
            for i, row in enumerate((~problem.valid).nonzero()[:, 0].tolist()):
                x[row] = (math.nan, math.inf, -math.inf)[i % 3]
        got = context.run(problem)
        states = problem.roles[0]
        zero = got.gradients[states]
        assert zero is not None
        context.expect((zero[~problem.valid] == 0).all(), f"grad_{states} is not 0 on ignored rows ({reduction})")
        for name, value in got.named().items():
            context.expect(_same(value, clean.named()[name]), f"{name} depends on ignored hidden states ({reduction})")
        if reduction == "none":
            first = got.outputs[problem.differentiable[0]]
            context.expect((first[~problem.valid] == 0).all(), "the loss is not 0 on ignored rows")


@probe("ignored-targets", ("jsd",))
def _ignored_targets(context: Context) -> None:
    """Labels only tell which tokens count: other values, whatever they are, change nothing."""
    problem = context.problem(N=12)
    want = context.run(problem)
    t = problem.tensors["target"]
    assert t is not None
    t[problem.valid] = 10**12
    got = context.run(problem)
    for name, value in got.named().items():
        context.expect(_same(value, want.named()[name]), f"{name} depends on the labels' values")


@probe("nothing-counts")
def _nothing_counts(context: Context) -> None:
    """No token that counts, or none at all: losses of 0 and zero gradients."""
    for tokens in (6, 0):
        for reduction in _reductions(context):
            problem = context.problem(N=6, options=_options(context, reduction=reduction), bias=torch.float32)
            for name in ("input", "student_input", "teacher_input", "target"):
                if (t := problem.tensors.get(name)) is not None:
                    problem.tensors[name] = t[:tokens].contiguous()
            t = problem.tensors["target"]
            assert t is not None
            t.fill_(-100)
            problem.upstream = upstreams(problem, "negative")
            got = context.run(problem)
            for name, value in got.named().items():
                what = f"{name} with {tokens} ignored tokens ({reduction})"
                context.expect(value is not None, f"{what} is missing")
                assert value is not None
                context.expect(torch.isfinite(value).all() and (value == 0).all(), f"{what} is not 0")


@probe("zero-upstream")
def _zero_upstream(context: Context) -> None:
    """An upstream of 0 gives gradients of 0, and one row's 0 leaves the other rows' gradients alone."""
    for reduction in _reductions(context):
        problem = context.problem(N=12, options=_options(context, reduction=reduction), bias=torch.float32)
        got = context.run(problem, upstream=upstreams(problem, "zero"))
        for role, g in got.gradients.items():
            context.expect(g is not None and bool((g == 0).all()), f"grad_{role} of a zero upstream is not 0")
        if reduction == "none":
            only = upstreams(problem, "negative")
            for g in only.values():
                g.view(-1)[torch.arange(12, device=g.device) != 3] = 0.0
            problem.tensors["target"][3] = 1  # type: ignore[index]
            context.compare(problem, upstream=only, note="one row: ")


@probe("gradient-accumulation", REDUCED)
def _gradient_accumulation(context: Context) -> None:
    """Micro-batches under one ``num_items`` add up to the whole batch, whichever tokens each of them counts."""
    whole = context.problem(N=12, options={"num_items": 9}, bias=torch.float32, ignored=0.4)
    context.compare(whole)
    one = {n: torch.ones_like(u) for n, u in whole.upstream.items()}
    want = oracles.oracle(whole, upstream=one)
    divisor = torch.tensor(9, device=context.device)
    total: dict[str, Tensor] = {}
    states = whole.roles[0]
    rows = []
    for part in (slice(0, 3), slice(3, 12)):
        tensors = {
            n: t[part] if t is not None and (n.endswith("input") or n == "target") else t
            for n, t in whole.tensors.items()
        }
        micro = Problem(whole.case, tensors, {"num_items": divisor}, one, whole.roles)
        got = context.compare(micro, note=f"rows {part.start} to {part.stop}: ", upstream=one)
        rows.append(got.gradients[states])
        for role in whole.roles[1:]:
            g = got.gradients[role]
            assert g is not None
            total[role] = total[role] + g if role in total else g
    total[states] = torch.cat([r for r in rows if r is not None])
    for role, value in total.items():
        true = want.gradients[role]
        assert true is not None
        # each part was held to its budget above: this only tells a wrong divisor from rounding, of the sum and of what
        # is summed, which for an fp32 bias beside 16-bit states has 16 bits
        error = (value.double() - true).norm() / true.norm()
        rounding = max(torch.finfo(value.dtype).eps, torch.finfo(whole.compute).eps)
        context.measure(f"grad_{role}, summed", float(error), 1e-5 + 4 * rounding)


# ---------------------------------------------------------------------------------------------- accumulation


@probe("equal-rows")
def _equal_rows(context: Context) -> None:
    """Many equal contributions: a 16-bit running sum stops growing after 2^8 of them."""
    for accum, mb in ((None, None), (torch.float32, 0.05)):
        case = context.case(
            N=2048,
            H=16,
            V=16,
            dtype=torch.bfloat16,
            bias=torch.float32,
            ignored=0.0,
            budget_mb=mb,
            options=_options(context, accum_dtype=accum, reduction="sum"),
            upstream="ones",
        )
        problem = context.problem(case)
        for name in ("input", "student_input", "teacher_input", "target"):
            if (t := problem.tensors.get(name)) is not None:
                problem.tensors[name] = t[:1].expand(t.shape).contiguous()
        # with equal rows the rounding errors of the logits' gradients are equal too, and none is an average
        got = context.run(problem)
        want = oracles.oracle(problem)
        for role in problem.roles[1:]:
            value, true = got.gradients[role], want.gradients[role]
            assert value is not None
            assert true is not None
            # half an ulp of the logits' gradient, again where a kernel keeps its exponential, and of the result
            error = float((value.double() - true).norm() / true.norm())
            context.measure(f"grad_{role}, accum_dtype={accum}", error, 1.5 * torch.finfo(torch.bfloat16).eps)


@probe("chunks")
def _chunks(context: Context) -> None:
    """However small the budget, results stay within their own, and fp32 sums lose nothing (1.1 times one chunk's)."""
    tokens = 96 if is_interpreted(context.backend) else 256
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        errors: dict[str, list[float]] = {}
        for mb in (64.0, 0.1, 0.02, 0.004):
            options = _options(context, accum_dtype=torch.float32, reduction="sum")
            problem = context.problem(context.case(N=tokens, H=16, V=96, dtype=dtype, options=options, budget_mb=mb))
            try:
                got = context.compare(problem, note=f"{dtype}, {mb} MiB: ")
            except Refused:
                if dtype == torch.float32:
                    raise
                break
            want = oracles.oracle(problem)
            for role in problem.roles[1:]:
                value, true = got.gradients[role], want.gradients[role]
                assert value is not None
                assert true is not None
                errors.setdefault(role, []).append(float((value.double() - true).norm() / true.norm()))
        if dtype == torch.float32:
            continue
        for role, found in errors.items():
            for error in found[1:]:
                context.measure(f"grad_{role}, {dtype} against one chunk", error, 1.1 * found[0])


@probe("loss-scale", REDUCED)
def _loss_scale(context: Context) -> None:
    """fp16 gradients of a mean, p / N = 2e-6 with six bits left, survive until the loss scale arrives."""
    case = context.case(N=512, H=16, V=1024, dtype=torch.float16, spread=0.1, ignored=0.0, options={})
    problem = context.problem(case)
    context.compare(problem, upstream={"loss": torch.tensor(65536.0, device=context.device)})


@probe("autocast-unrounded")
def _autocast_unrounded(context: Context) -> None:
    """Under autocast an fp32 weight's gradient comes from fp32 sums, not from 16-bit ones."""
    problem = context.problem(context.case(autocast=torch.bfloat16, dtype=torch.float32, bias=torch.float32))
    got = context.compare(problem)
    for role in problem.roles:
        g = got.gradients[role]
        assert g is not None
        context.expect(g.dtype == torch.float32, f"grad_{role} has dtype {g.dtype}")
        context.expect(not torch.equal(g, g.bfloat16().float()), f"every element of grad_{role} is a bf16 number")


@probe("alone-or-together")
def _alone_or_together(context: Context) -> None:
    """A row's loss and grad_input are the same alone as among others."""
    options = _options(context, reduction="none")
    problem = context.problem(N=48, options=options, ignored=0.0)
    context.compare(problem)
    states = problem.roles[0]
    for row in (0, 31, 47):
        tensors = {
            n: t[row : row + 1] if t is not None and (n.endswith("input") or n == "target") else t
            for n, t in problem.tensors.items()
        }
        alone = Problem(
            problem.case,
            tensors,
            problem.options,
            {n: u[row : row + 1] for n, u in problem.upstream.items()},
            (states,),
        )
        context.compare(alone, note=f"row {row}: ")


# ---------------------------------------------------------------------------------------------- memory and order


@probe("poisoned-memory")
def _poisoned_memory(context: Context) -> None:
    """Every element of a result is written on every path: fresh memory that holds NaN does not show."""
    for reduction, mb in itertools.product(_reductions(context), (None, CHUNKED_MB)):
        problem = context.problem(
            N=70, options=_options(context, reduction=reduction), bias=torch.float32, ignored=0.4, budget_mb=mb,
            forward=True,
        )  # fmt: skip
        want = context.run(problem)
        with Poisoned():
            got = oracles.evaluate(context.call, problem)
        for name, value in got.named().items():
            context.expect(_same(value, want.named()[name]), f"{name} depends on fresh memory ({reduction}, {mb} MiB)")


@probe("memory")
def _memory(context: Context) -> None:
    """No tensor is larger than the budget, weight's gradient in fp32, or input's: N * V is far out of reach."""
    mb = 0.25
    tokens = 192 if is_interpreted(context.backend) else 512
    for dtype in (None, torch.bfloat16):
        fields = {} if dtype is None else {"dtype": dtype}
        for reduction, wanted in ((_reductions(context)[0], True), ("none", True), ("none", False)):
            options = _options(context, reduction=reduction)
            problem = context.problem(N=tokens, H=16, V=1024, options=options, budget_mb=mb, **fields)
            context.admit(problem)
            roles = problem.roles if wanted else ()
            tensors = oracles.leaves(problem, roles)
            with Watch(*tensors.values(), *problem.upstream.values()) as watch:
                oracles.evaluate(context.call, problem, tensors, roles=roles)
            limit = max(mb * 2**20, 1024 * 16 * 4)
            name = f"bytes of the largest tensor, {problem.case.dtype}, {reduction}, gradients {wanted}"
            context.measure(name, watch.largest, limit)


@probe("deterministic")
def _deterministic(context: Context) -> None:
    """The same call gives the same bits."""
    for reduction, mb in itertools.product(_reductions(context), (None, CHUNKED_MB)):
        problem = context.problem(
            N=70, options=_options(context, reduction=reduction), bias=torch.float32, budget_mb=mb, forward=True
        )
        first = context.run(problem)
        for _ in range(2):
            again = context.run(problem)
            for name, value in again.named().items():
                context.expect(_same(value, first.named()[name]), f"{name} differs between two runs ({reduction})")


@probe("many-tokens", interpreted=False)
def _many_tokens(context: Context) -> None:
    """More tokens than a CUDA grid has places in its second dimension."""
    options = _options(context, reduction="none")
    problem = context.problem(N=65537, H=16, V=32, options=options, ignored=0.0, forward=True)
    got = context.run(problem)
    for row in (0, 65535, 65536):
        _compare_row(context, problem, got, row)


def _compare_row(context: Context, problem: Problem, got: oracles.Result, row: int) -> None:
    """Outputs and the gradient of the hidden states of one token against the oracle of that token alone."""
    tensors = {
        n: t[row : row + 1] if t is not None and (n.endswith("input") or n == "target") else t
        for n, t in problem.tensors.items()
    }
    roles = problem.roles[:1]
    upstream = {n: u[row : row + 1] for n, u in problem.upstream.items()}
    alone = Problem(problem.case, tensors, problem.options, upstream, roles)
    part = oracles.Result({n: t[row : row + 1] for n, t in got.outputs.items()})
    for role in roles:
        g = got.gradients[role]
        assert g is not None
        part.gradients[role] = g[row : row + 1]
    context.compare(alone, part, roles=roles, note=f"row {row}: ")


# ---------------------------------------------------------------------------------------------- compile


@probe("opcheck")
def _opcheck(context: Context) -> None:
    """The opaque op of torch.compile obeys its schema, its fake and its autograd."""
    for reduction in _reductions(context)[-2:]:
        problem = context.problem(N=12, options=_options(context, reduction=reduction), bias=torch.float32)
        tensors = oracles.leaves(problem)
        context.admit(problem, tensors)
        args = _autograd.with_needs(context.op, context.op.request(**tensors, **problem.options).args)
        flat = [getattr(args, f) for f in (*context.op.tensor_fields, *context.op.static_fields)]
        torch.library.opcheck(context.op.raw, (*flat, context.backend.name))


@probe("compiled")
def _compiled(context: Context) -> None:
    """torch.compile(fullgraph=True) gives what eager mode gives, for other numbers of tokens too."""
    for reduction in _reductions(context)[-2:]:
        torch._dynamo.reset()
        first = context.problem(N=12, options=_options(context, reduction=reduction), bias=torch.float32)
        context.admit(first)
        compiled = torch.compile(context.call, backend="aot_eager", fullgraph=True)
        for tokens in (12, 18):
            problem = context.problem(dataclasses.replace(first.case, N=tokens))
            got = oracles.evaluate(compiled, problem)
            context.compare(problem, got, note=f"{reduction}, {tokens} tokens: ")
    torch._dynamo.reset()
