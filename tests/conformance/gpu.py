"""Checks that only a CUDA device can make: synchronisation, graphs, streams, sizes past 2^31, memory."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import headmux
from headmux.testing import oracle as oracles
from headmux.testing.cases import Problem, build, upstreams
from headmux.testing.probes import _compare_row, _options, _reductions, _same, probe
from headmux.testing.runner import Context

# what ``probe`` adds goes into headmux.testing.probes.PROBES


@probe("no-host-sync", devices=("cuda",))
def _no_host_sync(context: Context) -> None:
    """Neither forward nor backward waits for the device."""
    for reduction, bound in itertools.product(_reductions(context), (None, 69)):
        options = _options(context, reduction=reduction, max_valid_tokens=bound)
        problem = context.problem(N=70, options=options, bias=torch.float32, forward=True)
        context.run(problem)
        tensors = oracles.leaves(problem)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            oracles.evaluate(context.call, problem, tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@probe("cuda-graph", devices=("cuda",))
def _cuda_graph(context: Context) -> None:
    """Forward and backward can be captured, and a replay computes from the inputs of that moment."""
    for reduction, bound in itertools.product(_reductions(context), (None, 69)):
        options = _options(context, reduction=reduction, max_valid_tokens=bound)
        case = context.case(N=70, options=options, bias=torch.float32)
        problem = context.problem(case, forward=True)
        context.run(problem)
        static = Problem(
            case,
            {n: None if t is None else t.clone() for n, t in problem.tensors.items()},
            problem.options,
            {n: u.clone() for n, u in problem.upstream.items()},
            problem.roles,
        )
        tensors = oracles.leaves(static)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                oracles.evaluate(context.call, static, tensors)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = oracles.evaluate(context.call, static, tensors)
        for kind in ("negative", "random"):
            generator = torch.Generator().manual_seed(len(kind))
            for t in static.tensors.values():
                if t is not None and t.is_floating_point():
                    t.copy_(torch.randn(t.shape, generator=generator) * 0.3)
                elif t is not None:
                    t.copy_(t.roll(1))  # other tokens count
            arrives = upstreams(static, kind)
            for n, u in static.upstream.items():
                u.copy_(arrives[n])
            graph.replay()
            context.compare(static, result, note=f"{reduction}, replay with {kind} upstream: ")


@probe("streams", devices=("cuda",))
def _streams(context: Context) -> None:
    """Work goes to the current stream: inputs that it makes just before are seen, on several streams at once."""
    problem = context.problem(N=70, options=_options(context, reduction="none"), bias=torch.float32, forward=True)
    want = context.run(problem)
    torch.cuda.synchronize()
    results = []
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        late = {
            n: None if t is None else torch.full_like(t, 0 if n == "target" else torch.nan)
            for n, t in problem.tensors.items()
        }
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for n, t in late.items():
                if t is not None:
                    t.copy_(problem.tensors[n])  # type: ignore[arg-type]
            delayed = Problem(problem.case, late, problem.options, problem.upstream, problem.roles)
            results.append(oracles.evaluate(context.call, delayed))
    torch.cuda.synchronize()
    for result in results:
        for name, value in result.named().items():
            context.expect(_same(value, want.named()[name]), f"{name} differs on another stream")


@probe("checked-targets", ("flce", "linear_logp"), devices=("cuda",))
def _checked_targets(context: Context) -> None:
    """HEADMUX_CHECK=1 raises on any device."""
    import os

    problem = context.problem(N=12, ignored=0.0)
    context.admit(problem)
    problem.tensors["target"][5] = 200  # type: ignore[index]
    before = os.environ.get("HEADMUX_CHECK")
    os.environ["HEADMUX_CHECK"] = "1"
    try:
        context.call(**problem.tensors, **problem.options)
    except ValueError as error:
        context.expect("200" in str(error), f"the message hides the value: {error}")
    else:
        context.expect(False, "HEADMUX_CHECK=1 raises nothing")
    finally:
        if before is None:
            del os.environ["HEADMUX_CHECK"]
        else:
            os.environ["HEADMUX_CHECK"] = before


@probe("too-many-tokens", devices=("cuda",))
def _too_many_tokens(context: Context) -> None:
    """More tokens that count than ``max_valid_tokens``: NaN for those left out, and in every gradient."""
    for reduction in _reductions(context):
        options = _options(context, reduction=reduction, max_valid_tokens=3)
        problem = context.problem(N=12, options=options, bias=torch.float32, forward=True)
        context.admit(problem)
        got = oracles.evaluate(context.call, problem)
        lost = problem.valid.nonzero()[3:, 0]
        for name, value in got.outputs.items():
            left_out = value[lost] if value.dim() else value
            context.expect(torch.isnan(left_out).all(), f"{name} hides that tokens were left out ({reduction})")
        for role, g in got.gradients.items():
            context.expect(g is not None and torch.isnan(g).all(), f"grad_{role} is not NaN ({reduction})")


@probe("peak-memory", devices=("cuda",))
def _peak_memory(context: Context) -> None:
    """A call holds at most its gradients, an fp32 running sum of weight's, and about its budget."""
    tokens, hidden, classes, mb = 4096, 256, 32768, 16.0
    for reduction, grads in ((_reductions(context)[0], True), ("none", True), ("none", False)):
        options = _options(context, reduction=reduction, accum_dtype=torch.float32)
        case = context.case(N=tokens, H=hidden, V=classes, dtype=torch.bfloat16, options=options, budget_mb=mb)
        problem = build(case, context.device)
        context.admit(problem)
        roles = problem.roles if grads else ()
        tensors = oracles.leaves(problem, roles)
        oracles.evaluate(context.call, problem, tensors, roles=roles)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        oracles.evaluate(context.call, problem, tensors, roles=roles)
        peak = torch.cuda.max_memory_allocated() - before
        weight, states = classes * hidden, tokens * hidden
        # the hidden states with ignored rows cleared, for each model; and half a budget for buffers per token
        allowed = 1.5 * mb * 2**20 + 2 * states * 2 * (2 if context.check.op == "jsd" else 1)
        if grads:
            allowed += weight * (4 + 2) + states * (4 + 2)
        context.measure(f"peak bytes, {reduction}, gradients {grads}", peak, allowed)


@probe("logits-past-2-31", devices=("cuda",))
def _logits_past_2_31(context: Context) -> None:
    """N * V > 2^31: the last row is what it is alone."""
    options = _options(context, reduction="none")
    case = context.case(N=17000, H=64, V=131072, dtype=torch.bfloat16, options=options, ignored=0.0)
    problem = context.problem(case, forward=True)
    with headmux.budget(6000):
        got = context.run(problem)
    for row in (0, 16383, 16384, 16999):
        _compare_row(context, problem, got, row)


@probe("weight-past-2-31", ("flce", "linear_logp"), devices=("cuda",))
def _weight_past_2_31(context: Context) -> None:
    """V * H > 2^31: the last class's logit is read, and its gradient written, where they lie. Takes 15 GB."""
    tokens, hidden, classes = 8, 16448, 131072
    dtype = context.case(N=tokens, dtype=torch.bfloat16).dtype
    x = torch.randn(tokens, hidden, device=context.device).to(dtype)
    w = torch.empty(classes, hidden, device=context.device, dtype=dtype).normal_(0.0, 1e-3)
    w[-1] = x[0] * 2e-4
    target = torch.full((tokens,), classes - 1, device=context.device)
    options = _options(context, reduction="none")
    case = context.case(N=tokens, H=hidden, V=classes, dtype=dtype, options=options)
    problem = Problem(case, {"input": x, "weight": w, "target": target, "bias": None}, options, {}, ("weight",))
    problem.upstream = upstreams(problem, "negative")
    tensors = oracles.leaves(problem)
    context.admit(problem, tensors)
    result = oracles.evaluate(context.call, problem, tensors)
    z = torch.cat([x.double() @ block.double().T for block in w.split(8192)], dim=1)
    loss = torch.logsumexp(z, 1) - z[:, -1]
    peer = torch.mm(x, w.T, out_dtype=torch.float32).double()
    peer_error = (torch.logsumexp(peer, 1) - peer[:, -1] - loss).abs().max()
    name = problem.differentiable[0]
    sign = 1.0 if name == "loss" else -1.0
    # a tensor core's sums of 16448 products are less exact than fp32 ones: the budget is what this device's GEMM gives
    error = float((result.outputs[name] * sign - loss).abs().max())
    context.measure("loss", error, 2 * float(peer_error) + 1e-5)
    g = sign * problem.upstream[name] * (torch.exp(-loss) - 1)
    want: Tensor = g @ x.double()
    found = result.gradients["weight"]
    assert found is not None
    context.measure("last row of grad_weight, relative", float((found[-1].double() - want).norm() / want.norm()), 0.01)
