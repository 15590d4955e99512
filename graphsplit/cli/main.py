"""The command line: `graphsplit demo`, `doctor`, `inspect`, `transpile`, `predict`, `worker`, ...

A command is one function: its options, what is checked before TensorFlow is imported, and what it does by names of
graphsplit, which are imported on first use.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

import graphsplit as gs
from graphsplit.cli import predict_commands
from graphsplit.cli.commands import Commands, names_in, number, parse_devices, parse_split, start_tensorflow
from graphsplit.core.addresses import check_port
from graphsplit.core.progress import phase, phases
from graphsplit.core.storage import forms
from graphsplit.core.storage.files import GRAPH_SUFFIXES, is_graph_file, write
from graphsplit.core.version import __version__
from graphsplit.errors import ArgumentError

app = typer.Typer(
    cls=Commands,
    help="Run TensorFlow functions on several devices, with exactly one device's results.",
    no_args_is_help=True,
)
demo = typer.Typer(help="See it work, on GPUs if there are any, else on logical CPU devices.", no_args_is_help=True)
app.add_typer(demo, name="demo")

_NO_WORK = {"Const", "Identity", "NoOp", "Placeholder"}


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"graphsplit {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Run TensorFlow functions on several devices, with exactly one device's results."""


@demo.command()
def polyfit(
    devices: Annotated[int, number("--devices", "How many devices.")] = 4,
    batch: Annotated[int, number("--batch", "Rows in each step's batch.")] = 100,
    steps: Annotated[int, number("--steps", "Optimizer steps.")] = 2000,
    data: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="Points to fit, a line 'x,y' each.")
    ] = None,
) -> None:
    """Fit a polynomial, 5x^2 + 0x + 3 or points of your own, on one device and on several, and compare."""
    start_tensorflow()
    from graphsplit.cli.demo import run

    run(devices, batch, steps, data)


@app.command()
def doctor(
    devices: Annotated[
        int | None,
        number("--devices", "How many devices to check; by default all GPUs, or four CPU devices."),
    ] = None,
    memory_mb: Annotated[
        int | None, number("--memory-mb", "Divide the GPUs into --devices parts of so many MiB.")
    ] = None,
) -> None:
    """Print the devices that TensorFlow and the driver find, and compare results on each device and on all of them.

    The exit status is 1 if results differ, or if TensorFlow does not use a GPU that the driver has.
    """
    if memory_mb is not None and devices is None:
        raise ArgumentError(f"--memory-mb {memory_mb} divides the GPUs; say into how many devices: --devices 4.")
    start_tensorflow()
    from graphsplit.cli.doctor import doctor as run

    if not run(devices, memory_mb):
        raise typer.Exit(code=1)


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(metavar="WHAT", help="A SavedModel's directory, or module:function.")],
    spec: Annotated[
        list[str] | None,
        typer.Option("--spec", metavar="SPEC", help="An argument: 'float32[64,784]', ? for any size; repeat."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="DEVICES", help="How many devices, or their names: GPU:0,GPU:1 (need not exist)."
        ),
    ] = None,
    actual: Annotated[bool, typer.Option("--actual", help="Run once, and show where TensorFlow ran it.")] = False,
    signature: Annotated[
        str, typer.Option("--signature", metavar="NAME", help="The SavedModel's signature.")
    ] = "serving_default",
    output: Annotated[
        list[str] | None,
        typer.Option("-o", "--output", metavar="FILE", help=f"A file to write: {', '.join(forms.PLACEMENT_SUFFIXES)}."),
    ] = None,
    timeline: Annotated[
        str | None, typer.Option("--timeline", metavar="FILE", help="Record one step, for ui.perfetto.dev: step.json.")
    ] = None,
) -> None:
    """Show which operation runs on which device, and what is sent between devices."""
    for path in output or ():
        forms.check_placement_suffix(path)
    if timeline is not None:
        forms.check_trace_suffix(timeline, "a timeline")
    for path in [*(output or ()), *([] if timeline is None else [timeline])]:
        forms.check(path)
    start_tensorflow()
    from graphsplit.cli import targets

    places = None if devices is None else parse_devices(devices)
    fn, arguments = targets.called(target, signature, spec or (), places, actual or timeline is not None)
    doing = "Running" if actual else "Tracing"
    with phase(doing.lower()), targets.users_code(f"{doing} {target!r}"):
        placement = gs.placement(fn, *arguments, actual=actual)
    if {op.type for op in placement.ops.values()} <= _NO_WORK:
        raise ArgumentError(f"{target!r} computes nothing with TensorFlow: there is nothing to place.")
    print(placement)
    for path in output or ():
        with phase(f"writing {path}"):
            placement.save(path)
        print(f"Written: {path}")
    if timeline is not None:
        with phase("recording a step"), targets.users_code(f"Running {target!r}"):
            recorded = gs.inspect.timeline(fn, *arguments)
        recorded.save(timeline)
        print(f"{recorded}\nWritten: {timeline}")


@app.command()
def transpile(
    source: Annotated[str, typer.Argument(metavar="IN", help="A SavedModel's directory, or a graph: .pb, .pbtxt.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="Where to write.")],
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="DEVICES",
            help="How many devices, or their names: GPU:0,GPU:1,..., the default device first. Required.",
        ),
    ] = None,
    signatures: Annotated[
        str, typer.Option("--signatures", metavar="NAMES", help="Names, with commas; all by default.")
    ] = "",
    split: Annotated[
        str,
        typer.Option(
            "--split",
            metavar="SPLIT",
            help="The axis along which batched arguments are split: 0, none, or x=0,mask=none.",
        ),
    ] = "0",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if work on the batch would run on one device.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a model or graph.")] = False,
    strip: Annotated[bool, typer.Option("--strip-devices", help="Only remove the devices in the graph.")] = False,
    replicate: Annotated[
        bool, typer.Option("--replicate-weights", help="A copy of the weights in every device's memory.")
    ] = False,
    inputs: Annotated[
        str, typer.Option("--inputs", metavar="NAMES", help="Of a graph: its arguments; by default its placeholders.")
    ] = "",
    outputs: Annotated[
        str,
        typer.Option("--outputs", metavar="NAMES", help="Of a graph: its results; by default what no operation reads."),
    ] = "",
) -> None:
    """Turn a finished SavedModel, or a graph, into one that runs on several devices."""
    axes, is_graph = parse_split(split), is_graph_file(source)
    if strip and (devices or signatures or replicate or inputs or outputs):
        raise ArgumentError("--strip-devices only removes requests for devices; leave the other options out.")
    if devices is None and not strip:
        raise ArgumentError(
            "Which devices? --devices GPU:0,GPU:1 names them, --devices 4 takes the first four. They need not exist on "
            "this machine; the first is the default device."
        )
    if is_graph and not target.endswith(GRAPH_SUFFIXES):
        raise ArgumentError(f"{source!r} is a graph, so is what is written; {target!r} ends neither in .pb nor .pbtxt.")
    if is_graph and (signatures or replicate):
        raise ArgumentError(f"{source!r} is a graph: it has no signatures, and its weights are part of it.")
    if not is_graph and (inputs or outputs):
        raise ArgumentError(f"{source!r} is a SavedModel: its signatures say what goes in and out; see --signatures.")
    start_tensorflow()
    from graphsplit.serving.options import TranspileOptions
    from graphsplit.serving.transpiling import transpile_directory

    if strip:
        print(f"Removed {gs.serving.strip_devices(source, target, overwrite=overwrite)} requests for devices: {target}")
        return
    with phases(f"transpiling {source}") as progress:
        options = TranspileOptions(
            devices=parse_devices(devices or ""),
            split=axes,
            strict=strict,
            signatures=names_in(signatures) or None,
            overwrite=overwrite,
            replicate_weights=replicate,
            progress=progress,
        )
        if is_graph:
            print(_transpile_graph(source, target, options, names_in(inputs), names_in(outputs)))
        else:
            print(transpile_directory(source, target, options))
    if note := options.note_on_devices:
        print(f"  note: {note}")
    print(f"Written: {target}")


def _transpile_graph(source: str, target: str, options: Any, inputs: list[str], outputs: list[str]) -> str:
    """Transpile the file of a graph, and return what to say of it."""
    from graphsplit.planning.amounts import format_bytes
    from graphsplit.serving import files
    from graphsplit.serving.graphs import transpile_and_plan
    from graphsplit.serving.parts import ends_of

    graph = files.read_graph_def(source)
    recognize = files.check_target(source, target, options.overwrite)
    inputs, outputs = (names or list(ends) for names, ends in zip((inputs, outputs), ends_of(graph), strict=True))
    result, plan = transpile_and_plan(graph, inputs, outputs, options)
    content = files.graph_def_bytes(result, target)
    write(target, content, recognize)
    sizes = f"{format_bytes(files.size_of(source))} -> {format_bytes(len(content))}"
    nodes = f"{len(graph.node)} -> {len(result.node)} nodes"
    return f"From {', '.join(inputs)} to {', '.join(outputs)}\n{plan}\n  size: {sizes}, {nodes}"


for _command in predict_commands.COMMANDS:
    app.command()(_command)


@app.command()
def worker(
    port: Annotated[int, number("--port", "Where clients connect.", most=65535)] = 2222,
    devices: Annotated[int | None, number("--devices", "How many logical CPU devices.")] = None,
    threads: Annotated[int | None, number("--threads", "Of an operation on the CPU.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="This machine has a public address, and the port is closed to it.")
    ] = False,
) -> None:
    """Let other machines use this one's devices, until it is ended. They connect with graphsplit.connect."""
    check_port(port, insecure)
    start_tensorflow(keras=False)
    from graphsplit.workers.worker import serve

    serve(port, devices, threads)
