"""The make_parallel recipe in TensorFlow 1 graphs: sessions, placeholders, variable scopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import names_of_devices
from graphsplit.errors import ArgumentError, bullet_list

v1 = tf.compat.v1


def make_parallel_in_graph(
    fn: Callable[..., Any], devices: int | str | Sequence[str] | None, inputs: Mapping[str, Any]
) -> Any:
    """Return `fn`'s outputs for `inputs`, computed in one tower per device. See `graphsplit.make_parallel`.

    A session knows its devices only when it is made, so names are not checked here. To run several CPU devices in one
    session, give it `ConfigProto(device_count={"CPU": n})`.
    """
    names = names_of_devices(devices, "num_gpus")
    tensors = {name: tf.convert_to_tensor(value) for name, value in inputs.items()}
    scalars = [f"{name} has shape []" for name, tensor in tensors.items() if tensor.shape.rank == 0]
    if scalars:
        raise ArgumentError(
            f"make_parallel splits every input along its first axis; these have none:\n{bullet_list(scalars)}\n"
            "Let the function capture them instead: functools.partial(fn, ...)."
        )
    pieces = {name: _split(tensor, len(names)) for name, tensor in tensors.items()}
    towers = []
    for i, device in enumerate(names):
        ids_before = {id(variable) for variable in v1.global_variables()}
        reuse = v1.AUTO_REUSE if i == 0 else True
        with tf.device(device), v1.variable_scope(v1.get_variable_scope(), reuse=reuse), v1.name_scope(f"tower_{i}"):
            towers.append(fn(**{name: pieces[name][i] for name in tensors}))
        if i:
            _check_shared([variable.name for variable in v1.global_variables() if id(variable) not in ids_before])
    flat = [[tf.convert_to_tensor(output) for output in tf.nest.flatten(tower)] for tower in towers]
    _check_have_rows(flat[0])
    joined = [tf.concat(parts, axis=0) for parts in zip(*flat, strict=True)]
    return tf.nest.pack_sequence_as(towers[0], joined)


def _check_shared(new_variables: list[str]) -> None:
    """Raise `ArgumentError` if a tower after the first has made variables."""
    if new_variables:
        raise ArgumentError(
            "make_parallel runs the function once for each device, and each run made new variables, so devices would "
            "train different models.\n"
            f"{bullet_list(new_variables)}\n"
            "Make them with tf.compat.v1.get_variable or tf.compat.v1.layers, which share them by name, or before and "
            "outside of the function."
        )


def _check_have_rows(outputs: Sequence[tf.Tensor]) -> None:
    """Raise `ArgumentError` for outputs that are no rows and cannot be joined."""
    scalars = [f"output {k}, {output.name}" for k, output in enumerate(outputs) if output.shape.rank == 0]
    if scalars:
        raise ArgumentError(
            f"make_parallel joins outputs along their first axis; these have none:\n{bullet_list(scalars)}\n"
            "Return a value for each row and reduce what make_parallel returns: tf.reduce_mean(make_parallel(...))."
        )


def _split(tensor: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Split along the first axis, the first pieces one row longer where it does not divide; the size may be unknown."""
    rows = tf.shape(tensor)[0]
    sizes = rows // count + tf.cast(tf.range(count) < rows % count, tf.int32)
    return list(tf.split(tensor, sizes, axis=0, num=count))
