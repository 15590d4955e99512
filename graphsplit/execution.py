"""Execution: an emitted graph as a callable on flat tensors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import tensorflow as tf

from graphsplit.emission import emit
from graphsplit.graphdefs import function_definition
from graphsplit.plans import Plan
from graphsplit.tensorflow_internals import RuntimeFunction
from graphsplit.tracing import Trace

_serial = itertools.count()


class Executable:
    """A plan made runnable: call it with the flat argument tensors, get the flat results."""

    def __init__(self, trace: Trace, plan: Plan, name: str):
        self.plan = plan
        self.emitted = emit(plan, _resource_devices(trace, plan))
        self._captures = trace.captures
        self._keep_alive = (trace.function, trace.variables)
        program = plan.program
        graph = self.emitted
        label = re.sub(r"\W", "_", name)
        definition = function_definition(
            f"graphsplit_{label}_{next(_serial)}",
            graph.nodes,
            (*graph.inputs, *graph.captures),
            graph.outputs,
            graph.effects,
        )
        positions = (*program.inputs, *program.captures)
        specs = [_spec(program.ops[i].out_dtypes[0], program.ops[i].out_shapes[0]) for i in positions]
        outs = [
            _spec(program.ops[t.op].out_dtypes[t.index], program.ops[t.op].out_shapes[t.index]) for t in program.outputs
        ]
        self._function = RuntimeFunction(definition, graph.library.function, specs, outs)

    def __call__(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run on the flat arguments."""
        return self._function([*tensors, *self._captures])


def _spec(dtype: tf.DType, shape: tuple[int | None, ...] | None) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype)


def _resource_devices(trace: Trace, plan: Plan) -> dict[str, str]:
    """Return where captured variables and tables live, by the name of their placeholder."""
    devices = {}
    for position, handle in zip(plan.program.captures, trace.captures, strict=True):
        if handle.dtype == tf.resource and handle.device:
            devices[plan.program.ops[position].name] = handle.device
    return devices
