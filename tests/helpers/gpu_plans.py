"""Plans and graphs for GPUs that are not here: a TensorFlow that is built with CUDA knows their kernels anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import graphsplit as gs
from graphsplit.api.calls.compilation import trace_and_plan
from graphsplit.api.options import Options
from graphsplit.core import structures
from graphsplit.core.gpus.kernel_devices import kernel_devices
from graphsplit.emission import EmittedGraph
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
    pairs = zip(trace.program.captures, trace.captures, strict=True)
    held = {trace.program.ops[i].name: handle for i, handle in pairs if handle.dtype == tf.resource}
    return State({name: f"/device:{'CPU' if _holds_int32(handle) else 'GPU'}:0" for name, handle in held.items()})


def _holds_int32(handle: tf.Tensor) -> bool:
    [held] = handle._handle_data.shape_and_type  # no public name says what is behind a handle
    return bool(held.dtype == tf.int32.as_datatype_enum)


def without_gpu_kernel(graph: EmittedGraph) -> Counter[str]:
    """Return the types of the nodes that are asked to run on GPUs and cannot; bodies run where their loop does."""
    nodes = [node for node in graph.nodes if "GPU" in node.device]
    nodes += [node for function in graph.library.function for node in function.node_def]
    return Counter(n.op for n in nodes if n.op != "Placeholder" and "GPU" not in kernel_devices(n))
