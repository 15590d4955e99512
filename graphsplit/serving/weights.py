"""Weights of a SavedModel that are replicated: every device holds a copy of them, so that none travels per request.

A copy is a resource of its own that is made when the model is loaded, from the variable that the checkpoint restored:
on disk there is one. For the plan they are replicated variables like all others.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

import tensorflow as tf

from graphsplit.errors import UnsupportedError, bullet_list
from graphsplit.planning.plan import Plan
from graphsplit.program.program import Program


class Mirror(tf.saved_model.experimental.TrackableResource):  # type: ignore[misc]
    """A copy of a variable on a device, filled when the SavedModel that holds it is loaded.

    Whoever needs the copy names it anew, inside of a function: there, TensorFlow replaces a device that the server does
    not have. On a node outside of all functions, where a captured handle would stand, loading in C++ refuses it.
    """

    def __init__(self, variable: tf.Variable, device: str):
        super().__init__()
        self._variable = variable
        self._device = device
        self._shared_name = f"graphsplit_{uuid.uuid4().hex}"

    def handle(self) -> tf.Tensor:
        """Return the copy's handle in the function that is being traced."""
        with tf.device(self._device):
            return tf.raw_ops.VarHandleOp(
                dtype=self._variable.dtype, shape=self._variable.shape, shared_name=self._shared_name
            )

    def _create_resource(self) -> tf.Tensor:  # TensorFlow asks for one; it holds nothing, on any server
        return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=f"{self._shared_name}_filled")

    def _initialize(self) -> None:
        tf.raw_ops.AssignVariableOp(resource=self.handle(), value=self._variable.read_value())

    def _destroy_resource(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self.handle(), ignore_lookup_error=True)


class Mirrors:
    """All copies that the signatures of one model share."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], Mirror] = {}
        self._variables: dict[int, tf.Variable] = {}

    def get(self, variable: tf.Variable, device: str) -> Mirror:
        """Return the copy of a variable on a device."""
        key = (id(variable), device)
        if key not in self._made:
            self._variables[id(variable)] = variable
            self._made[key] = Mirror(variable, device)
        return self._made[key]

    @property
    def made(self) -> list[Mirror]:
        """All copies."""
        return list(self._made.values())

    @property
    def bytes(self) -> int:
        """The size of the copied variables, each counted once."""
        return sum(int(v.dtype.size) * int(v.shape.num_elements() or 0) for v in self._variables.values())


def check_only_read(name: str, program: Program, variables: Mapping[str, tf.Variable]) -> None:
    """Raise `UnsupportedError` if a signature may change variables: then copies of them would go stale.

    Args:
      name: of the signature.
      program: of the signature.
      variables: the captured variables by the names of their placeholders.
    """
    ops = program.ops
    changed = {
        variables[ops[tensor.op].name].name
        for op in ops
        for tensor in op.inputs
        if ops[tensor.op].name in variables and op.type not in ("ReadVariableOp", "VariableShape")
    }
    if changed:
        raise UnsupportedError(
            f"replicate_weights=True, but the signature {name!r} changes variables, so copies would go stale:\n"
            f"{bullet_list(sorted(changed))}\n"
            "Leave it out (signatures=[...]), or keep one copy of the weights (replicate_weights=False)."
        )


def sent_bytes(plan: Plan) -> int:
    """Return how many bytes of whole values, weights above all, go from home to other devices each time."""
    away = sum(device != plan.home for device in dict.fromkeys(plan.devices))
    return sum(plan.program.bytes(move.tensor) for move in plan.moves if move.kind == "broadcast") * away


def where_variables_live(devices: Sequence[str]) -> str:
    """Return where a loader puts variables without a device: the first GPU, or the CPU."""
    return "/device:GPU:0" if any("GPU" in name for name in devices) else "/device:CPU:0"
