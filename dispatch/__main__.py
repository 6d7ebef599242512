"""``python -m headmux``: what runs here, why a call runs where it does, and the demo."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import headmux
from headmux import doctor, registry, select
from headmux.devices import inventory
from headmux.errors import UnknownNameError

if TYPE_CHECKING:
    from headmux.contract import Call, Selection
    from headmux.ops._op import Op

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_DEFAULT = "default: %(default)s"
_COMMANDS = {
    "doctor": "what is installed, and which op runs on which backend (the default)",
    "explain": "which backend would run a call, and why not the others",
    "demo": "train, distil and score on real text, beside plain PyTorch",
}


class _Refused(Exception):
    """The command line cannot be carried out; its text is the message."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments; those of the process if None.

    Returns:
        0; 1 if ``explain`` finds no backend for the call; 2 for a command line that cannot be carried out.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and not words[0].startswith("-") else "doctor"
    try:
        if command == "doctor":
            return _doctor(words)
        if command == "explain":
            return _explain(words)
        if command == "demo":
            return _demo(words)
        raise _Refused(registry.unknown("command", command, _COMMANDS))
    except SystemExit as stop:  # argparse has printed its message, or the help
        return int(stop.code or 0)
    except (_Refused, UnknownNameError) as error:
        print(f"python -m headmux: error: {error}", file=sys.stderr)
        return 2


def _doctor(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m headmux",
        allow_abbrev=False,
        description="Losses at the end of a language model, on the best kernels the device can run.",
        epilog="\n".join(["commands:", *(f"  {name:<8} {text}" for name, text in _COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--version", action="version", version=f"headmux {headmux.__version__}")
    flags = parser.parse_args(words)
    report = doctor.examine()
    print(json.dumps(report.as_dict(), indent=2) if flags.json else report)
    return 0


def _demo(words: list[str]) -> int:
    try:
        from headmux.demo import main as demo
    except ImportError as error:
        raise _Refused(f"the demo does not import ({error}): pip install 'headmux[demo]'") from error
    return int(demo(words))


# ---------------------------------------------------------------------------------------------------- explain


def _explain(words: list[str]) -> int:
    names = ", ".join(registry.op_names())
    if not words or words[0].startswith("-"):
        parser = argparse.ArgumentParser(prog="python -m headmux explain", description=f"Ops: {names}.")
        parser.add_argument("op", metavar="OP", help="name of an op; OP --help lists its options")
        parser.parse_args(words)
    op = registry.get_op(words[0])
    parser = _parser(op)
    flags = parser.parse_args(words[1:])
    try:
        call = _call(op, flags)
    except (TypeError, ValueError) as error:
        raise _Refused(str(error)) from error
    found = select.decide(call, flags.impl, thorough=True)
    print(json.dumps(_as_dict(found), indent=2) if flags.json else found)
    return 0 if found.backend is not None else 1


def _parser(op: Op) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m headmux explain {op.name}",
        allow_abbrev=False,
        description=f"Which backend would run a call of {op.name}, and why not the others. Nothing is run.",
    )
    parser.add_argument("--device", help="of the tensors, here or not (default: the first CUDA device, else cpu)")
    parser.add_argument("--capability", help="CUDA compute capability, such as 9.0 (default: that of the device)")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the tensors (default: bfloat16)")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="dtype that autocast casts to")
    for letter, *size in (("N", "-n", "--tokens"), ("H", "-H", "--hidden"), ("V", "-v", "--vocabulary")):
        parser.add_argument(*size, type=_size, default=doctor.SIZES[letter], metavar=letter, help=_DEFAULT)
    if any("H_teacher" in shape for shape in op.shapes.values()):
        parser.add_argument("--teacher-hidden", type=_size, metavar="H_TEACHER", help="default: that of the student")
    for parameter in _options(op):
        _add(parser, parameter)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--needs", metavar="ROLES", help=f"gradients wanted, a comma list of {', '.join(op.gradients)} "
                        "(default: all that can be)")
    wanted.add_argument("--no-grad", action="store_true", help="no gradient is wanted")
    parser.add_argument("--impl", help="comma list of backends, as the call's own impl=")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _options(op: Op) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(op.request).parameters.values() if p.default is not p.empty]


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter) -> None:
    """A flag for an option of the op, by its annotation."""
    flag, kind = "--" + parameter.name.replace("_", "-"), str(parameter.annotation)
    more: dict[str, Any] = {"dest": "option_" + parameter.name, "default": parameter.default}
    if kind == "bool":
        more.update(action="store_true", help="set it")
    elif kind == "Tensor | None":
        more.update(action="store_const", const=torch.Tensor, help="as a tensor of the op's shape")
    elif "Tensor" in kind:
        more.update(type=_number_or_tensor, metavar="NUMBER|tensor", help=_DEFAULT)
    elif kind.startswith("torch.dtype"):
        more.update(type=_dtype, choices=list(_DTYPES.values()), metavar="DTYPE", help=_DEFAULT)
    else:
        types = {"float": float, "int": int, "str": str}
        more.update(type=types[kind.removesuffix(" | None")], metavar=parameter.name.upper(), help=_DEFAULT)
    parser.add_argument(flag, **more)


def _size(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _number_or_tensor(text: str) -> Any:
    return torch.Tensor if text == "tensor" else float(text)


def _dtype(text: str) -> torch.dtype | str:
    return _DTYPES.get(text, text)


def _call(op: Op, flags: argparse.Namespace) -> Call:
    given = {p.name: getattr(flags, "option_" + p.name) for p in _options(op)}
    tensors = [name for name, value in given.items() if value is torch.Tensor]
    device, capability = _place(flags.device, flags.capability)
    sizes = {"N": flags.tokens, "H": flags.hidden, "V": flags.vocabulary}
    teacher = getattr(flags, "teacher_hidden", None)
    sizes["H_teacher"] = flags.hidden if teacher is None else teacher
    needs: list[str] | None = None
    if flags.no_grad:
        needs = []
    elif flags.needs is not None:
        needs = [role.strip() for role in flags.needs.split(",") if role.strip()]
    return op.call_on(
        device,
        capability,
        sizes,
        _DTYPES[flags.dtype],
        compute=_DTYPES.get(flags.autocast or ""),
        tensors=tensors,
        needs=needs,
        **{name: value for name, value in given.items() if name not in tensors},
    )


def _place(name: str | None, text: str | None) -> tuple[torch.device, tuple[int, int] | None]:
    """The device, and its capability from the flag or else from this machine."""
    if name is None and text is None:
        name = next((d.name for d in inventory().devices if d.name and torch.version.cuda), "cpu")
    try:
        device = torch.device(name or "cuda:0")
    except RuntimeError as error:
        raise _Refused(f"--device {name}: {str(error).splitlines()[0]}") from error
    if text is not None:
        if device.type != "cuda":
            raise _Refused(f"--capability {text} needs a CUDA device, not {device}")
        match = re.fullmatch(r"(\d+)\.(\d)", text)
        if match is None:
            raise _Refused(f"--capability {text!r} must be major.minor, such as 9.0")
        return device, (int(match[1]), int(match[2]))
    if device.type != "cuda":
        return device, None
    here = inventory().devices
    wanted = f"cuda:{device.index or 0}"
    for found in here:
        if found.name == wanted:
            return torch.device(wanted), found.capability
    known = ", ".join(d.name for d in here if d.name) or "none"
    raise _Refused(f"{device} is not on this machine (CUDA devices here: {known}): tell what it is with --capability, "
                   "such as --capability 9.0")


def _as_dict(found: Selection) -> dict[str, Any]:
    call = found.call
    return {
        "call": {
            "op": call.op,
            "device": str(call.device),
            "capability": None if call.capability is None else list(call.capability),
            "dtypes": {role: str(dtype) for role, dtype in call.dtypes},
            "sizes": dict(call.sizes),
            "options": {k: str(v) if isinstance(v, torch.dtype) else v for k, v in call.options},
            "needs": list(call.needs),
        },
        "order_from": found.source,
        "candidates": [{"name": b.name, "reasons": list(reasons)} for b, reasons in found.candidates],
        "selected": found.chosen,
    }


if __name__ == "__main__":
    sys.exit(main())
