"""Writing a placement to a file; the suffix chooses the form."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import short_name
from graphsplit.core.storage import files, forms
from graphsplit.inspect.findings import find_warnings
from graphsplit.inspect.graph import PlacementGraph, layer_names
from graphsplit.inspect.views.pages import page_html
from graphsplit.inspect.views.pictures import picture


def save(placement: PlacementGraph, path: str | os.PathLike[str]) -> None:
    """Write `placement` to `path`; see `Placement.save`."""
    path = os.fspath(path)
    forms.check_placement_suffix(path)
    (save_events if os.path.isdir(path) else WRITERS.get(forms.suffix_of(path), save_events))(placement, path)


def save_html(placement: PlacementGraph, path: str) -> None:
    """Write the self-contained page."""
    forms.write(path, page_html(placement).encode())


def save_picture(placement: PlacementGraph, path: str) -> None:
    """Write the still picture."""
    forms.write(path, picture(placement).encode())


def save_json(placement: PlacementGraph, path: str) -> None:
    """Write operations, edges and the answers to the usual questions."""
    content = {
        "title": placement.title,
        "actual": placement.actual,
        "rows": list(placement.rows),
        "ops": [{**asdict(op), "device": op.device} for op in placement.ops.values()],
        "edges": [asdict(edge) for edge in placement.edges],
        "devices": [asdict(totals) for totals in placement.devices.values()],
        "transfers": [asdict(transfer) for transfer in placement.transfers],
        "warnings": list(find_warnings(placement)),
    }
    forms.write_json(path, content, indent=1)


def save_table(placement: PlacementGraph, path: str) -> None:
    """Write a line for each operation. The mark is the name of a last column, an empty one: CSV has no remarks."""
    layers, text = layer_names(list(placement.ops.values())), io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["name", "type", "device", "asked device", "shard", "layer", "bytes", "FLOPs", forms.MARK])
    for op in placement.ops.values():
        requested = short_name(op.requested) if op.moved else ""
        own_name = layers.get(op.name, op.name).removeprefix(op.prefix + op.written)
        layer = own_name.rpartition("/")[0]
        rows.writerow(
            [op.name, op.type, short_name(op.device), requested, op.shard, layer, op.output_bytes, op.flops, ""]
        )
    forms.write(path, text.getvalue().encode())


def save_graph_def(placement: PlacementGraph, path: str) -> None:
    """Write the graph as a binary `GraphDef` with the device that each node has."""
    graph_def = graph_def_with_devices(placement)
    for node in graph_def.node[:1]:
        node.attr["_about"].s = forms.MARK.encode()
    forms.write(path, graph_def.SerializeToString())


def save_events(placement: PlacementGraph, path: str) -> None:
    """Write an event file for TensorBoard's graph page.

    The operations are written as one flat graph: the page colours by device only what is outside of functions.
    """
    target = path if forms.suffix_of(path) == ".tfevents" else forms.events_file(path)
    graph_def = graph_def_with_devices(placement)
    event = tf.compat.v1.Event(graph_def=graph_def.SerializeToString())
    version = tf.compat.v1.Event(file_version="brain.Event:2", source_metadata={"writer": forms.MARK})
    try:
        with files.replacing(target, forms.recognize) as new_path, tf.io.TFRecordWriter(new_path) as writer:
            writer.write(version.SerializeToString())
            writer.write(event.SerializeToString())
    except tf.errors.OpError as error:
        raise files.writing_failed(target, error) from error


def graph_def_with_devices(placement: PlacementGraph) -> Any:
    """Return all operations, bodies inlined, as one `GraphDef` in which every node has its device and shapes."""
    graph = tf.compat.v1.GraphDef()
    originals = {node.name: node for node in placement.graph_def.node} if placement.graph_def is not None else {}
    inputs: dict[str, list[str]] = {}
    for edge in sorted(placement.edges, key=lambda edge: (edge.operand < 0, edge.operand)):
        waits = edge.control or edge.operand < 0
        reference = f"^{edge.source}" if waits else edge.source + (f":{edge.output}" if edge.output else "")
        inputs.setdefault(edge.target, []).append(reference)
    for op in placement.ops.values():
        node = graph.node.add(name=op.name, op=op.type, device=op.device)
        node.input.extend(inputs.get(op.name, ()))
        if op.name in originals:
            for key, value in originals[op.name].attr.items():
                if value.ByteSize() < 4096:
                    node.attr[key].CopyFrom(value)
        shapes = node.attr["_output_shapes"].list
        for shape in op.shapes:
            shapes.shape.add().CopyFrom(tf.TensorShape(shape).as_proto())
    return graph


WRITERS: dict[str, Callable[[PlacementGraph, str], None]] = {
    ".html": save_html,
    ".svg": save_picture,
    ".json": save_json,
    ".pb": save_graph_def,
    ".tfevents": save_events,
    ".csv": save_table,
}
