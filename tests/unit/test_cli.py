"""``python -m headmux``: doctor, explain and demo, on whole and on broken installations."""

from __future__ import annotations

import inspect
import json
import os
import platform
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import headmux
from headmux import devices, doctor, registry, requirements
from headmux.__main__ import main
from headmux.devices import Device, Inventory

OPS = registry.op_names()
HOPPER = ("--device", "cuda:0", "--capability", "9.0")


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def in_new_process(*words: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m headmux`` with stub modules on the path and variables set."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HEADMUX_", "LIGER_", "TRITON_"))}
    environment.update(variables)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-m", "headmux", *words], env=environment, capture_output=True, text=True, timeout=120
    )


# ------------------------------------------------------------------------------------------------ doctor


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "torch")
    monkeypatch.setenv("HEADMUX_BUDGET_MB", "64")
    status, out, _ = run(capsys=capsys)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split() == ["headmux", headmux.__version__]
    assert lines[1].split() == ["python", platform.python_version()]
    assert any(line.startswith("torch ") and torch.__version__ in line for line in lines)
    assert "  LIGER_KERNEL_IMPL=torch" in lines
    assert "  HEADMUX_BUDGET_MB=64" in lines
    header = next(line for line in lines if line.startswith("cpu "))
    assert header.split() == ["cpu", *registry.names(), "runs", "on"]
    for op in OPS:
        row = next(line.split() for line in lines if line.startswith(f"  {op} "))
        assert row == [op, "-", "-", "usable", "torch", "(LIGER_KERNEL_IMPL=torch)"]
    assert "device cpu is not one of cuda" in out
    assert run("doctor", capsys=capsys)[1] == out


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("--json", capsys=capsys)
    found = json.loads(out)
    assert status == 0
    assert found["versions"]["headmux"] == headmux.__version__
    assert found["support"]["cpu"]["flce"]["selected"] == "torch"
    assert found["support"]["cpu"]["flce"]["reasons"]["torch"] == []
    assert set(found["support"]["cpu"]) == set(OPS)
    assert all(found["support"]["cpu"][op]["reasons"]["cutedsl"] for op in OPS)


def test_doctor_tells_every_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = Inventory(
        (
            Device("cuda:0", "Old One", (7, 5), 16 * 2**30),
            Device("cuda:1", "New One", (9, 0), 140 * 2**30),
            Device(None, "Hidden One", (9, 0), None),
        ),
        "nvml",
        "580.1",
        (),
    )
    monkeypatch.setattr(doctor, "inventory", lambda: found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    _, out, _ = run(capsys=capsys)
    assert "  cuda:0  Old One, capability 7.5, 16 GiB" in out
    assert "  hidden  Hidden One, capability 9.0" in out
    old, new = (out[out.index(f"\n{name} ") :] for name in ("cuda:0", "cuda:1"))
    reason = "compute capability 7.5, needs at least 9.0 and below 10.0"
    assert reason in old
    assert reason not in new
    data = json.loads(run("--json", capsys=capsys)[1])
    assert list(data["support"]) == ["cpu", "cuda:0", "cuda:1"]
    assert data["driver"] == "580.1"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert f"PyTorch {torch.__version__} is built without CUDA" in run(capsys=capsys)[1]


def boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("headmux.devices._from_nvml", "nvml: RuntimeError: boom"),
        ("headmux.devices._from_torch", "torch: RuntimeError: boom"),
        ("headmux.doctor.metadata.version", "unreadable: RuntimeError"),
        ("headmux.registry.get_backend", "broken: RuntimeError: boom"),
        ("headmux.contract.Backend.reject", "broken: RuntimeError: boom"),
        ("headmux.select.decide", "nothing (boom)"),
        ("headmux.registry.get_op", "the op is broken: RuntimeError: boom"),
    ],
)
def test_doctor_survives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str, text: str
) -> None:
    monkeypatch.setattr(where, boom)
    status, out, _ = run(capsys=capsys)
    assert status == 0
    assert text in out
    assert run("--json", capsys=capsys)[0] == 0


def test_doctor_tells_an_unknown_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADMUX_IMPL", "tritn")
    status, out, _ = run(capsys=capsys)
    assert status == 0
    assert "nothing (no backend is named 'tritn'" in out


def stub(folder: Path, body: str) -> None:
    """Kernel languages whose import runs ``body``; PyTorch itself imports cuda.bindings, so only NVML is touched."""
    for module in ("triton", "cutlass", "tvm_ffi", "cuda/bindings/nvml"):
        file = folder / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body.format(module) + "\n")
    for package in ("cuda", "cuda/bindings"):
        (folder / package / "__init__.py").touch()


STUBS = {
    "absent": ("raise ModuleNotFoundError(\"No module named '{0}'\", name='{0}')", "ModuleNotFoundError"),
    "broken": ("raise OSError('libcuda.so.1: cannot open shared object file')", "OSError: libcuda.so.1"),
    "no_driver": ("raise RuntimeError('0 active drivers ([]). There should only be one.')", "0 active drivers"),
}


@pytest.mark.parametrize("state", STUBS)
def test_kernel_languages_that_do_not_import(tmp_path: Path, state: str) -> None:
    """In a process of its own: doctor, and a strict call on the CPU that must not care."""
    body, text = STUBS[state]
    stub(tmp_path, body)
    found = in_new_process(path=tmp_path)
    assert found.returncode == 0, found.stderr
    assert text in found.stdout
    assert "module cutlass does not import: " in found.stdout
    assert found.stdout.count("usable") == len(OPS)
    explained = in_new_process("explain", "flce", *HOPPER, "--impl", "cutedsl,torch", path=tmp_path)
    assert explained.returncode == 0, explained.stderr
    assert text in explained.stdout
    assert "torch    selected" in explained.stdout


def test_import_loads_no_kernel_language(tmp_path: Path) -> None:
    """Neither importing headmux nor a call on the CPU imports one, and nothing initialises CUDA."""
    stub(tmp_path, "raise SystemError('imported')")
    code = (
        "import sys, time, torch; start = time.perf_counter(); import headmux; took = time.perf_counter() - start\n"
        "x = torch.ones(3, 4, requires_grad=True); w = torch.ones(5, 4)\n"
        "headmux.get_op('flce')(x, w, torch.tensor([0, 1, 2])).backward()\n"
        "assert not {'triton', 'cutlass', 'cuda.bindings.nvml'} & set(sys.modules)\n"
        "assert not torch.cuda.is_initialized(); print(took)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.0


# ------------------------------------------------------------------------------------------------ explain


def test_explain_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--dtype", "bfloat16", "-n", "8192", "-H", "4096", "-v", "128256", "--softcap", "30")
    status, out, _ = run("explain", "flce", *HOPPER, *words, capsys=capsys)
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == (
        "flce on cuda:0 sm_90 torch.bfloat16 N=8192 H=4096 V=128256 softcap=30.0 gradients of input,weight"
    )
    assert lines[1] == "order from: automatic order"
    assert sum("selected" in line for line in lines) == 1


def test_explain_without_a_backend() -> None:
    """Through the variable that the project is named for, in a process of its own."""
    done = in_new_process("explain", "flce", "--device", "cpu", LIGER_KERNEL_IMPL="cutedsl")
    assert done.returncode == 1
    assert "order from: LIGER_KERNEL_IMPL=cutedsl\n" in done.stdout
    assert "device cpu is not one of cuda" in done.stdout
    assert "no CUDA compute capability (cpu), needs at least 9.0 and below 10.0" in done.stdout
    assert "selected" not in done.stdout
    assert "Traceback" not in done.stderr


def test_explain_names_every_reason(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make(
        "picky",
        requirements.device("cuda"),
        requirements.multiple("V", 512),
        requirements.dtypes(torch.float16),
        requirements.option("reduction", None),
        imports=("no_such_module",),
    )
    status, out, _ = run("explain", "flce", "--device", "cpu", "--impl", "picky", capsys=capsys)
    assert status == 1
    assert [line.strip() for line in out.splitlines()[2:]] == [
        "picky  device cpu is not one of cuda",
        "V=128256 is not a multiple of 512",
        "compute dtype torch.bfloat16 is not one of torch.float16",
        "module no_such_module is not installed",
    ]


@pytest.mark.parametrize("op", OPS)
def test_explain_has_a_flag_for_every_option(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("explain", op, "--help", capsys=capsys)
    assert status == 0
    for p in inspect.signature(registry.get_op(op).request).parameters.values():
        if p.default is not p.empty:
            assert f"--{p.name.replace('_', '-')}" in out


ALL_OPTIONS = {
    "flce": (
        "--bias --ce-weight --ignore-index -1 --lse-square-scale 1e-4 --label-smoothing 0.1 --reduction sum "
        "--logit-scale 2 --softcap 30 --accum-dtype float32 --use-token-scaling --token-weight --return-z-loss "
        "--return-token-accuracy --return-predicted-tokens --needs input,bias",
        {
            "ignore_index": -1,
            "lse_square_scale": 1e-4,
            "label_smoothing": 0.1,
            "logit_scale": 2.0,
            "softcap": 30.0,
            "accum_dtype": "torch.float32",
            "use_token_scaling": True,
            "return_z_loss": True,
            "return_predicted": True,
        },
        ["input", "bias"],
    ),
    "jsd": (
        "--target --student-bias --teacher-bias --beta 0.1 --temperature 2 --ignore-index 3 --reduction none "
        "--student-logit-scale 2 --student-softcap 30 --teacher-logit-scale 3 --teacher-softcap 50 "
        "--accum-dtype float32 --teacher-hidden 512 --no-grad",
        {
            "beta": 0.1,
            "temperature": 2.0,
            "ignore_index": 3,
            "student_logit_scale": 2.0,
            "student_softcap": 30.0,
            "teacher_logit_scale": 3.0,
            "teacher_softcap": 50.0,
            "accum_dtype": "torch.float32",
        },
        [],
    ),
    "linear_logp": (
        "--bias --temperature tensor --logit-scale 2 --softcap 30 --ignore-index 0 --return-entropy --return-lse "
        "--accum-dtype float32",
        {
            "temperature": 1.0,
            "logit_scale": 2.0,
            "softcap": 30.0,
            "ignore_index": 0,
            "return_entropy": True,
            "return_lse": True,
            "accum_dtype": "torch.float32",
        },
        ["input", "weight", "bias"],
    ),
}


@pytest.mark.parametrize("op", OPS)
def test_explain_takes_every_option(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, options, needs = ALL_OPTIONS[op]
    status, out, err = run("explain", op, *HOPPER, *flags.split(), "--impl", "torch", "--json", capsys=capsys)
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["call"]["options"] == options
    assert found["call"]["needs"] == needs
    assert found["call"]["capability"] == [9, 0]
    assert found["selected"] == "torch"
    assert found["order_from"] == "impl=torch"
    assert found["candidates"] == [{"name": "torch", "reasons": []}]
    if op == "jsd":
        assert found["call"]["sizes"] == {"N": 8192, "H": 4096, "H_teacher": 512, "V": 128256}
    else:
        assert "bias" in found["call"]["dtypes"]


def test_explain_autocast_and_num_items(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--dtype", "float32", "--autocast", "bfloat16", "--num-items", "12", "--no-grad")
    _, out, _ = run("explain", "flce", "--device", "cpu", *words, capsys=capsys)
    assert out.startswith("flce on cpu torch.float32 as torch.bfloat16 N=8192 H=4096 V=128256\n")
    assert run("explain", "flce", "--device", "cpu", "--num-items", "tensor", capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("explain fcle", "no op is named 'fcle'; known: flce, jsd"),
        ("explain fcle", "did you mean 'flce'?"),
        ("explain flce --device cpu --impl tritn", "did you mean 'triton'?"),
        ("explan", "no command is named 'explan'; known: doctor, explain, demo; did you mean 'explain'?"),
        ("explain", "the following arguments are required: OP"),
        ("explain flce --device gpu", "--device gpu: "),
        ("explain flce --device cpu --capability 9.0", "--capability 9.0 needs a CUDA device, not cpu"),
        ("explain flce --device cuda:0 --capability nine", "--capability 'nine' must be major.minor, such as 9.0"),
        ("explain flce --device cuda:0 --capability 90", "must be major.minor"),
        ("explain flce --device cpu --softcap -1", "softcap=-1.0 must be finite and above 0"),
        ("explain flce --device cpu --softcap x", "argument --softcap: invalid float value"),
        ("explain flce --device cpu --reduction avg", "reduction='avg' is not one of"),
        ("explain flce --device cpu --needs bias", "flce has no gradient of 'bias' here; it has input, weight"),
        ("explain flce --device cpu --needs input --no-grad", "not allowed with argument"),
        ("explain flce --device cpu -n -3", "argument -n/--tokens: "),
        ("explain flce --device cpu -H 0", "input has shape (1, 0), needs [..., H] with H >= 1"),
        ("explain flce --device cpu --accum-dtype int3", "argument --accum-dtype: "),
        ("explain flce --device cpu --accum-dtype float64", "accum_dtype=torch.float64 is not one of"),
        ("explain flce --device cpu --teacher-hidden 3", "unrecognized arguments: --teacher-hidden 3"),
        ("--jsn", "unrecognized arguments: --jsn"),
        ("doctor extra", "unrecognized arguments: extra"),
    ],
)
def test_command_lines_that_cannot_be(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(*words.split(), capsys=capsys)
    assert (status, out) == (2, "")
    assert text in err


def test_unknown_name_in_a_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "cutedls")
    status, _, err = run("explain", "flce", "--device", "cpu", capsys=capsys)
    assert status == 2
    assert "did you mean 'cutedsl'?" in err


def test_cuda_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    here = (Device("cuda:0", "One", (8, 0), 1), Device(None, "Hidden", (9, 0), 1))
    monkeypatch.setattr("headmux.__main__.inventory", lambda: Inventory(here, "nvml", None, ()))
    status, _, err = run("explain", "flce", "--device", "cuda:3", capsys=capsys)
    assert status == 2
    assert "cuda:3 is not on this machine (CUDA devices here: cuda:0): tell what it is with --capability" in err
    status, out, _ = run("explain", "flce", "--device", "cuda", "--impl", "torch", capsys=capsys)
    assert status == 0
    assert out.startswith("flce on cuda:0 sm_80 ")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert run("explain", "flce", "--impl", "torch", capsys=capsys)[1].startswith("flce on cuda:0 sm_80 ")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert run("explain", "flce", "--impl", "torch", capsys=capsys)[1].startswith("flce on cpu ")


# ------------------------------------------------------------------------------------------------ devices


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        (None, ["cuda:0", "cuda:1", "cuda:2"]),
        ("", [None, None, None]),
        ("1", [None, "cuda:0", None]),
        ("2,0", ["cuda:1", None, "cuda:0"]),
        (" 2 , 0 ", ["cuda:1", None, "cuda:0"]),
        ("0,9,1", ["cuda:0", None, None]),
        ("-1,0", [None, None, None]),
        ("1,1", [None, None, None]),
        ("GPU-bb", [None, "cuda:0", None]),
        ("GPU-c,GPU-aa11", ["cuda:1", None, "cuda:0"]),
        ("GPU-", [None, None, None]),
        ("MIG-x", [None, None, None]),
    ],
)
def test_visible_devices(setting: str | None, names: list[str | None]) -> None:
    assert devices.visible_names(["GPU-aa11", "GPU-bb22", "GPU-cc33"], setting) == names


class Nvml(types.ModuleType):
    """NVML with two devices, as cuda-python shows it."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.nvml")
        self.open = 0

    def init_v2(self) -> None:
        self.open += 1

    def shutdown(self) -> None:
        self.open -= 1

    def device_get_count_v2(self) -> int:
        return 2

    def device_get_handle_by_index_v2(self, index: int) -> int:
        return 100 + index

    def device_get_uuid(self, handle: int) -> str:
        return f"GPU-{handle}"

    def device_get_cuda_compute_capability(self, handle: int) -> tuple[int, int]:
        return (9, 0) if handle == 100 else (12, 0)

    def device_get_memory_info_v2(self, handle: int) -> Any:
        return types.SimpleNamespace(total=handle * 2**30)

    def device_get_name(self, handle: int) -> str:
        return f"Card {handle}"

    def system_get_driver_version(self) -> str:
        return "580.95"


def test_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    for name, module in (("cuda", types.ModuleType("cuda")), ("cuda.bindings", types.ModuleType("cuda.bindings"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", nvml)
    sys.modules["cuda.bindings"].nvml = nvml  # type: ignore[attr-defined]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = devices.inventory()
    assert (found.source, found.driver, found.problems) == ("nvml", "580.95", ())
    assert found.devices == (
        Device(None, "Card 100", (9, 0), 100 * 2**30),
        Device("cuda:0", "Card 101", (12, 0), 101 * 2**30),
    )
    assert nvml.open == 0
    monkeypatch.setattr(nvml, "device_get_name", boom)
    monkeypatch.setattr(devices, "_from_torch", lambda: ())
    failed = devices.inventory()
    assert (failed.devices, failed.source, failed.problems) == ((), "none", ("nvml: RuntimeError: boom",))
    assert nvml.open == 0


def test_devices_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_from_nvml", boom)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    facts = types.SimpleNamespace(name="Card", total_memory=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: facts)
    monkeypatch.setattr(devices, "capability", lambda device: (8, 6))
    found = devices.inventory()
    assert found.source == "torch"
    assert found.devices == (Device("cuda:0", "Card", (8, 6), 7),)
    monkeypatch.setattr(torch.cuda, "get_device_properties", boom)
    found = devices.inventory()
    assert (found.devices, found.source) == ((), "none")
    assert found.problems == ("nvml: RuntimeError: boom", "torch: RuntimeError: boom")


# ------------------------------------------------------------------------------------------------ demo, version, help


def test_demo_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    fake = types.ModuleType("headmux.demo")
    fake.main = lambda argv: seen.append(list(argv)) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headmux.demo", fake)
    assert main(["demo", "--steps", "3"]) == 7
    assert seen == [["--steps", "3"]]


def test_demo_that_does_not_import(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "headmux.demo", None)
    status, _, err = run("demo", capsys=capsys)
    assert status == 2
    assert "pip install 'headmux[demo]'" in err


@pytest.mark.parametrize("module", ["matplotlib", "tokenizers", "tqdm"])
def test_demo_without_an_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    status, _, err = run("demo", "--steps", "1", capsys=capsys)
    assert status == 2
    assert module in err
    assert "pip install 'headmux[demo]'" in err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("--version", capsys=capsys)
    assert (status, out) == (0, f"headmux {headmux.__version__}\n")
    status, out, _ = run("--help", capsys=capsys)
    assert status == 0
    assert all(word in out for word in ("doctor", "explain", "demo"))
    assert run("explain", "--help", capsys=capsys)[0] == 0
