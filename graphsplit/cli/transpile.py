"""`graphsplit transpile`: a SavedModel, or a graph's `.pb` or `.pbtxt`, from the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from graphsplit.cli.running import shown_progress
from graphsplit.core.errors import ArgumentError
from graphsplit.core.storage.files import write
from graphsplit.core.storage.model_files import is_graph_file
from graphsplit.planning.amounts import format_bytes
from graphsplit.saved_models import files
from graphsplit.saved_models.graphs import transpile_and_plan
from graphsplit.saved_models.options import TranspileOptions
from graphsplit.saved_models.parts import ends_of
from graphsplit.saved_models.stripping import strip_devices
from graphsplit.saved_models.transpiling import transpile_directory


def transpile(
    source: str, target: str, options: TranspileOptions, *, inputs: Sequence[str] = (), outputs: Sequence[str] = ()
) -> None:
    """Transpile, and print what was done.

    Args:
      source, target: directories of SavedModels, or files of graphs.
      options: see `TranspileOptions`.
      inputs, outputs: of a graph: names of tensors and operations; else its placeholders, and what nobody reads.

    Raises:
      GraphsplitError: whatever the functions raise; options that clash.
    """
    if is_graph_file(source) and (options.signatures or options.replicate_weights):
        raise ArgumentError(f"{source!r} is a graph: it has no signatures, and its weights are part of it.")
    if not is_graph_file(source) and (inputs or outputs):
        raise ArgumentError(f"{source!r} is a SavedModel: its signatures say what goes in and out; see --signatures.")
    with shown_progress(f"transpiling {source}") as progress:
        if is_graph_file(source):
            text = _transpile_file(source, target, options, inputs, outputs)
        else:
            text = str(transpile_directory(source, target, dataclasses.replace(options, progress=progress)))
    print(text)
    if note := options.note_on_devices:
        print(f"  note: {note}")
    print(f"Written: {target}")


def strip(source: str, target: str, overwrite: bool) -> None:
    """Remove the requests for devices, and print how many there were."""
    count = strip_devices(source, target, overwrite=overwrite)
    print(f"Removed {count} requests for devices: {target}")


def _transpile_file(
    source: str, target: str, options: TranspileOptions, inputs: Sequence[str], outputs: Sequence[str]
) -> str:
    graph = files.read_graph_def(source)
    recognize = files.check_target(source, target, options.overwrite)
    found_inputs, found_outputs = ends_of(graph)
    inputs, outputs = inputs or found_inputs, outputs or found_outputs
    result, plan = transpile_and_plan(graph, list(inputs), list(outputs), options)
    content = files.graph_def_bytes(result, target)
    write(target, content, recognize)
    sizes = f"{format_bytes(files.size_of(source))} -> {format_bytes(len(content))}"
    nodes = f"{len(graph.node)} -> {len(result.node)} nodes"
    return f"From {', '.join(inputs)} to {', '.join(outputs)}\n{plan}\n  size: {sizes}, {nodes}"
