"""Planning speed: microseconds per operation of workloads' programs, and of synthetic ones: is it linear?"""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from benchmarks.timing import took
from graphsplit.core.layouts import SINGLE_DEVICE, Shard
from graphsplit.core.protos import make_node
from graphsplit.emission import emit
from graphsplit.planning.mesh import mesh_of
from graphsplit.planning.plan import Plan
from graphsplit.planning.planner import plan_program
from graphsplit.program.program import Program
from graphsplit.program.reading.flat_graphs import FlatGraph, KnownBefore, Labels
from graphsplit.program.reading.reader import build_program

_NODES_PER_LAYER = 6
_ROWS, _WIDTH = 32, 16


def program_speed(plan: Plan, repetitions: int = 3) -> dict[str, float]:
    """Return microseconds per operation for planning, and per emitted node for emission; the best of some runs."""
    operations = len(plan.program.ops)
    plan_s = min(took(lambda: _again(plan)).wall for _ in range(repetitions))
    emit_s = min(took(lambda: emit(plan)).wall for _ in range(repetitions))
    return {
        "operations": operations,
        "plan_us_per_op": plan_s / operations * 1e6,
        "emit_us_per_node": emit_s / len(emit(plan).nodes) * 1e6,
    }


def synthetic_speed(operations: int, devices: int) -> dict[str, float]:
    """Return the speed of planning and emitting a training-shaped chain of about so many operations."""
    start = time.perf_counter()
    program = synthetic_program(operations)
    read_s = time.perf_counter() - start
    inputs = [Shard(0), Shard(0), SINGLE_DEVICE, SINGLE_DEVICE]
    names = [f"/device:CPU:{d}" for d in range(devices)]
    plan = plan_program(program, mesh=mesh_of(names, _ROWS), default_device=names[0], input_layouts=inputs)
    read = {"read_us_per_op": read_s / len(program.ops) * 1e6, "sharded_operations": len(plan.sharded_ops)}
    return {**program_speed(plan, 2), **read}


def synthetic_program(operations: int) -> Program:
    """Return layers of MatMul and Relu with their backward operations, as many as make up `operations` nodes."""
    layers = max(1, (operations - 4) // _NODES_PER_LAYER)
    nodes = [_argument(name, shape) for name, shape in _ARGUMENTS.items()]
    current = "x"
    for i in range(layers):
        nodes.append(_matmul(f"forward_{i}", current, "w"))
        nodes.append(make_node(f"relu_{i}", "Relu", [f"forward_{i}"], T=tf.float32))
        current = f"relu_{i}"
    gradient, total = "seed", "zero"
    for i in reversed(range(layers)):
        previous = f"relu_{i - 1}" if i else "x"
        nodes.append(make_node(f"masked_{i}", "ReluGrad", [gradient, f"relu_{i}"], T=tf.float32))
        nodes.append(_matmul(f"by_w_{i}", previous, f"masked_{i}", transpose_a=True))
        nodes.append(_matmul(f"by_x_{i}", f"masked_{i}", "w", transpose_b=True))
        nodes.append(make_node(f"total_{i}", "AddV2", [total, f"by_w_{i}"], T=tf.float32))
        gradient, total = f"by_x_{i}", f"total_{i}"
    flat = FlatGraph(
        nodes=nodes,
        inputs=list(_ARGUMENTS),
        outputs=[f"{total}:0", f"{current}:0"],
        library=tf.compat.v1.GraphDef().library,
        versions=tf.Graph().as_graph_def().versions,
    )
    return build_program(flat, KnownBefore(), Labels(input_names=list(_ARGUMENTS)))


_ARGUMENTS = {"x": (_ROWS, _WIDTH), "seed": (_ROWS, _WIDTH), "w": (_WIDTH, _WIDTH), "zero": (_WIDTH, _WIDTH)}


def _argument(name: str, shape: tuple[int, int]) -> Any:
    value = tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto())
    return make_node(name, "Placeholder", [], dtype=tf.float32, shape=value)


def _matmul(name: str, a: str, b: str, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    return make_node(name, "MatMul", [a, b], T=tf.float32, transpose_a=transpose_a, transpose_b=transpose_b)


def _again(plan: Plan) -> Plan:
    return plan_program(
        plan.program,
        mesh=plan.mesh,
        default_device=plan.default_device,
        input_layouts=plan.input_layouts,
        state=plan.state,
    )
