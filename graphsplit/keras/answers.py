"""Which step of a wrapped model a question is about, and its arguments, as Keras itself would have them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.errors import ArgumentError
from graphsplit.keras.batches import BatchFunction, parts_of_batch
from graphsplit.keras.flavors import defines, flavor_of
from graphsplit.planning.amounts import count_text

STEPS = {
    "train": "a training step of {!r}",
    "test": "an evaluation step of {!r}",
    "predict": "a prediction of {!r} (to check training, pass y or step='train')",
}  # and their titles, in `verify`
_STAND_IN = 64  # for sizes that a specification leaves open, while Keras builds what it has not built


def kind_of_step(model: Any, y: Any, step: str | None) -> str:
    """Return which step is meant: the one that is named, else training if there are targets, else prediction."""
    if step is None and y is None and not defines(model, "call") and not defines(model, "predict_step"):
        raise ArgumentError(
            f"A batch without y is for a prediction, and {model.name!r} has no call(): write step='train'."
        )
    if step is None:
        return "predict" if y is None else "train"
    if step not in STEPS:
        raise ArgumentError(f"step={step!r} of {model.name!r}: write 'train', 'test' or 'predict'.")
    return step


def check_one_batch(model: Any, x: Any, y: Any) -> None:
    """Raise `ArgumentError` if `x` is a dataset, or the whole batch that a dataset gives: it would pass for inputs."""
    if isinstance(x, tf.data.Dataset):
        star = "*" if type(x.element_spec) is tuple else ""
        raise ArgumentError(
            f"This takes one batch of {model.name!r}, got a tf.data.Dataset: write gs.verify(model, "
            f"{star}next(iter(dataset))), and plan and placement alike."
        )
    inputs = getattr(model, "inputs", None)
    if y is not None or type(x) is not tuple or len(x) not in (2, 3) or not isinstance(inputs, (list, tuple)):
        return
    leaves = tf.nest.flatten(x)
    is_batch = len(tf.nest.flatten(x[0])) == len(inputs) < len(leaves)
    if is_batch and all(hasattr(leaf, "shape") for leaf in leaves):
        raise ArgumentError(
            f"x is a tuple of {len(leaves)} tensors, and {model.name!r} takes {count_text(len(inputs), 'input')}. If "
            "it is a whole batch, write gs.verify(model, *next(iter(dataset))), and plan and placement alike."
        )


def busiest(model: Any, functions: Sequence[Any]) -> BatchFunction:
    """Return the function whose step ran most batches.

    Raises:
      ArgumentError: if none ran.
    """
    ran = [f for f in functions if isinstance(f, BatchFunction) and f.batches]
    if not ran:
        raise ArgumentError(
            f"Without arguments, plan() and placement() describe the step that ran most, and {model.name!r} has run no "
            "step since it was wrapped and compiled. Pass a batch or tf.TensorSpecs: x and y for training, x alone for "
            "prediction."
        )
    return max(ran, key=lambda function: function.batches)


def arguments_of(model: Any, kind: str, function: Any, batch: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """Return the arguments of a step for a batch, `(x, y, sample_weight)`; where it has specifications, with these.

    Keras itself makes tensors of them, in `train_on_batch` and the like, and builds optimizer and metrics; and packs
    them as `fit` does: what is not given is no part of the batch. (`train_on_batch` passes None for it.) Of a batch
    that ran, the step knows the sizes that it knew then, so what was traced and planned is found.

    Raises:
      ArgumentError: for a model that runs eagerly.
    """
    if not isinstance(function, BatchFunction):
        raise ArgumentError(
            f"{model.name!r} was compiled with run_eagerly=True: it runs operation by operation, on one device, and "
            "has no plan. Compile it without run_eagerly."
        )
    leaves_of_batch = tf.nest.flatten([part for part in batch if part is not None])
    x, y, weight = tf.nest.map_structure(lambda leaf: _as_fit_has_it(model, leaf), batch)
    calls = {
        "train": lambda: model.train_on_batch(x, y, weight),
        "test": lambda: model.test_on_batch(x, y, weight),
        "predict": lambda: model.predict_on_batch(x),
    }
    with _metrics_kept(model):
        step_data = function.batch_in(calls[kind])
    leaves = tf.nest.flatten(step_data)
    batch_leaves = iter(leaves_of_batch)
    if len([leaf for leaf in leaves if leaf is not None]) == len(leaves_of_batch):
        leaves = [leaf if leaf is None else _asked_or(next(batch_leaves), leaf) for leaf in leaves]
    flavor = flavor_of(model)
    assert flavor is not None
    pack = flavor.module().utils.pack_x_y_sample_weight
    return function.step.as_called(parts_of_batch(pack(*tf.nest.pack_sequence_as(step_data, leaves))))


def _asked_or(spec_or_array: Any, leaf: Any) -> Any:
    return spec_or_array if isinstance(spec_or_array, tf.TensorSpec) else leaf


def _as_fit_has_it(model: Any, leaf: Any) -> Any:
    """Return an array in the floating type in which `fit` has it; zeros for a specification."""
    if isinstance(leaf, tf.TensorSpec):
        return tf.zeros([_STAND_IN if size is None else size for size in leaf.shape.as_list()], leaf.dtype)
    if isinstance(leaf, np.ndarray) and np.issubdtype(leaf.dtype, np.floating):
        flavor = flavor_of(model)
        return leaf if flavor is None else leaf.astype(flavor.module().backend.floatx())
    return leaf


@contextlib.contextmanager
def _metrics_kept(model: Any) -> Iterator[None]:
    """Give metrics back what they have counted, which Keras forgets before such a batch."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    values_before = [tf.identity(variable) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, values_before, strict=True):
            variable.assign(value)
