"""`with_layout`: how a tensor inside of a function is to lie along the axes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tensorflow as tf

from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.program.asked_layouts import marked

T = TypeVar("T")


def with_layout(x: T, layout: Sequence[str | None]) -> T:
    """Return the tensor, and ask for its layout along the axes of a mesh. Its gradient has the same layout.

    It is for intermediate values of a function that `parallelize` runs on a mesh. If you ask for a cut, a sum over the
    axis becomes a reduce-scatter; if you ask for the whole, parts are all-gathered. Values and gradients do not
    change. It does nothing elsewhere: eagerly, in a `tf.function` by itself, without a mesh, and inside of loops and
    branches.

    Args:
      x: a tensor of known rank.
      layout: for each dimension, the name of the axis along which it is cut, or None. Along an axis that is not named,
        the tensor is whole. `"batch"` is only for the reader: the rows of the batch are cut anyway.

    Raises:
      ArgumentError: if it is no tensor, the layout has not as many entries as it has dimensions, or an axis is named
        twice; when the function is planned, for an axis that its mesh has not, and for a dimension that is shorter than
        the axis.
      UnsupportedError: for a symbolic Keras tensor; when the function is planned, for a dimension of unknown length.

    >>> import tensorflow as tf, graphsplit as gs
    >>> def layer(x, up, down):
    ...     return gs.with_layout(tf.nn.relu(x @ up) @ down, ("model", None))
    >>> x, up, down = tf.ones([4, 6]), tf.ones([6, 8]), tf.ones([8, 6])
    >>> bool(tf.reduce_all(gs.parallelize(layer, mesh={"model": 2})(x, up, down) == layer(x, up, down)))
    True
    """
    if type(x).__name__ == "KerasTensor":
        raise UnsupportedError(
            f"with_layout is called on a symbolic Keras tensor, {x!r}. A functional model keeps layers, not the "
            "layouts of tensors. Call it in the `call` method of a layer or model, or in a function."
        )
    if not isinstance(x, tf.Tensor):
        raise ArgumentError(f"with_layout takes a tensor and its layout, got {x!r} for the tensor.")
    names = tuple(layout) if isinstance(layout, (tuple, list)) else None
    if names is None or not all(name is None or (isinstance(name, str) and name.isidentifier()) for name in names):
        raise ArgumentError(
            f"with_layout(..., {layout!r}): a layout has the name of an axis, or None, for each dimension: "
            '("batch", None, "model").'
        )
    if x.shape.rank != len(names):
        rank = "an unknown number of" if x.shape.rank is None else x.shape.rank
        raise ArgumentError(f"with_layout(..., {layout!r}) has {len(names)} dimensions, the tensor {rank}: {x.shape}.")
    twice = [name for name in dict.fromkeys(names) if name is not None and names.count(name) > 1]
    if twice:
        raise ArgumentError(f"with_layout(..., {layout!r}): {twice[0]!r} is named twice; an axis cuts one dimension.")
    if tf.executing_eagerly() or not names:
        return x
    return marked(names)(x)  # type: ignore[no-any-return]  # without type stubs
