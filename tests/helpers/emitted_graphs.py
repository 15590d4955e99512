"""What graphsplit writes for each of `emitted_programs.py`, and the record of it, `tests/emitted_graphs.txt`."""

from __future__ import annotations

import contextlib
import functools
import platform
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.protos import function_definition, split_reference
from graphsplit.core.storage.stored_models import read_saved_model
from graphsplit.emission import emit
from graphsplit.emission.clusters import compile_clusters
from graphsplit.runtime import executable
from tests.helpers.emitted_programs import GRAPHS, PROGRAMS, SAVED_MODELS, Program
from tests.helpers.graph_digests import digest_of, reached
from tests.helpers.hosts import on_hosts, planning_for
from tests.helpers.layout_cases import numbers

FILE = Path(__file__).parent.parent / "emitted_graphs.txt"
VERSIONS = f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {platform.system()} {platform.machine()}"
NAMES = (*PROGRAMS, *GRAPHS, *SAVED_MODELS)


class Function(NamedTuple):
    """What TensorFlow's runtime is given: a `FunctionDef` and those that it may call."""

    definition: Any
    library: Sequence[Any]


class Record(NamedTuple):
    """What is recorded of a program.

    Attributes:
      operations: how many there are in its graph, those of functions that it calls included.
      sends: how often an operation of the graph reads what another device has; once for each device that reads it.
      digest: see `graph_digests.py`.
    """

    operations: int
    sends: int
    digest: str


def recorded() -> tuple[str, dict[str, Record]]:
    """Return the versions of the record, and what it says of each program."""
    head, *lines = FILE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    return head, {name: Record(int(count), int(sends), digest) for name, count, sends, digest in rows}


def text() -> str:
    """Return what the record has to be."""
    lines = ["\t".join(map(str, (name, *record_of(name)))) for name in NAMES]
    return "\n".join([VERSIONS, *lines]) + "\n"


def record_of(name: str) -> Record:
    """Return what there is to record of a program."""
    functions = functions_of(name)
    all_of_it = [reached(*function) for function in functions]
    operations = sum(len(one.node_def) for each in all_of_it for one in each)
    digest = "-".join(digest_of(*function) for function in functions)
    return Record(operations, sum(_sends(one) for each in all_of_it for one in each), digest)


def functions_of(name: str) -> list[Function]:
    """Return what graphsplit writes for a program: the one place that knows how to get hold of it."""
    keras.utils.set_random_seed(0)
    if name in GRAPHS:
        write, outputs = GRAPHS[name]
        return [_of_graph(write(), outputs)]
    if name in SAVED_MODELS:
        with tempfile.TemporaryDirectory() as folder:
            SAVED_MODELS[name](folder)
            return [_of_signature(folder)]
    program = PROGRAMS[name]
    if program.way != "call":
        return list(_run(program, parallel_of(program)))
    return [_of_plan(plan_of(name))]


def parallel_of(program: Program) -> gs.ParallelFunction[Any, Any]:
    """Return the function of a program for several devices, its variables laid out."""
    function, variables = program.make()
    devices = sum(program.hosts) or program.devices
    if program.layout is not None:
        mesh = program.options.get("mesh")
        gs.set_variable_layout(
            list(variables), program.layout, devices, mesh=mesh, reshard_after_forward=program.reshard
        )
    parallel = gs.parallelize(function, devices=devices, **program.options)
    if program.before:
        parallel.plan(*_specs(program.before))
    return parallel


@functools.cache
def plan_of(name: str) -> gs.inspect.Plan:
    """Return the plan of a program, on its hosts; layers are numbered from the first on."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    program = PROGRAMS[name]
    parallel = parallel_of(program)
    with planning_for(on_hosts(*program.hosts)) if program.hosts else contextlib.nullcontext():
        return parallel.plan(*_specs(program.given))


def _specs(given: Sequence[Any]) -> list[Any]:
    return [tf.TensorSpec(one) if isinstance(one, tuple) else one for one in given]


def _of_plan(plan: gs.inspect.Plan) -> Function:
    graph = emit(plan)
    nodes, outputs, effects, functions = graph.nodes, graph.outputs, graph.effects, list(graph.library.function)
    if graph.compiled:
        compiled = compile_clusters(graph, nodes, outputs, effects)
        nodes, outputs, effects = compiled.nodes, compiled.outputs, compiled.effects
        functions += compiled.functions
    inputs = (*graph.inputs, *graph.captures)
    return Function(function_definition("whole", nodes, inputs, outputs, effects), functions)


def _of_graph(graph: Any, names: Sequence[str]) -> Function:
    """Return a `GraphDef` as a function of its placeholders, which returns what is named, or runs it."""
    inputs = [node.name for node in graph.node if node.op == "Placeholder"]
    run = [node.name for node in graph.node if node.name in names and node.op == "NoOp"]
    outputs = [name for name in names if split_reference(name)[0] not in run]
    return Function(function_definition("whole", graph.node, inputs, outputs, run), graph.library.function)


def _of_signature(folder: str) -> Function:
    """Return the function that the signature of a SavedModel calls."""
    [graph] = read_saved_model(f"{folder}/several").meta_graphs
    library = graph.graph_def.library.function
    [output, *_] = graph.signature_def["serving_default"].outputs.values()
    [call] = [node for node in graph.graph_def.node if node.name == split_reference(output.name)[0]]
    [function] = [one for one in library if one.signature.name == call.attr["f"].func.name]
    return Function(function, library)


def _run(program: Program, parallel: Any) -> Iterator[Function]:
    """Run a program and yield each function that TensorFlow's runtime is given for it."""
    given = [tf.abs(numbers(*shape)) for shape in program.given]
    found = []

    def noting(definition: Any, library: Sequence[Any], *others: Any) -> Any:
        found.append(Function(definition, list(library)))
        return make(definition, library, *others)

    make = executable.RuntimeFunction
    with mock.patch.object(executable, "RuntimeFunction", noting):
        if program.way == "map":
            list(parallel.map([tuple(given)]))
        else:
            with tf.GradientTape() as outer, tf.GradientTape() as tape:
                outer.watch(given)
                tape.watch(given)
                results = parallel(*given)
            gradients = tape.gradient(results, given)
            if program.way == "gradients of gradients":
                outer.gradient(gradients, given)
    yield from found


def _sends(function: Any) -> int:
    devices = {node.name: node.device for node in function.node_def}
    read = {(r.lstrip("^"), node.device) for node in function.node_def for r in node.input}
    sources = [(devices.get(reference.partition(":")[0], ""), target) for reference, target in read]
    return sum(source not in ("", target) for source, target in sources)
