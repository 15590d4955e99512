"""Plans and graphs for GPUs that are not here: a TensorFlow that is built with CUDA knows their kernels anywhere."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import graphsplit as gs
from graphsplit.api.calls.argument_splitting import resolve_split
from graphsplit.api.calls.plan_requests import PlanRequest
from graphsplit.api.options import Options
from graphsplit.core import structures
from graphsplit.core.device_mesh import mesh_axes
from graphsplit.core.gpus import kernel_devices
from graphsplit.emission import EmittedGraph
from graphsplit.planning.state import State, state_of
from graphsplit.tracing.trace import Trace, trace_function


def plan_for_gpus(
    step: Callable[..., Any], arguments: Sequence[tf.Tensor], gpus: int = 3, **options: Any
) -> gs.inspect.Plan:
    """Return the plan that a process with GPUs makes: variables are on the first one, those of int32 on the CPU.

    Args:
      step, arguments: what is planned. Variables that are laid out on CPU:1, CPU:2, ... here are so there on GPU:0,
        GPU:1, ...; CPU:0 is the host.
      gpus: how many; a mesh has as many as it says.
      **options: as for `parallelize`.
    """
    axes = mesh_axes(options.pop("mesh", None))
    devices = [f"/device:GPU:{d}" for d in range(axes.count or gpus)]
    _, call = structures.flatten((tuple(arguments), {}))
    leaves = tuple(structures.TensorLeaf(x.dtype, tuple(x.shape)) for x in arguments)
    named = structures.Container(dict, tuple(f"argument_{i}" for i in range(len(leaves))), leaves)
    own = Options(mesh=axes, **options)
    splitting = resolve_split(own.split, named)
    names = [path for path, _ in structures.paths(named)]
    traced = trace_function(step, call, names).read(names, splitting.shapes)
    home, state = devices[0], state_on_gpus(traced)
    return PlanRequest(traced.program, splitting, own, devices, home, trace=traced, state=state).plan()


def state_on_gpus(trace: Trace) -> State:
    """Return where TensorFlow puts variables where there is a GPU: it has no int32 ones there."""
    pairs = zip(trace.program.captures, trace.captures, strict=True)
    held = {trace.program.ops[i].name: handle for i, handle in pairs if handle.dtype == tf.resource}
    places = {name: f"/device:{'CPU' if _holds_int32(handle) else 'GPU'}:0" for name, handle in held.items()}
    state = state_of(trace)
    return dataclasses.replace(state, devices=places, divisions=_on_gpus(dict(state.divisions)))


def _on_gpus(value: Any) -> Any:
    """Return how variables are several, with GPUs for the CPU devices after the first."""
    if isinstance(value, str):
        return re.sub(r"CPU:([1-9]\d*)", lambda found: f"GPU:{int(found[1]) - 1}", value)
    if isinstance(value, tuple):
        return tuple(map(_on_gpus, value))
    if isinstance(value, dict):
        return {name: _on_gpus(own) for name, own in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _on_gpus(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def _holds_int32(handle: tf.Tensor) -> bool:
    [held] = handle._handle_data.shape_and_type  # no public name says what is behind a handle
    return bool(held.dtype == tf.int32.as_datatype_enum)


def without_gpu_kernel(graph: EmittedGraph) -> Counter[str]:
    """Return the types of the nodes that are asked to run on GPUs and cannot; bodies run where their loop does."""
    nodes = [node for node in graph.nodes if "GPU" in node.device]
    nodes += [node for function in graph.library.function for node in function.node_def]
    return Counter(n.op for n in nodes if n.op != "Placeholder" and "GPU" not in kernel_devices(n))
