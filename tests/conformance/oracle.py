"""What a result is compared with: a float64 oracle, and a plain PyTorch run in the same dtype that sets the budget.

The oracle is ``op.reference`` in float64, fed the same rounded inputs. The peer is ``op.reference`` in the inputs'
dtype, as a model written in PyTorch runs it: the logits come out of their matrix product in the operands' dtype (but in
jsd, whose gradient is a difference of near-equal numbers and must not feel that rounding, and where they would overflow
it) and go on in fp32, and the logits' gradient is rounded to the operands' dtype before its two matrix products and
before the bias's sum. A result passes when each of its errors is at most twice the peer's plus a floor.

Two errors are measured, over groups of rows: the Euclidean norm of the difference over the whole group, and the largest
Euclidean norm of a row's. ``grad_weight`` and ``grad_bias`` fall into two groups, classes among the targets and the
others, whose gradients are much smaller and would vanish beside the first. Nothing is summed before it is compared.

The floors, for what one peer's errors do not show, since they can be small by luck in a small group:

- fp32 arithmetic (fp64 for fp64 inputs): an fp32 logit z is off by a few ulps of max|z|, so is log p, and p by as much
  relative to itself: ``FLOOR_ULPS * eps * (1 + max|z|)`` of the result's natural size: for a loss, 1 + max|loss|; for a
  row of a gradient, the upstream gradients that enter it times the largest factor each is multiplied with.
- the expected error of the peer itself. Of a gradient: half an ulp of every logit gradient (the operand of a matrix
  product must be rounded to its dtype) or, if that is larger, of the probability in it (which a kernel may keep from
  the forward in the operands' dtype; an entropy or label smoothing subtracts from it; not at the target, and not in
  jsd), carried through the product as independent errors, as much again for the hidden states in grad_weight, into
  which a kernel may fold what arrives later, half an ulp of the result, twice, for it may be scaled once formed, and
  what half an ulp of every logit makes of the probabilities (not in jsd). Of the loss or the log-probability: half an
  ulp of the logit at the target and, weighted with their probabilities, of all logits. It is taken instead of the
  peer's measured error where that is smaller by luck, not in addition.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import headmux
from headmux.testing.cases import Problem

FLOOR_ULPS = 4.0


@dataclass
class Result:
    """Outputs by name and gradients by role; a gradient is None where autograd returned none.

    ``logit_gradient`` is the [N, V] operand of the gradients' matrix products, ``logits`` and ``probabilities`` those
    of the model that is differentiated, all of the oracle alone.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    logit_gradient: Tensor | None = None
    logits: Tensor | None = None
    probabilities: Tensor | None = None

    def named(self) -> dict[str, Tensor | None]:
        """Everything, gradients as ``grad_ROLE``."""
        return {**self.outputs, **{f"grad_{role}": g for role, g in self.gradients.items()}}


@dataclass(frozen=True)
class Measure:
    """An error and how large it may be."""

    name: str
    error: float
    budget: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the budget; NaN is not."""
        return self.error <= self.budget


def outputs(problem: Problem, returned: Any) -> dict[str, Tensor]:
    """The outputs of a call by name, whatever form they came in."""
    if isinstance(returned, Tensor):
        return {problem.differentiable[0]: returned}
    return {n: t for n, t in returned._asdict().items() if t is not None}


def leaves(problem: Problem, roles: tuple[str, ...] | None = None) -> dict[str, Tensor | None]:
    """The tensor arguments, sharing the problem's memory, those of ``roles`` as leaves that require gradients."""
    wanted = problem.roles if roles is None else roles
    return {n: t if t is None or n not in wanted else t.detach().requires_grad_() for n, t in problem.tensors.items()}


def evaluate(
    f: Callable[..., Any],
    problem: Problem,
    tensors: dict[str, Tensor | None] | None = None,
    *,
    roles: tuple[str, ...] | None = None,
    upstream: dict[str, Tensor] | None = None,
) -> Result:
    """Run ``f`` on the problem forward and, if any gradient is wanted, backward."""
    wanted = problem.roles if roles is None else roles
    arguments = leaves(problem, wanted) if tensors is None else tensors
    with context(problem):
        found = outputs(problem, f(**arguments, **problem.options))
    result = Result({n: t.detach() for n, t in found.items()})
    if wanted:
        arrives = problem.upstream if upstream is None else upstream
        given = [n for n in problem.differentiable if n in arrives]
        gradients = torch.autograd.grad(
            [found[n] for n in given],
            [_tensor(arguments[r]) for r in wanted],
            [arrives[n].to(found[n].dtype) for n in given],
            allow_unused=True,
        )
        result.gradients = dict(zip(wanted, gradients, strict=True))
    return result


@contextlib.contextmanager
def context(problem: Problem) -> Iterator[None]:
    """The autocast and the memory budget of a problem."""
    case = problem.case
    with contextlib.ExitStack() as stack:
        if case.autocast is not None:
            stack.enter_context(torch.autocast(problem.states.device.type, dtype=case.autocast))
        if case.budget_mb is not None:
            stack.enter_context(headmux.budget(case.budget_mb))
        yield


def oracle(
    problem: Problem, *, roles: tuple[str, ...] | None = None, upstream: dict[str, Tensor] | None = None
) -> Result:
    """The problem in float64, from operands rounded as the op rounds them. Gradients of every role there is."""
    wanted = problem.roles if roles is None else roles
    plain = _without_context(problem)
    given = problem.upstream if upstream is None else upstream
    seen: list[Tensor] = []

    def see(gradient: Tensor) -> None:
        seen.append(gradient)

    with _LogitGradients(see) as mode:
        result = evaluate(
            problem.op.reference,
            plain,
            _converted(problem, wanted, torch.float64),
            roles=wanted,
            upstream={n: t.double() for n, t in given.items()},
        )
    result.logit_gradient = seen[-1] if seen else None
    result.logits, result.probabilities = mode.normalised, mode.probabilities
    return result


def peer(
    problem: Problem, *, roles: tuple[str, ...] | None = None, upstream: dict[str, Tensor] | None = None
) -> Result:
    """The problem in plain PyTorch in its own dtypes."""
    wanted = problem.roles if roles is None else roles

    def logits(z: Tensor) -> Tensor:
        rounded = z.to(problem.compute).to(z.dtype)
        return torch.where(torch.isinf(rounded), z, rounded)

    kept = None if problem.case.op == "jsd" else logits
    with _LogitGradients(lambda g: g.to(problem.compute).to(g.dtype), kept):
        return evaluate(
            problem.op.reference,
            _without_context(problem),
            _converted(problem, wanted, None),
            roles=wanted,
            upstream=upstream,
        )


class _LogitGradients(TorchFunctionMode):
    """Hands the gradient that arrives at each matrix product's result, or at that plus a bias, to a hook.

    With ``logits``, a product's result is replaced by that of it.

    Attributes:
        normalised: The first logits that are normalised.
        probabilities: Their softmax.
    """

    _NORMALISED = (torch.logsumexp, torch.log_softmax)
    _PRODUCTS = (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul)
    _SUMS = (torch.Tensor.__add__, torch.Tensor.add)

    def __init__(
        self, hook: Callable[[Tensor], Tensor | None], logits: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self._hook = hook
        self._logits = logits
        self._product: Tensor | None = None
        self.normalised: Tensor | None = None
        self.probabilities: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in self._NORMALISED and self.probabilities is None:
            self.normalised = args[0].detach()
            self.probabilities = torch.softmax(self.normalised, dim=1)
        product = func in self._PRODUCTS
        if product and self._logits is not None:
            found = self._logits(found)
        if (product or (func in self._SUMS and args[0] is self._product)) and found.requires_grad:
            found.register_hook(self._hook)
        if product:
            self._product = found
        return found


def _without_context(problem: Problem) -> Problem:
    return Problem(
        replace(problem.case, autocast=None, budget_mb=None),
        problem.tensors,
        problem.options,
        problem.upstream,
        problem.roles,
    )


def _converted(problem: Problem, roles: tuple[str, ...], dtype: torch.dtype | None) -> dict[str, Tensor | None]:
    """The arguments with autocast's rounding made, in ``dtype`` (None: their own), as new leaves."""
    found: dict[str, Tensor | None] = {}
    for name, value in problem.tensors.items():
        if value is None or not value.is_floating_point():
            found[name] = value
            continue
        made = value.detach()
        if (
            problem.case.autocast is not None
            and name.endswith(("input", "weight"))
            and name not in ("ce_weight", "token_weight")
        ):
            made = made.to(problem.case.autocast)
        made = made.to(value.dtype if dtype is None else dtype)
        found[name] = made.clone().requires_grad_() if name in roles else made
    return found


# ---------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class _Scale:
    """Sizes of a problem's numbers, for the floors of fp32 arithmetic.

    Attributes:
        relative: How far a probability can be off, relative to itself.
        largest: Largest gradient that arrives at a row's loss.
        together: Euclidean norm of those of all rows; their sum where all rows are equal.
        rows: [N], those of all rows.
        states: Largest Euclidean norm of a hidden state.
        weight: Largest Euclidean norm of a row of the weight.
    """

    relative: float
    largest: float
    together: float
    rows: Tensor
    states: float
    weight: float

    def of(self, name: str, want: Tensor) -> float:
        """The floor of an output or gradient."""
        if name.endswith("_input") or name == "grad_input":
            return self.relative * self.largest * self.weight
        if name.startswith("grad_") and name.endswith("weight"):
            return self.relative * self.together * self.states
        if name.startswith("grad_"):
            return self.relative * self.together
        return self.relative * (1.0 + float(want.abs().max()) if want.numel() else 0.0)


def _scale(problem: Problem, upstream: dict[str, Tensor]) -> _Scale:
    wide = _converted(problem, (), torch.float64)
    valid = problem.valid
    largest_logit, largest_state, largest_weight, chain = 0.0, 0.0, 0.0, 1.0
    prefixes = ("student_", "teacher_") if problem.case.op == "jsd" else ("",)
    for i, prefix in enumerate(prefixes):
        x, w, b = (wide[prefix + n] for n in ("input", "weight", "bias"))
        x, w = _tensor(x), _tensor(w)
        x = x.reshape(-1, x.shape[-1])[valid]
        z = x @ w.T if b is None else x @ w.T + b
        factor = abs(float(problem.options.get(prefix + "logit_scale", 1.0)))
        temperature = problem.options.get("temperature", 1.0)
        if isinstance(wide.get("temperature"), Tensor):
            temperature = float(_tensor(wide["temperature"]).min())
        largest_logit = max(largest_logit, float(z.abs().max()) * factor / temperature if z.numel() else 0.0)
        if i == 0:
            chain = factor / temperature
            largest_state = float(x.norm(dim=1).max()) if x.numel() else 0.0
            largest_weight = float(w.norm(dim=1).max()) * chain
            largest_state *= chain
    with torch.no_grad():
        args = problem.op.request(**wide, **problem.options).args
    row_scale = getattr(args, "row_scale", None)
    rows = torch.zeros(valid.numel(), dtype=torch.float64, device=valid.device)
    for name, g in upstream.items():
        g = g.double() if row_scale is None else g.double() * row_scale
        # an entropy's and a divergence's gradients carry a factor of the size of log p, a z-loss's of the logsumexp
        logarithm = name == "entropy" or (problem.case.op == "jsd" and problem.options.get("beta") != 0.0)
        rows += g.reshape(-1).abs() * (1.0 + largest_logit if logarithm else 1.0)
    if (weight := wide.get("token_weight")) is not None and row_scale is None:
        rows *= weight.reshape(-1)
    if (weight := wide.get("ce_weight")) is not None:
        rows *= float(weight.max())
    rows *= 1.0 + 2.0 * float(problem.options.get("lse_square_scale", 0.0)) * largest_logit
    counted = rows[valid]
    eps = torch.finfo(torch.float64 if problem.compute == torch.float64 else torch.float32).eps
    return _Scale(
        relative=FLOOR_ULPS * eps * (1.0 + largest_logit),
        largest=float(counted.max()) if counted.numel() else 0.0,
        # equal rows have equal errors, which add up; others' are independent
        together=float(counted.sum() if problem.case.layout == "expanded" else counted.norm()),
        rows=torch.where(valid, rows, 0.0) * chain,
        states=largest_state,
        weight=largest_weight,
    )


def judge(
    problem: Problem,
    got: Result,
    want: Result,
    by: Result,
    *,
    upstream: dict[str, Tensor] | None = None,
) -> list[Measure]:
    """Errors of a result and their budgets.

    Raises:
        AssertionError: A result is there that should not be or is missing; or its dtype, shape or device is not the
            parameter's; or integers or the places of NaN differ.
    """
    scale = _scale(problem, problem.upstream if upstream is None else upstream)
    found, oracles, peers = got.named(), want.named(), by.named()
    if set(found) != set(oracles):
        raise AssertionError(f"returned {sorted(found)}, should be {sorted(oracles)}")
    measures = []
    for name, value in found.items():
        true, rival = oracles[name], peers[name]
        if (value is None) != (true is None):
            raise AssertionError(f"{name} is {'missing' if value is None else 'there, although not asked for'}")
        if value is None or true is None or rival is None:
            continue
        _check_form(problem, name, value, true)
        if not value.is_floating_point():
            if not torch.equal(value, true.to(value.dtype)):
                raise AssertionError(f"{name} is {value.tolist()}, should be {true.tolist()}")
            continue
        terms = _terms(problem, name, want, scale.rows)
        roundings = 2 if name.startswith("grad_") else 1
        for group, rows in _groups(problem, name, value):
            measures += _errors(f"{name}{group}", value, true, rival, rows, terms, roundings, scale.of(name, true))
    return measures


def _check_form(problem: Problem, name: str, value: Tensor, true: Tensor) -> None:
    if value.shape != true.shape:
        raise AssertionError(f"{name} has shape {tuple(value.shape)}, should be {tuple(true.shape)}")
    if value.device != problem.states.device:
        raise AssertionError(f"{name} is on {value.device}, should be on {problem.states.device}")
    if name.startswith("grad_"):
        parameter = _tensor(problem.tensors[name.removeprefix("grad_")])
        if value.dtype != parameter.dtype:
            raise AssertionError(f"{name} has dtype {value.dtype}, should be the parameter's {parameter.dtype}")
        if parameter.is_contiguous() and not value.is_contiguous():
            raise AssertionError(f"{name} has strides {value.stride()}, should be contiguous")
    elif value.is_floating_point():
        wide = torch.float64 if problem.compute == torch.float64 else torch.float32
        if value.dtype != wide:
            raise AssertionError(f"{name} has dtype {value.dtype}, should be {wide}")


def _groups(problem: Problem, name: str, value: Tensor) -> list[tuple[str, Tensor | None]]:
    """Names of groups and [rows] bool, or None for all rows."""
    target = problem.tensors.get("target")
    per_class = name.startswith("grad_") and name.endswith(("weight", "bias")) and name != "grad_token_weight"
    if target is None or not per_class or problem.case.op == "jsd":
        return [("", None)]
    classes = value.shape[0]
    labels = target.reshape(-1)[problem.valid].long()
    among = torch.zeros(classes, dtype=torch.bool, device=value.device)
    among[labels[(labels >= 0) & (labels < classes)]] = True
    return [(" of targets", among), (" of other classes", ~among)]


def _terms(problem: Problem, name: str, want: Result, upstream: Tensor) -> Tensor | float:
    """For each row of a result, the expected error of rounding what enters it, squared: of a gradient the logits'
    gradient, of a loss or a log-probability the logits.
    """
    if name in ("loss", "logp") and problem.case.op != "jsd":
        return _logit_terms(problem, want)
    if want.logit_gradient is None or not name.startswith("grad_"):
        return 0.0
    prefix = "student_" if problem.case.op == "jsd" else ""
    half = torch.finfo(problem.compute).eps / 2
    rounded = want.logit_gradient.abs()
    target = problem.tensors.get("target")
    if problem.case.op != "jsd" and want.probabilities is not None and target is not None:
        kept = want.probabilities * upstream[:, None]
        index = target.reshape(-1).long().clamp(0, kept.shape[1] - 1)
        rounded = torch.maximum(rounded, kept.scatter(1, index[:, None], 0.0))
    squares = (rounded * half).square()
    if problem.case.op != "jsd" and want.probabilities is not None and want.logits is not None:
        squares += _probability_terms(want.probabilities, want.logits * half) * upstream[:, None].square()
    role = name.removeprefix(f"grad_{prefix}")
    if role == "input":
        return squares @ _tensor(problem.tensors[f"{prefix}weight"]).double().square().sum(1)
    if role == "weight":
        states = problem.states.reshape(-1, problem.states.shape[-1]).double()
        states = torch.where(problem.valid[:, None], states, 0.0)
        return 2 * squares.T @ states.square().sum(1)
    return squares.sum(0) if role == "bias" else 0.0


def _probability_terms(p: Tensor, off: Tensor) -> Tensor:
    """[N, V] variances of probabilities whose logits have independent errors ``off``: dp_j = p_j (dz_j - sum p dz)."""
    squares = torch.where(p > 0, off, 0.0).square()
    mean = (p.square() * squares).sum(1, keepdim=True)
    return p.square() * (((1 - p).square() - p.square()) * squares + mean).clamp_(min=0.0)


def _logit_terms(problem: Problem, want: Result) -> Tensor | float:
    z, p, target = want.logits, want.probabilities, problem.tensors.get("target")
    if z is None or p is None or target is None or problem.compute in (torch.float32, torch.float64):
        return 0.0
    index = target.reshape(-1).long().clamp(0, z.shape[1] - 1)
    squares = z.gather(1, index[:, None])[:, 0].square() + (p * z.square()).sum(1)
    squares = torch.where(problem.valid, squares, 0.0) * (torch.finfo(problem.compute).eps / 2) ** 2
    with torch.no_grad():
        scale = getattr(problem.op.request(**problem.tensors, **problem.options).args, "row_scale", None)
    return squares if scale is None else (squares * scale.double().square()).sum()


def _errors(
    name: str,
    value: Tensor,
    true: Tensor,
    rival: Tensor,
    rows: Tensor | None,
    terms: Tensor | float,
    roundings: int,
    floor: float,
) -> list[Measure]:
    matrix = value.dim() > 1 and name.startswith("grad_")
    width = value.shape[-1] if matrix else 1
    got, want, other = (t.double().reshape(-1, width) for t in (value, true, rival))
    expected = roundings * (want * (torch.finfo(value.dtype).eps / 2)).square().sum(1) + terms
    if rows is not None:
        got, want, other, expected = (t[rows] for t in (got, want, other, expected))
    if got.numel() == 0:
        return []
    same = torch.isnan(got) == torch.isnan(want)
    if not bool(same.all()):
        raise AssertionError(
            f"{name}: {int((~same).sum())} of {same.numel()} elements are NaN, or should be and are not"
        )
    got, want, other, expected = (torch.nan_to_num(t, nan=0.0) for t in (got, want, other, expected))
    off, rival_off = (t.norm(dim=1) for t in (got - want, other - want))
    whole = max(2 * float(rival_off.norm()), math.sqrt(float(expected.sum())))
    worst = max(2 * float(rival_off.max()), math.sqrt(float(expected.max())))
    return [
        Measure(f"{name}, all", float(off.norm()), whole + floor * math.sqrt(len(off))),
        Measure(f"{name}, worst row", float(off.max()), worst + floor),
    ]


def _tensor(value: Tensor | None) -> Tensor:
    assert value is not None
    return value
