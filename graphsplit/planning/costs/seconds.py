"""Seconds: how long an operation takes on a device."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from graphsplit.planning.costs.families import FREE, PASSED_ON, family_of
from graphsplit.planning.costs.machine import Device, Sample
from graphsplit.planning.costs.work import Described, Work, flops_of
from graphsplit.program.program import Op, Program

REFERENCE = Device(
    # without tensor cores; per byte, CPUs and newer GPUs do about as many
    name="A100",
    kind="GPU",
    matrix_flops_per_s={"float32": 19.5e12},
    vector_flops_per_s={"float32": 19.5e12},
    bytes_per_s=1.55e12,
    memory_bytes=40e9,
)
"""The device by which planning compares operations with each other where it is not told another one."""

_NO_WORK_S = 1e-6  # an operation that takes longer does something
_TELLS_RATE_S = 1e-5  # of work, by the roofline: what was measured with less tells what it takes to start, not more
_ALIKE = 0.05  # operations that move tensors and take about as long: they may read some sizes besides
_UNKNOWN = re.compile(r"\[(?:\.\.\.|[\d,]*\?[\d,?]*)\]")  # a shape of which something is not known
_TOLD = frozenset({"s", "i", "f", "b", "list"})
_NOT_TOLD = frozenset({"_class", "_XlaMustCompile", "_output_shapes", "container", "shared_name"})


class Costs:
    """How long operations take on a device. What is asked twice is computed once: all shards of one size are alike.

    Args:
      device: what it can do.
      unknown_size: what sizes count as that are not known; None: as 1, and times are least ones.
    """

    def __init__(self, device: Device, unknown_size: int | None = None):
        self.device = device
        self.unknown_size = unknown_size
        self.sampled: set[str] = set()
        self.estimated: set[str] = set()
        self._like = _by_type(device)
        self._shortest_s = min([_NO_WORK_S, *[sample.seconds for sample in device.samples.values()]])

    def seconds(self, work: Work, key: str = "") -> float:
        """Return how long one execution takes: as measured, where it was; else by the rates of its family.

        Args:
          work: what it does.
          key: see `sample_key`; the type and the bytes of what moves tensors, `"AddN 800 B"`, which was measured if one
            as large was; "" for work that no operation is known of.
        """
        device = self.device
        if work.family == FREE:
            return 0.0
        if work.family == PASSED_ON:
            return 0.0 if device.kind == "GPU" else device.overhead_s  # on the host, while kernels run
        return self.started(self.own_s(work, key))

    def started(self, own_s: float) -> float:
        """Return how long takes what the device is asked for once, given how long it works for that."""
        return max(self.device.launch_s, self.device.overhead_s + own_s)

    def own_s(self, work: Work, key: str = "") -> float:
        """Return how long the device works, without what it takes to start: see `seconds`."""
        device = self.device
        sample = device.samples.get(key)
        if sample is not None:
            self.sampled.add(key)
            return sample.seconds
        roofline_s, op_type = device.roofline_s(work), key.partition(" ")[0]
        nearest = self._nearest(op_type, roofline_s)
        if key:
            is_alike = (
                nearest is not None
                and "->" not in key
                and math.isclose(device.roofline_s(nearest.work), roofline_s, rel_tol=_ALIKE)
            )
            (self.sampled if is_alike else self.estimated).add(key)
        if nearest is None:
            return roofline_s
        of_near = device.roofline_s(nearest.work)
        if of_near < _TELLS_RATE_S and roofline_s > of_near:  # to do next to nothing takes some time, and is no rate
            return roofline_s + max(0.0, nearest.seconds - of_near)
        # what even the shortest takes is no work, and does not grow with it
        return self._shortest_s + (nearest.seconds - self._shortest_s) * (roofline_s / of_near if of_near else 1.0)

    def _nearest(self, op_type: str, roofline_s: float) -> Sample | None:
        """Return what was measured of an operation of the same type that is about as large: by their ratio.

        (By their difference, half of something would be as near to nothing as to it.)
        """

        def apart(sample: Sample) -> float:
            sample_roofline_s = self.device.roofline_s(sample.work)
            return abs(math.log(sample_roofline_s / roofline_s)) if sample_roofline_s and roofline_s else math.inf

        return min(self._like.get(op_type, ()), key=apart, default=None)


def _by_type(device: Device) -> dict[str, list[Sample]]:
    samples_by_type: dict[str, list[Sample]] = {}
    for key, sample in device.samples.items():
        if not _UNKNOWN.search(key):  # (what it does is not known, so it is no measure for others)
            samples_by_type.setdefault(key.partition(" ")[0], []).append(sample)
    return samples_by_type


def sample_key(node: Any, inputs: Sequence[Described], outputs: Sequence[Described]) -> str:
    """Return what tells operations apart that take different times: type, attributes, what they read and make.

    >>> import tensorflow as tf
    >>> from graphsplit.core.protos import make_node
    >>> sample_key(make_node("y", "Relu", ["x"], T=tf.float32), [((2, 3), tf.float32)], [((2, 3), tf.float32)])
    'Relu float32[2,3] -> float32[2,3]'
    """
    attributes = told_attributes(node)
    sides = [" ".join(map(_text, side)) for side in (inputs, outputs)]
    return " ".join([str(node.op), *attributes, sides[0], "->", sides[1]]).replace("  ", " ")


def told_attributes(node: Any) -> tuple[str, ...]:
    """Return those attributes of an operation by which its time may differ, `("transpose_a=b: true",)`."""
    return tuple(
        [
            f"{name}={_attribute(value)}"
            for name, value in sorted(node.attr.items())
            if name not in _NOT_TOLD and value.WhichOneof("value") in _TOLD and name[0] != "_"
        ]
    )


def _attribute(value: Any) -> str:
    return " ".join(str(value).split()).replace('"', "'")


def _text(described: Described) -> str:
    shape, dtype = described
    return f"{dtype.name}[{'...' if shape is None else ','.join('?' if s is None else str(int(s)) for s in shape)}]"


def seconds_of(program: Program, op: Op, device: Device = REFERENCE) -> float:  # frozen
    """Return how long one execution of an operation of a program takes, on all rows; 0 for what passes on a buffer.

    Seconds are for comparison: all numbers count as 32 bits, and nothing is launched.
    """
    family = family_of(op.type)
    if family in (FREE, PASSED_ON):
        return 0.0
    moved = sum(map(program.bytes, dict.fromkeys(op.inputs))) + sum(op.out_bytes)
    return device.roofline_s(Work(family, "float32", flops_of(op), moved))
