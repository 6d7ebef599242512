"""The case list: calls of the three ops, stated as data, for tests, benchmarks and the support table.

A ``Case`` names sizes, dtype, options and how tensors lie in memory; ``build`` makes the tensors, the same ones each
time and on each device. ``CASES`` are the calls that the conformance suite compares with the oracle.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headmux import registry
from headmux.contract import Backend, Call

PER_CLASS = "<per class>"
PER_TOKEN = "<per token>"
COUNT = "<count>"
VALID = "<valid>"
_PLACEHOLDERS = (PER_CLASS, PER_TOKEN, COUNT, VALID)

LAYOUTS = (
    "plain",
    "strided",
    "offset",
    "transposed",
    "expanded",
    "3d",
    "3d-transposed",
)
UPSTREAMS = ("random", "ones", "negative", "zero", "expanded", "strided")
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """One call of an op, as data.

    Attributes:
        id: ``"op/name"``, unique.
        op: Name of the op.
        N: Tokens.
        H: Hidden size.
        V: Vocabulary size.
        dtype: dtype of hidden states and weights.
        options: Keyword arguments. ``PER_CLASS``, ``PER_TOKEN`` and ``COUNT`` stand for a random positive tensor of
            shape [V], of the shape of the target, and for a number of tokens as a 0-dim tensor; ``VALID`` for the
            number of tokens that count.
        bias: dtype of the bias (the teacher's too), or None for no bias.
        needs: Roles whose gradient is asked for; None for all of the op.
        ignored: Share of tokens that do not count.
        layout: How tensors lie in memory, one of ``LAYOUTS``.
        upstream: The gradient that arrives at the outputs, one of ``UPSTREAMS``.
        spread: Standard deviation of the logits.
        late: Factor of the weights of the second half of the vocabulary.
        teacher: Distance of the teacher's logits from the student's for jsd, relative to ``spread``; None for an
            independent teacher.
        teacher_hidden: Hidden size of an independent teacher; None for H.
        target_dtype: Integer dtype of the target.
        budget_mb: Memory budget in MiB, or None for the default one.
        autocast: dtype of autocast, or None for no autocast.
        feature: Row of the support table that this case stands for, or "".
    """

    id: str
    op: str
    N: int = 12
    H: int = 16
    V: int = 40
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)
    bias: torch.dtype | None = None
    needs: tuple[str, ...] | None = None
    ignored: float = 0.25
    layout: str = "plain"
    upstream: str = "random"
    spread: float = 2.0
    late: float = 1.0
    teacher: float | None = None
    teacher_hidden: int | None = None
    target_dtype: torch.dtype = torch.int64
    budget_mb: float | None = None
    autocast: torch.dtype | None = None
    feature: str = ""


@dataclass
class Problem:
    """The tensors of a case.

    Attributes:
        case: The case.
        tensors: Tensor arguments by name, None where absent. Not leaves that require gradients: a run makes those.
        options: The other arguments by name.
        upstream: For each differentiable output, the gradient that arrives.
        roles: Names of the arguments whose gradient is asked for.
    """

    case: Case
    tensors: dict[str, Tensor | None]
    options: dict[str, Any]
    upstream: dict[str, Tensor]
    roles: tuple[str, ...]

    @property
    def op(self) -> Any:
        """The op."""
        return registry.get_op(self.case.op)

    @property
    def compute(self) -> torch.dtype:
        """dtype of the matrix products' operands."""
        return self.case.autocast or self.case.dtype

    @property
    def reduction(self) -> str:
        """``"mean"``, ``"sum"`` or ``"none"``."""
        return "none" if self.case.op == "linear_logp" else str(self.options.get("reduction", "mean"))

    @property
    def valid(self) -> Tensor:
        """[N] bool, the tokens that count."""
        states = self.states
        target = self.tensors.get("target")
        ignore = self.options.get("ignore_index", None if self.case.op == "linear_logp" else IGNORED)
        if target is None or ignore is None:
            return torch.ones(math.prod(states.shape[:-1]), dtype=torch.bool, device=states.device)
        return target.reshape(-1) != ignore

    @property
    def states(self) -> Tensor:
        """[..., H], the hidden states that the op differentiates."""
        found = self.tensors["student_input" if self.case.op == "jsd" else "input"]
        assert found is not None
        return found

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the outputs that a gradient can arrive at."""
        if self.case.op != "linear_logp":
            return ("loss",)
        return ("logp", *(n for n in ("entropy", "lse") if self.options.get(f"return_{n}")))


def gradient_roles(op: str) -> tuple[str, ...]:
    """Names of the arguments of an op that kernels differentiate: hidden states, weight, bias."""
    return tuple(registry.get_op(op).gradients)


def seed(text: str) -> int:
    """A seed that depends on a text alone."""
    return zlib.crc32(text.encode())


def build(case: Case, device: str | torch.device = "cpu") -> Problem:
    """Make the tensors of a case: drawn in float64 on the CPU from a seed of its id, rounded, laid out, moved."""
    g = torch.Generator().manual_seed(seed(case.id))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lead = (case.N,)
    if case.layout.startswith("3d"):
        if case.N % 3:
            raise ValueError(f"{case.id}: layout {case.layout} needs N divisible by 3, got {case.N}")
        lead = (3, case.N // 3)
    x = normal(case.N, case.H)
    if case.layout == "expanded":
        x = x[:1].expand(case.N, -1)
    w = normal(case.V, case.H) * (case.spread / math.sqrt(case.H))
    w[case.V // 2 :] *= case.late
    classes = torch.randint(0, case.V, (case.N,), generator=g)
    dropped = torch.rand(case.N, generator=g) < case.ignored
    if case.ignored and case.N > 1:
        dropped[case.N // 2], dropped[0] = True, False
    ignore = case.options.get("ignore_index", None if case.op == "linear_logp" else IGNORED)
    target = classes if ignore is None else torch.where(dropped, ignore, classes)

    def states(values: Tensor) -> Tensor:
        return _laid_out(values.to(case.dtype).to(device), case.layout, lead)

    def matrix(values: Tensor) -> Tensor:
        return _laid_out(values.to(case.dtype).to(device), case.layout, None)

    def vector(values: Tensor) -> Tensor:
        between = torch.full_like(values, math.nan)
        return torch.stack([values, between], 1)[:, 0] if case.layout == "strided" else values

    def bias() -> Tensor | None:
        return None if case.bias is None else vector(normal(case.V).to(case.bias).to(device))

    laid_target = target.to(case.target_dtype).to(device).reshape(lead)
    if case.layout == "strided" and len(lead) == 1:
        laid_target = laid_target.repeat_interleave(2)[::2]
    tensors: dict[str, Tensor | None]
    if case.op == "jsd":
        if case.teacher is None:
            hidden = case.teacher_hidden or case.H
            tx, tw = normal(case.N, hidden), normal(case.V, hidden) * (case.spread / math.sqrt(hidden))
        else:
            tx, tw = x, w + case.teacher * normal(case.V, case.H) * (case.spread / math.sqrt(case.H))
        tensors = {
            "student_input": states(x),
            "student_weight": matrix(w),
            "teacher_input": states(tx),
            "teacher_weight": matrix(tw),
            "target": None if case.options.get("target", 0) is None else laid_target,
            "student_bias": bias(),
            "teacher_bias": bias(),
        }
    else:
        tensors = {"input": states(x), "weight": matrix(w), "target": laid_target, "bias": bias()}
    options: dict[str, Any] = {}
    for name, value in case.options.items():
        if name == "target":
            continue
        if value in _PLACEHOLDERS:
            if value == VALID:
                options[name] = int((target != ignore).sum())
            elif value == COUNT:
                # not the true count, so that a kernel which counts by itself shows
                tensors[name] = torch.tensor(float(3 * case.N), device=device)
            else:
                shape = (case.V,) if value == PER_CLASS else lead
                made = (0.5 + torch.rand(*shape, generator=g)).to(device)
                tensors[name] = vector(made) if value == PER_CLASS else made
        else:
            options[name] = value
    roles = tuple(r for r in gradient_roles(case.op) if tensors.get(r) is not None)
    if case.needs is not None:
        roles = tuple(case.needs)
    problem = Problem(case, tensors, options, {}, roles)
    problem.upstream = upstreams(problem, case.upstream, g)
    return problem


def upstreams(problem: Problem, kind: str, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Gradients of a kind for each differentiable output, in the dtype of the statistics.

    ``"random"`` has both signs and a 0 for the first token; ``"expanded"`` has stride 0, ``"strided"`` stride 2.
    """
    g = generator or torch.Generator().manual_seed(seed(problem.case.id + kind))
    states = problem.states
    wide = torch.float64 if problem.compute == torch.float64 else torch.float32
    shape = states.shape[:-1] if problem.reduction == "none" else torch.Size(())
    found = {}
    for name in problem.differentiable:
        values = torch.randn(shape, generator=g, dtype=torch.float64)
        if kind == "random":
            if shape and values.numel() > 1:
                values.view(-1)[0] = 0.0
        elif kind == "ones":
            values = torch.ones(shape)
        elif kind == "negative":
            values = -values.abs() - 0.25
        elif kind == "zero":
            values = torch.zeros(shape)
        elif kind == "expanded":
            values = torch.tensor(-1.75).expand(shape)
        elif kind != "strided":
            raise ValueError(f"no upstream is called {kind!r}; known: {', '.join(UPSTREAMS)}")
        if kind == "expanded":
            found[name] = torch.tensor(-1.75, dtype=wide, device=states.device).expand(shape)
            continue
        values = values.to(wide).to(states.device)
        if kind == "strided" and shape:
            values = torch.stack([values, torch.full_like(values, 1e9)], dim=-1)[..., 0]
        found[name] = values
    return found


def _laid_out(values: Tensor, layout: str, lead: tuple[int, ...] | None) -> Tensor:
    """Equal values with other strides. ``lead`` are the leading dimensions of hidden states, None for a weight."""
    if layout == "plain":
        return values.contiguous()
    if layout == "strided":
        big = values.new_full((values.shape[0], 2 * values.shape[1]), math.nan)
        big[:, ::2] = values
        return big[:, ::2]
    if layout == "offset":
        flat = values.new_full((values.numel() + 1,), math.nan)
        flat[1:] = values.reshape(-1)
        return flat[1:].view(values.shape)
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "expanded":
        return values[:1].expand(values.shape) if lead is not None else values.contiguous()
    if lead is None:
        return values.contiguous()
    if layout == "3d":
        return values.reshape(*lead, -1).contiguous()
    if layout == "3d-transposed":
        return values.reshape(*lead, -1).transpose(0, 1).contiguous().transpose(0, 1)
    raise ValueError(f"no layout is called {layout!r}; known: {', '.join(LAYOUTS)}")


# ---------------------------------------------------------------------------------------------------- the list

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
VOCABULARIES = (1, 2, 3, 17, 127, 129, 257, 1000, 4097)

# what each op accepts: name of the case, row of the support table, options
_OPTIONS: dict[str, tuple[tuple[str, str, dict[str, Any]], ...]] = {
    "flce": (
        ("softcap", "softcap", {"softcap": 2.0}),
        ("logit-scale", "logit_scale", {"logit_scale": 0.4}),
        ("negative-logit-scale", "", {"logit_scale": -1.5}),
        ("z-loss", "lse_square_scale", {"lse_square_scale": 1e-2}),
        ("return-z-loss", "return_z_loss", {"lse_square_scale": 1e-2, "return_z_loss": True}),
        ("label-smoothing", "label_smoothing", {"label_smoothing": 0.1}),
        ("class-weights", "ce_weight", {"ce_weight": PER_CLASS}),
        ("smoothed-class-weights", "", {"ce_weight": PER_CLASS, "label_smoothing": 0.2}),
        ("token-scaling", "use_token_scaling", {"use_token_scaling": True}),
        ("token-weights", "token_weight", {"token_weight": PER_TOKEN}),
        ("num-items", "num_items", {"num_items": 37}),
        ("num-items-tensor", "", {"num_items": COUNT}),
        ("accuracy", "return_token_accuracy", {"return_token_accuracy": True}),
        ("predicted", "return_predicted_tokens", {"return_predicted_tokens": True}),
        ("ignore-index-in-range", "ignore_index inside the vocabulary", {"ignore_index": 3}),
        ("accum-fp32", "accum_dtype=torch.float32", {"accum_dtype": torch.float32}),
        ("left-out", "max_valid_tokens", {"max_valid_tokens": VALID}),
        (
            "everything",
            "all options at once",
            {
                "softcap": 5.0,
                "logit_scale": 0.7,
                "lse_square_scale": 1e-2,
                "label_smoothing": 0.1,
                "ce_weight": PER_CLASS,
                "token_weight": PER_TOKEN,
                "use_token_scaling": True,
                "return_z_loss": True,
                "return_token_accuracy": True,
                "return_predicted_tokens": True,
                "accum_dtype": torch.float32,
            },
        ),
    ),
    "jsd": (
        ("forward-kl", "beta=0", {"beta": 0.0}),
        ("beta-0.1", "0 < beta < 1", {"beta": 0.1}),
        ("beta-0.9", "", {"beta": 0.9}),
        ("reverse-kl", "beta=1", {"beta": 1.0}),
        ("temperature-2", "temperature", {"temperature": 2.0}),
        ("temperature-0.5", "", {"temperature": 0.5}),
        ("student-softcap", "student_softcap", {"student_softcap": 2.0}),
        ("teacher-softcap", "teacher_softcap", {"teacher_softcap": 2.0}),
        ("student-logit-scale", "student_logit_scale", {"student_logit_scale": 0.4}),
        ("teacher-logit-scale", "teacher_logit_scale", {"teacher_logit_scale": -0.6}),
        ("num-items", "num_items", {"num_items": 37}),
        ("num-items-tensor", "", {"num_items": COUNT}),
        ("no-target", "no target", {"target": None}),
        ("ignore-index-in-range", "ignore_index inside the vocabulary", {"ignore_index": 3}),
        ("accum-fp32", "accum_dtype=torch.float32", {"accum_dtype": torch.float32}),
        ("left-out", "max_valid_tokens", {"max_valid_tokens": VALID}),
        (
            "everything",
            "all options at once",
            {
                "beta": 0.3,
                "temperature": 1.5,
                "student_softcap": 5.0,
                "teacher_softcap": 6.0,
                "student_logit_scale": 0.7,
                "teacher_logit_scale": 1.2,
                "accum_dtype": torch.float32,
            },
        ),
    ),
    "linear_logp": (
        ("softcap", "softcap", {"softcap": 2.0}),
        ("logit-scale", "logit_scale", {"logit_scale": 0.4}),
        ("temperature-0.5", "temperature", {"temperature": 0.5}),
        ("temperature-2", "", {"temperature": 2.0}),
        ("token-temperature", "temperature per token", {"temperature": PER_TOKEN}),
        ("entropy", "return_entropy", {"return_entropy": True}),
        ("lse", "return_lse", {"return_lse": True}),
        ("ignored", "ignore_index", {"ignore_index": -100}),
        ("ignore-index-in-range", "ignore_index inside the vocabulary", {"ignore_index": 3}),
        ("accum-fp32", "accum_dtype=torch.float32", {"accum_dtype": torch.float32}),
        ("left-out", "max_valid_tokens", {"max_valid_tokens": VALID, "ignore_index": -100}),
        (
            "everything",
            "all options at once",
            {
                "softcap": 5.0,
                "logit_scale": 0.7,
                "temperature": PER_TOKEN,
                "ignore_index": -100,
                "return_entropy": True,
                "return_lse": True,
                "accum_dtype": torch.float32,
            },
        ),
    ),
}


def _cases() -> Iterable[Case]:
    for op, variants in _OPTIONS.items():
        reduced = op != "linear_logp"
        for short, dtype in _DTYPES.items():
            plain = {"reduction": "none"} if reduced else {}
            yield Case(f"{op}/{short}", op, dtype=dtype, options=plain, feature=str(dtype))
            if reduced:
                for reduction in ("mean", "sum"):
                    yield Case(
                        f"{op}/{short}-{reduction}",
                        op,
                        dtype=dtype,
                        options={"reduction": reduction},
                        feature=f"reduction={reduction}" if short == "fp32" else "",
                    )
        per_token = {"reduction": "none"} if reduced else {}
        if reduced:
            yield Case(f"{op}/per-token", op, options=per_token, feature="reduction=none")
        for name, feature, options in variants:
            loss = {} if not reduced or "num_items" in options else per_token
            yield Case(f"{op}/{name}", op, options={**loss, **options}, bias=torch.float32, feature=feature)
            yield Case(
                f"{op}/{name}-bf16", op, N=21, H=24, V=130, dtype=torch.bfloat16, options=options, bias=torch.bfloat16
            )
        yield Case(
            f"{op}/bias-fp32",
            op,
            dtype=torch.bfloat16,
            bias=torch.float32,
            options=per_token,
            feature="fp32 bias beside 16-bit weights",
        )
        yield Case(
            f"{op}/bias-16-bit", op, dtype=torch.bfloat16, bias=torch.bfloat16, options=per_token, feature="bias"
        )
        for layout in LAYOUTS[1:]:
            yield Case(f"{op}/layout-{layout}", op, layout=layout, options=per_token, feature=f"{layout} tensors")
            yield Case(f"{op}/layout-{layout}-bf16", op, layout=layout, dtype=torch.bfloat16, H=24, options=per_token)
        weighted = {"ce_weight": PER_CLASS} if op == "flce" else {}
        smoothed = {**weighted, "label_smoothing": 0.1} if op == "flce" else {}
        for short, more, hidden in (("fp32", smoothed, 16), ("bf16", weighted, 24)):
            yield Case(
                f"{op}/strided-vectors-{short}",
                op,
                layout="strided",
                dtype=_DTYPES[short],
                H=hidden,
                bias=torch.float32,
                options={**per_token, **more},
            )
        for upstream in UPSTREAMS[1:]:
            yield Case(f"{op}/upstream-{upstream}", op, upstream=upstream, options=per_token, bias=torch.float32)
            if reduced and upstream in ("ones", "negative", "zero"):
                yield Case(f"{op}/scalar-upstream-{upstream}", op, upstream=upstream, dtype=torch.bfloat16)
        for classes in VOCABULARIES:
            yield Case(f"{op}/vocabulary-{classes}", op, N=5, H=8, V=classes, bias=torch.float32, options=per_token)
            yield Case(f"{op}/vocabulary-{classes}-bf16", op, N=7, H=16, V=classes, dtype=torch.bfloat16)
        for hidden in (1, 7, 100):
            yield Case(
                f"{op}/hidden-{hidden}",
                op,
                H=hidden,
                dtype=torch.bfloat16,
                options=per_token,
                feature="odd hidden sizes" if hidden == 7 else "",
            )
        for tokens in (1, 2, 33, 130):
            yield Case(f"{op}/tokens-{tokens}", op, N=tokens, dtype=torch.bfloat16, options=per_token)
        # sizes of which kernels can make whole tiles, with room for all tokens inside grad_weight, and for some
        for short in ("bf16", "fp16"):
            yield Case(f"{op}/whole-tiles-{short}", op, N=200, H=256, V=1000, dtype=_DTYPES[short])
        yield Case(f"{op}/whole-tiles-more-tokens", op, N=300, H=256, V=600, dtype=torch.bfloat16)
        for short, options in (("more-tokens", {}), ("accum-bf16", {"accum_dtype": torch.float32})):
            yield Case(f"{op}/part-tiles-{short}", op, N=350, H=328, V=600, dtype=torch.bfloat16, options=options)
        if op != "jsd":  # blocks of some 300 classes, so that those of grad_weight cover others' logits
            yield Case(f"{op}/whole-tiles-in-place", op, N=200, H=256, V=3000, dtype=torch.bfloat16, budget_mb=0.25)
        for short in ("int32", "int16", "uint8"):
            yield Case(
                f"{op}/target-{short}", op, target_dtype=getattr(torch, short), options={**per_token, "ignore_index": 3}
            )
        # accum_dtype=None may round 16-bit sums once a chunk: only fp32 ones are held to the budget in many chunks
        yield Case(f"{op}/chunked-fp32", op, N=70, V=257, budget_mb=0.02, bias=torch.float32, options=per_token)
        for short in ("fp32", "bf16", "fp16"):
            for reduction in ("mean", "none") if reduced else ("none",):
                options = {"accum_dtype": torch.float32, **({"reduction": reduction} if reduced else {})}
                yield Case(
                    f"{op}/chunked-accum-{short}-{reduction}",
                    op,
                    N=70,
                    V=257,
                    dtype=_DTYPES[short],
                    budget_mb=0.02,
                    bias=torch.float32,
                    options=options,
                )
        for short in ("bf16", "fp16"):
            yield Case(
                f"{op}/autocast-{short}",
                op,
                autocast=_DTYPES[short],
                options=per_token,
                feature=f"autocast to {_DTYPES[short]}",
            )
            yield Case(
                f"{op}/autocast-{short}-bias",
                op,
                autocast=_DTYPES[short],
                bias=torch.float32,
                N=70,
                V=257,
                budget_mb=0.02,
            )
        yield Case(f"{op}/extreme-fp32", op, spread=3e4, options=per_token, ignored=0.0)
        yield Case(f"{op}/extreme-bf16", op, spread=3e4, dtype=torch.bfloat16, options=per_token)
        yield Case(f"{op}/extreme-fp16", op, H=8, spread=3e4, dtype=torch.float16, options=per_token)
        yield Case(f"{op}/uniform-bf16", op, spread=1e-3, V=1000, dtype=torch.bfloat16, options=per_token)
        for short in ("fp32", "bf16"):  # what is seen first says nothing of the largest logit
            yield Case(f"{op}/late-{short}", op, V=2200, late=60.0, dtype=_DTYPES[short], options=per_token)
    # some ignored tokens enter, behind those that count
    for op, options in (
        ("flce", {"reduction": "sum", "token_weight": PER_TOKEN, "return_predicted_tokens": True}),
        ("jsd", {"reduction": "sum"}),
        ("linear_logp", {"ignore_index": IGNORED, "temperature": PER_TOKEN, "return_entropy": True}),
    ):
        yield Case(f"{op}/left-out-fewer", op, ignored=0.5, options={"max_valid_tokens": 11, **options})
    # the label's logit alone counts, and its rounding error is larger than what any exponential can hold
    for name, options in (("cold", {}), ("cold-entropy", {"return_entropy": True})):
        yield Case(
            f"linear_logp/{name}-bf16",
            "linear_logp",
            N=64,
            H=4,
            V=5,
            dtype=torch.bfloat16,
            options={"temperature": 1e-3, **options},
            spread=40.0,
            upstream="ones",
        )
    yield Case("flce/gap-200-smoothed", "flce", spread=60.0, options={"label_smoothing": 0.1, "reduction": "none"})
    yield Case("jsd/hidden-sizes-differ", "jsd", H=8, teacher_hidden=12, V=17, feature="teacher of another hidden size")
    for short in ("fp32", "bf16", "fp16"):
        for beta in (0.0, 0.5, 1.0):
            yield Case(
                f"jsd/near-teacher-{short}-beta-{beta:g}",
                "jsd",
                N=64,
                H=128,
                V=512,
                dtype=_DTYPES[short],
                spread=5.0,
                teacher=2e-3,
                options={"beta": beta, "reduction": "none"},
            )
    yield Case(
        "linear_logp/entropy-and-lse-bf16",
        "linear_logp",
        N=21,
        H=24,
        V=257,
        dtype=torch.bfloat16,
        options={"return_entropy": True, "return_lse": True, "temperature": 0.7},
        bias=torch.bfloat16,
    )


CASES: tuple[Case, ...] = tuple(_cases())
"""Every call that the suite compares with the oracle."""


def by_id(case_id: str) -> Case:
    """The case of that id; KeyError if there is none."""
    return {c.id: c for c in CASES}[case_id]


# ---------------------------------------------------------------------------------------------------- the table


def call_of(case: Case, device: torch.device | None = None, capability: tuple[int, int] | None = None) -> Call:
    """What selection is told of a case. A device and capability, if given, replace the CPU's."""
    problem = build(case)
    tensors = {
        n: t if t is None or n not in problem.roles else t.detach().requires_grad_() for n, t in problem.tensors.items()
    }
    with torch.autocast("cpu", dtype=case.autocast or torch.bfloat16, enabled=case.autocast is not None):
        call = problem.op.explain(**tensors, **problem.options, impl="torch").call
    return call if device is None else dataclasses.replace(call, device=device, capability=capability)


def refusals(backend: Backend, call: Call) -> tuple[str, ...]:
    """What a backend's requirements say against a call, whether or not its modules are installed here."""
    kernel = backend.kernels.get(call.op)
    if kernel is None:
        return (f"has no kernel for {call.op}",)
    checks = (*backend.requires, *kernel.requires)
    return tuple(reason for check in checks if (reason := check(call)) is not None)


def support(backend: Backend, case: Case, device: torch.device, capability: tuple[int, int] | None) -> tuple[bool, str]:
    """Whether a backend runs the feature that a case stands for, if only in 16 bits, or without a gradient of the bias,
    or without any, and in words: "yes", under which of these limits, or the first reason against it.
    """
    call = call_of(case, device, capability)
    reasons = refusals(backend, call)
    if not reasons:
        return True, "yes"
    calls = {"": call}
    if case.dtype == torch.float32 and case.autocast is None and case.feature != str(torch.float32):
        calls["in 16 bits"] = call_of(dataclasses.replace(case, dtype=torch.bfloat16), device, capability)
    for limit, candidate in calls.items():
        unbiased = tuple(role for role in candidate.needs if not role.endswith("bias"))
        for needs, less in ((candidate.needs, ""), (unbiased, "without bias's gradient"), ((), "without gradients")):
            if not refusals(backend, dataclasses.replace(candidate, needs=needs)):
                return True, ", ".join(word for word in (limit, less) if word)
    return False, reasons[0]


def support_table(backends: Iterable[Backend], device: str = "cpu", capability: tuple[int, int] | None = None) -> str:
    """Markdown tables, one an op, of what each backend runs, from its requirements alone: nothing is run.

    Args:
        backends: The columns.
        device: Kind of device that the tensors would lie on.
        capability: Its CUDA compute capability.

    Returns:
        A heading and a table for each op; a cell is the words of ``support``.
    """
    columns = list(backends)
    lines: list[str] = []
    for op in registry.op_names():
        lines += [
            f"### {op}",
            "",
            "| | " + " | ".join(b.name for b in columns) + " |",
            "|---" * (1 + len(columns)) + "|",
        ]
        for case in CASES:
            if case.op != op or not case.feature:
                continue
            cells = [support(b, case, torch.device(device), capability)[1] for b in columns]
            lines.append("| " + " | ".join([case.feature, *(c.replace("|", "\\|") for c in cells)]) + " |")
        lines.append("")
    return "\n".join(lines)
