"""What a placement is made of: operations, the tensors between them, and transfers between devices. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

PlacedShape = tuple[int | None, ...]
NO_DATA = frozenset({"resource", "variant"})


@dataclass(frozen=True)
class PlacedOp:
    """One operation and where it runs.

    Attributes:
      name: its name; that of an operation inside a function body, loop or branch begins with the name of the call.
      type: the operation's type, `MatMul`.
      requested: the device that was asked for, "" if none was.
      actual: the device on which TensorFlow ran it; "" if that is not known, or the operation is not there any more.
      default: the device that TensorFlow is expected to choose if none was asked for.
      shard: the shard whose rows it works on; None for operations that run once.
      stage: the name of its stage, if it works on rows of a shard in one; "" for none.
      shapes, dtypes: of its outputs; None for an unknown size and for an unknown rank.
      output_bytes: size of its outputs, unknown ones counted as 0.
      flops: floating-point operations of one execution, a multiplication and an addition being two; None if unknown.
      variable: for the handle of a variable, the variable's name.
      parameter_bytes: for the handle of a variable, the size of its value.
      argument: for the placeholder of an argument, how users call that, `x`.
      role: what it is there for, if it is no operation of the function: the kind of a move, `"scatter"`; `"sizes"` for
        numbers of rows, `"order"` and `"relay"` for what waits or is sent on; "" for operations.
      source: the user's source line, `model.py:31`, or "".
      ran: False if it was looked for in the graphs that ran and has no part in them.
      reason: why `actual` differs from `requested`, or why it is missing.
      unsharded_reason: for an operation that carries rows of the batch and all the same runs once: why.
      gathered_bytes: for such an operation, the bytes that had to be gathered for it.
      backward: whether it belongs to a backward pass.
      body_of: the loop, branch or call in whose body it is; "" at the top level.
      prefix: what its name begins with before the name that graphsplit gave it, if it is in a graph that graphsplit
        wrote and somebody loaded: `StatefulPartitionedCall/`.
      written: the scopes that graphsplit put before the name that it has in the function, `shard_2/`; on a mesh, those
        of both axes.
      no_kernel: whether the device that was asked for has no kernel for it, as it is: TensorFlow then runs it on a CPU.
    """

    name: str
    type: str
    requested: str = ""
    actual: str = ""
    default: str = ""
    shard: int | None = None
    shapes: tuple[PlacedShape | None, ...] = ()
    dtypes: tuple[str, ...] = ()
    output_bytes: int = 0
    flops: int | None = None
    variable: str = ""
    parameter_bytes: int = 0
    source: str = ""
    ran: bool = True
    reason: str = ""
    unsharded_reason: str = ""
    gathered_bytes: int = 0
    backward: bool = False
    body_of: str = ""
    no_kernel: bool = False
    stage: str = ""
    argument: str = ""
    prefix: str = ""
    role: str = ""
    written: str = ""

    @property
    def own_name(self) -> str:
        """Return its name as graphsplit gave it, or as it is in the graph."""
        return self.name.removeprefix(self.prefix)

    @property
    def device(self) -> str:
        """Return the best knowledge of where it runs: actual, else requested, else the default."""
        return self.actual or self.requested or self.default

    @property
    def moved(self) -> bool:
        """Return whether it ran on another device than the one asked for."""
        requested = self.requested.removesuffix("*")  # `/device:GPU:*` is any GPU
        return bool(
            self.actual
            and requested
            and not (self.actual == requested or (requested.endswith(":") and requested in self.actual))
        )


@dataclass(frozen=True)
class Edge:
    """A tensor that one operation hands to another, or (`control`) that one waits for the other.

    Attributes:
      source, target: names of the operations.
      output: which output of `source` it is.
      bytes: its size, 0 if unknown.
      control: whether no tensor is handed over.
      operand: which input of `target` it is; -1 if it only waits, or gets the tensor from inside its own body.
    """

    source: str
    target: str
    output: int = 0
    bytes: int = 0
    dtype: str = ""
    control: bool = False
    operand: int = 0


@dataclass(frozen=True)
class Transfer:
    """A tensor sent from one device to another: once, however many operations there read it."""

    source: str
    output: int
    source_device: str
    target_device: str
    bytes: int
    readers: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.readers) - 1} more" if len(self.readers) > 1 else ""
        return f"{self.source}:{self.output} {self.source_device} -> {self.target_device} for {self.readers[0]}{more}"


@dataclass(frozen=True)
class DeviceTotals:
    """What one device has to do.

    Attributes:
      ops: operations that run there.
      flops: their floating-point operations where known; loop bodies count once.
      parameter_bytes: values of the variables that live there.
      activation_bytes: outputs of all operations there but constants and variables: what they would take if nothing
        were ever freed, an upper bound.
      received_bytes, sent_bytes: tensors from and to other devices.
    """

    device: str
    ops: int = 0
    flops: int = 0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class Change:
    """One difference between two placements of the same function: what, in which operation, before and after."""

    name: str
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what} {self.before or 'none'} -> {self.after or 'none'}"
