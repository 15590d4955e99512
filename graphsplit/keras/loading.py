"""Weights from files, one variable after the other: no device has the whole of one in parts, and the host of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.api.layouts.variable_layouts import plain_variable
from graphsplit.core.tensorflow_internals import parse_checkpoint_objects
from graphsplit.core.user_code import user_stack_level
from graphsplit.core.variables.parted_variables import can_be_read_by_part, name_of, parts_of_variable
from graphsplit.core.variables.values import host_tensor
from graphsplit.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.keras.flavors import KERAS_3, flavor_of
from graphsplit.keras.safetensors_files import SUFFIXES, Names, readable, sources_of

_WEIGHTS = "model.weights.h5"  # in a .keras file
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"  # a checkpoint's tensor that says what the others belong to
_VALUE = "VARIABLE_VALUE"
_SHOWN = 20  # names in an error


def load_weights(
    target: Any, path: str | os.PathLike[str], names: Names | None = None, ignore: Sequence[str] = ()
) -> None:
    """Load the weights of a model that need not fit in one place: a file of Keras', a checkpoint, safetensors.

    The host reads one variable at a time, and each device gets its parts. (`model.load_weights` also makes variables
    whole on the first device, and reads a whole `.keras` file into memory, as TensorFlow does with a checkpoint.) The
    loaded weights are the same. Of safetensors the host reads one part at a time. A checkpoint is read twice: nothing
    is written before all checksums are right. If loading ends early all the same (an interrupt, a full memory), the
    error says which variables are new. A warning names values of a checkpoint for which the target has no variable.

    Args:
      target: a Keras model, for a file; for a checkpoint, what was saved, as it was: a `tf.train.Checkpoint`, a module,
        a model; for safetensors any of these, or variables. (Of a model these are its `weights`.)
      path: ends with `.weights.h5` or `.keras`; or is that of a checkpoint (its prefix); or ends with `.safetensors`,
        or `.safetensors.index.json`, Hugging Face's index of several files.
      names: of safetensors, which tensor each variable takes: a dictionary from names of variables, or a function. It
        gives the tensor's name; or that and the order in which the variable has its axes: `("up.weight", (1, 0))`.
        By default tensors have the variables' names, their paths in Keras 3.
      ignore: of safetensors, patterns of names of variables and tensors that are left out.

    Raises:
      ArgumentError: if a checkpoint lacks variables of the target, or has them in other shapes; for safetensors also,
        if a tensor is left over, two variables have one name, or floats meet integers; and if a file is damaged.
        Nothing is loaded then.
      UnsupportedError: for checkpoints that are not of objects, or with other state than variables (tables, iterators,
        slots of `tf.compat.v1` optimizers); without the library safetensors for such files.

    >>> import tempfile, tensorflow as tf, graphsplit as gs
    >>> saved, other = tf.Module(), tf.Module()
    >>> saved.w, other.w = tf.Variable(tf.ones((64, 8))), tf.Variable(tf.zeros((64, 8)))
    >>> path = tf.train.Checkpoint(saved).write(tempfile.mkdtemp() + "/weights")
    >>> gs.set_variable_layout(other, "sharded", devices=2)
    >>> gs.load_weights(tf.train.Checkpoint(other), path)
    >>> float(tf.reduce_sum(other.w))
    512.0
    """
    name = os.fspath(path)
    if name.endswith(SUFFIXES):
        _give(name, sources_of(target, name, names, ignore))
        return
    if names is not None or ignore:
        raise ArgumentError(f"names and ignore are for safetensors, and {name} is another file.")
    if name.endswith(".keras"):
        with tempfile.TemporaryDirectory() as folder:
            with readable(name), zipfile.ZipFile(name) as archive:
                weights = archive.extract(_WEIGHTS, folder)
            _load_file(target, weights, name)
    elif name.endswith((".h5", ".weights.json")):
        _load_file(target, name, name)
    else:
        _load_checkpoint(target, name)


def _load_file(model: Any, weights: str, path: str) -> None:
    """Load a file of weights, which is what a user calls `path`, or is in it."""
    with tf.device("CPU:0"), _loading(path) as done, contextlib.ExitStack() as stack:
        if flavor_of(model) is KERAS_3:
            stack.enter_context(_assigning_by_part(done))
        model.load_weights(weights)


@contextlib.contextmanager
def _assigning_by_part(done: list[str]) -> Iterator[None]:
    """Let variables of Keras 3 take arrays part by part: Keras makes a tensor of each before it hands it on.

    Args:
      done: takes the names of those that take values.
    """
    import keras

    kind, own_assign = keras.Variable, vars(keras.Variable).get("assign")
    original = kind.assign

    def assign(variable: Any, value: Any) -> Any:
        parts, by_part = parts_of_variable(variable.value), can_be_read_by_part(value)
        if not by_part or parts is None or not parts.take(value):
            value = original(variable, _whole(value, variable.value) if by_part else value)
        done.append(variable.path)
        return value

    kind.assign = assign
    try:
        yield
    finally:
        if own_assign is None:
            del kind.assign
        else:
            kind.assign = own_assign


def _load_checkpoint(target: Any, path: str) -> None:
    with readable(path):
        reader = tf.train.load_checkpoint(path)
        objects = parse_checkpoint_objects(reader.get_tensor(_OBJECTS)) if reader.has_tensor(_OBJECTS) else None
    if objects is None:
        raise UnsupportedError(
            f"{path} is a checkpoint of names, written by tf.compat.v1.train.Saver, and not of objects. Restore it "
            "with tf.train.Checkpoint, and save it again."
        )
    nodes = _nodes_of(target, objects.nodes)
    _check_has_variables_only(path, list(nodes.values()))
    shapes, loaded, missing = reader.get_variable_to_shape_map(), [], []
    for owner in tf.train.TrackableView(target).descendants():
        variable, node = plain_variable(owner), nodes.get(id(owner))
        if isinstance(variable, tf.Variable):
            key = node.attributes[0].checkpoint_key if node is not None and node.attributes else ""
            if key and tuple(shapes[key]) == tuple(variable.shape):
                loaded.append((variable, key))
            elif key or variable.name != "save_counter:0":
                missing.append(f"{name_of(variable)} {tuple(variable.shape)}")
    if missing:
        raise ArgumentError(
            f"The checkpoint {path} lacks variables of the target, or has them in other shapes:\n{bullet_list(missing)}"
        )
    with readable(path):
        # TensorFlow compares the checksums of what it reads; none is written before all are right
        for _, key in loaded:
            reader.get_tensor(key)
    _give(path, ((variable, reader.get_tensor(key)) for variable, key in loaded))
    unread_keys = shapes.keys() - {key for _, key in loaded} - {_OBJECTS}
    names = sorted(key.partition("/.ATTRIBUTES")[0] for key in unread_keys if not key.startswith("save_counter/"))
    if names:
        warnings.warn(
            f"These values of the checkpoint {path} have no variable in the target, and were not loaded:\n"
            f"{bullet_list(names, _SHOWN)}\n"
            "If they are an optimizer's, make its slots first: optimizer.build(model.trainable_variables).",
            stacklevel=user_stack_level(),
        )


@contextlib.contextmanager
def _loading(path: str) -> Iterator[list[str]]:
    """Give a list of names of variables that is to be filled as they take values; if that ends early, say which did."""
    done: list[str] = []
    try:
        with readable(path):
            yield done
    except BaseException as error:
        if not done:
            raise
        kind = ArgumentError if isinstance(error, Exception) else type(error)
        raise kind(
            f"Loading {path} ended early: {error or type(error).__name__}\n"
            "These variables have the new values, perhaps one more, and all others the old ones:\n"
            f"{bullet_list(done, _SHOWN)}\n"
            "Load it again, or another file, before you use the model."
        ) from error


def _give(path: str, values: Iterable[tuple[tf.Variable, Any]]) -> None:
    """Give variables what a file has for them."""
    with _loading(path) as done:
        for variable, value in values:
            _assign(variable, value)
            done.append(name_of(variable))


def _assign(variable: tf.Variable, value: Any) -> None:
    parts = parts_of_variable(variable)
    if parts is None or not parts.take(value):
        variable.assign(_whole(value, variable) if can_be_read_by_part(value) else value)


def _whole(value: Any, variable: tf.Variable) -> tf.Tensor:
    return host_tensor(value, list(map(range, value.shape)), variable.dtype)


def _nodes_of(target: Any, nodes: Sequence[Any]) -> dict[int, Any]:
    """Return what a checkpoint has for each object below a target, by the objects' ids, as names of attributes tell."""
    node_by_id, waiting = {id(target): nodes[0]}, [target]
    for owner in waiting:
        children = tf.train.TrackableView.children(owner)
        for child in node_by_id[id(owner)].children:
            if child.local_name in children and id(children[child.local_name]) not in node_by_id:
                waiting.append(children[child.local_name])
                node_by_id[id(waiting[-1])] = nodes[child.node_id]
    return node_by_id


def _check_has_variables_only(path: str, nodes: Sequence[Any]) -> None:
    other_state = {
        attribute.checkpoint_key for node in nodes for attribute in node.attributes if attribute.name != _VALUE
    }
    other_state |= {f"slot {slot.slot_name!r}" for node in nodes for slot in node.slot_variables}
    other_state |= {node.registered_saver.name for node in nodes if node.registered_saver.name}
    if other_state:
        raise UnsupportedError(
            f"The checkpoint {path} has state that is not a variable:\n"
            f"{bullet_list(sorted(other_state))}\n"
            "Read it with tf.train.Checkpoint, which needs host memory for the whole checkpoint."
        )
