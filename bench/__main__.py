"""``python -m headmux.bench flce|jsd|linear_logp|kernels|selection|host|compare|report|plot``; see ``--help``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from headmux.bench import compare, host, kernels, report
from headmux.bench.providers import masked_environment, named, providers
from headmux.bench.records import Results, header
from headmux.bench.runner import Case, DeviceLost, run
from headmux.bench.shapes import OPS, PRESETS, Part, Shape, Variant

_DTYPES = {
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
    "float32": torch.float32, "fp32": torch.float32, "float64": torch.float64, "fp64": torch.float64,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0 good, 1 a regression or nothing timed, 2 wrong usage, 3 device lost."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(words)
    try:
        with masked_environment():
            status: int = options.run(options, words)
            return status
    except (ValueError, LookupError, OSError) as error:
        print(f"headmux.bench: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m headmux.bench", description="Time, memory and errors of every backend beside every peer."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    presets = "; ".join(f"{name}: {p.what}" for name, p in PRESETS.items())
    for op in OPS:
        command = commands.add_parser(op, help=f"measure {op}")
        command.set_defaults(run=_measure, op=op)
        command.add_argument("--shape", action="append", default=[], metavar="N,H,V[,SOFTCAP]", nargs="+",
                             help="sizes; may be repeated")
        command.add_argument("--preset", choices=tuple(PRESETS),
                             help=f"a set of measurements ({presets}); default quick")
        command.add_argument("--impl", help="comma list of headmux backends, or none; default all")
        command.add_argument("--peers", help="all, none, eager (none under torch.compile), or a comma list of names "
                                             "and groups; default as the preset says")
        command.add_argument("--dtype", help="comma list of bfloat16, float16, float32, float64")
        command.add_argument("--device", help="default cuda if there is one, else cpu")
        command.add_argument("--variant", action="append", default=[], nargs="+", metavar="WORD[+WORD]",
                             help="default, scaled, nograd or rows, with half and trained; may be repeated")
        command.add_argument("--seconds", type=float, help="time for the rounds of one shape")
        command.add_argument("--threads", type=int, help="threads on a CPU")
        command.add_argument("--cpu-time", action="store_true",
                             help="on a CPU, time by the processor seconds of this process, for a busy machine")
        command.add_argument("--no-graph", action="store_true", help="do not try CUDA graph capture")
        command.add_argument("--rss", action="store_true",
                             help="on a CPU, also the peak resident memory in a fresh process for each provider")
        _outputs(command)
        command.add_argument("--plot", type=Path, metavar="DIR", help="draw pictures into this folder")
    command = commands.add_parser("kernels", help="bytes and bandwidth of the backends' own kernels")
    command.set_defaults(run=_kernels)
    command.add_argument("--shape", action="append", default=[], metavar="N,H,V", nargs="+",
                         help=f"sizes; may be repeated; default {' and '.join(map(str, kernels.GPU_SHAPES))} on a GPU")
    command.add_argument("--impl", default=",".join(kernels.BACKENDS),
                         help="comma list of backends; default %(default)s")
    command.add_argument("--dtype", default="bfloat16", help="comma list of bfloat16, float16, float32; default "
                                                             "%(default)s")
    command.add_argument("--device", help="default cuda if there is one, else cpu, where Triton has to interpret")
    command.add_argument("--seconds", type=float, default=10.0,
                         help="most time for the rounds of one shape on one backend")
    _outputs(command)
    for name, run_it, text in (
        ("selection", _selection, "host time of selection and of a tiny call"),
        ("host", _host, "host time of a warm call of every provider, and on a GPU of one launch"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run_it)
        command.add_argument("--op", choices=OPS, help="one op; default all")
        command.add_argument("--dtype", help="default bfloat16 on a GPU, float32 elsewhere")
        command.add_argument("--device")
        if name == "host":
            command.add_argument("--shape", metavar="N,H,V", help=f"default {host.SMALL}")
            command.add_argument("--impl")
            command.add_argument("--peers", default="pytorch")
        _outputs(command)
    command = commands.add_parser("compare", help="two files of results; exits with 1 on a regression")
    command.set_defaults(run=_compare)
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    command.add_argument("--bound", type=float, default=1.05, help="largest ratio of times that is no regression")
    command.add_argument("--memory-bound", type=float, default=1.10, help="largest ratio of extra memory that is none")
    command.add_argument("--absolute", action="store_true", help="milliseconds, not ratios to each run's floor")
    command = commands.add_parser("report", help="tables of a file of results")
    command.set_defaults(run=_report)
    command.add_argument("files", type=Path, nargs="+", metavar="FILE")
    command.add_argument("--markdown", action="store_true")
    command = commands.add_parser("plot", help="pictures of files of results of one device, later ones winning")
    command.set_defaults(run=_plot)
    command.add_argument("files", type=Path, nargs="+", metavar="FILE")
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    return parser


def _outputs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", type=Path, metavar="OUT", help="write records here, each as it is finished")
    command.add_argument("--quiet", action="store_true", help="print no tables")


def _device(name: str | None) -> torch.device:
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device if device.index is not None else 0)
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _dtypes(text: str) -> list[torch.dtype]:
    found = []
    for name in text.split(","):
        key = name.strip().lower().removeprefix("torch.")
        if key not in _DTYPES:
            raise ValueError(f"--dtype {name!r} is not one of {', '.join(_DTYPES)}")
        found.append(_DTYPES[key])
    return found


def _flat(lists: list[list[str]]) -> list[str]:
    return [word for words in lists for word in words]


def _measure(options: argparse.Namespace, words: list[str]) -> int:
    parts = [Part(shapes, peers="all")] if (shapes := tuple(map(Shape.parse, _flat(options.shape)))) else []
    named = options.preset is not None or not parts
    preset = PRESETS[options.preset or "quick"]
    if named:
        parts += preset.parts[options.op]
    device = _device(options.device)
    if threads := options.threads or (preset.threads if named else None):
        torch.set_num_threads(threads)
    default = preset.dtype if named else ("bfloat16" if device.type == "cuda" else "float32")
    dtypes = _dtypes(options.dtype or default)
    seconds = options.seconds or (preset.seconds if named else 60.0)
    impl = options.impl or (preset.impl if named else None)
    cases = [
        Case(options.op, shape, dtype, Variant.parse(variant), options.peers or part.peers)
        for dtype in dtypes for part in parts for variant in _flat(options.variant) or part.variants
        for shape in part.shapes
    ]
    for case in cases:
        providers(case.op, impl, case.peers)  # unknown names are errors before anything runs
    results = Results(header(device, words), options.json)
    clock = time.process_time if options.cpu_time else time.perf_counter
    results.header["clock"] = "events" if device.type == "cuda" else clock.__name__
    status = 0
    try:
        run(cases, lambda case: providers(case.op, impl, case.peers, half=case.variant.half), device, results,
            seconds=seconds, graphs=not options.no_graph, resident=options.rss, clock=clock,
            report=lambda text: print(text, file=sys.stderr, flush=True))
    except DeviceLost as error:
        print(f"headmux.bench: {error}", file=sys.stderr)
        status = 3
    except KeyboardInterrupt:
        print("headmux.bench: interrupted; finished records are kept", file=sys.stderr)
        status = 130
    if not options.quiet:
        print(report.tables(results), end="")
    if options.plot is not None and results.records:
        from headmux.bench import plots

        for path in plots.draw(plots.sheets(results.records), results.header, options.plot):
            print(path)
    return status or (0 if any(r.ms is not None for r in results.records) else 1)


def _kernels(options: argparse.Namespace, words: list[str]) -> int:
    device = _device(options.device)
    shapes = [Shape.parse(text) for text in _flat(options.shape)]
    if capped := [s for s in shapes if s.softcap is not None]:
        raise ValueError(f"--shape {capped[0]}: kernels are measured without a softcap")
    impls = named(options.impl)
    if not impls or not set(impls) <= set(kernels.BACKENDS):
        raise ValueError(f"--impl {options.impl!r} is not of {', '.join(kernels.BACKENDS)}")
    results = Results(header(device, words), options.json)
    results.header["clock"] = "events" if device.type == "cuda" else time.perf_counter.__name__
    default = kernels.GPU_SHAPES if device.type == "cuda" else (kernels.TINY,)
    failed = kernels.run(shapes or default, _dtypes(options.dtype), device, results, seconds=options.seconds,
                         impls=impls, report=_tell)
    if not options.quiet:
        print(report.tables(results), end="")
    for line in failed:
        _tell(line)
    return 1 if failed else 0


def _tell(line: str) -> None:
    print(f"headmux.bench: {line}", file=sys.stderr, flush=True)


def _selection(options: argparse.Namespace, words: list[str]) -> int:
    device = _device(options.device)
    (dtype, *_) = _dtypes(options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    costs = host.selection(device, dtype, (options.op,) if options.op else OPS)
    results = Results(header(device, words), options.json)
    for cost in costs:
        results.put(cost.record(host.TINY, dtype))
    print(host.table(costs), end="")
    return 0


def _host(options: argparse.Namespace, words: list[str]) -> int:
    device = _device(options.device)
    (dtype, *_) = _dtypes(options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    shape = Shape.parse(options.shape) if options.shape else host.SMALL
    costs, failed = host.host(device, dtype, shape, options.impl, options.peers, (options.op,) if options.op else OPS)
    results = Results(header(device, words), options.json)
    for record in [*[c.record(shape, dtype) for c in costs], *failed]:
        results.put(record)
    print(host.table(costs), end="")
    for record in failed:
        print(f"{record.op:<12} {record.provider}: {record.error}")
    return 0


def _compare(options: argparse.Namespace, words: list[str]) -> int:
    del words
    found = compare.changes(Results.load(options.old), Results.load(options.new), bound=options.bound,
                            memory_bound=options.memory_bound, absolute=options.absolute)
    print(compare.text(found), end="")
    return 1 if not found or any(c.regressions for c in found) else 0


def _report(options: argparse.Namespace, words: list[str]) -> int:
    del words
    print("\n".join(report.tables(Results.load(f), markdown=options.markdown) for f in options.files), end="")
    return 0


def _plot(options: argparse.Namespace, words: list[str]) -> int:
    del words
    from headmux.bench import plots

    files = [Results.load(f) for f in options.files]
    records = {r.key: r for results in files for r in results.records}.values()
    for path in plots.draw(plots.sheets(records), files[-1].header, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
