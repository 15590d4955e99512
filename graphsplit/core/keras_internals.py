"""The only file that uses what is private in Keras: modules and attributes, for which no public name serves.

What is asked on each call looks only at modules that are imported already.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.tensorflow_internals import captures_of_graph, in_save_context, lifting_variables
from graphsplit.core.user_code import user_stack_level
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import OWN_TRACE


def open_scopes() -> Hashable:
    """Return what the scopes that are open now say, which no public name does; () outside of all.

    What is traced there (whether it trains, the dtype and the values of variables) must not serve elsewhere. Keras 3:
    the context of the layer that is being called, above all `training`, and the dtype to which variables are cast.
    tf_keras: the same, and the learning phase. TensorFlow: whether a SavedModel is written, with variables whole.
    """
    return (*_of_keras_3(), *_of_keras_2(), *(["SavedModel"] if in_save_context() else []))


def _of_keras_3() -> Iterator[Hashable]:
    cast, call = map(_global_attribute, ("autocast_scope", "current_call_ctx"))
    if cast is not None:
        yield "cast to", cast.dtype
    for name, value in sorted(vars(call).items()) if call is not None else ():
        if name != "entry_layer" and value is not None:
            yield name, _hashable(value)


def _global_attribute(name: str) -> Any:
    """Return what is open in Keras 3 now; None if it is not imported."""
    state = sys.modules.get("keras.src.backend.common.global_state")
    return None if state is None else state.get_global_attribute(name)


def _of_keras_2() -> Iterator[Hashable]:
    layers = sys.modules.get("tf_keras.src.engine.base_layer_utils")
    if layers is not None:
        context, backend = layers.call_context(), sys.modules["tf_keras.src.backend"]
        handed_on = {"training": context._state.get("training"), **context._state.get("call_context_args", {})}
        for name, value in sorted(handed_on.items()):  # (up to tf_keras 2.16, training alone)
            if value is not None:
                yield name, _hashable(value)
        if backend.global_learning_phase_is_set():
            yield "learning phase", _hashable(backend._GRAPH_LEARNING_PHASES.get(backend._DUMMY_EAGER_GRAPH.key))
        cast = sys.modules["tf_keras.src.mixed_precision.autocast_variable"]._autocast_dtype
        if getattr(cast, "dtype", None) is not None:
            yield "cast to", cast.dtype


def _hashable(value: Any) -> Hashable:
    tensors, tree = structures.flatten(value)
    return tree, tuple(map(_tensor_key, tensors))


def _tensor_key(tensor: tf.Tensor) -> Hashable:
    """Return what tells a tensor from others of its type: of an eager number its value, else which tensor it is."""
    is_number = hasattr(tensor, "numpy") and tensor.shape.rank == 0
    return structures.StaticLeaf(np.asarray(tensor).item()) if is_number else tensor.ref()


def variables_have_other_values() -> bool:
    """Return whether Keras' variables are worth something else than they hold: in `stateless_call`, while it builds."""
    return _global_attribute("stateless_scope") is not None


def only_shapes_count() -> bool:
    """Return whether Keras 3 wants to know shapes only: while it builds layers and functional models."""
    return _global_attribute("symbolic_scope") is not None


def slots_of(optimizer: Any, variables: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the slots of an optimizer, each with its variable, which only old ones of tf_keras have a method for.

    Those of Keras 3 and tf_keras have lists of slots in the order of the variables that they train.
    """
    # one that scales the loss, or has an optimizer for some of the variables each, has these do all else
    if inner := [optimizer.inner_optimizer] if hasattr(optimizer, "inner_optimizer") else _several_in(optimizer):
        for inner_optimizer in inner:
            yield from slots_of(inner_optimizer, variables)
        return
    if hasattr(optimizer, "get_slot_names"):
        for variable in variables:
            for name in optimizer.get_slot_names():
                with contextlib.suppress(KeyError):  # it does not train that one
                    yield optimizer.get_slot(variable, name), variable
        return
    trained = list(getattr(optimizer, "_trainable_variables", ()))
    if not trained:
        by_key = {getattr(variable, "_unique_id", None): variable for variable in variables}
        trained = [by_key.get(key) for key in getattr(optimizer, "_index_dict", ())]
    for slots in vars(optimizer).values():
        if trained and isinstance(slots, (list, tuple)) and len(slots) == len(trained):
            pairs = zip(slots, trained, strict=True)
            yield from [(slot, v) for slot, v in pairs if v is not None and slot is not v and hasattr(slot, "assign")]


def is_built(optimizer: Any) -> bool:
    """Return whether an optimizer has made its slots; True of those of tf_keras, which do not say."""
    return bool(getattr(optimizer, "built", True))


def _several_in(optimizer: Any) -> list[Any]:
    """Return the optimizers of a `MultiOptimizer`."""
    kind = getattr(getattr(sys.modules.get("keras"), "optimizers", None), "MultiOptimizer", None)
    return list(optimizer.optimizers) if kind is not None and isinstance(optimizer, kind) else []


_SLOTS = ("momentum", "velocity", "accumulator", "accumulated_grad", "accumulated_delta_var", "norm", "linear")


def names_in_optimizers(optimizer: Any, names: Sequence[str]) -> Iterator[str]:
    """Yield the names that Keras 3 gives an optimizer's variables before it makes them.

    Args:
      optimizer: of a model; None for any of Keras' own, of which one may be compiled later.
      names: of the model's variables.
    """
    keras: Any = sys.modules["keras"]
    kinds = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)]
    kind_names = [re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind.__name__).lower() for kind in kinds]
    for optimizer_name in kind_names if optimizer is None else [optimizer.name]:
        yield from (f"{optimizer_name}/iteration", f"{optimizer_name}/learning_rate")
        yield from [f"{optimizer_name}/{name.replace('/', '_')}_{slot}" for name in names for slot in _SLOTS]


def make_slots(optimizer: Any, variables: Sequence[Any]) -> None:
    """Let an optimizer make its slots for variables now, if it has not; old ones of tf_keras have no public way."""
    if hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
        keras = sys.modules.get("keras")
        if keras is not None and isinstance(optimizer, keras.optimizers.Optimizer):
            _build_in_graph(optimizer, variables)
        else:
            optimizer.build(variables)
    elif hasattr(optimizer, "_create_all_weights"):
        optimizer._create_all_weights(variables)


def _build_in_graph(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build an optimizer of Keras 3 as `fit` does: in a graph that makes variables and never runs.

    What `build` assigns is lost there. Slots are made outside of it, one by one, as if there were no graph.
    """
    outside = tf.compat.v1.get_default_graph()
    graphs: list[Any] = []

    def build() -> None:
        if not optimizer.built:  # (TensorFlow may trace twice)
            graphs.append(tf.compat.v1.get_default_graph())
            setattr(graphs[0], OWN_TRACE, True)
            with lifting_variables(outside):
                optimizer.build(variables)

    tf.function(build, autograph=False).get_concrete_function()
    with raw_handles():
        placeholders, handles = captures_of_graph(graphs[0])
        pairs = zip(placeholders, handles, strict=True)
        written = [id(handle) for p, handle in pairs if any(op.type.startswith("Assign") for op in p.consumers())]
        of_keras = [v for v in (*optimizer.variables, *variables) if not isinstance(v, tf.Variable)]
        lost = [v.path for v in of_keras if id(v.value.handle) in written]
    if lost:
        warnings.warn(
            f"{type(optimizer).__name__}.build assigns values to {', '.join(lost[:3])}"
            f"{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}. Keras builds an optimizer inside of its first "
            "training step, where they are lost, on one device as on several: training begins with what the variables "
            "were made with, mostly zeros. Build it before: optimizer.build(model.trainable_variables).",
            stacklevel=user_stack_level(),
        )


def compilation_of(model: Any) -> Any:
    """Return an object that is another one after each `compile` of a model: Keras keeps its arguments in it.

    No public name says that a model was compiled anew, after which its functions have to be made anew.
    """
    return getattr(model, "_compile_config", None)


def quantization_of(model: Any) -> tuple[str, ...]:
    """Return how layers of a model are quantized. Keras then drops the functions of the template, and tells nobody."""
    modes = [getattr(layer, "quantization_mode", None) for layer in model._flatten_layers()]
    return tuple([mode for mode in modes if mode is not None])


def layers_not_built(model: Any) -> list[str]:
    """Return the names of the layers in a model that have no variables yet."""
    return [layer.name for layer in model._flatten_layers(include_self=False) if not layer.built]


def step_counter(model: Any, kind: str) -> tf.Variable:
    """Return the variable in which tf_keras counts the steps of a kind: its callbacks read it, its functions write it.

    Args:
      model: of tf_keras.
      kind: "train", "test" or "predict".
    """
    counter: tf.Variable = getattr(model, f"_{kind}_counter")
    return counter


class SharedState:
    """A model seen a second time: an object of a class of its own that has the template's whole state.

    The two have one `__dict__`. So layers, optimizer, metrics, compile state and checkpoint dependencies cannot differ,
    and whatever Keras does to one it does to both. Its own few attributes lie in slots, beside that dictionary. It
    says that its `__class__` is the template's, so that Keras writes the template's own name into files and makes the
    template's own class from them. Keras' own ways to a second model, constructors and clones, make new state.

    Attributes:
      template: the model.
    """

    __slots__ = ("template",)

    template: Any

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.template)

    def __reduce__(self) -> Any:
        return self.template.__reduce__()  # a copy, or what is unpickled, is a template


def sharing_state(kind: type[SharedState], template: Any, **attributes: Any) -> Any:
    """Return a model as an object of another class, which calls no constructor."""
    model = object.__new__(kind)
    object.__setattr__(model, "__dict__", template.__dict__)
    for name, value in {"template": template, **attributes}.items():
        object.__setattr__(model, name, value)
    return model


# `keras.distribution` on TensorFlow replaces some names of these, when a user asks for it. What and why is listed in
# keras/distribution/replacements.py. No public name leads to them.


def tensorflow_distribution() -> Any:
    """Return the module of which Keras 3 asks what a backend does for `keras.distribution`."""
    return importlib.import_module("keras.src.backend.tensorflow.distribution_lib")


def tensorflow_trainer() -> Any:
    """Return the class that runs the batches of all models of Keras 3."""
    return importlib.import_module("keras.src.backend.tensorflow.trainer").TensorFlowTrainer


def tensorflow_variable() -> Any:
    """Return the class of variables of Keras 3."""
    return importlib.import_module("keras.src.backend.tensorflow.core").Variable


def give_shape(variable: Any, shape: Sequence[int]) -> None:
    """Let a variable of Keras 3 that is being made have its shape: a distribution asks for it before Keras sets it."""
    if variable._shape is None:
        variable._shape = tuple(shape)


def new_variable_of(make: Any) -> tuple[Any, Any] | None:
    """Return the initializer and the variable of Keras 3 for which a function makes the value; None for others.

    All that `tf.Variable` is told of them is this function, which Keras makes around the two.
    """
    if getattr(getattr(make, "__code__", None), "co_freevars", None) != ("initializer", "self"):
        return None
    initializer, owner = (cell.cell_contents for cell in make.__closure__)
    keras = sys.modules.get("keras")
    return (initializer, owner) if keras is not None and isinstance(owner, keras.Variable) else None


def layout_map_of(distribution: Any) -> Any:
    """Return the layout map of a distribution of Keras; None if it has none. No public name leads to it."""
    return getattr(distribution, "_layout_map", None)


def asks_for_xla(model: Any) -> bool:
    """Return whether a model was compiled with `jit_compile=True`. (Of "auto", Keras makes True where GPUs are.)"""
    config = getattr(model, "_compile_config", None)
    return config is not None and config.config.get("jit_compile") is True
