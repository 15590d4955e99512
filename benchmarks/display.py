"""Progress and tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.results import Record, Results

console = Console() if Console().is_terminal else Console(width=150)  # a log has no width of its own


def progress() -> Progress:
    """Return a progress bar that also says what is being done."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def times(value: float | None, digits: int = 2) -> str:
    """Return a ratio for people."""
    return "-" if value is None else f"{value:.{digits}f}x"


def milliseconds(seconds: float) -> str:
    """Return a step time for people."""
    return f"{seconds * 1e3:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def ratios(results: Results, to: str) -> tuple[list[str], list[list[str]]]:
    """Return a table of graphsplit's step as a multiple of another contestant's, beside the milliseconds of both."""
    counts = sorted({cell[2] for cell in results.cells() if results.ratio(cell, "graphsplit", to) is not None})
    rows = [[*program, *[_beside(results, (*program, n), to) for n in counts]] for program in _programs(results)]
    return ["workload", "mode", *[f"N = {n}{crowded(results, n)}" for n in counts]], rows


def _beside(results: Results, cell: tuple[str, str, int], to: str) -> str:
    """Return the two times and the ratio; who is faster is bold."""
    ratio = results.ratio(cell, "graphsplit", to)
    own, other = results.find(*cell, "graphsplit"), results.find(*cell, to)
    if ratio is None or own is None or other is None:
        return "-"
    times = f"{milliseconds(own.median_s)} / {milliseconds(other.median_s)}"
    return f"{times}: {ratio:.2f}" if ratio <= 1 else f"{times}: **{ratio:.2f}**"


def crowded(results: Results, devices: int) -> str:
    """Return a star for more devices than the machine has cores, if devices are cores."""
    return "\\*" if results.settings["kind"] == "cpu" and devices > results.environment["cores"] else ""


def side_by_side(results: Results, say: Callable[[Record], str]) -> tuple[list[str], list[list[str]]]:
    """Return a table of one figure: of the plain function, and of the others on few and on many devices."""
    columns = [("plain", n) for n in _counts(results)[:1]]
    columns += [(name, n) for n in _few_and_many(results) for name in ("mirrored", "graphsplit")]
    rows = []
    for workload, mode in _programs(results):
        found = [results.find(workload, mode, n, name) for name, n in columns]
        rows.append([workload, mode, *["-" if record is None else say(record) for record in found]])
    named = [name if name == "plain" else f"{name}, N = {n}" for name, n in columns]
    return ["workload", "mode", *named], rows


def sent(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return a table of the MB that a step of graphsplit sends, beside the least."""
    counts, rows = _few_and_many(results), []
    for workload, mode in _programs(results):
        found = [results.find(workload, mode, n, "graphsplit") for n in counts]
        sizes = [(_megabytes(r, "total"), _megabytes(r, "bound")) if r and r.graph else ("-", "-") for r in found]
        rows.append([workload, mode, *[size for pair in sizes for size in pair]])
    return ["workload", "mode", *[name for n in counts for name in (f"N = {n}", "least")]], rows


def _megabytes(record: Record, which: str) -> str:
    return f"{record.graph['communication'][which]['transfer_bytes'] / 1e6:.2f}"


def _programs(results: Results) -> list[tuple[str, str]]:
    return list(dict.fromkeys(cell[:2] for cell in results.cells()))


def _counts(results: Results) -> list[int]:
    return sorted({cell[2] for cell in results.cells()})


def _few_and_many(results: Results) -> list[int]:
    """Return two numbers of devices: 2 and 8 where both were measured, else the fewest and the most."""
    several = [n for n in _counts(results) if n > 1] or _counts(results)
    return [n for n in (2, 8) if n in several] or sorted({several[0], several[-1]})


def step_rows(results: Results) -> list[list[str]]:
    """Return step, first call, memory and graph of every contestant in every cell."""
    rows = []
    for record in results.records:
        cell = record.workload, record.mode, record.devices
        head = [record.workload, record.mode, str(record.devices), record.contestant]
        if record.skipped:
            rows.append([*head, f"skipped: {record.skipped}", "", "", "", "", "", ""])
            continue
        rows.append(
            [
                *head,
                f"{milliseconds(record.median_s)} ±{record.spread:.0%}",
                times(results.ratio(cell, record.contestant, "plain")),
                times(results.ratio(cell, record.contestant, "mirrored")),
                f"{record.first_s['total']:.2f}",
                f"{record.peak_bytes / 1e6:.0f}",
                str(record.graph.get("nodes", "")),
                f"{record.graph['bytes'] / 1e6:.2f}" if record.graph else "",
            ]
        )
    return rows


STEP_COLUMNS = [
    "workload",
    "mode",
    "N",
    "contestant",
    "step ms",
    "/ plain",
    "/ mirrored",
    "first call s",
    "peak MB",
    "nodes",
    "graph MB",
]


def gpu_memory_rows(results: Results) -> list[list[str]]:
    """Return the most memory that tensors of each contestant took on each GPU."""
    measured = [record for record in results.records if record.gpu_peak_bytes]
    return [
        [
            record.workload,
            record.mode,
            str(record.devices),
            record.contestant,
            f"{max(record.gpu_peak_bytes.values()) / 1e6:.0f}",
            ", ".join(f"{size / 1e6:.0f}" for size in record.gpu_peak_bytes.values()),
        ]
        for record in measured
    ]


GPU_MEMORY_COLUMNS = ["workload", "mode", "N", "contestant", "largest MB", "MB on each GPU"]


def first_call_rows(results: Results) -> list[list[str]]:
    """Return the parts of graphsplit's first call, beside the totals of the others."""
    rows = []
    for record in results.described():
        cell, parts = (record.workload, record.mode, record.devices), record.first_s
        others = [results.find(*cell, name) for name in ("plain", "mirrored")]
        rows.append(
            [
                *map(str, cell),
                *[f"{parts[part]:.2f}" for part in FIRST_CALL_PARTS],
                *["-" if other is None else f"{other.first_s['total']:.2f}" for other in others],
            ]
        )
    return rows


FIRST_CALL_PARTS = ("trace", "plan", "emit", "register", "rest", "total")
FIRST_CALL_COLUMNS = ["workload", "mode", "N", *FIRST_CALL_PARTS, "plain", "mirrored"]


def communication_rows(results: Results) -> list[list[str]]:
    """Return what is sent per step, beside the lower bound."""
    rows = []
    for record in results.described():
        found = record.graph["communication"]
        total, bound = found["total"], found["bound"]
        kinds = ", ".join(f"{kind} {own['transfers']}" for kind, own in found["kinds"].items() if own["transfers"])
        rows.append(
            [
                record.workload,
                record.mode,
                str(record.devices),
                str(total["transfers"]),
                str(bound["transfers"]),
                f"{total['transfer_bytes'] / 1e6:.3f}",
                f"{bound['transfer_bytes'] / 1e6:.3f}",
                str(found["transfers_in_graph"]),
                kinds or "nothing",
            ]
        )
    return rows


COMMUNICATION_COLUMNS = ["workload", "mode", "N", "transfers", "bound", "MB", "bound MB", "in graph", "kinds"]


def planning_rows(results: Results) -> list[list[str]]:
    """Return planning speed of the workloads' programs, then of the synthetic ones."""
    own = [(f"{r.workload} {r.mode}", r.devices, r.graph["planning"]) for r in results.described()]
    rows = own + [("synthetic", int(found["devices"]), found) for found in results.planning]
    return [
        [
            name,
            str(devices),
            str(int(found["operations"])),
            f"{found['plan_us_per_op']:.1f}",
            f"{found['emit_us_per_node']:.1f}",
        ]
        for name, devices, found in rows
    ]


PLANNING_COLUMNS = ["program", "N", "operations", "plan us/op", "emit us/node"]


def show(results: Results) -> None:
    """Print everything that was measured."""
    tables = [
        ("Steps, side by side", STEP_COLUMNS, step_rows(results)),
        ("Peak memory on GPUs", GPU_MEMORY_COLUMNS, gpu_memory_rows(results)),
        ("Seconds of graphsplit's first call", FIRST_CALL_COLUMNS, first_call_rows(results)),
        ("Communication per step", COMMUNICATION_COLUMNS, communication_rows(results)),
        ("Planning", PLANNING_COLUMNS, planning_rows(results)),
    ]
    for title, columns, rows in tables:
        if rows:
            made = Table(*columns, title=title, title_justify="left")
            for row in rows:
                made.add_row(*row)
            console.print(made)
