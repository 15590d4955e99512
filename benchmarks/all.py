"""Everything that pages show, measured again and written into them, in an hour of two idle cores.

python -m benchmarks.all [--only steps,serving] [--minutes 60] [--quick] [--beside-others] [--write-only]

Parts run one after the other, and each runs its contestants in turns, in processes of their own. A part that is not
done within its time is ended, and pages keep what they show of it. What was measured goes to
`benchmarks/results/measured`, and from there into pages and charts: `--write-only` does only that. `--quick` measures
the smallest case of each part, to see that everything works, into a folder of its own, and writes no page. To run it
alone, in the background:

nohup python -m benchmarks.all > measured.log 2>&1 &
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import beside, report
from benchmarks.environment import environment, load_average
from benchmarks.pages import with_printed
from benchmarks.results import Results
from benchmarks.workloads import FIT
from graphsplit.core.storage import forms

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "results" / "measured"
QUICK = FOLDER.with_name("quick")
DOCS = ROOT / "docs"
README = ROOT / "README.md"
ROWS = Path(__file__).parent / "measurements.md"
MOST_LOAD = 0.5  # processes that want to run, over the last minute


@dataclass(frozen=True)
class Part:
    """Something that is measured by one command.

    Attributes:
      name: of the part.
      minutes: after which it is ended.
      command: what `python -m` runs; `{folder}` is where its JSON goes.
      quick: what runs instead, for the smallest case.
      page: of `docs/` that shows what it prints, at a mark of this name; "" if the page of measurements does.
      file: what it writes into the folder; "" if what it prints is kept.
    """

    name: str
    minutes: float
    command: str
    quick: str
    page: str = ""
    file: str = ""


PARTS = (
    Part(
        "fit",
        12,
        "benchmarks --full --modes fit --rounds 4 --fit-round-seconds 2 --planning-ops 1000 --output {folder}/fit.json",
        "benchmarks --full --small --workloads mlp --modes fit --devices 2 --contestants plain,graphsplit "
        "--rounds 2 --fit-round-seconds 0.05 --planning-ops 100 --output {folder}/fit.json",
        file="fit.json",
    ),
    Part(
        "steps",
        22,
        "benchmarks --full --workloads polyfit,mlp,mini_googlenet_bn,resnet50,lstm,transformer --devices 1,2,8 "
        "--modes training,forward --contestants plain,towers,mirrored,graphsplit --minutes 20 "
        "--output {folder}/steps.json",
        "benchmarks --full --small --workloads mlp --modes training --devices 2 --contestants plain,graphsplit "
        "--rounds 2 --round-seconds 0.02 --planning-ops 100 --output {folder}/steps.json",
        file="steps.json",
    ),
    Part(
        "many_devices",
        3,
        "benchmarks --full --workloads resnet50 --modes training --devices 8,64 --batch 64 --rounds 2 "
        "--contestants plain,graphsplit --planning-ops 1000 --output {folder}/many_devices.json",
        "benchmarks --full --small --workloads mlp --modes training --devices 3 --batch 6 --rounds 2 "
        "--round-seconds 0.02 --contestants plain,graphsplit --planning-ops 100 --output {folder}/many_devices.json",
        file="many_devices.json",
    ),
    Part(
        "layouts",
        7,
        "benchmarks.layouts --steps-only --rounds 5",
        "benchmarks.layouts --workload mlp --devices 2 --small --rounds 1 --ways graphsplit,layout_sharded "
        "--steps-only",
    ),
    Part(
        "layouts_predicted",
        3,
        "benchmarks.layouts --predict 8xA100-SXM4-80GB 4xV100-PCIE-16GB",
        "benchmarks.layouts --workload mlp --devices 2 --small --bytes-only",
    ),
    Part(
        "layouts_over_workers",
        4,
        "benchmarks.layouts_over_workers --optimizer adam --workers 4 --mbit 1000 --rounds 5",
        "benchmarks.layouts_over_workers --workers 2 --width 64 --depth 2 --rounds 1",
    ),
    Part(
        "workers",
        3,
        "benchmarks.workers --widths 512,1024 --rounds 9",
        "benchmarks.workers --workers 2 --widths 32 --rows 8 --rounds 1",
        page="several_machines.md",
    ),
    Part(
        "workers_over_links",
        5,
        "benchmarks.workers --widths 512,1024 --rounds 5 --mbit 1000",
        "benchmarks.workers --workers 2 --widths 32 --rows 8 --rounds 1",
        page="several_machines.md",
    ),
    Part(
        "recomputation",
        5,
        "benchmarks.recomputation --rounds 3",
        "benchmarks.recomputation --models transformer --rounds 1 --small",
    ),
    Part(
        "micro_batches",
        5,
        "benchmarks.microbatches --counts 1,8",
        "benchmarks.microbatches --small --models mlp --counts 1,2 --rounds 1",
    ),
    Part(
        "pipelines",
        2,
        "benchmarks.pipelines",
        "benchmarks.pipelines --schedules 1f1b --counts 2 --rows 16 --rounds 1",
    ),
    Part(
        "serving",
        3,
        "benchmarks.serving --rows 1,8,64,256,1024 --growth 1,8,64",
        "benchmarks.serving --rows 1,3 --devices 1,2 --growth 1,3 --rounds 2 --model dense",
        page="serving.md",
    ),
    Part(
        "predictions",
        9,
        "benchmarks.prediction --workloads mlp,transformer --modes training --devices 1,4 --micro-batches 1 "
        "--seconds 1 --output {folder}/predictions.json",
        "benchmarks.prediction --workloads polyfit --modes training --devices 2 --layouts home --micro-batches 1 "
        "--seconds 0.1 --small --output {folder}/predictions.json",
        page="generated/predictions.md",
    ),
)


@dataclass
class Printed:
    """What a part printed, and on what it ran."""

    command: str
    seconds: float
    lines: list[str]
    environment: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    """Measure, and write pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(part.name for part in PARTS), help="names of parts")
    parser.add_argument("--minutes", type=float, default=60, help="after which no part goes on")
    parser.add_argument("--quick", action="store_true", help="the smallest case of each part; no page is written")
    parser.add_argument("--beside-others", action="store_true", help="though other work runs; the page says how much")
    parser.add_argument("--write-only", action="store_true", help="pages and charts, of what was measured before")
    options = parser.parse_args()
    chosen = chosen_parts(options.only)
    folder = QUICK if options.quick else FOLDER
    if not options.write_only:
        check_idle(load_average(), options.beside_others or options.quick)
        measure(chosen, folder, options.quick, time.monotonic() + 60 * options.minutes)
    if not options.quick:
        write_pages(folder)


def chosen_parts(names: str) -> list[Part]:
    """Return the parts of these names.

    Raises:
      SystemExit: if there is none of a name.
    """
    known = {part.name: part for part in PARTS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"There is no part {', '.join(unknown)}; there are {', '.join(known)}.")
    return [known[name] for name in names.split(",")]


def check_idle(load: float, allowed: bool) -> None:
    """Raise `SystemExit` if other work runs, unless that is allowed."""
    if load > MOST_LOAD and not allowed:
        raise SystemExit(
            f"Other work runs here: {load:.2f} processes wanted to run in the last minute, and times are only worth "
            f"showing below {MOST_LOAD}. Wait until it is done, or say --beside-others to see whether all works."
        )


def measure(parts: Sequence[Part], folder: Path, is_quick: bool, end: float) -> None:
    """Run the parts, one after the other, until the time `end`; keep what each printed as soon as it is done."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        limit_s = min(60 * part.minutes, end - time.monotonic())
        if limit_s <= 0:
            print(f"{part.name}: no time is left; --only {part.name} measures it", flush=True)
            continue
        arguments = shlex.split((part.quick if is_quick else part.command).format(folder=shlex.quote(str(folder))))
        begun = time.monotonic()
        lines, trouble = ended(arguments, limit_s)
        seconds = time.monotonic() - begun
        print(f"{part.name}: {trouble or 'done'} after {seconds:.0f} s", flush=True)
        if not trouble and not part.file:
            printed = Printed(part.quick if is_quick else part.command, round(seconds, 1), lines, environment())
            forms.write_json(str(folder / f"{part.name}.printed.json"), asdict(printed), indent=1)


def ended(arguments: Sequence[str], limit_s: float) -> tuple[list[str], str]:
    """Return the lines that `python -m` printed, and what went wrong, if anything did.

    A command that takes longer than the limit is ended, with all processes that it started.
    """
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "150"}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, wrote = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return [], f"ended: it takes longer than {limit_s / 60:.0f} minutes"
    if process.returncode:
        return [], f"failed with {process.returncode}: {(wrote.strip().splitlines() or [''])[-1]}"
    return [line.rstrip() for line in printed.strip("\n").splitlines()], ""


def write_pages(folder: Path) -> None:
    """Write all that was measured into pages and charts."""
    kept = f"`benchmarks/results/{folder.name}`"
    printed = {part: read_printed(folder / f"{part.name}.printed.json") for part in PARTS if not part.file}
    measured = {part: output for part, output in printed.items() if output is not None}
    steps = of_steps_and_fit(folder)
    if steps is not None:
        more = folder / "many_devices.json"
        many = Results.load(more) if more.exists() else None
        quoted = [quotation(part, output) for part, output in measured.items() if not part.page]
        report.write(steps, DOCS / "generated" / "measurements.md", ROWS, many, kept, quoted)
        write_mark(DOCS / "performance.md", "answers", report.answers(steps))
        if steps.of(FIT).records:
            beside.draw(steps, DOCS / "beside.png")
            write_mark(README, "beside", beside.caption(steps, report.where_and_when(steps.environment)))
    for part, output in measured.items():
        if part.page:
            write_mark(DOCS / part.page, part.name, table_or_block(output))


def of_steps_and_fit(folder: Path) -> Results | None:
    """Return steps and `fit` as one, with the load before the first of them; None if no steps were measured."""
    steps, fit = folder / "steps.json", folder / "fit.json"
    if not steps.exists():
        return None
    results = Results.load(steps)
    if fit.exists():
        first = Results.load(fit)
        results.records = [*first.records, *results.records]
        results.environment["load_average"] = first.environment["load_average"]
    return results


def write_mark(page: Path, name: str, block: str) -> None:
    """Write a block where a page has the mark of this name."""
    page.write_text(with_printed(page.read_text(), name, block))


def read_printed(path: Path) -> Printed | None:
    """Return what a part printed, if it was measured."""
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    return Printed(**{name: content[name] for name in ("command", "seconds", "lines", "environment")})


def quotation(part: Part, output: Printed) -> str:
    """Return a section of the page of measurements."""
    return f"### {part.name.replace('_', ' ').capitalize()}\n\n{table_or_block(output)}"


def table_or_block(output: Printed) -> str:
    """Return what was printed for a page, and who printed it when and where.

    If it has tables in Markdown, they are shown with what is below, a paragraph for each line; else all is one block.
    """
    measured_on, lines = report.where_and_when(output.environment, ()), [line.strip() for line in output.lines]
    first = next((k for k, line in enumerate(lines) if line.startswith("|")), None)
    shown = ["```", *output.lines, "```"] if first is None else paragraphs(lines[first:])
    return "\n".join([f"`python -m {output.command}`, {measured_on}:", "", *shown])


def paragraphs(lines: Sequence[str]) -> list[str]:
    """Return lines with an empty one wherever a table does not go on."""
    apart: list[str] = []
    for before, line in zip(["", *lines], lines, strict=False):
        if line and before and not (line.startswith("|") and before.startswith("|")):
            apart.append("")
        apart.append(line)
    return apart


if __name__ == "__main__":
    main()
