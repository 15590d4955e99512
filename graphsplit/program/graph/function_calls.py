"""Functions that operations call: which, with which arguments, new names for changed ones, and bodies in their place.

Calls are replaced by what is called (`inline_calls`): a flat graph, whose effects keep their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.core.protos import (
    GraphDef,
    functions_named,
    inputs_of,
    make_node,
    output_names,
    prefixed,
    source_of,
    split_reference,
    with_inputs,
)
from graphsplit.errors import UnsupportedError
from graphsplit.program.graph.graph import reached


@dataclass(frozen=True)
class ControlFlow:
    """How an op type calls functions.

    Attributes:
      functions: the attributes that name them.
      types: the attribute with the types of their arguments.
      chooses: whether its first operand says which function to call, and is not handed on.
      loops: whether what a function returns is handed to it again.
      compiled: whether XLA compiles the function as a whole. (Other calls are inlined.)
      stateless: the type of the same op without effects.
    """

    functions: tuple[str, ...]
    types: str = "Tin"
    chooses: bool = False
    loops: bool = False
    compiled: bool = False
    stateless: str = ""


_WHILE = ControlFlow(("cond", "body"), "T", loops=True, stateless="StatelessWhile")
_IF = ControlFlow(("then_branch", "else_branch"), chooses=True, stateless="StatelessIf")
_CASE = ControlFlow(("branches",), chooses=True, stateless="StatelessCase")
_CALL = ControlFlow(("f",), compiled=True, stateless="PartitionedCall")
CONTROL_FLOW = {
    "While": _WHILE,
    "StatelessWhile": _WHILE,
    "If": _IF,
    "StatelessIf": _IF,
    "Case": _CASE,
    "StatelessCase": _CASE,
    "PartitionedCall": _CALL,
    "StatefulPartitionedCall": _CALL,
}


_MOST_LEVELS = 50


def function_names(node: Any) -> list[str]:
    """Return the functions that a control-flow node names, in the order of its attributes."""
    names = []
    for attribute in CONTROL_FLOW[node.op].functions:
        value = node.attr[attribute]
        names += [value.func.name] if value.HasField("func") else [f.name for f in value.list.func]
    return names


def functions_called(nodes: Iterable[Any], library: Mapping[str, Any]) -> list[Any]:
    """Return the functions of a library that run where nodes do: those that they name, those that these name, ..."""
    names = reached(functions_named(nodes, library), lambda name: functions_named(library[name].node_def, library))
    return [library[name] for name in names]


def check_nesting(nodes: Iterable[Any], library: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` if functions in functions are too many levels for Python's stack.

    (Planning needs 12 of its 1,000 frames for each. With 100 levels TensorFlow takes 10 seconds for one run.)
    """
    level: Sequence[str] = ()
    for _ in range(_MOST_LEVELS + 1):
        calling = [node for node in nodes if node.op in CONTROL_FLOW]
        level = [name for name in dict.fromkeys(n for node in calling for n in function_names(node)) if name in library]
        if not level:
            return
        nodes = [node for name in level for node in library[name].node_def]
    raise UnsupportedError(
        f"Loops and branches are nested more than {_MOST_LEVELS} levels deep, down to the function {level[0]!r} and "
        "further. Merge some of them into one tf.while_loop or tf.switch_case."
    )


def rename_functions(node: Any, names: Mapping[str, str]) -> None:
    """Let a control-flow node name other functions."""
    for attribute in CONTROL_FLOW[node.op].functions:
        value = node.attr[attribute]
        for function in [value.func] if value.HasField("func") else value.list.func:
            function.name = names.get(function.name, function.name)


def hand_over(node: Any, references: Sequence[str]) -> None:
    """Let a control-flow node hand more arguments to its functions, 64-bit integers."""
    if references:
        data, controls = inputs_of(node)
        node.input[:] = [*data, *references, *controls]
        types = node.attr[CONTROL_FLOW[node.op].types].list.type
        types.extend([tf.int64.as_datatype_enum] * len(references))
        if CONTROL_FLOW[node.op].loops:
            del node.attr["output_shapes"].list.shape[:]  # TensorFlow infers them again


def named_by_content(function: Any) -> Any:
    """Return `function` under a name that its content determines: equal functions are one, others never clash."""
    result = deepcopy(function)
    base = result.signature.name.split("__graphsplit_")[0]
    result.signature.name = ""
    digest = hashlib.sha256(result.SerializeToString(deterministic=True)).hexdigest()[:16]
    result.signature.name = f"{base}__graphsplit_{digest}"
    return result


CALL_TYPES = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
KNOWN_INSIDE = "/known"
"""The end of the name of a constant that stands in a body for an argument, behind the argument's name."""
XLA_ATTRIBUTE = "_XlaMustCompile"


def is_compiled(node: Any) -> bool:
    """Return whether a call is compiled by XLA as a whole (`jit_compile=True`)."""
    return XLA_ATTRIBUTE in node.attr and bool(node.attr[XLA_ATTRIBUTE].b)


def function_called(node: Any, library: Mapping[str, Any]) -> Any:
    """Return the function of a library that a node does nothing but call; None if it is no call, or of no such one."""
    return library.get(node.attr["f"].func.name if node.op in CALL_TYPES else node.op)


class Body:
    """The body of a function, read in a place of a flat graph.

    Args:
      function: its `FunctionDef`.
      prefix: what comes before the names of its nodes there.
      arguments: what stands for its arguments there.
      library: the functions that its nodes may have as their types, by name.
    """

    def __init__(self, function: Any, prefix: str, arguments: Sequence[str], library: Mapping[str, Any]):
        self.nodes, self.prefix = function.node_def, prefix
        self.arguments = {a.name: arguments[k] for k, a in enumerate(function.signature.input_arg)}
        self.handles = {a.name for a in function.signature.input_arg if a.type == tf.resource.as_datatype_enum}
        self._function, self._library = function, library
        self._outputs: dict[str, list[str]] = {}
        self._by_name = {node.name: node for node in function.node_def}

    def reference(self, text: str) -> str:
        """Return what a node of the body calls `text` (`node:output_name:0`) as the flat graph does (`node:2`)."""
        name = source_of(text)
        if name in self.arguments:
            return f"^{source_of(self.arguments[name])}" if text[0] == "^" else self.arguments[name]
        if text[0] == "^":
            return prefixed(self.prefix, text)
        if name not in self._outputs:
            self._outputs[name] = output_names(self._by_name[name], self._library)
        return f"{self.prefix}{name}:{self._outputs[name].index(text.partition(':')[2])}"

    @property
    def results(self) -> list[str]:
        """The references of what the function returns."""
        return [self.reference(self._function.ret[output.name]) for output in self._function.signature.output_arg]

    @property
    def effects(self) -> list[str]:
        """The names of the nodes that must run."""
        return [self.prefix + name for name in self._function.control_ret.values()]


class Replaced:
    """Calls in whose place there are bodies now, and what stands for what others read of them, or wait for."""

    def __init__(self) -> None:
        self._results: dict[str, str] = {}  # "call:2" -> the reference inside of the body
        self._ends: dict[str, list[str]] = {}  # "call" -> the nodes that have run when the call has
        self._spelled: set[str] = (
            set()
        )  # how others may name them: few do, and one look at all that a node reads says so

    def add(self, name: str, body: Body, more_ends: Iterable[str]) -> None:
        """Note that a body is in the place of a call, which has ended when its effects and others have run."""
        results = {f"{name}:{k}": reference for k, reference in enumerate(body.results)}
        self._results.update(results)
        self._spelled.update(results, [name, f"^{name}"])
        self._ends[name] = [*body.effects, *more_ends]

    def concern(self, references: Iterable[str]) -> bool:
        """Return whether something else stands for any of some references."""
        return not self._spelled.isdisjoint(references)

    def now(self, references: Iterable[str]) -> list[str]:
        """Return what stands for references: tensors first, and each wait once."""
        references = list(references)
        waits = [f"^{end}" for r in references if r[0] == "^" for end in self._finished(r[1:])]
        return [*[self._tensor(r) for r in references if r[0] != "^"], *dict.fromkeys(waits)]

    def _tensor(self, reference: str) -> str:
        while source_of(reference) in self._ends:
            reference = self._results["{}:{}".format(*split_reference(reference))]
        return reference

    def _finished(self, name: str) -> Iterator[str]:
        pending = [name]
        while pending:
            name = pending.pop()
            if name not in self._ends:
                yield name
            pending += reversed(self._ends.get(name, ()))


def inline_calls(graph: Any, results: Sequence[str], compiled: bool = False) -> tuple[list[Any], list[str]]:
    """Replace every function call in `graph` by the called body.

    Bodies of `While`, `If` and other ops that take functions as attributes stay in the library. Effects keep their
    order: what waited for the call waits for the effects of its body, and the body waits for what the call waited for.

    Args:
      graph: a `GraphDef`; its nodes are edited in place.
      results: references (`node:0`) and effects (`^node`) to follow into the bodies.
      compiled: whether calls that XLA compiles as a whole are replaced too. If not, they stay calls.

    Returns:
      The nodes, and `results` as they are named now.
    """
    library, replaced = {function.signature.name: function for function in graph.library.function}, Replaced()
    called = CALL_TYPES | library.keys()
    inlined: list[Any] = []
    pending = [iter(graph.node)]  # the graph, and the bodies around the one that is read
    while pending:
        node = next(pending[-1], None)
        if node is None:
            pending.pop()
            continue
        kind = node.op
        stays = (kind in CALL_TYPES and is_compiled(node) and not compiled) or kind not in called
        function = None if stays else function_called(node, library)
        if function is None:
            inlined.append(node)
            continue
        data, controls = inputs_of(node)
        body, begin = Body(function, f"{node.name}/", data, library), f"{node.name}/begin"
        inlined += [make_node(begin, "NoOp", controls)] if controls else []
        inside = [name for name in map(source_of, body.results) if name.startswith(body.prefix)]
        replaced.add(node.name, body, [*inside, *([begin] if controls else [])])
        pending.append(_written(body, node.device, begin if controls else ""))
    for node in inlined:
        if replaced.concern(node.input):
            node.input[:] = replaced.now(node.input)
    names = [replaced.now([reference]) for reference in results]
    return inlined, [name for names_of_result in names for name in names_of_result]


def _written(body: Body, device: str, begin: str) -> Iterator[Any]:
    """Yield the nodes of a body as they are in the flat graph; those that read nothing of it wait for `begin`.

    So does what is given a variable: a loop that waits by what else it is given may have its read taken out of it.
    """
    for original in body.nodes:
        sources = set(map(source_of, original.input)) if begin else set()
        is_first = begin and (sources <= body.arguments.keys() or not sources.isdisjoint(body.handles))
        waits = [f"^{begin}"] if is_first else []
        node = with_inputs(original, [*map(body.reference, original.input), *waits])
        node.name, node.device = body.prefix + original.name, original.device or device
        yield node


def function_graph(
    function: Any, library: Iterable[Any], versions: Any, shapes: Sequence[Any], constants: Mapping[int, Any]
) -> tuple[Any, list[str]]:
    """Return the body of a function as a `GraphDef`, and the references of its outputs.

    The arguments become placeholders of their names, with the given shapes (tuples, None where unknown). Where the
    value of one is known, the body reads a constant in its place.

    Args:
      constants: the `Const` nodes of those arguments, by position; they get names here.
    """
    graph = GraphDef(versions=versions)
    graph.library.function.extend(library)
    for argument, shape in zip(function.signature.input_arg, shapes, strict=True):
        value = tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto())
        dtype = tf.as_dtype(argument.type)
        graph.node.append(make_node(argument.name, "Placeholder", [], dtype=dtype, shape=value))
    arguments, names = [node.name for node in graph.node], {node.name for node in function.node_def}
    for i, constant in constants.items():
        name = f"{arguments[i]}{KNOWN_INSIDE}"
        while name in names:
            name += "_"
        graph.node.add().CopyFrom(constant)
        graph.node[-1].name = arguments[i] = name
    functions = {other.signature.name: other for other in graph.library.function}
    body = Body(function, "", arguments, functions)
    graph.node.extend(_written(body, "", ""))
    return graph, body.results
