"""Seconds: how long an operation takes on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphsplit.costs.families import FREE, PASSED_ON, family_of
from graphsplit.costs.machine import Device, Sample
from graphsplit.costs.work import Described, Work, flops_of
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

    def seconds(self, work: Work, key: str = "") -> float:
        """Return how long one execution takes: as measured, where it was; else by the rates of its family.

        Args:
          work: what it does.
          key: see `sample_key`; "" for work that no operation is known of.
        """
        device = self.device
        if work.family == FREE:
            return 0.0
        if work.family == PASSED_ON:
            return 0.0 if device.kind == "GPU" else device.overhead_s  # on the host, while kernels run
        sample = device.samples.get(key)
        if sample is not None:
            self.sampled.add(key)
            return max(device.launch_s, device.overhead_s + sample.seconds)
        if key:
            self.estimated.add(key)
        own = device.roofline_s(work)
        near = self._nearest(key.partition(" ")[0], own)
        if near is not None:
            own = near.seconds * (own / device.roofline_s(near.work) if device.roofline_s(near.work) else 1.0)
        return max(device.launch_s, device.overhead_s + own)

    def _nearest(self, op_type: str, roofline_s: float) -> Sample | None:
        """Return what was measured of an operation of the same type that is about as large."""
        samples = self._like.get(op_type, ())
        return min(samples, key=lambda sample: abs(self.device.roofline_s(sample.work) - roofline_s), default=None)


def _by_type(device: Device) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for key, sample in device.samples.items():
        found.setdefault(key.partition(" ")[0], []).append(sample)
    return found


def sample_key(node: Any, inputs: Sequence[Described], outputs: Sequence[Described]) -> str:
    """Return what tells operations apart that take different times: type, attributes, what they read and make.

    >>> import tensorflow as tf
    >>> from graphsplit.core.graphdefs import make_node
    >>> sample_key(make_node("y", "Relu", ["x"], T=tf.float32), [((2, 3), tf.float32)], [((2, 3), tf.float32)])
    'Relu float32[2,3] -> float32[2,3]'
    """
    told = [
        f"{name}={_attribute(value)}"
        for name, value in sorted(node.attr.items())
        if name not in _NOT_TOLD and value.WhichOneof("value") in ("s", "i", "f", "b", "list") and name[0] != "_"
    ]
    sides = [" ".join(map(_text, side)) for side in (inputs, outputs)]
    return " ".join([str(node.op), *told, sides[0], "->", sides[1]]).replace("  ", " ")


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
