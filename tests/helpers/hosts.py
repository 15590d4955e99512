"""Plans for devices of several hosts that are not there, and their graphs run on the logical devices that are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf

import graphsplit as gs
from graphsplit.api.calls import plan_requests
from graphsplit.axes.columns import program_on_mesh
from graphsplit.core import structures
from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import Division, Replicate
from graphsplit.core.protos import NodeDef, make_node, split_reference
from graphsplit.emission import EmittedGraph, check_emitted, emit
from graphsplit.planning.communication.collectives import bucketed, find_collectives, in_turns
from graphsplit.planning.communication.transfers import Collective
from graphsplit.planning.device_bytes import traffic
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.plan import Plan
from graphsplit.planning.planner import plan_program
from graphsplit.planning.state import State
from graphsplit.program.program import Program, Tensor
from graphsplit.runtime.executable import runtime_function
from graphsplit.runtime.gradients.planned_functions import PlannedFunction
from graphsplit.runtime.handles import captured
from graphsplit.tracing.trace import Trace
from tests.helpers.law import assert_close


def worker_device(task: int, number: int) -> str:
    return f"/job:worker/replica:0/task:{task}/device:CPU:{number}"


def on_hosts(*counts: int) -> dict[str, str]:
    """Return the devices of hosts that have so many each, by the local devices that stand for them."""
    names = [worker_device(task, number) for task, count in enumerate(counts) for number in range(count)]
    return {f"/device:CPU:{i}": name for i, name in enumerate(names)}


@contextlib.contextmanager
def planning_for(names: Mapping[str, str]) -> Iterator[None]:
    """Let functions be planned for other devices in place of the local ones: once, with all that a plan decides."""

    def renamed(devices: Sequence[str]) -> tuple[str, ...]:
        return tuple([names[device] for device in devices])

    def of_division(division: Division) -> Division:
        own: dict[str, Any] = {"devices": renamed(division.devices)}
        if isinstance(division, Replicate):
            own["sums"] = renamed(division.sums)
        return dataclasses.replace(division, **own)

    def on_mesh(trace: Trace, state: State, reshard: bool, mesh: Mesh) -> tuple[Program, State]:
        renamed_state = dataclasses.replace(
            state,
            devices={name: names[device] for name, device in state.devices.items()},
            divisions={name: of_division(division) for name, division in state.divisions.items()},
        )
        return program_on_mesh(trace, renamed_state, reshard, with_names(mesh))

    def with_names(mesh: Mesh) -> Mesh:
        return dataclasses.replace(mesh, devices=renamed(mesh.devices))

    def plan(
        program: Program,
        *,
        mesh: Mesh,
        default_device: str,
        input_devices: Sequence[str],
        default_devices: Sequence[str],
        **others: Any,
    ) -> gs.inspect.Plan:
        return plan_program(
            program,
            mesh=with_names(mesh),
            default_device=names[default_device],
            input_devices=renamed(input_devices),
            default_devices=renamed(default_devices),
            **others,
        )

    as_planned = mock.patch.object(PlannedFunction, "on", lambda compiled, _: compiled)  # wherever the arguments lie
    on_names = mock.patch.multiple(plan_requests, plan_program=plan, program_on_mesh=on_mesh)
    with on_names, as_planned:
        yield


def plan_on_hosts(
    function: Callable[..., Any], counts: Sequence[int], *arguments: Any, **options: Any
) -> gs.inspect.Plan:
    """Return the plan of a function for hosts that have so many devices each."""
    with planning_for(on_hosts(*counts)):
        return gs.parallelize(function, devices=sum(counts), **options).plan(*arguments)


def by_gateways(plan: Plan) -> list[Collective]:
    """Return the collectives in which something passes from host to host through one device of several."""
    return [collective for collective in plan.collectives if collective.gateways]


def straight(plan: gs.inspect.Plan) -> gs.inspect.Plan:
    """Return a plan without gateways."""
    made = find_collectives(plan.program, plan.places, plan.moves)
    made = in_turns(bucketed(plan.program, made, [bucket.moves for bucket in plan.buckets]), plan.mesh)
    return dataclasses.replace(plan, collectives=tuple(made))


def on_local_devices(graph: EmittedGraph, names: Mapping[str, str]) -> EmittedGraph:
    """Return a graph with local devices in place of those that they stand for."""
    local = {name: device for device, name in names.items()}

    def moved(node: Any) -> Any:
        copy = NodeDef()
        copy.CopyFrom(node)
        copy.device = local.get(node.device, node.device)
        return copy

    library = type(graph.library)()
    library.CopyFrom(graph.library)
    for function in library.function:
        for node in function.node_def:
            node.device = local.get(node.device, node.device)
    return dataclasses.replace(graph, nodes=tuple(map(moved, graph.nodes)), library=library)


def run_on_hosts(
    function: Callable[..., Any], counts: Sequence[int], calls: Sequence[tuple[Any, ...]], **options: Any
) -> tuple[list[Any], gs.inspect.Plan]:
    """Run a function as it is planned for hosts that have so many devices each, checked; return results and plan."""
    names, results = on_hosts(*counts), []
    parallel = gs.parallelize(function, devices=sum(counts), **options)
    for arguments in calls:
        with planning_for(names):
            compiled, tensors = parallel._planning(arguments, {})
        trace, plan = compiled.trace, compiled.plan
        plan.check()
        graph = emit(plan)
        check_emitted(plan, graph)
        local = on_local_devices(graph, names)
        inputs = (*local.inputs, *local.captures)
        run = runtime_function("hosts", local, local.nodes, inputs, local.outputs, local.effects, {}, whole=True)
        results.append(structures.unflatten(trace.result, run([*tensors, *captured(trace, plan)])))
    return results, plan


def assert_law_on_hosts(
    make: Callable[[], tuple[Callable[..., Any], Sequence[tf.Variable]]],
    calls: Sequence[tuple[Any, ...]],
    counts: Sequence[int],
    **options: Any,
) -> gs.inspect.Plan:
    """Run a function and its twin, made anew, as planned for hosts; compare results and variables; return the plan."""
    (single, single_variables), (many, many_variables) = make(), make()
    expected = [single(*arguments) for arguments in calls]
    actual, plan = run_on_hosts(many, counts, calls, **options)
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b)
    for a, b in zip(many_variables, single_variables, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), f"variable {b.name}")
    return plan


def crossing_bytes(plan: gs.inspect.Plan) -> Counter[str]:
    """Return the bytes of what nodes of the emitted graph read of other hosts' nodes, by the role of what they read.

    A value counts once for each device that reads it: TensorFlow's runtime sends it so often.
    """
    graph = emit(plan)
    device = {node.name: node.device for node in graph.nodes}
    found = {
        (reference, node.device)
        for node in graph.nodes
        for reference in node.input
        if reference[0] != "^" and host_name(device[split_reference(reference)[0]]) != host_name(node.device)
    }
    total: Counter[str] = Counter()
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(_with_shapes(plan, graph), name="")
    for reference, _ in found:
        name, index = split_reference(reference)
        tensor = imported.get_tensor_by_name(f"{name}:{index}")
        if tensor.dtype != tf.resource:
            total[graph.origins[name].role] += tensor.shape.num_elements() * tensor.dtype.size
    return total


def _with_shapes(plan: gs.inspect.Plan, graph: EmittedGraph) -> Any:
    """Return a graph whose arguments and variables have their shapes."""
    found = graph.graph_def()
    for node in found.node:
        if node.op == "ReadVariableOp" or node.name in graph.inputs:
            tensor = Tensor(graph.origins[node.name].op or 0, 0)
            dtype, shape = plan.program.ops[tensor.op].out_dtypes[0], tf.TensorShape(plan.program.shape(tensor))
            attributes = {"dtype": dtype, "shape": tf.compat.v1.AttrValue(shape=shape.as_proto())}
            node.CopyFrom(make_node(node.name, "Placeholder", [], node.device, **attributes))
    return found


def assert_counted(plan: gs.inspect.Plan) -> int:
    """Compare the bytes between hosts that a plan says with those of the emitted graph, and return them."""
    found = traffic(plan).between_hosts
    assert found == sum(crossing_bytes(plan).values())
    return found
