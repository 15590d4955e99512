"""Program: the single-device function as a flat list of operations. The planner reads it, nothing edits it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import Replicate, Shard
from graphsplit.core.polynomials import Symbol
from graphsplit.core.sizes import ROWS, Shape
from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.core.user_code import calling_class, line_in_models
from graphsplit.errors import CheckError
from graphsplit.program.row_numbers import InOrder, Numbers
from graphsplit.program.stages import Stage
from graphsplit.program.undefined_outputs import undefined_outputs

SIZES = "Sizes"
"""The type of an op that TensorFlow does not have: integers that follow from unknown sizes."""

TAPES = frozenset({"gradient_tape", "gradients"})
"""The scopes in which TensorFlow's tapes and `tf.gradients` put what they make."""

Locate = Callable[[str], Sequence[Any]]
"""From the name of an operation to the frames of the Python code that made it, outermost first."""


# Stateful, so that TensorFlow runs them where and when the graph says; they change nothing.
_CALL = re.compile(r"(?<![^/])(?:Stateful)?PartitionedCall(?:_\d+)?/")
_ONLY_READ = frozenset(
    {
        "Assert",
        "DeepCopy",
        "DeviceIndex",
        "GuaranteeConst",
        "LookupTableExportV2",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "NoOp",
        "Placeholder",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "StatelessRandomGetAlg",
        "VarHandleOp",
        "VarIsInitializedOp",
        "VariableShape",
    }
)
_NO_ATTRIBUTE = tf.compat.v1.AttrValue()


class Tensor(NamedTuple):
    """One output of one operation: the operation's position in the program and the output's number."""

    op: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on these


@dataclass(frozen=True)
class Provenance:
    """Where an operation comes from. It is read off names once, where tracing made them, and handed on from then on.

    Attributes:
      origin: the name of the operation of the traced function that it is, or was made for.
      stage: the stage that this one belongs to.
      backward: whether it runs in a stage's backward pass.
      is_gradient: whether TensorFlow made it for a tape, or for `tf.gradients`.
      column: which devices along the other axes of the mesh than the batch's run it, by number; None for what runs
        once, wherever.
      role, axis: `"op"`, or what it carries out, and along which such axis: the kind of a move, `"all-gather"`.
    """

    origin: str = ""
    stage: Stage | None = None
    backward: bool = False
    is_gradient: bool = False
    column: int | None = None
    role: str = "op"
    axis: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """One operation with everything a rule may look at.

    Attributes:
      inputs: the tensors it reads; every one is an output of an earlier operation.
      controls: positions of the operations that must have run before it.
      node: the `NodeDef`, for its attributes. Not to be changed.
      in_shapes, out_shapes: static shapes; `None` for an unknown size, and for an unknown rank; `Size` for what
        follows from unknown sizes.
      out_bytes: sizes in bytes, plain integers: for the stand-ins of unknown sizes, 0 where nothing is known.
      constants: values of the operands that are known integers: axes, shapes, permutations.
      symbols: those constants that depend on unknown sizes, as arrays of polynomials (`sizes`). Their values under
        `constants` are those for the stand-ins.
      yields: of an op of type `SIZES`, the polynomials.
      numbers: what is known of operands that may number rows.
      provenance: where it comes from.
      stateful: whether running it twice differs from running it once.
      bodies: for loops and branches, the functions that they call, by the functions' names.
      devices: where it runs, once: what is done for one part or copy of a variable; of the placeholder of a variable
        that is several, those of its parts or copies.
      layout: of the placeholder of a variable, how it lies: `Shard` where each shard uses its own part, `Replicate`
        where each device of a group has a copy; of another operation, the group on each of whose devices it runs once.
      divides: whether it puts together or takes apart what lies in parts because a variable does.
      merged: `"mean"`, `"difference"` or `"variance"`, of moments that are merged from those of each shard's own rows;
        `"center"` or `"row"`, of weighted ones.
    """

    index: int
    name: str
    type: str
    inputs: tuple[Tensor, ...]
    controls: tuple[int, ...]
    node: Any
    in_shapes: tuple[Shape | None, ...]
    out_shapes: tuple[Shape | None, ...]
    out_dtypes: tuple[tf.DType, ...]
    out_bytes: tuple[int, ...]
    constants: Mapping[int, np.ndarray]
    stateful: bool
    bodies: Mapping[str, Program] = field(default_factory=dict)
    symbols: Mapping[int, np.ndarray] = field(default_factory=dict)
    yields: np.ndarray | None = None
    numbers: Mapping[int, Numbers | InOrder] = field(default_factory=dict)
    provenance: Provenance = Provenance()
    devices: tuple[str, ...] = ()
    layout: Shard | Replicate | None = None
    divides: bool = False
    merged: str = ""

    def __repr__(self) -> str:
        return f"<{self.type} {self.name!r}>"

    @property
    def label(self) -> str:
        """Its type and name for people, who do not know the calls of functions that were inlined."""
        return f"{self.type} {_CALL.sub('', self.name)!r}"

    @property
    def stage(self) -> Stage | None:
        """The stage that it belongs to, with devices of its own."""
        return self.provenance.stage

    @property
    def device(self) -> str:
        """The one device on which it runs, as it is done for a part or copy of a variable; "" for any other."""
        return self.devices[0] if len(self.devices) == 1 else ""

    @property
    def is_constant(self) -> bool:
        """Return whether any device can make its value, whole, from nothing but sizes."""
        return self.type in ("Const", SIZES)

    @property
    def writes(self) -> bool:
        """Return whether it changes something outside of the program: a loop does if its body does."""
        if self.bodies:
            return any(body.writes for body in self.bodies.values())
        return self.stateful and self.type not in _ONLY_READ

    @property
    def has_columns(self) -> bool:
        """Return whether what it calls runs in several columns of a mesh."""
        inside = (op for body in self.bodies.values() for op in body.ops) if self.bodies else ()
        return any(op.provenance.column is not None or op.has_columns for op in inside)

    @property
    def sources(self) -> list[int]:
        """Return the positions of the operations that it reads and waits for."""
        return [*[tensor.op for tensor in self.inputs], *self.controls]

    def attr(self, name: str) -> Any:
        """Return an attribute as `AttrValue`, an empty one if the node has none of that name.

        (Indexing the proto's map would add the missing entry to the node.)
        """
        return self.node.attr.get(name, _NO_ATTRIBUTE)


@dataclass(frozen=True, eq=False)
class Program:
    """A traced function: operations in an order in which every one follows its inputs.

    Attributes:
      inputs: positions of the placeholders of the arguments, in the order of the flattened arguments.
      input_names: how the user calls each argument: `x`, `batch['image']`.
      captures: positions of the placeholders of captured tensors (variables, tables), after the inputs.
      outputs: what the function returns, flattened.
      effects: positions of operations that must run even if no output depends on them.
      library: functions that `While`, `If` and the like refer to.
      seeds: how many of the inputs, the last, are gradients of outputs.
      symbols: the unknown sizes for all of which it was read.
      notes: one sentence for each thing that tracing changed.
      locate: operation name -> the frames of the Python code that made it, outermost first; none if not known.
      stages: those that operations belong to, in the order in which shards go through them.
    """

    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    input_names: tuple[str, ...]
    captures: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    effects: tuple[int, ...]
    library: Any = field(repr=False)
    versions: Any = field(repr=False)
    seeds: int = 0
    symbols: tuple[Symbol, ...] = ()
    notes: tuple[str, ...] = ()
    locate: Locate = field(default=lambda _: (), repr=False)
    stages: tuple[Stage, ...] = field(default=(), repr=False)

    @functools.cached_property
    def copied(self) -> Mapping[int, Replicate]:
        """How variables lie that have a copy on each device of a group, by the positions of their placeholders."""
        lying = {i: self.ops[i].layout for i in self.captures}
        return {i: layout for i, layout in lying.items() if isinstance(layout, Replicate)}

    @functools.cached_property
    def has_parts_in_place(self) -> bool:
        """Whether shards use their own part of a variable."""
        return any(isinstance(self.ops[i].layout, Shard) for i in self.captures)

    def shape(self, tensor: Tensor) -> Shape | None:
        """Return the static shape of `tensor`."""
        return self.ops[tensor.op].out_shapes[tensor.index]

    def dtype(self, tensor: Tensor) -> tf.DType:
        """Return the dtype of `tensor`."""
        return self.ops[tensor.op].out_dtypes[tensor.index]

    def bytes(self, tensor: Tensor) -> int:
        """Return the size of `tensor` in bytes, 0 where its shape is not known."""
        return self.ops[tensor.op].out_bytes[tensor.index]

    def all_stages(self) -> tuple[Stage, ...]:
        """Return every stage, those in loops and branches too."""
        inside = (stage for op in self.ops for body in op.bodies.values() for stage in body.all_stages())
        return tuple(dict.fromkeys([*self.stages, *inside]))

    def line_of(self, op: Op) -> str:
        """Return the line of the user's code that made an operation, `model.py:31`, or ""."""
        return line_in_models(self.locate(op.provenance.origin or op.name))

    def layer_of(self, op: Op) -> str:
        """Return the class of the layer that an operation belongs to, or whose gradient it is: `Dense`; "" for none.

        A gradient's name is that of the operation which it differentiates, in a scope of the tape.
        """
        name = op.provenance.origin or op.name
        return calling_class(self.locate("/".join([scope for scope in name.split("/") if scope not in TAPES])))

    def copies_beside(self, op: Op) -> Replicate | None:
        """Return the group on each of whose devices an operation runs: of a variable that it is, reads or writes."""
        if isinstance(op.layout, Replicate):
            return op.layout
        return next((self.copied[t.op] for t in op.inputs if t.op in self.copied), None)

    @property
    def handles(self) -> list[tuple[int, str]]:
        """The position of each captured tensor, once for each part or copy that it has, and the device of that."""
        return [(i, device) for i in self.captures for device in self.ops[i].devices or ("",)]

    @property
    def batch_is_unknown(self) -> bool:
        """Return whether it was read for any number of rows."""
        return ROWS in self.symbols

    @property
    def writes(self) -> set[int]:
        """The positions of operations that change something outside of the program."""
        return {op.index for op in self.ops if op.writes}

    def check(self) -> None:
        """Raise `CheckError` unless the operations are in order, every reference exists and every constant is known."""
        for position, op in enumerate(self.ops):
            if op.index != position:
                raise CheckError(f"Operation {op.name!r} stands at {position} and says {op.index}.")
            for tensor in op.inputs:
                if not 0 <= tensor.op < position:
                    raise CheckError(f"Operation {op.name!r} reads {tensor}, which does not come before it.")
                if tensor.index >= len(self.ops[tensor.op].out_shapes):
                    raise CheckError(f"Operation {op.name!r} reads {tensor}, which has no such output.")
            for operand in op.constants:
                tensor = op.inputs[operand]
                if tensor.index in undefined_outputs(self.ops[tensor.op].node):
                    name = self.ops[tensor.op].name
                    raise CheckError(
                        f"Operation {op.name!r} takes output {tensor.index} of {name!r} for known, "
                        "which TensorFlow leaves undefined."
                    )
            if any(not 0 <= control < position for control in op.controls):
                raise CheckError(f"Operation {op.name!r} waits for an operation that does not come before it.")
        for tensor in self.outputs:
            if not 0 <= tensor.op < len(self.ops) or tensor.index >= len(self.ops[tensor.op].out_shapes):
                raise CheckError(f"The program returns {tensor}, which does not exist.")

    def __str__(self) -> str:
        lines = [f"Program: {len(self.ops)} operations, arguments {', '.join(self.input_names) or 'none'}"]
        for op in self.ops:
            shapes = ", ".join(str(list(s)) if s is not None else "?" for s in op.out_shapes)
            reads = ", ".join(f"%{t.op}" + (f":{t.index}" if t.index else "") for t in op.inputs)
            lines.append(f"  %{op.index} = {op.type}({reads}) -> {shapes}  # {op.name}")
        return "\n".join(lines)


# The first two are stateful so that TensorFlow keeps them though nobody reads them; run twice, they say the same twice.
# TensorFlow does not know the next two.
_REPEATABLE = frozenset({"CheckNumerics", "CheckNumericsV2", SIZES, "Placeholder"})


@functools.cache
def is_stateful(op_type: str) -> bool:
    """Return whether running an op of this type twice differs from running it once."""
    return op_type not in _REPEATABLE and bool(op_definition(op_type).is_stateful)


def is_repeatable(node: Any) -> bool:
    """Return whether running this node twice is running it once, though its type has side effects.

    cuDNN's recurrent kernels draw random numbers, and only where they drop out.
    """
    return bool(node.op.startswith("CudnnRNN") and "dropout" in node.attr and not node.attr["dropout"].f)


def is_write(op_type: str) -> bool:
    """Return whether an op of this type changes something outside of the program."""
    return op_type not in _ONLY_READ and is_stateful(op_type)
