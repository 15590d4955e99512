"""`graphsplit transpile`: a SavedModel, or a graph's `.pb` or `.pbtxt`, from the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from graphsplit.api.argument_splitting import Split
from graphsplit.core.errors import ArgumentError
from graphsplit.planning.amounts import format_bytes
from graphsplit.saved_models import files
from graphsplit.saved_models.graphs import transpile_and_plan
from graphsplit.saved_models.parts import ends_of
from graphsplit.saved_models.stripping import strip_devices
from graphsplit.saved_models.transpiling import transpile_saved_model


def transpile(
    source: str,
    target: str,
    *,
    devices: str | None,
    signatures: Sequence[str] = (),
    split: str = "0",
    strict: bool = False,
    overwrite: bool = False,
    strip: bool = False,
    replicate_weights: bool = False,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
) -> None:
    """Transpile, and print what was done.

    Args:
      source, target: directories of SavedModels, or files of graphs.
      devices: a number, or names with commas between them.
      signatures, strict, overwrite, replicate_weights: see `transpile_saved_model`.
      split: `0`, `none`, or `x=0,mask=none`.
      strip: only remove the requests for devices.
      inputs, outputs: of a graph: names of tensors and operations; else its placeholders, and what nobody reads.

    Raises:
      GraphsplitError: whatever the functions raise; options that clash.
    """
    _check(devices, strip, source, signatures, replicate_weights, inputs, outputs)
    if strip:
        count = strip_devices(source, target, overwrite=overwrite)
        print(f"Removed {count} requests for devices: {target}")
        return
    with _progress() as progress:
        if _is_graph(source):
            text = _transpile_file(
                source, target, parse_devices(devices), parse_split(split), strict, overwrite, inputs, outputs
            )
        else:
            report = transpile_saved_model(
                source,
                target,
                parse_devices(devices),
                signatures=signatures or None,
                split=parse_split(split),
                strict=strict,
                overwrite=overwrite,
                replicate_weights=replicate_weights,
                progress=progress,
            )
            text = str(report)
    print(text)
    print(f"Written: {target}")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show what is being done: on a terminal in one line, elsewhere line by line."""
    console = rich.console.Console(stderr=True)
    with console.status("reading ...") as status:

        def show(text: str) -> None:
            status.update(f"{text} ...")
            if not console.is_terminal:
                console.print(f"{text} ...", highlight=False)

        yield show


def _transpile_file(
    source: str,
    target: str,
    devices: int | list[str] | None,
    split: Split,
    strict: bool,
    overwrite: bool,
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> str:
    if not _is_graph(target):
        raise ArgumentError(f"{source!r} is a graph, so is what is written; {target!r} ends neither in .pb nor .pbtxt.")
    graph = files.read_graph_def(source)
    files.check_target(source, target, overwrite)
    found_inputs, found_outputs = ends_of(graph)
    inputs, outputs = inputs or found_inputs, outputs or found_outputs
    result, plan = transpile_and_plan(graph, inputs, outputs, devices, split=split, strict=strict)
    content = files.graph_def_bytes(result, target)
    with files.replacing(target) as made:
        Path(made).write_bytes(content)
    sizes = f"{format_bytes(files.size_of(source))} -> {format_bytes(len(content))}"
    nodes = f"{len(graph.node)} -> {len(result.node)} nodes"
    return f"From {', '.join(inputs)} to {', '.join(outputs)}\n{plan}\n  size: {sizes}, {nodes}"


def parse_devices(text: str | None) -> int | list[str] | None:
    """Return what `--devices` says: a number, or names.

    >>> parse_devices("GPU:0,GPU:1")
    ['GPU:0', 'GPU:1']
    """
    if text is None:
        return None
    return int(text) if text.strip().isdigit() else [name.strip() for name in text.split(",") if name.strip()]


def parse_split(text: str) -> Split:
    """Return what `--split` says: an axis, None, or a mapping from names to those.

    >>> parse_split("x=0,mask=none")
    {'x': 0, 'mask': None}
    """
    pairs = [part.rpartition("=") for part in text.split(",") if part.strip()]
    if len(pairs) == 1 and not pairs[0][1]:
        return _axis(text)
    if not all(equals for _, equals, _ in pairs):
        raise ArgumentError(f"--split {text!r} is not understood; write an axis, none, or name=axis,name=none.")
    result: Mapping[str, Any] = {name.strip(): _axis(axis) for name, _, axis in pairs}
    return result


def _axis(text: str) -> int | None:
    if text.strip().lower() == "none":
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ArgumentError(f"--split: {text!r} is no axis; write a number or none.") from error


def _is_graph(path: str) -> bool:
    return path.endswith((".pb", ".pbtxt")) and not Path(path).is_dir()


def _check(
    devices: str | None,
    strip: bool,
    source: str,
    signatures: Sequence[str],
    replicate_weights: bool,
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> None:
    if strip and (devices or signatures or replicate_weights or inputs or outputs):
        raise ArgumentError("--strip-devices only removes requests for devices; leave the other options out.")
    if _is_graph(source) and (signatures or replicate_weights):
        raise ArgumentError(f"{source!r} is a graph: it has no signatures, and its weights are part of it.")
    if not _is_graph(source) and (inputs or outputs):
        raise ArgumentError(f"{source!r} is a SavedModel: its signatures say what goes in and out; see --signature.")
