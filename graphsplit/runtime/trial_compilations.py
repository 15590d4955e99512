"""Trial compilations: what XLA refuses of a plan's graph, found out before it runs (`jit_compile="auto"`).

XLA's registry says for which operations it has kernels. That a loop's list has no greatest length, that a shape follows
from data or changes from turn to turn, it says when it compiles. So each different cluster is lowered once, for the
shapes that it is going to be called with; nothing runs, and XLA's own compilation, which takes longer, is not begun.
What the refusal names is left out of clusters, and the new ones are tried.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.core.devices import missing_devices, name_for_runtime, task_of
from graphsplit.core.errors import bullet_list
from graphsplit.core.graphdefs import constant_node, split_reference
from graphsplit.core.layouts import Cut
from graphsplit.core.parted_variables import parts_of
from graphsplit.core.polynomials import Point
from graphsplit.core.symbolic_sizes import Shape
from graphsplit.core.tensorflow_internals import RuntimeFunction, resource_value
from graphsplit.core.user_code import user_stack_level
from graphsplit.emission.clusters import kind_of_device
from graphsplit.emission.compiled_calls import CompiledNodes, compile_clusters
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.graph.compilability import holds_variants, why_not_compiled
from graphsplit.graph.function_calls import named_by_content
from graphsplit.planning.compiled_text import NO_WORK
from graphsplit.planning.plan import Plan
from graphsplit.program.shape_inference import Findings, import_for_shapes, known_shape
from graphsplit.runtime.failures import callers, words_of_xla
from graphsplit.runtime.handles import captured
from graphsplit.tracing.trace import Trace

_NODES = re.compile(r"(?:\{\{function_node ([^}]*)\}\}\s*)?\{\{node ([^}]*)\}\}")
_FEW = 8  # rounds in which single operations are left out; then whole clusters
_ELSEWHERE = "XLA can only be asked in the process that has the device"
_NOT_HERE = "it takes what the graph around the call makes"
_SHARED = "its list of tensors is read or made outside of what is compiled"
_UNKNOWN = "the size of what it takes is not known before it runs"

Answers = dict[tuple[Any, ...], str]


class Trials:
    """The trial compilations of a function, for all its plans.

    Args:
      name: the function's.
    """

    def __init__(self, name: str):
        self._name = name
        self._answers: Answers = {}
        self._told: set[str] = set()

    def asked(self, plan: Plan, trace: Trace, point: Point) -> Plan:
        """Return a plan that says what XLA refuses, and warn of what is new; as it is, if that is not to be found out.

        Args:
          plan: of the trace's program, or of that in parts.
          trace: what was captured.
          point: what the sizes are that are not known.
        """
        if not self._are_for(plan, point):
            return plan
        graph = emit(plan)
        asking = Asking(plan, graph, trace, point, self._answers)
        asking.compiled(graph.nodes, graph.outputs, graph.effects, {})
        return self.told(plan, asking)

    def asking(self, plan: Plan, graph: EmittedGraph, trace: Trace, point: Point) -> Asking | None:
        """Return what asks XLA about parts of the graph emitted from a plan; None if that is not to be found out."""
        return Asking(plan, graph, trace, point, self._answers) if self._are_for(plan, point) else None

    def _are_for(self, plan: Plan, point: Point) -> bool:
        """Return whether XLA is to be asked about a plan, and can be: its sizes are known and its devices are here."""
        known = set(plan.program.symbols) <= set(point)
        return plan.jit_compile == "auto" and known and not missing_devices(sorted({*plan.devices, plan.home}))

    def told(self, plan: Plan, asking: Asking | None) -> Plan:
        """Return a plan that says what was refused, and warn of what is new."""
        if asking is None:
            return plan
        plan = replace(plan, refused={**(plan.refused or {}), **asking.refused})
        self._warn(plan)
        return plan

    def _warn(self, plan: Plan) -> None:
        found: dict[tuple[str, str], dict[str, None]] = {}
        for position, why in (plan.refused or {}).items():
            op = plan.program.ops[position]
            if op.type in NO_WORK:
                continue
            found.setdefault((plan.program.line_of(op), why), {})[op.type] = None
        lines = [f"{where}{where and ', '}{', '.join(types)}: {why}" for (where, why), types in found.items()]
        new = [line for line in lines if line not in self._told]
        self._told.update(new)
        if new:
            warnings.warn(
                f"jit_compile='auto' leaves these operations of {self._name} uncompiled:\n{bullet_list(new)}\n"
                "All others that XLA has kernels for are compiled; results are the same.",
                stacklevel=user_stack_level(),
            )


class _Call(NamedTuple):
    """A compiled call that is tried.

    Attributes:
      device: where it runs.
      function: the `FunctionDef`.
      read: the references that it reads, as the emitted graph has them.
      members: of the emitted graph, by their names in the function.
    """

    device: str
    function: Any
    read: Sequence[str]
    members: Mapping[str, Any]


class _Argument(NamedTuple):
    """What stands for a tensor that a call takes.

    Attributes:
      tensor: a variable's handle, known integers (an array), or a specification.
      said: what of it the answer depends on.
      reason: why there is none, if there is none.
    """

    tensor: Any = None
    said: str = ""
    reason: str = ""


class Asking:
    """XLA's answers about the graph of one plan, for one choice of sizes.

    Attributes:
      refused: the operations that it refuses, by position, each with the reason.
    """

    def __init__(self, plan: Plan, graph: EmittedGraph, trace: Trace, point: Point, answers: Answers):
        self.refused: dict[int, str] = {}
        self._graph = graph
        self._nodes = graph.by_name
        self._library = {function.signature.name: function for function in graph.library.function}
        with tf.init_scope():
            self._handles = dict(zip(graph.captures, captured(trace, plan), strict=True))
        self._operations = _imported(plan, graph, _held(plan, trace, graph.captures), point)
        self._answers = answers
        self._stand_ins: Mapping[str, str] = {}
        self._part: Mapping[str, Any] = {}

    def compiled(
        self, nodes: Sequence[Any], outputs: Sequence[str], effects: Sequence[str], stand_ins: Mapping[str, str]
    ) -> CompiledNodes:
        """Return some of the graph's nodes with each cluster that XLA compiles as one call.

        Args:
          nodes, outputs, effects: see `compile_clusters`.
          stand_ins: for placeholders that the graph does not have, the references that they stand for.
        """
        self._stand_ins, self._part = stand_ins, {node.name: node for node in nodes}
        rounds, own = 0, dict[int, str]()
        while True:
            graph = replace(self._graph, uncompiled=self._graph.uncompiled | frozenset(own))
            compiled = compile_clusters(graph, nodes, outputs, effects)
            rounds += 1
            new: dict[int, str] = {}
            for call in self._calls(compiled):
                new.update(self._refused_of(call, rounds > _FEW))
            if not new:
                self.refused.update({**own, **self._with_them(nodes, compiled, own)})
                return compiled
            own.update(new)

    def _calls(self, compiled: CompiledNodes) -> list[_Call]:
        members: dict[str, dict[str, Any]] = {}
        for name, call in compiled.inside.items():
            shard = self._graph.origins[name].shard
            prefix = "" if shard is None else self._graph.prefixes[shard]
            members.setdefault(call, {})[name.removeprefix(prefix)] = self._nodes[name]
        functions = {function.signature.name: function for function in compiled.functions}
        calls = [node for node in compiled.nodes if node.name in compiled.given]
        found = [
            _Call(n.device, functions[n.attr["f"].func.name], compiled.given[n.name], members[n.name]) for n in calls
        ]
        return sorted(found, key=lambda call: task_of(call.device) is not None)  # others answer for those elsewhere

    def _refused_of(self, call: _Call, all_of_it: bool) -> dict[int, str]:
        """Return the operations of a call that have to be left out, by position, with the reason."""
        given = [self._argument(reference) for reference in call.read]
        if any(what.reason == _UNKNOWN for what in given):
            return self._positions([node for node in call.members.values() if self._is_of_unknown_size(node)], _UNKNOWN)
        if reason := next((what.reason for what in given if what.reason), ""):
            return self._positions(call.members.values(), reason)
        key = (call.function.signature.name, kind_of_device(call.device), *[what.said for what in given])
        if key not in self._answers:
            if task_of(call.device) is not None:
                return self._positions(call.members.values(), _ELSEWHERE)
            self._answers[key] = self._asked(call, given)
        why = self._answers[key]
        return self._culprits(call, why, all_of_it) if why else {}

    def _asked(self, call: _Call, given: Sequence[_Argument]) -> str:
        """Return why XLA refuses a call, in TensorFlow's words; "" if it does not."""
        definition, variables = _for_trial(call.function, given)
        types = [tf.as_dtype(argument.type) for argument in definition.signature.input_arg]
        results = [tf.TensorSpec(None, tf.as_dtype(argument.type)) for argument in definition.signature.output_arg]
        specs = [what.tensor for what in given if isinstance(what.tensor, tf.TensorSpec)]
        library = list(self._library.values())
        function = RuntimeFunction(definition, library, [tf.TensorSpec(None, dtype) for dtype in types], results)
        return function.why_xla_refuses(name_for_runtime(call.device), specs, variables)

    def _argument(self, reference: str) -> _Argument:
        """Return what stands for a tensor that a call reads."""
        name, index = split_reference(reference)
        while name not in self._operations:  # it stands for another one, or is there for shards that have rows
            name, index = split_reference(self._stand_ins.get(name) or self._part[name].input[0])
        symbol = self._operations[name].outputs[index]
        if symbol.dtype == tf.resource:
            return self._variable(name)
        if not symbol.shape.is_fully_defined():
            return _Argument(reason=_UNKNOWN)
        value = tf.get_static_value(symbol) if symbol.dtype.is_integer else None
        if value is not None:
            return _Argument(value, f"{symbol.dtype.name}{value.tolist()}")
        return _Argument(tf.TensorSpec(symbol.shape, symbol.dtype), f"{symbol.dtype.name}{symbol.shape}")

    def _variable(self, name: str) -> _Argument:
        while name not in self._handles:  # it was sent, or is there for shards that have rows
            name = split_reference(self._nodes[name].input[0])[0]
        handle = self._handles[name]
        if not hasattr(handle, "numpy"):
            return _Argument(reason=_NOT_HERE)
        return _Argument(handle, str(resource_value(handle)))

    def _is_of_unknown_size(self, node: Any) -> bool:
        operation = self._operations[node.name]
        return any(
            not tensor.shape.is_fully_defined()
            for tensor in (*operation.inputs, *operation.outputs)
            if tensor.dtype not in (tf.resource, tf.variant)
        )

    def _culprits(self, call: _Call, why: str, all_of_it: bool) -> dict[int, str]:
        """Return the operations that a refusal names, or else all of the call, by position, with the reason."""
        words = words_of_xla(why).removeprefix("Failed getting HLO text: '")
        words = re.split(r"\. (?=[A-Z])|\n", words)[0].rstrip(".")
        named: list[Any] = []
        for function, name in () if all_of_it else _NODES.findall(why):
            own = [node for inner, node in call.members.items() if f"{name}/".startswith(f"{inner}/")]
            named += own or callers(call.members.values(), self._library, function)
        return self._positions(named or call.members.values(), words)

    def _positions(self, nodes: Iterable[Any], why: str) -> dict[int, str]:
        found = {self._graph.origins[node.name].op for node in nodes}
        return dict.fromkeys(sorted(p for p in found if p is not None), why)

    def _with_them(self, nodes: Sequence[Any], last: CompiledNodes, own: Mapping[int, str]) -> dict[int, str]:
        """Return the operations that XLA could compile, were the lists that they read or make not used elsewhere."""
        lists = [
            node
            for node in nodes
            if node.name in self._graph.origins and node.name not in last.inside and holds_variants(node)
            if not why_not_compiled(node, self._library, kind_of_device(node.device))
        ]
        left = self._graph.uncompiled | set(own)
        return {position: why for position, why in self._positions(lists, _SHARED).items() if position not in left}


def _for_trial(function: Any, given: Sequence[_Argument]) -> tuple[Any, list[tf.Tensor]]:
    """Return a function with known integers inside, which takes variables last; and these."""
    made = deepcopy(function)
    arguments = list(zip(function.signature.input_arg, given, strict=True))
    constants = {a.name: what.tensor for a, what in arguments if isinstance(what.tensor, np.ndarray)}
    variables = [(a, what.tensor) for a, what in arguments if a.type == tf.resource.as_datatype_enum]
    others = [a for a, _ in arguments if a.name not in constants and a.type != tf.resource.as_datatype_enum]
    del made.signature.input_arg[:]
    made.signature.input_arg.extend([*others, *[argument for argument, _ in variables]])
    for node in made.node_def:
        node.input[:] = [f"{reference}:output:0" if reference in constants else reference for reference in node.input]
    for result, reference in function.ret.items():
        made.ret[result] = f"{reference}:output:0" if reference in constants else reference
    made.node_def.extend([constant_node(name, value, tf.as_dtype(value.dtype)) for name, value in constants.items()])
    return named_by_content(made), [handle for _, handle in variables]


def _imported(plan: Plan, graph: EmittedGraph, held: Mapping[str, Any], point: Point) -> dict[str, tf.Operation]:
    """Return the nodes of a graph as operations that know their shapes, by name."""
    positions = dict(zip(graph.inputs, plan.program.inputs, strict=True))
    given: dict[str, Shape | None] = {name: plan.program.ops[i].out_shapes[0] for name, i in positions.items()}
    operations = import_for_shapes(graph.nodes, graph.versions, held, given, Findings(), point)
    return {operation.name: operation for operation in operations}


def _held(plan: Plan, trace: Trace, names: Sequence[str]) -> dict[str, tuple[tf.DType, Shape | None]]:
    """Return dtype and shape of what captured variables and parts of variables hold, by placeholder."""
    found = {}
    for name, (k, part) in zip(names, plan.state.parts or [(k, 0) for k in range(len(names))], strict=True):
        parts = parts_of(trace.captures[k])
        value = resource_value(trace.captures[k]) if trace.captures[k].dtype == tf.resource else None
        if value is not None:
            shape = known_shape(value[1])
            if parts is not None and isinstance(parts.division, Cut) and name not in plan.state.whole:
                shape = parts.shape_of(part)
            found[name] = (value[0], shape)
    return found
