"""Selection: where names come from, what they may be, what speaks against a backend, and what is said about it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import headmux
from headmux import devices, explain, get_op, registry, requirements, select, use_backend
from headmux.contract import Backend, Call, Kernel
from headmux.errors import DispatchError, UnknownNameError, UnsupportedCallError
from headmux.order import default_order

OPS = registry.op_names()
SIZES = {"N": 8192, "H": 4096, "V": 128256, "H_teacher": 4096}


def call(op: str = "flce", device: str = "cpu", capability: tuple[int, int] | None = None, **options: Any) -> Call:
    return get_op(op).call_on(torch.device(device), capability, SIZES, torch.bfloat16, **options)


def tensors(*, grad: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=generator).requires_grad_(grad)
    w = torch.randn(11, 8, generator=generator).requires_grad_(grad)
    return x, w, torch.tensor([0, 3, 10, -100, 4])


def order_of(found: Any) -> list[str]:
    return [b.name for b, _ in found.candidates]


# ------------------------------------------------------------------------------------------------ 1: precedence

LEVELS = (
    "impl",
    "use_backend",
    "HEADMUX_IMPL_{}",
    "HEADMUX_IMPL",
    "LIGER_KERNEL_IMPL_{}",
    "LIGER_KERNEL_IMPL",
)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strongest", range(len(LEVELS) + 1))
def test_precedence(make: Any, monkeypatch: pytest.MonkeyPatch, op: str, strongest: int) -> None:
    """With every level from ``strongest`` down set to a backend of its own, that level's backend runs."""
    for i in range(len(LEVELS)):
        make(f"level{i}")
    impl = None
    override = ""
    source = "automatic order"
    for i, level in reversed(list(enumerate(LEVELS))):
        if i < strongest:
            break
        name = f"level{i}"
        if level == "impl":
            impl, source = name, f"impl={name}"
        elif level == "use_backend":
            override, source = name, f"use_backend({name!r})"
        else:
            variable = level.format(op.upper())
            monkeypatch.setenv(variable, name)
            source = f"{variable}={name}"
    with use_backend(override):
        found = select.decide(call(op), impl)
    assert found.source == source
    if strongest < len(LEVELS):
        assert order_of(found) == [f"level{strongest}"]
    else:
        assert found.chosen == "torch"


@pytest.mark.parametrize(("level", "other"), list(itertools.permutations(OPS, 2)))
def test_variable_of_one_op_leaves_others_alone(
    make: Any, monkeypatch: pytest.MonkeyPatch, level: str, other: str
) -> None:
    make("mine")
    monkeypatch.setenv(f"HEADMUX_IMPL_{level.upper()}", "mine")
    monkeypatch.setenv(f"LIGER_KERNEL_IMPL_{level.upper()}", "mine")
    assert select.decide(call(level)).chosen == "mine"
    assert select.decide(call(other)).chosen == "torch"


@pytest.mark.parametrize("blank", ["", " ", "\t", ",", " , ,"])
def test_blank_level_leaves_the_choice_to_the_next(make: Any, monkeypatch: pytest.MonkeyPatch, blank: str) -> None:
    make("mine")
    for variable in ("HEADMUX_IMPL_FLCE", "HEADMUX_IMPL", "LIGER_KERNEL_IMPL_FLCE"):
        monkeypatch.setenv(variable, blank)
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "mine")
    with use_backend(blank):
        found = select.decide(call(), blank)
    assert (found.chosen, found.source) == ("mine", "LIGER_KERNEL_IMPL=mine")


def test_automatic_at_a_strong_level_hides_weaker_ones(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make("mine")
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "mine")
    assert select.decide(call(), "auto").chosen == "torch"
    monkeypatch.setenv("HEADMUX_IMPL", "auto")
    assert select.decide(call()).chosen == "torch"


# ------------------------------------------------------------------------------------------------ 2: values

AUTOMATIC = ["cutedsl", "triton", "torch"]


@pytest.mark.parametrize(
    ("value", "order"),
    [
        ("torch", ["torch"]),
        (" Torch ", ["torch"]),
        ("TORCH", ["torch"]),
        ("torch,torch, TORCH", ["torch"]),
        ("pytorch", ["torch"]),
        ("pytorch,torch", ["torch"]),
        ("nvidia-triton", ["triton"]),
        ("nvidia-cutedsl", ["cutedsl"]),
        ("Cute", ["cutedsl"]),
        ("cute, triton", ["cutedsl", "triton"]),
        (",torch,", ["torch"]),
        ("auto", AUTOMATIC),
        ("AUTO", AUTOMATIC),
        ("auto,torch", AUTOMATIC),
        ("torch,auto", ["torch", "cutedsl", "triton"]),
        ("cutedsl,auto", ["cutedsl", "triton", "torch"]),
    ],
)
@pytest.mark.parametrize("how", ["impl", "use_backend", "with_impl", "HEADMUX_IMPL", "LIGER_KERNEL_IMPL"])
def test_values(monkeypatch: pytest.MonkeyPatch, value: str, order: list[str], how: str) -> None:
    x, w, t = tensors()
    if how == "impl":
        found = explain("flce", x, w, t, impl=value)
    elif how == "with_impl":
        found = get_op("flce").with_impl(value).explain(x, w, t)
    elif how == "use_backend":
        with use_backend(value):
            found = explain("flce", x, w, t)
    else:
        monkeypatch.setenv(how, value)
        found = explain("flce", x, w, t)
    assert order_of(found) == order


@pytest.mark.parametrize(
    ("value", "wrong", "near"),
    [
        ("tritn", "tritn", "triton"),
        ("torch,cutdsl", "cutdsl", "cutedsl"),
        ("auto,pytroch", "pytroch", "pytorch"),
        ("triton;torch", "triton;torch", "triton"),
        ("ascend", "ascend", None),
    ],
)
@pytest.mark.parametrize("how", ["impl", "use_backend", "with_impl", "HEADMUX_IMPL", "LIGER_KERNEL_IMPL_FLCE"])
def test_unknown_names(monkeypatch: pytest.MonkeyPatch, value: str, wrong: str, near: str | None, how: str) -> None:
    """One unknown name spoils the list, even behind a backend that would run, and the call too, not only explain."""
    x, w, t = tensors()
    flce = get_op("flce")

    def run() -> None:
        if how == "impl":
            flce(x, w, t, impl=value)
        elif how == "with_impl":
            flce.with_impl(value)
        elif how == "use_backend":
            with use_backend(value):
                pass
        else:
            monkeypatch.setenv(how, value)
            flce(x, w, t)

    with pytest.raises(UnknownNameError) as caught:
        run()
    text = str(caught.value)
    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, DispatchError)
    assert f"no backend is named {wrong!r}" in text
    assert all(name in text for name in AUTOMATIC)
    assert ("did you mean" in text) == (near is not None)
    if near is not None:
        assert f"did you mean {near!r}?" in text


def test_names_that_are_not_strings() -> None:
    x, w, t = tensors()
    with pytest.raises(TypeError, match="comma-separated string, got list"):
        get_op("flce")(x, w, t, impl=["torch"])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="got int"), use_backend(3):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="a name is a string, got NoneType"):
        get_op(None)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("flce", "flce"),
        ("FLCE", "flce"),
        (" flce ", "flce"),
        ("fused_linear_cross_entropy", "flce"),
        ("Linear_Cross_Entropy", "flce"),
        ("fused_linear_jsd", "jsd"),
        ("linear_jsd", "jsd"),
        ("LINEAR_LOGP", "linear_logp"),
        ("fused_linear_logp", "linear_logp"),
        ("linear_log_prob", "linear_logp"),
    ],
)
def test_op_names(name: str, op: str) -> None:
    assert get_op(name) is get_op(op)
    assert get_op(name).name == op


def test_unknown_op() -> None:
    with pytest.raises(UnknownNameError, match=r"no op is named 'fcle'; known: flce, jsd, .*did you mean 'flce'\?"):
        get_op("fcle")


def test_variables_are_read_at_each_call(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make("first"), make("second")
    x, w, t = tensors()
    op = get_op("flce")
    for name in ("first", "second", "first"):
        monkeypatch.setenv("LIGER_KERNEL_IMPL", name)
        op(x, w, t)
    monkeypatch.delenv("LIGER_KERNEL_IMPL")
    op(x, w, t)
    assert [name for name, _, _ in make.ran] == ["first", "second", "first"]


def test_use_backend_nests_and_ends(make: Any) -> None:
    make("outer"), make("inner")
    chosen = []
    with use_backend("outer"):
        chosen.append(select.select(call()).chosen)
        with contextlib.suppress(ZeroDivisionError), use_backend("inner"):
            chosen.append(select.select(call()).chosen)
            _ = 1 / 0
        chosen.append(select.select(call()).chosen)
    chosen.append(select.select(call()).chosen)
    assert chosen == ["outer", "inner", "outer", "torch"]


def test_with_impl_is_a_default_of_the_call(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make("bound"), make("named"), make("env")
    monkeypatch.setenv("HEADMUX_IMPL", "env")
    x, w, t = tensors()
    bound = get_op("flce").with_impl("bound")
    bound(x, w, t)
    bound(x, w, t, impl="named")
    get_op("flce")(x, w, t)
    assert [name for name, _, _ in make.ran] == ["bound", "named", "env"]
    assert repr(bound) == "<headmux op flce impl=bound>"
    assert repr(get_op("flce")) == "<headmux op flce>"


# ------------------------------------------------------------------------------------------------ 3: order, strictness


def test_first_without_a_reason_wins(make: Any, refuse: Any) -> None:
    make("a", refuse("no a")), make("b"), make("c")
    found = select.select(call(), "a,b,c")
    assert found.chosen == "b"
    assert found.reasons == {"a": ("no a",), "b": (), "c": ()}


@pytest.mark.parametrize("names", ["a", "a,b"])
def test_named_backends_are_strict(make: Any, refuse: Any, names: str) -> None:
    """torch would run the call, but was not named."""
    make("a", refuse("first"), refuse("second")), make("b", refuse("third"))
    x, w, t = tensors()
    with pytest.raises(UnsupportedCallError) as caught:
        get_op("flce")(x, w, t, impl=names)
    error = caught.value
    assert isinstance(error, NotImplementedError)
    assert error.selection.chosen is None
    assert error.selection.backend is None
    assert str(error) == str(explain("flce", x, w, t, impl=names))
    assert error.selection.reasons["a"] == ("first", "second")
    assert make.ran == []
    with pytest.raises(UnsupportedCallError):
        _ = error.selection.kernel


def test_error_crosses_processes(make: Any, refuse: Any) -> None:
    make("a", refuse("because"))
    with pytest.raises(UnsupportedCallError) as caught:
        select.select(call(), "a,triton")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, UnsupportedCallError)
    assert str(copy) == str(caught.value)
    assert copy.selection.reasons == caught.value.selection.reasons
    assert copy.selection.call == caught.value.selection.call


@pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (9, 0), (10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("op", OPS)
def test_automatic_order_ends_with_torch(op: str, capability: tuple[int, int] | None) -> None:
    order = default_order(call(op, "cuda:0" if capability else "cpu", capability))
    assert order[-1] == "torch"
    assert sorted(order) == sorted(AUTOMATIC)


def test_torch_requires_nothing() -> None:
    backend = registry.get_backend("torch")
    assert backend.requires == ()
    assert backend.imports == ()
    assert backend.unavailable is None
    assert set(backend.kernels) == set(OPS)
    assert all(kernel.requires == () for kernel in backend.kernels.values())


def test_registered_backends_come_after_the_built_in_ones(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make("zeta"), make("alpha")
    assert order_of(select.decide(call())) == [*AUTOMATIC, "zeta", "alpha"]
    assert registry.names() == (*AUTOMATIC, "zeta", "alpha")
    monkeypatch.setenv("HEADMUX_IMPL", "alpha")
    assert select.decide(call()).chosen == "alpha"


# ------------------------------------------------------------------------------------------------ 4: reasons

CAPABILITIES = [(7, 5), (8, 0), (9, 0), (10, 0), (10, 3), (12, 0)]


@pytest.mark.parametrize("have", CAPABILITIES)
def test_capability_requirement(have: tuple[int, int]) -> None:
    here = call(device="cuda:0", capability=have)
    dotted = f"{have[0]}.{have[1]}"
    least = requirements.capability((8, 0))(here)
    assert least == (None if have >= (8, 0) else f"compute capability {dotted}, needs at least 8.0")
    hopper = requirements.capability((9, 0), below=(10, 0))(here)
    expected = None if have == (9, 0) else f"compute capability {dotted}, needs at least 9.0 and below 10.0"
    assert hopper == expected


@pytest.mark.parametrize("have", CAPABILITIES)
def test_built_in_backends_by_capability(have: tuple[int, int]) -> None:
    here = call(device="cuda:0", capability=have)
    dotted = f"compute capability {have[0]}.{have[1]}, needs at least "
    spoken = {n: [r for r in registry.get_backend(n).reject(here) if r.startswith(dotted)] for n in AUTOMATIC}
    assert len(spoken["triton"]) == (have < (8, 0))
    assert len(spoken["cutedsl"]) == (have != (9, 0))
    assert spoken["torch"] == []


def test_capability_is_that_of_the_tensors_device(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two unlike GPUs: what counts is where the tensors lie, not the current device."""
    table = {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr("headmux.ops._op.capability", lambda device: table[device.index])
    make("hopper", requirements.capability((9, 0)))
    for index, chosen in ((0, None), (1, "hopper")):
        with FakeTensorMode():
            x = torch.empty(4, 8, device=f"cuda:{index}")
            t = torch.empty(4, dtype=torch.int64, device=f"cuda:{index}")
            found = explain("flce", x, torch.empty(11, 8, device=f"cuda:{index}"), t, impl="hopper")
        assert found.call.device == torch.device("cuda", index)
        assert found.call.capability == table[index]
        assert found.chosen == chosen


def test_amd_gpus_have_no_cuda_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch calls them cuda and gives them capabilities such as 9.4, which no requirement may take for Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    devices._cuda_capability.cache_clear()
    try:
        assert devices.capability(torch.device("cuda", 0)) == (9, 4)
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert devices.capability(torch.device("cuda", 0)) is None
    finally:
        devices._cuda_capability.cache_clear()
    assert devices.capability(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("requirement", "options", "reason"),
    [
        (requirements.device("cuda"), {}, "device cpu is not one of cuda"),
        (requirements.device("cuda", "cpu"), {}, None),
        (requirements.capability((8, 0)), {}, "no CUDA compute capability (cpu), needs at least 8.0"),
        (requirements.dtypes(torch.float32), {}, "compute dtype torch.bfloat16 is not one of torch.float32"),
        (requirements.dtypes(torch.float32, torch.bfloat16), {}, None),
        (requirements.dtypes(torch.float32, role="bias"), {}, None),
        (
            requirements.dtypes(torch.float32, role="bias"),
            {"tensors": ["bias"]},
            "bias dtype torch.bfloat16 is not one of torch.float32",
        ),
        (requirements.option("softcap", None), {"softcap": 30.0}, "softcap=30.0 is not one of None"),
        (requirements.option("softcap", None), {}, None),
        (requirements.option("label_smoothing", 0.0, 0.1), {"label_smoothing": 0.1}, None),
        (requirements.option("beta", 0.5), {}, None),
        (requirements.multiple("V", 256), {}, None),
        (requirements.multiple("V", 512), {}, "V=128256 is not a multiple of 512"),
        (requirements.no_gradients(), {}, "gradients of input, weight are not supported"),
        (requirements.no_gradients(), {"needs": []}, None),
    ],
)
def test_requirements(requirement: Any, options: dict[str, Any], reason: str | None) -> None:
    assert requirement(call(**options)) == reason


def test_every_reason_is_told(make: Any) -> None:
    backend = make(
        "picky",
        requirements.device("cuda"),
        requirements.multiple("V", 512),
        requirements.option("softcap", None),
        imports=("no_such_module",),
    )
    assert backend.reject(call(softcap=5.0), thorough=True) == (
        "device cpu is not one of cuda",
        "V=128256 is not a multiple of 512",
        "softcap=5.0 is not one of None",
        "module no_such_module is not installed",
    )


def test_kernel_of_another_op_is_a_reason(make: Any) -> None:
    backend = make("narrow", ops=("jsd",))
    assert backend.reject(call("flce")) == ("has no kernel for flce",)
    assert backend.reject(call("jsd")) == ()


MODULES = {
    "raises_os": ("raise OSError('libcuda.so.1: cannot open shared object file')", "OSError: libcuda.so.1"),
    "raises_runtime": ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
    "raises_import": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "raises_syntax": ("def", "SyntaxError"),
    "raises_assertion": ("assert False, 'no GPU'", "AssertionError: no GPU"),
}


@pytest.mark.parametrize("module", MODULES)
def test_broken_module_is_a_reason(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    body, text = MODULES[module]
    (tmp_path / f"{module}.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    make("broken", imports=(module,))
    x, w, t = tensors()
    get_op("flce")(x, w, t, impl="broken,torch")
    assert make.ran == []
    with pytest.raises(UnsupportedCallError, match=f"module {module} does not import: {text}"):
        get_op("flce")(x, w, t, impl="broken")


def test_modules_are_imported_only_for_calls_that_could_run(
    make: Any, refuse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heavy.py").write_text("import sys\nsys.heavy_was_imported = True\nraise OSError('too heavy')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    backend = make("heavy", refuse("wrong device"), imports=("heavy",))
    import sys

    assert select.select(call(), "heavy,torch").reasons["heavy"] == ("wrong device",)
    assert not hasattr(sys, "heavy_was_imported")
    assert backend.reject(call(), thorough=True)[1].endswith("OSError: too heavy")
    assert vars(sys).pop("heavy_was_imported")


def test_bugs_propagate(make: Any) -> None:
    """Neither a kernel that raises nor a requirement that raises makes way for the next candidate."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    registry.register(Backend("buggy", {"flce": Kernel(broken, broken)}))
    registry.register(Backend("buggy-check", {"flce": Kernel(broken, broken, requires=(broken,))}))
    x, w, t = tensors()
    try:
        for name in ("buggy", "buggy-check"):
            with pytest.raises(ZeroDivisionError, match="a bug"):
                get_op("flce")(x, w, t, impl=f"{name},torch")
    finally:
        registry.unregister("buggy")
        registry.unregister("buggy-check")


# ------------------------------------------------------------------------------------------------ 5: the text


def test_explanation(make: Any) -> None:
    make("narrow", requirements.option("softcap", None), requirements.multiple("V", 512))
    make("wide"), make("spare")
    wanted = call(device="cuda:0", capability=(9, 0), softcap=30.0, needs=[])
    assert str(select.decide(wanted, "narrow,wide,spare")) == (
        "flce on cuda:0 sm_90 torch.bfloat16 N=8192 H=4096 V=128256 softcap=30.0\n"
        "order from: impl=narrow,wide,spare\n"
        "  narrow  softcap=30.0 is not one of None\n"
        "          V=128256 is not a multiple of 512\n"
        "  wide    selected\n"
        "  spare   would run"
    )


@pytest.mark.parametrize(
    ("op", "options", "text"),
    [
        ("flce", {}, "flce on cpu torch.bfloat16 N=8192 H=4096 V=128256 gradients of input,weight"),
        (
            "flce",
            {"tensors": ["bias"], "compute": torch.float16, "accum_dtype": torch.float32, "needs": ["bias"]},
            "flce on cpu torch.bfloat16 as torch.float16 N=8192 H=4096 V=128256 accum_dtype=torch.float32 "
            "gradients of bias",
        ),
        (
            "jsd",
            {"beta": 0.1, "needs": []},
            "jsd on cpu torch.bfloat16 N=8192 H=4096 H_teacher=4096 V=128256 beta=0.1",
        ),
        (
            "linear_logp",
            {"return_entropy": True, "needs": []},
            "linear_logp on cpu torch.bfloat16 N=8192 H=4096 V=128256 return_entropy=True",
        ),
    ],
)
def test_call_text(op: str, options: dict[str, Any], text: str) -> None:
    assert str(call(op, **options)) == text


def test_call_on_tells_what_a_call_tells() -> None:
    """Described without tensors, a call is the same as the one that tensors make."""
    x, w, t = tensors(grad=True)
    sizes = {"N": 5, "H": 8, "V": 11}
    real = explain("flce", x, w, t, bias=w.detach()[:, 0], softcap=3.0).call
    made = get_op("flce").call_on(
        torch.device("cpu"), None, sizes, torch.float32, tensors=["bias"], needs=["input", "weight"], softcap=3.0
    )
    assert made == real
    assert hash(made) == hash(real)


def test_call_on_under_autocast() -> None:
    x, w, t = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        real = explain("flce", x, w, t).call
    made = get_op("flce").call_on(
        torch.device("cpu"), None, {"N": 5, "H": 8, "V": 11}, torch.float32, compute=torch.bfloat16, needs=[]
    )
    assert made == real


def test_call_on_refuses_what_the_op_refuses() -> None:
    with pytest.raises(ValueError, match=r"softcap=-1\.0 must be finite and above 0"):
        call(softcap=-1.0)
    with pytest.raises(ValueError, match="flce has no gradient of 'bias' here; it has input, weight"):
        call(needs=["bias"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'softcp'; did you mean 'softcap'"):
        call(softcp=1.0)


def test_call_lookups() -> None:
    here = call("jsd", tensors=["student_bias"])
    assert here.dtype("student_bias") == torch.bfloat16
    assert here.dtype("teacher_bias") is None
    assert here.dtype("teacher_compute") == torch.bfloat16
    assert here.size("H_teacher") == 4096
    assert here.option("beta") == 0.5
    with pytest.raises(KeyError):
        here.size("K")
    with pytest.raises(KeyError):
        here.option("softcap")


# ------------------------------------------------------------------------------------------------ 6: memo, log, threads


def counting(counter: list[Call]) -> Any:
    def check(seen: Call) -> None:
        counter.append(seen)

    return check


def test_decisions_are_remembered_per_call(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Call] = []
    make("counted", counting(asked))
    for _ in range(3):
        assert select.select(call(), "counted").chosen == "counted"
    assert len(asked) == 1
    select.select(call(softcap=1.0), "counted")
    assert len(asked) == 2
    with use_backend("counted"):
        select.select(call())
    monkeypatch.setenv("HEADMUX_IMPL", "counted")
    select.select(call())
    assert len(asked) == 4


def test_new_backends_spoil_the_memo(make: Any, refuse: Any) -> None:
    make("first", refuse("never"))
    assert order_of(select.select(call())) == [*AUTOMATIC, "first"]
    make("second")
    assert order_of(select.select(call())) == [*AUTOMATIC, "first", "second"]
    registry.unregister("second")
    make._names.remove("second")
    assert order_of(select.select(call())) == [*AUTOMATIC, "first"]


def test_memo_is_bounded_and_holds_no_refusals(make: Any, refuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_MEMO_SIZE", 4)
    for i in range(20):
        select.select(call(softcap=1.0 + i), "torch")
        assert 1 <= len(select._memo) <= 4
    make("never", refuse("never"))
    select._memo.clear()
    with pytest.raises(UnsupportedCallError):
        select.select(call(), "never")
    assert not select._memo


def test_warm_selection_is_cheap() -> None:
    wanted = call()
    select.select(wanted)
    best = float("inf")
    for _ in range(3000):
        start = time.perf_counter()
        select.select(wanted)
        best = min(best, time.perf_counter() - start)
    assert best < 10e-6


def test_log(make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    make("a"), make("b")
    with caplog.at_level(logging.DEBUG, "headmux"):
        for softcap in (1.0, 2.0, 2.0):
            select.select(call(softcap=softcap), "a")
        select.select(call(), "b")
        select.select(call("jsd"), "a")
    info = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert info == [
        "flce runs on a (order from: impl=a)",
        "flce runs on b (order from: impl=b)",
        "jsd runs on a (order from: impl=a)",
    ]
    debug = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert len(debug) == 4
    assert debug[0] == str(select.decide(call(softcap=1.0), "a"))
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.DEBUG, "headmux"):
        select.select(call("linear_logp"), "a")
    assert caplog.records == []


def test_threads_do_not_inherit_use_backend_but_backward_keeps_its_backend(make: Any) -> None:
    make("inside")
    x, w, t = tensors(grad=True)
    chosen: list[str | None] = []
    with use_backend("inside"):
        loss = get_op("flce")(x, w, t)
        thread = threading.Thread(target=lambda: chosen.append(select.select(call()).chosen))
        thread.start()
        thread.join()
    assert chosen == ["torch"]
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert make.ran == [("inside", "flce", "forward"), ("inside", "flce", "backward")]
    assert x.grad is not None


def test_many_threads(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, registering and selecting at once gives each thread what it asked for."""
    monkeypatch.setattr(select, "_MEMO_SIZE", 3)
    monkeypatch.setattr(registry, "_loaded", {})
    for i in range(4):
        make(f"t{i}")
    barrier = threading.Barrier(8)
    wrong: list[Any] = []

    def work(i: int) -> None:
        try:
            barrier.wait()
            for k in range(50):
                with use_backend(f"t{i % 4}"):
                    if select.select(call(softcap=1.0 + k % 5)).chosen != f"t{i % 4}":
                        wrong.append(i)
                if registry.get_backend("torch") is not registry.get_backend("pytorch"):
                    wrong.append("two torch backends")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_op_in_a_compiled_function_follows_the_environment(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """get_op may be called inside, and a change of the variable needs no recompile."""
    make("one"), make("two")

    @torch.compile(fullgraph=True, backend="eager")
    def loss(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return get_op("flce")(x, w, t) * 2

    x, w, t = tensors()
    for name in ("one", "two"):
        monkeypatch.setenv("HEADMUX_IMPL", name)
        with torch.compiler.set_stance("fail_on_recompile" if name == "two" else "default"):
            loss(x, w, t)
    assert [name for name, _, _ in make.ran] == ["one", "two"]


# ------------------------------------------------------------------------------------------------ 7: registering


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch", "a backend named 'torch' is there already"),
        ("cute", "a backend named 'cute' is there already"),
        ("Mine", "must be lower-case"),
        (" mine", "must be lower-case"),
        ("", "must be lower-case, not empty"),
        ("auto", "not 'auto'"),
        ("a,b", "without commas"),
    ],
)
def test_bad_backend_names(name: str, text: str) -> None:
    before = registry.names()
    with pytest.raises(ValueError, match=text):
        registry.register(Backend(name, {}))
    assert registry.names() == before


def test_registering_other_things() -> None:
    with pytest.raises(TypeError, match=r"takes a headmux\.contract\.Backend, got dict"):
        registry.register({})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["torch", "triton", "never-there"])
def test_only_registered_backends_can_be_taken_out(name: str) -> None:
    registry.get_backend("torch")
    with pytest.raises(ValueError, match=f"{name!r} was not added by register"):
        registry.unregister(name)


# ------------------------------------------------------------------------------------------------ 8: plug-ins

GOOD = """
from headmux.contract import Backend
backend = Backend({name!r}, kernels=dict(__import__("headmux.backends.torch", fromlist=["backend"]).backend.kernels))
"""


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a distribution with entry points, as pip would leave it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(registry._loaded)

    def install(project: str, entries: dict[str, str], modules: dict[str, str]) -> None:
        info = tmp_path / f"{project.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        lines = [f"[{registry.ENTRY_POINT_GROUP}]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, body in modules.items():
            (tmp_path / f"{name}.py").write_text(body)
        registry._plugins.cache_clear()

    yield install
    registry._loaded.clear()
    registry._loaded.update(before)


def test_plugin_runs_when_named_and_comes_last_otherwise(plug: Any) -> None:
    plug("headmux-acme", {"acme": "acme_plug_a:backend"}, {"acme_plug_a": GOOD.format(name="acme")})
    assert registry.names() == (*AUTOMATIC, "acme")
    assert order_of(select.decide(call())) == [*AUTOMATIC, "acme"]
    x, w, t = tensors()
    assert explain("flce", x, w, t, impl="ACME").chosen == "acme"
    assert get_op("flce")(x, w, t, impl="acme") == get_op("flce")(x, w, t, impl="torch")


@pytest.mark.parametrize(
    ("value", "body", "reason"),
    [
        ("plug_os:backend", "raise OSError('gone')", "entry point plug_os:backend does not import: OSError: gone"),
        ("plug_absent:backend", "", "does not import: AttributeError"),
        ("plug_none_such:backend", None, "does not import: ModuleNotFoundError: No module named 'plug_none_such'"),
        ("plug_type:backend", "backend = 3", "entry point plug_type:backend gives int, not Backend 'acme'"),
        ("plug_other:backend", GOOD.format(name="other"), "gives Backend 'other', not Backend 'acme'"),
        ("not a module!", None, "does not import"),
    ],
)
def test_broken_plugin_is_unavailable(plug: Any, value: str, body: str | None, reason: str) -> None:
    """It is a reason where the plug-in is named, and no trouble where it is not."""
    plug("headmux-acme", {"acme": value}, {} if body is None else {value.split(":")[0]: body})
    x, w, t = tensors()
    assert get_op("flce")(x, w, t).isfinite()
    with pytest.raises(UnsupportedCallError) as caught:
        get_op("flce")(x, w, t, impl="acme")
    (text,) = caught.value.selection.reasons["acme"]
    assert reason in text


def test_plugins_cannot_take_names(plug: Any, caplog: pytest.LogCaptureFixture) -> None:
    entries = {"torch": "clash:backend", "cute": "clash:backend", "auto": "clash:backend", "acme": "clash_a:backend"}
    plug("headmux-clash", entries, {"clash_a": GOOD.format(name="acme"), "clash": "raise SystemError('loaded')"})
    plug("headmux-clash-again", {"ACME": "clash:backend"}, {})
    with caplog.at_level(logging.WARNING, "headmux"):
        assert registry.names() == (*AUTOMATIC, "acme")
    ignored = sorted(r.getMessage().split(" is ignored")[0] for r in caplog.records)
    assert len(ignored) == 4
    assert registry.get_backend("torch").kernels
    assert {f"plug-in {name!r} (clash:backend)" for name in ("torch", "cute", "auto")} <= set(ignored)


def test_plugins_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[str] = []

    def scan(group: str) -> list[Any]:
        scans.append(group)
        return []

    monkeypatch.setattr(registry, "entry_points", scan)
    registry._plugins.cache_clear()
    for _ in range(3):
        select.decide(call())
        registry.names()
    assert scans == ["headmux.backends"]


def test_public_names() -> None:
    assert headmux.get_op is registry.get_op
    assert all(hasattr(headmux, name) for name in headmux.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = headmux.nothing
