"""Plans and graphs for GPUs that are not here: a TensorFlow that is built with CUDA knows their kernels anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import graphsplit as gs
from graphsplit.api.compilation import trace_and_plan
from graphsplit.api.options import Options
from graphsplit.core import structures
from graphsplit.core.kernel_devices import kernel_devices
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.planning.state import State
from graphsplit.tracing.trace import Trace


def plan_for_gpus(step: Callable[..., Any], arguments: Sequence[tf.Tensor], gpus: int = 3) -> gs.Plan:
    """Return the plan that a process with GPUs makes: variables are on the first one, those of int32 on the CPU."""
    devices = [f"/device:GPU:{d}" for d in range(gpus)]
    _, call = structures.flatten((tuple(arguments), {}))
    leaves = tuple(structures.TensorLeaf(x.dtype, tuple(x.shape)) for x in arguments)
    named = structures.Branch(dict, tuple(f"argument_{i}" for i in range(len(leaves))), leaves)
    _, plan = trace_and_plan(step, call, named, Options(), devices, devices[0], state_on_gpus)
    return plan


def state_on_gpus(trace: Trace) -> State:
    """Return where TensorFlow puts variables where there is a GPU: it has no int32 ones there."""
    ops, host = trace.program.ops, set()
    for op in ops:
        if "dtype" in op.node.attr and op.node.attr["dtype"].type == tf.int32.as_datatype_enum:
            host.update(tensor.op for tensor in op.inputs)
    pairs = zip(trace.program.captures, trace.captures, strict=True)
    held = [position for position, handle in pairs if handle.dtype == tf.resource]
    return State({ops[i].name: f"/device:{'CPU' if i in host else 'GPU'}:0" for i in held})


def without_gpu_kernel(graph: EmittedGraph) -> Counter[str]:
    """Return the types of the nodes that are asked to run on GPUs and cannot; bodies run where their loop does."""
    nodes = [node for node in graph.nodes if "GPU" in node.device]
    nodes += [node for function in graph.library.function for node in function.node_def]
    return Counter(n.op for n in nodes if n.op != "Placeholder" and "GPU" not in kernel_devices(n))
