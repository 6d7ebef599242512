"""Property tests: calls drawn by hypothesis, compared with the oracle, and the environment variable's values.

The draws are derandomised: the same each time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headmux import registry, select
from headmux.errors import UnknownNameError
from headmux.testing.cases import LAYOUTS, PER_CLASS, PER_TOKEN, UPSTREAMS, Case, build, gradient_roles
from headmux.testing.probes import OPS, REDUCED
from headmux.testing.runner import Check, Context, Refused

EXAMPLES = 40
_settings = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

_SOFTCAPS = st.sampled_from([None, None, 1.5, 30.0])
_SCALES = st.sampled_from([1.0, 1.0, 0.3, -2.0])
_TEMPERATURES = st.sampled_from([1.0, 0.5, 3.0])
_OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "flce": {
        "softcap": _SOFTCAPS,
        "logit_scale": _SCALES,
        "label_smoothing": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        "lse_square_scale": st.sampled_from([0.0, 1e-3]),
        "ce_weight": st.sampled_from([None, PER_CLASS]),
        "token_weight": st.sampled_from([None, None, PER_TOKEN]),
        "use_token_scaling": st.booleans(),
        "return_z_loss": st.booleans(),
    },
    "jsd": {
        "beta": st.sampled_from([0.0, 0.01, 0.5, 0.9, 1.0]),
        "temperature": _TEMPERATURES,
        "student_softcap": _SOFTCAPS,
        "teacher_softcap": _SOFTCAPS,
        "student_logit_scale": _SCALES,
        "teacher_logit_scale": _SCALES,
    },
    "linear_logp": {
        "temperature": st.one_of(_TEMPERATURES, st.just(PER_TOKEN)),
        "softcap": _SOFTCAPS,
        "logit_scale": _SCALES,
        "return_entropy": st.booleans(),
        "return_lse": st.booleans(),
    },
}
_DEFAULTS = {
    "softcap": None,
    "logit_scale": 1.0,
    "label_smoothing": 0.0,
    "lse_square_scale": 0.0,
    "ce_weight": None,
    "token_weight": None,
    "use_token_scaling": False,
    "return_z_loss": False,
    "student_softcap": None,
    "teacher_softcap": None,
    "student_logit_scale": 1.0,
    "teacher_logit_scale": 1.0,
    "return_entropy": False,
    "return_lse": False,
    "temperature": 1.0,
}


@st.composite
def _calls(draw: st.DrawFn, op: str) -> Case:
    options = {n: v for n, s in _OPTIONS[op].items() if (v := draw(s)) != _DEFAULTS.get(n, 0.5)}
    if op in REDUCED:
        options["reduction"] = draw(st.sampled_from(["none", "mean", "sum"]))
    elif draw(st.booleans()):
        options["ignore_index"] = -100
    options["accum_dtype"] = torch.float32
    layout = draw(st.sampled_from(LAYOUTS))
    tokens = 3 * draw(st.integers(1, 8)) if layout.startswith("3d") else draw(st.integers(1, 24))
    bias = draw(st.sampled_from([None, torch.float32]))
    roles = gradient_roles(op)[: 2 if bias is None else 3]
    return Case(
        f"{op}/drawn-{draw(st.integers(0, 3))}",
        op,
        N=tokens,
        H=draw(st.integers(1, 40)),
        V=draw(st.one_of(st.integers(1, 20), st.integers(100, 300))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        options=options,
        bias=bias,
        needs=tuple(draw(st.lists(st.sampled_from(roles), unique=True))),
        ignored=draw(st.sampled_from([0.0, 0.3, 0.9])),
        layout=layout,
        upstream=draw(st.sampled_from(UPSTREAMS)),
        budget_mb=draw(st.sampled_from([None, 0.01])),
    )


def _drawn(context: Context) -> None:
    refusals: list[Refused] = []
    ran = 0

    @_settings
    @given(_calls(context.check.op))
    def hold(case: Case) -> None:
        nonlocal ran
        try:
            context.compare(build(case, context.device))
            ran += 1
        except Refused as refused:
            refusals.append(refused)

    hold()
    context.measures = _worst(context)
    if not ran:
        raise refusals[0]


def _worst(context: Context) -> list[Any]:
    """Of the thousands of measures, the ones closest to their budgets."""
    return sorted(context.measures, key=lambda m: m.error / m.budget if m.budget else 0.0, reverse=True)[:10]


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    names = [f"{p}{s}" for p in select.PREFIXES for s in ("", *(f"_{op.upper()}" for op in OPS))]
    before = {n: os.environ.pop(n) for n in names if n in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


def _selected(context: Context) -> None:
    """The variable's value is stripped and lower-cased, a comma list is tried in order, and a wrong name is told."""
    problem = context.problem()
    context.admit(problem)
    name = context.backend.name
    blank = st.text(" \t", max_size=2)
    spelled = st.lists(st.booleans(), min_size=len(name), max_size=len(name)).map(
        lambda ups: "".join(c.upper() if up else c for c, up in zip(name, ups, strict=True))
    )
    padded = st.tuples(blank, spelled, blank).map("".join)
    known = {*registry.names(), "auto", "nvidia-triton", "nvidia-cutedsl", "cute", "pytorch"}
    wrong = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=1).filter(
        lambda v: v.strip().lower() not in known
    )
    variables = st.sampled_from([f"{p}{s}" for p in select.PREFIXES for s in ("", f"_{context.check.op.upper()}")])

    @_settings
    @given(variables, padded, st.sampled_from(["", ",", ",torch", ", AUTO"]))
    def right(variable: str, value: str, rest: str) -> None:
        with _environment(**{variable: value + rest}):
            found = context.op.explain(**problem.tensors, **problem.options)
        context.expect(found.chosen == name, f"{variable}={value + rest!r} selects {found.chosen}")
        context.expect(variable in found.source, f"the source is {found.source}, not {variable}")

    @_settings
    @given(variables, wrong)
    def unknown(variable: str, value: str) -> None:
        with _environment(**{variable: value}):
            try:
                context.op(**problem.tensors, **problem.options)
            except UnknownNameError as error:
                context.expect("torch" in str(error), f"the error lists no known names: {error}")
            else:
                context.expect(False, f"{variable}={value!r} raises nothing")

    @_settings
    @given(variables, blank)
    def empty(variable: str, value: str) -> None:
        with _environment(**{variable: value}):
            found = context.op.explain(**problem.tensors, **problem.options)
        context.expect(found.source == "automatic order", f"{variable}={value!r} means {found.source}")

    right()
    unknown()
    empty()


PROPERTIES: list[Check] = [
    *(Check(f"{op}/drawn-calls", op, _drawn) for op in OPS),
    *(Check(f"{op}/environment", op, _selected) for op in OPS),
]
