"""Results as tables, for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headmux.bench.records import KernelRecord, Record, Results, command

_HEAD = ("provider", "ms", "p20-p80", "x floor", "+MiB", "beyond grads", "loss", "dX", "dW", "dW untargeted", "syncs",
         "graph", "rounds")
_RSS = "RSS +MiB"
_KERNEL_HEAD = ("kernel", "backend", "ms", "p20-p80", "work", "rate", "beside", "share")
_WORK = {"TB/s": ("MB", 1e6), "TFLOP/s": ("GFLOP", 1e9)}


def tables(results: Results, *, markdown: bool = False) -> str:
    """Every table: one for each op, shape, dtype and variant, fastest provider first, then those without a time; and
    one of kernels for each shape and dtype.
    """
    lines = [where(results)]
    line = command(str(results.header.get("command")))
    lines.append(f"`{line}`" if markdown else line)
    for records in cases(results.records):
        lines += ["", ("### " if markdown else "") + title(records[0]), ""]
        lines += table(records, markdown=markdown)
        missing = [r for r in records if r.ms is None]
        if missing and len(missing) < len(records):
            lines.append("")
        lines += [f"{'- ' if markdown else '  '}{r.provider}: {r.error}" for r in missing]
    for heading, rows in kernel_tables(results.kernels, markdown=markdown):
        lines += ["", ("### " if markdown else "") + heading, "", *rows]
    return "\n".join(lines) + "\n"


def cases(records: Iterable[Record]) -> list[list[Record]]:
    """Records of one op, shape, dtype and variant together, in the order of their first."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        found.setdefault(record.case, []).append(record)
    return list(found.values())


def table(records: Sequence[Record], *, markdown: bool) -> list[str]:
    """The lines of one table: the records of a case that have a time, fastest first, below their floor."""
    timed = sorted((r for r in records if r.ms is not None), key=lambda r: r.ms or 0.0)
    if not timed:
        return []
    floors = [r.floor_ms for r in timed if r.floor_ms is not None]
    rows = [_row(r) for r in timed]
    if floors:
        rows.insert(0, ("floor (matrix products)", f"{floors[0]:.4g}", "", "1.000", *[""] * 9))
    head: tuple[str, ...] = _HEAD
    if any(r.rss_mib is not None for r in timed):
        head = (*head, _RSS)
        resident = [""] * (len(rows) - len(timed)) + [_memory(r.rss_mib) for r in timed]
        rows = [(*row, cell) for row, cell in zip(rows, resident, strict=True)]
    return _grid(_without_empty([head, *rows]), markdown)


def kernel_tables(records: Iterable[KernelRecord], *, markdown: bool) -> list[tuple[str, list[str]]]:
    """For each shape and dtype, a title and the lines of the table of its kernels."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for r in records:
        of, size = _WORK[r.unit]
        row = (r.kernel, r.backend, _number(r.ms), f"{_number(r.p20)}-{_number(r.p80)}", f"{r.work / size:.4g} {of}",
               f"{r.rate:.3g} {r.unit}", f"{r.beside:.3g}", f"{r.share:.2f}")
        found.setdefault(f"N={r.n} H={r.h} V={r.v} {r.dtype}", [_KERNEL_HEAD]).append(row)
    return [(f"kernels {case}", _grid(rows, markdown)) for case, rows in found.items()]


def _without_empty(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows without columns in which nothing stands, such as synchronisations on a CPU."""
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return [[row[i] for i in kept] for row in rows]


def where(results: Results) -> str:
    """Device, versions, commit and time of a file."""
    h = results.header
    words = [str(h.get("device")), f"torch {h.get('torch')}"]
    words += [f"{k} {h[k]}" for k in ("triton", "cutlass", "cuda", "driver") if h.get(k)]
    words += [f"{name} {v}" for name, v in (h.get("peers") or {}).items() if v]
    return ", ".join([*words, f"commit {h.get('commit')}", str(h.get("time"))])


def title(r: Record) -> str:
    """What the records of a case have in common."""
    cap = f" softcap={r.softcap:g}" if r.softcap is not None else ""
    model = f" ({r.model})" if r.model else ""
    return f"{r.op} N={r.n} H={r.h} V={r.v}{cap}{model} {r.dtype}, {r.variant}"


def _row(r: Record) -> tuple[str, ...]:
    return (
        r.provider,
        _number(r.ms),
        f"{_number(r.p20)}-{_number(r.p80)}",
        "" if r.ratio is None else f"{r.ratio:.3f}",
        _memory(r.extra_mib),
        _memory(r.extra_mib_beyond_grads),
        *(_error(e) for e in (r.err_loss, r.err_input, r.err_weight, r.err_weight_untargeted)),
        "" if r.syncs is None else str(r.syncs),
        "" if r.graph is None else ("yes" if r.graph else "no"),
        "" if r.rounds is None else str(r.rounds),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _memory(value: float | None) -> str:
    return "" if value is None else (f"{value:.1f}" if value < 10 else f"{value:.0f}")


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _grid(rows: Sequence[Sequence[str]], markdown: bool) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(cells: Iterable[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return ("| " + " | ".join(padded) + " |") if markdown else "  ".join(padded).rstrip()

    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)] if markdown else None
    body = [line(rows[0])]
    body.append("| " + " | ".join(rule) + " |" if rule else "-" * len(body[0]))
    return body + [line(row) for row in rows[1:]]
