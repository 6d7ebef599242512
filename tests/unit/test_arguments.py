"""What every op refuses: the same error for every backend, before one is considered, with the values in it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headmux import get_op
from headmux.errors import UnknownNameError

N, H, V, HT = 6, 8, 11, 4
F16, BF16, F64 = torch.float16, torch.bfloat16, torch.float64


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def labels(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values or (0, 1, 2, 3, 4, 10), dtype=dtype)


def good(op: str) -> dict[str, Any]:
    if op == "jsd":
        return {
            "student_input": randn(N, H),
            "student_weight": randn(V, H),
            "teacher_input": randn(N, HT),
            "teacher_weight": randn(V, HT),
        }
    return {"input": randn(N, H), "weight": randn(V, H), "target": labels()}


Bad = tuple[str, dict[str, Any], type[Exception], str]
EVERY = ("flce", "jsd", "linear_logp")
HEADS = (("flce", ""), ("linear_logp", ""), ("jsd", "student_"), ("jsd", "teacher_"))
STUDENTS = (("flce", ""), ("linear_logp", ""), ("jsd", "student_"))


def head_cases() -> list[Bad]:
    cases: list[Bad] = []
    for op, who in HEADS:
        x, w, b = f"{who}input", f"{who}weight", f"{who}bias"
        h = HT if who == "teacher_" else H
        floats = "torch.float32, torch.bfloat16, torch.float16, torch.float64"
        cases += [
            (op, {x: [[1.0]]}, TypeError, f"{x} must be a tensor, got list"),
            (op, {w: torch.nn.Linear(h, V)}, TypeError, f"{w} must be a tensor, got Linear; pass {w}.weight"),
            (
                op,
                {x: torch.ones(N, h, dtype=torch.int64)},
                TypeError,
                f"{x} has dtype torch.int64, which is not one of {floats}",
            ),
            (op, {w: torch.ones(V, h, dtype=torch.complex64)}, TypeError, f"{w} has dtype torch.complex64"),
            (op, {x: torch.ones(N, h, dtype=torch.float8_e4m3fn)}, TypeError, f"{x} has dtype torch.float8_e4m3fn"),
            (op, {x: torch.tensor(1.0)}, ValueError, f"{x} has shape (), needs [..., H] with H >= 1"),
            (op, {x: randn(N, 0)}, ValueError, f"{x} has shape ({N}, 0), needs [..., H] with H >= 1"),
            (op, {w: randn(V * h)}, ValueError, f"{w} has shape ({V * h},), needs [V, H] with V >= 1: a flat or empty"),
            (op, {w: randn(0)}, ValueError, "usually sharded (ZeRO-3, FSDP) and un-gathered"),
            (op, {w: randn(0, h)}, ValueError, f"{w} has shape (0, {h}), needs [V, H] with V >= 1"),
            (op, {w: randn(V, h, 1)}, ValueError, f"{w} has shape ({V}, {h}, 1), needs [V, H]"),
            (op, {w: randn(h, V)}, ValueError, f"{w} has shape ({h}, {V}), but {x} of shape ({N}, {h}) needs [V, {h}]"),
            (
                op,
                {w: randn(V, h, dtype=BF16)},
                TypeError,
                f"{x} has dtype torch.float32 and {w} torch.bfloat16: cast one",
            ),
            (op, {x: randn(N, h, dtype=F64)}, TypeError, f"{x} has dtype torch.float64 and {w} torch.float32"),
            (op, {w: torch.ones(V, h, device="meta")}, ValueError, f"{w} is on meta, but the input is on cpu"),
            (op, {b: randn(V + 1)}, ValueError, f"{b} has shape ({V + 1},), but {w} of shape ({V}, {h}) needs [{V}]"),
            (op, {b: randn(V, 1)}, ValueError, f"{b} has shape ({V}, 1)"),
            (op, {b: randn(V, dtype=F16)}, TypeError, f"{b} has dtype torch.float16, needs torch.float32"),
            (op, {b: 1.0}, TypeError, f"{b} must be a tensor, got float"),
            (op, {b: torch.ones(V, device="meta")}, ValueError, f"{b} is on meta"),
        ]
    return cases


def number_cases() -> list[Bad]:
    cases: list[Bad] = []
    nonzero = ["flce logit_scale", "linear_logp logit_scale", "jsd student_logit_scale", "jsd teacher_logit_scale"]
    positive = ["flce softcap", "linear_logp softcap", "jsd student_softcap", "jsd teacher_softcap"]
    positive += ["linear_logp temperature", "jsd temperature"]
    for op, name in map(str.split, nonzero):
        cases.append((op, {name: 0.0}, ValueError, f"{name}=0 makes every logit equal"))
    for op, name in map(str.split, positive):
        cases += [(op, {name: v}, ValueError, f"{name}={v} must be finite and above 0") for v in (0.0, 0, -1.0)]
    unit = [("flce", "label_smoothing"), ("jsd", "beta")]
    for op, name in unit:
        cases += [
            (op, {name: v}, ValueError, f"{name}={v} must be finite and at least 0 and at most 1") for v in (-0.1, 1.1)
        ]
    cases.append(
        ("flce", {"lse_square_scale": -1.0}, ValueError, "lse_square_scale=-1.0 must be finite and at least 0")
    )
    for op, name in [*map(str.split, nonzero + positive), *unit, ("flce", "lse_square_scale")]:
        cases += [(op, {name: v}, ValueError, f"{name}={v} must be finite") for v in (math.nan, math.inf, -math.inf)]
        cases += [
            (op, {name: True}, TypeError, f"{name} must be a number, got True of type bool"),
            (op, {name: "1"}, TypeError, f"{name} must be a number, got '1' of type str"),
        ]
        if name != "temperature" or op == "jsd":
            cases.append((op, {name: torch.tensor(1.0)}, TypeError, f"{name} must be a number, got tensor(1.)"))
    return cases


def target_cases() -> list[Bad]:
    cases: list[Bad] = []
    for op in EVERY:
        cases += [
            (op, {"target": [0] * N}, TypeError, "target must be a tensor, got list"),
            (op, {"target": torch.zeros(N)}, TypeError, "target has dtype torch.float32, needs an integer dtype"),
            (op, {"target": torch.zeros(N, dtype=torch.bool)}, TypeError, "target has dtype torch.bool"),
            (
                op,
                {"target": labels(0, 1)},
                ValueError,
                f"target has shape (2,), but an input of shape ({N}, {H}) needs ({N},)",
            ),
            (op, {"target": labels()[None]}, ValueError, f"target has shape (1, {N})"),
            (op, {"target": torch.zeros(N, dtype=torch.int64, device="meta")}, ValueError, "target is on meta"),
            (op, {"ignore_index": 1.0}, TypeError, "ignore_index must be an int, got 1.0 of type float"),
            (op, {"ignore_index": True}, TypeError, "ignore_index must be an int, got True of type bool"),
            (op, {"accum_dtype": BF16}, ValueError, "accum_dtype=torch.bfloat16 is not one of None, torch.float32"),
            (op, {"accum_dtype": "float32"}, ValueError, "accum_dtype='float32' is not one of None, torch.float32"),
        ]
    for op, ignored in (("flce", -100), ("linear_logp", None)):
        tail = f"are not ignore_index={ignored}"
        cases += [
            (
                op,
                {"target": labels(0, 1, 2, 3, 4, V)},
                ValueError,
                f"1 of {N} labels lie outside [0, {V}) and {tail} (smallest {V}, largest {V}, V={V})",
            ),
            (
                op,
                {"target": labels(-1, 1, 2, 3, 4, 99)},
                ValueError,
                f"2 of {N} labels lie outside [0, {V}) and {tail} (smallest -1, largest 99",
            ),
            # looked at before anything is narrowed: each would be a good label in 32 or 8 bits
            (op, {"target": labels(2**32 + 1, 1, 2, 3, 4, 5)}, ValueError, f"largest {2**32 + 1}"),
            (
                op,
                {"target": torch.full((N,), 2**64 - 1, dtype=torch.uint64)},
                ValueError,
                f"{N} of {N} labels lie outside",
            ),
            (op, {"target": torch.full((N,), 200, dtype=torch.uint8)}, ValueError, "largest 200"),
        ]
    cases.append(("linear_logp", {"target": labels(-100, 1, 2, 3, 4, 5)}, ValueError, "smallest -100"))
    return cases


def other_cases() -> list[Bad]:
    cases: list[Bad] = []
    for op in ("flce", "jsd"):
        cases += [
            (op, {"reduction": "avg"}, ValueError, "reduction='avg' is not one of 'mean', 'sum', 'none'"),
            (op, {"reduction": None}, ValueError, "reduction=None is not one of"),
            (
                op,
                {"num_items": 5, "reduction": "sum"},
                ValueError,
                "num_items replaces the divisor of a mean, but reduction='sum'",
            ),
            (op, {"num_items": -1}, ValueError, "num_items=-1 must be finite and at least 0"),
            (op, {"num_items": math.nan}, ValueError, "num_items=nan must be finite"),
            (op, {"num_items": "5"}, TypeError, "num_items must be a number, got '5'"),
            (op, {"num_items": True}, TypeError, "num_items must be a number, got True"),
            (
                op,
                {"num_items": torch.ones(2)},
                ValueError,
                "num_items has shape (2,), needs a number or a 0-dim tensor",
            ),
            (op, {"num_items": torch.tensor(1.0, requires_grad=True)}, ValueError, "num_items requires a gradient"),
        ]
    flags = ["use_token_scaling", "return_z_loss", "return_token_accuracy", "return_predicted_tokens"]
    for op, name in [*(("flce", f) for f in flags), ("linear_logp", "return_entropy"), ("linear_logp", "return_lse")]:
        cases += [(op, {name: v}, TypeError, f"{name} must be True or False, got {v!r}") for v in (1, None, "yes")]
    for op, needed in (("flce", {}), ("jsd", {"target": labels()}), ("linear_logp", {"ignore_index": -100})):
        name = "max_valid_tokens"
        cases += [
            (op, {**needed, name: v}, ValueError, f"{name}={v} must be at least 1, or None") for v in (0, -1)
        ]
        cases += [
            (op, {**needed, name: v}, TypeError, f"{name} must be an int, got {v!r}") for v in (True, 2.0, "2")
        ]
        cases.append((op, {**needed, name: torch.tensor(2)}, TypeError, f"{name} must be an int, got tensor(2)"))
    cases += [
        ("jsd", {"max_valid_tokens": 2}, ValueError, "max_valid_tokens=2 needs a target"),
        ("linear_logp", {"max_valid_tokens": 2}, ValueError, "max_valid_tokens=2 needs an ignore_index"),
        ("flce", {"ce_weight": randn(V + 1)}, ValueError, f"ce_weight has shape ({V + 1},)"),
        ("flce", {"ce_weight": torch.ones(V, dtype=torch.int64)}, TypeError, "ce_weight has dtype torch.int64"),
        (
            "flce",
            {"ce_weight": randn(V).requires_grad_()},
            ValueError,
            "ce_weight requires a gradient, which this op does not compute: pass ce_weight.detach()",
        ),
        (
            "flce",
            {"token_weight": randn(N + 1)},
            ValueError,
            f"token_weight has shape ({N + 1},), but an input of shape ({N}, {H}) needs ({N},)",
        ),
        ("flce", {"token_weight": 1.0}, TypeError, "token_weight must be a tensor, got float"),
        (
            "linear_logp",
            {"temperature": randn(N + 1)},
            ValueError,
            f"temperature has shape ({N + 1},), which does not broadcast to target's ({N},)",
        ),
        (
            "linear_logp",
            {"temperature": torch.ones(N, dtype=torch.int64)},
            TypeError,
            "temperature has dtype torch.int64",
        ),
        ("linear_logp", {"temperature": randn(N).requires_grad_()}, ValueError, "temperature requires a gradient"),
        (
            "jsd",
            {"teacher_input": randn(N + 1, HT)},
            ValueError,
            f"teacher_input has shape ({N + 1}, {HT}) and student_input ({N}, {H})",
        ),
        (
            "jsd",
            {"teacher_weight": randn(V + 1, HT)},
            ValueError,
            f"the vocabularies differ: student_weight has shape ({V}, {H}), teacher_weight ({V + 1}, {HT})",
        ),
        ("jsd", {"teacher_input": torch.ones(N, HT, device="meta")}, ValueError, "teacher_input is on meta"),
    ]
    cases += [
        (
            "linear_logp",
            {"temperature": torch.tensor([1.0] * (N - 1) + [v])},
            ValueError,
            f"temperature must be finite and above 0: 1 of {N} tokens have others, such as {v}",
        )
        for v in (0.0, -1.0, math.inf, math.nan)
    ]
    for op, keyword, near in (
        ("flce", "label_smothing", "label_smoothing"),
        ("jsd", "betta", "beta"),
        ("linear_logp", "temprature", "temperature"),
    ):
        cases.append(
            (
                op,
                {keyword: 0.1},
                TypeError,
                f"{op}() got an unexpected keyword argument '{keyword}'; did you mean '{near}'?",
            )
        )
    cases += [(op, {"zzz": 1}, TypeError, f"{op}() got an unexpected keyword argument 'zzz'") for op in EVERY]
    return cases


CASES = [*head_cases(), *number_cases(), *target_cases(), *other_cases()]
IDS = [f"{op}-{'-'.join(given)}-{i}" for i, (op, given, _, _) in enumerate(CASES)]


@pytest.mark.parametrize(("op", "given", "error", "text"), CASES, ids=IDS)
def test_refused(
    monkeypatch: pytest.MonkeyPatch, op: str, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    """By the call, under each way of naming a backend, one that is not there among them, and by the reference."""
    ways: list[Callable[..., Any]] = [get_op(op), get_op(op).with_impl("cutedsl")]
    messages = set()
    for run in ways:
        for impl in (None, "torch", "triton", "no-such-backend"):
            with pytest.raises(error, match=re.escape(text)) as caught:
                run(**{**good(op), **given, "impl": impl})
            assert type(caught.value) is error
            messages.add(str(caught.value))
    for variable in ("HEADMUX_IMPL", "LIGER_KERNEL_IMPL"):
        monkeypatch.setenv(variable, "no-such-backend")
        with pytest.raises(error, match=re.escape(text)) as caught:
            get_op(op)(**{**good(op), **given})
        messages.add(str(caught.value))
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("op", "given", "error", "text"),
    [
        c
        for c in CASES
        if "labels lie outside" not in c[3]
        and "tokens have others" not in c[3]
        and not c[3].startswith(("largest", "smallest"))
    ],
)
def test_explain_and_reference_refuse_the_same(
    op: str, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    """All but values inside tensors, which only a run looks at."""
    for run in (get_op(op).explain, get_op(op).reference):
        with pytest.raises(error, match=re.escape(text)):
            run(**{**good(op), **given})


@pytest.mark.parametrize("op", EVERY)
def test_missing_arguments(op: str) -> None:
    needed = list(good(op))
    for missing in needed:
        given = {k: v for k, v in good(op).items() if k != missing}
        for run in (get_op(op).explain, get_op(op).reference):
            with pytest.raises(TypeError, match=rf"{op}\(\) missing a required argument: '{missing}'"):
                run(**given)
        with pytest.raises(TypeError, match=missing):
            get_op(op)(**given)


@pytest.mark.parametrize("op", EVERY)
def test_good_arguments_pass(op: str) -> None:
    """The base that every case above spoils in one place runs; then an unknown backend is told."""
    assert get_op(op)(**good(op)).isfinite().all()
    with pytest.raises(UnknownNameError, match="no backend is named 'no-such-backend'"):
        get_op(op)(**good(op), impl="no-such-backend")


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64]
)
@pytest.mark.parametrize("op", ["flce", "linear_logp"])
def test_any_integer_labels(op: str, dtype: torch.dtype) -> None:
    here = {**good(op), "target": labels(dtype=dtype)}
    torch.testing.assert_close(get_op(op)(**here), get_op(op)(**good(op)), rtol=0, atol=0)


@pytest.mark.parametrize("op", EVERY)
def test_bias_in_float32_beside_16_bits(op: str) -> None:
    given = {k: v.to(BF16) if v.is_floating_point() else v for k, v in good(op).items()}
    for name in ("student_bias", "teacher_bias") if op == "jsd" else ("bias",):
        for dtype in (torch.float32, BF16):
            assert get_op(op)(**given, **{name: randn(V, dtype=dtype)}).isfinite().all()


def test_autocast_takes_mixed_dtypes_but_not_float64() -> None:
    given = {**good("flce"), "weight": randn(V, H, dtype=BF16)}
    with torch.autocast("cpu", dtype=BF16):
        assert get_op("flce")(**given).isfinite()
        with pytest.raises(TypeError, match=r"input has dtype torch\.float64 and weight torch\.bfloat16"):
            get_op("flce")(**{**given, "input": randn(N, H, dtype=F64)})


def test_ignored_temperature_may_be_anything() -> None:
    t = torch.tensor([1.0] * (N - 1) + [math.nan])
    target = labels(0, 1, 2, 3, 4, -100)
    found = get_op("linear_logp")(randn(N, H), randn(V, H), target, temperature=t, ignore_index=-100)
    assert found[-1] == 0.0
    assert found.isfinite().all()
