"""Writing a few nodes that compute with sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.protos.graphdefs import constant_node, make_node

AddNode = Callable[[Any], None]


class Writer:
    """Writes nodes of one scope on one device, named by their type and a number; equal constants once."""

    def __init__(self, scope: str, device: str, add: AddNode, control: str = ""):
        self.device = device
        self.control = control
        self.scope = scope
        self._add = add
        self._serial = itertools.count()
        self._constants: dict[tuple[bytes, tuple[int, ...], tf.DType], str] = {}

    def __call__(self, op_type: str, *inputs: str, device: str = "", **attributes: Any) -> str:
        """Write a node, on another device if one is named, and return the reference of its first output."""
        name = f"{self.scope}/{op_type}_{next(self._serial)}"
        return self.write(name, op_type, *inputs, device=device, **attributes)

    def write(self, name: str, op_type: str, *inputs: str, device: str = "", **attributes: Any) -> str:
        """Write a node under a name of its own."""
        self._add(make_node(name, op_type, inputs, device or self.device, **attributes))
        return name

    def constant(self, value: Any, dtype: tf.DType = tf.int64) -> str:
        """Write a constant, or find the one that is there."""
        array = np.asarray(value, dtype.as_numpy_dtype)
        key = array.tobytes(), array.shape, dtype
        if key not in self._constants:
            name = self._constants[key] = f"{self.scope}/Const_{next(self._serial)}"
            self._add(constant_node(name, array, dtype, self.device, self.control))
        return self._constants[key]

    def cast(self, source: str, dtype: tf.DType, target: tf.DType) -> str:
        """Write a conversion, if one is needed."""
        return source if dtype == target else self("Cast", source, SrcT=dtype, DstT=target)


def host_of(device: str) -> str:
    """Return the device on which sizes are computed for another: itself if it is a CPU, else its machine's.

    >>> host_of("/job:localhost/replica:0/task:0/device:GPU:3")
    '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    before, _, kind = device.rpartition("device:")
    return device if not before or kind.startswith("CPU") else f"{before}device:CPU:0"
