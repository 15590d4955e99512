"""`Placement`: where every operation runs, to print, save and ask; and how a function, model or graph gets its own."""

from __future__ import annotations

import functools
import html
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.call_signatures import check_takes_inputs
from graphsplit.core.stand_ins import answering
from graphsplit.errors import ArgumentError
from graphsplit.inspect.actual import match, run_and_collect
from graphsplit.inspect.findings import find_warnings
from graphsplit.inspect.graph import PlacementGraph
from graphsplit.inspect.reading import flatten, read_ops
from graphsplit.inspect.sources import (
    PlacementSource,
    Planned,
    Planning,
    load_signature,
    loaded_with_gpus,
    name_of,
    source_of_function,
    source_of_plan,
)
from graphsplit.inspect.views.exports import save
from graphsplit.inspect.views.pages import page_html
from graphsplit.inspect.views.tables import render


class Placement(PlacementGraph):
    """Where every operation of a graph runs: requested and, if it has been run, actual. Print it, save it, ask it."""

    @functools.cached_property
    def warnings(self) -> tuple[str, ...]:
        """What is likely to disappoint, in plain sentences."""
        return tuple(find_warnings(self))

    def save(self, path: str) -> None:
        """Write the placement; the suffix chooses the form.

        `.html` a page to explore, without network; `.svg` a still picture; `.json` for other tools; `.csv` a line for
        each operation; `.pb` a `GraphDef` with devices, for Netron; a directory or `.tfevents`: an event file for
        TensorBoard.

        Raises:
          ArgumentError: for another suffix.
          StorageError: if writing fails, or if graphsplit did not write the file at `path`. That file is not changed.
        """
        save(self, path)

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        page = html.escape(page_html(self), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:1px solid #d8dee4"></iframe>'


def placement(
    fn: Any, *args: Any, actual: bool = False, signature: str = "serving_default", **kwargs: Any
) -> Placement:
    """Return where every operation of a function runs: any function, graphsplit's or not.

    Args:
      fn: a Python function, `tf.function`, function made by `parallelize`, Keras model (one made by `multi_gpu_model`,
        too), a SavedModel's signature, the directory of a SavedModel, or a `tf.Graph` (TensorFlow 1, no arguments).
      *args, **kwargs: its arguments; for requested placement, `tf.TensorSpec`s are enough. None for a SavedModel,
        unless it is to run. Of a model made by `multi_gpu_model` a batch: `x` for its prediction, `x, y` for its
        training.
      actual: run the function once on the arguments, restore all variables, and read from TensorFlow where each
        operation ran. Other state (tables, files, what is printed) is not restored.
      signature: for the directory of a SavedModel, which of its signatures.

    Returns:
      A `Placement`. `print` it, `save` it, ask it.

    Raises:
      ArgumentError: if `fn` is nothing that has a graph, arguments do not fit a graph that is already there, or
        `actual=True` and arguments are missing.

    >>> import tensorflow as tf, graphsplit as gs
    >>> placed = gs.placement(lambda x: tf.reduce_sum(x * 2.0), tf.zeros([8, 4]))
    >>> placed.select("Mul")[0].flops
    32
    """
    source, arguments, title = source_of(fn, args, kwargs, signature, runs=actual)
    return placement_of_source(source, title, run_and_collect(source, arguments) if actual else None)


def source_of(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], signature: str = "serving_default", runs: bool = True
) -> tuple[PlacementSource, Sequence[Any], str]:
    """Return the graph of anything that `placement` takes, its flat arguments, and what to call it.

    Variables move to where a plan wants them only if the graph `runs`.
    """
    fn = answering(fn)
    if isinstance(fn, Planning):
        planned = fn._planned(tuple(args), dict(kwargs), runs)
        return source_of_plan(planned.trace, planned.plan, planned.name), planned.tensors, planned.name
    if isinstance(fn, tf.Graph):
        if args or kwargs:
            raise ArgumentError("A tf.Graph takes no arguments here: its placeholders stand for them.")
        return PlacementSource(fn.as_graph_def()), (), "graph"
    check_takes_inputs(fn, args)
    title = name_of(fn)
    if isinstance(fn, (str, os.PathLike)):
        title, fn = f"{os.fspath(fn)} ({signature})", load_signature(os.fspath(fn), signature)
    source, flat = source_of_function(fn, args, kwargs)
    return loaded_with_gpus(source), flat, title


def placement_of_plan(planned: Planned, actual: bool) -> Placement:
    """Return the placement of a parallelized function for one signature; see `ParallelFunction.placement`."""
    source = source_of_plan(planned.trace, planned.plan, planned.name)
    graphs = run_and_collect(source, planned.tensors) if actual else None
    return placement_of_source(source, planned.name, graphs)


def placement_of_graph(graph_def: Any, *, title: str = "graph") -> Placement:
    """Return the requested placement of a bare `GraphDef`."""
    return placement_of_source(PlacementSource(graph_def), title)


def placement_of_source(source: PlacementSource, title: str, graphs: Sequence[Any] | None = None) -> Placement:
    """Return the placement of a graph; the actual one, given the partition graphs that ran."""
    flat = flatten(source.graph)
    ops, edges = read_ops(source, flat)
    actual, added = graphs is not None, list[str]()
    if graphs is not None:
        ops, added = match(ops, flat, source, graphs)
    return Placement(ops, edges, actual=actual, rows=source.rows, graph_def=source.graph, added=added, title=title)
