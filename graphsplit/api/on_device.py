"""`on_device`: a layer or function with devices of its own, by itself or as a stage of a parallelized function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.parallel_function import P, ParallelFunction, R
from graphsplit.api.options import Options
from graphsplit.core.devices import canonical_name, resolve_devices
from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.program.stages import marked
from graphsplit.tracing.trace import inside_trace


class DeviceFunction(ParallelFunction[P, R]):
    """A function with devices of its own. Made by `on_device`."""

    @property
    def _traced(self) -> Callable[P, R]:
        return marked(self._fn, self._name(), self.devices)

    def _name(self) -> str:
        name = getattr(self._fn, "name", None)  # of a Keras layer
        return name if isinstance(name, str) else super()._name()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(type(part).__name__ == "KerasTensor" for part in tf.nest.flatten((args, kwargs))):
            raise UnsupportedError(
                f"{self._name()}, which on_device returned, is called on a symbolic Keras tensor. A functional model "
                "keeps layers, not their devices. Call it in the `call` method of a layer or model, or in a function."
            )
        if inside_trace():  # of a function whose plan covers this one, and knows it by its mark
            return self._traced(*args, **kwargs)
        return super()._run(args, kwargs)


def on_device(layer_or_fn: Callable[P, R], device: str | Sequence[str]) -> ParallelFunction[P, R]:
    """Give a layer or function devices of its own: model parallelism, with exactly one device's results.

    Its operations run on that device, forward and backward, and variables that it makes are made there. (A plain
    `GradientTape` puts the backward pass on the first device.) Existing variables stay where they are, and so do
    variables that Keras makes when it builds a whole model: build the layer before,
    `with tf.device(...): layer.build(shape)`. The plan says which stages read variables from other devices.

    Inside a parallelized function it is a stage. With a list of devices, one for each device of that function, shard
    `d` of the batch runs on the stage's device `d`. With a single device, all shards run there, one by one, each as
    soon as its rows arrive, while the others are in other stages. What needs the whole batch, the reduction of the
    stage's gradients included, runs on the stage's first device. Inside a loop or branch that every shard runs by
    itself, a stage stays on the shard's device; the plan says so.

    Outside of one, eagerly or in a `tf.function`, it splits its batch over its devices. As for a `tf.function`, the
    gradient by arguments of unused results is zeros, not None.

    Args:
      layer_or_fn: a Keras layer or model, or a function of tensors.
      device: the name of a device, `"GPU:1"`, or a list of names.

    Returns:
      A function like `layer_or_fn`; a `ParallelFunction`.

    Raises:
      ArgumentError: if `layer_or_fn` cannot be called or `device` names none; when a function around it is traced,
        if the stage has neither one device nor as many as that function.
      DeviceError: for devices that do not exist; raised on first use if TensorFlow has not started yet.
      UnsupportedError: when it is called on symbolic tensors of a functional Keras model.

    >>> import tensorflow as tf, graphsplit as gs
    >>> double = gs.on_device(lambda x: 2 * x, "CPU:0")
    >>> add_one = gs.parallelize(lambda x: double(x) + 1, devices=["CPU:0"])
    >>> add_one(tf.constant([1, 2, 3])).numpy().tolist()
    [3, 5, 7]
    """
    if not callable(layer_or_fn):
        raise ArgumentError(f"on_device takes a layer or function and its device, got {layer_or_fn!r} to place.")
    names = (device,) if isinstance(device, str) else tuple(device) if isinstance(device, (list, tuple)) else None
    if names is None:
        raise ArgumentError(f"on_device takes the name of a device, 'GPU:1', or a list of names, got {device!r}.")
    full = [canonical_name(name, "device") for name in names]
    if not full or len(set(full)) != len(full):
        resolve_devices(names, "device")
    return DeviceFunction(layer_or_fn, Options(devices=names, devices_argument="device"))
