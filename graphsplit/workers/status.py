"""Asking a worker process, from outside of TensorFlow's runtime, whether it is there, and which one it is.

TensorFlow's servers answer `GetStatus` at any time, computing or not; the runtime itself has no call with a deadline
(its own `check_alive` waits for a frozen process as long as that is frozen). The answer names the devices, each with a
number that a process draws when it starts: another number is another process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from graphsplit.core.tensorflow_internals import device_attributes_file

_METHOD = "/tensorflow.WorkerService/GetStatus"
_REPEATED, _MESSAGE = 3, 11  # as descriptor.proto numbers labels and types


class Status(NamedTuple):
    """What a worker says of itself.

    Attributes:
      devices: their kinds and numbers, `GPU:0`.
      incarnation: of the process.
    """

    devices: tuple[str, ...]
    incarnation: int


def ask(address: str, timeout_s: float) -> Status | None:
    """Return what the worker at an address says of itself; None if nobody answers in time."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(_METHOD, lambda nothing: nothing, _answer_class().FromString)
        try:
            answer = call(b"", timeout=timeout_s)
        except grpc.RpcError:  # (what went wrong is all the same to who asks whether anybody is there)
            return None
    found = answer.device_attributes
    names = [attributes.name.rpartition("/device:")[2] for attributes in found]
    return Status(tuple(names), found[0].incarnation if found else 0)


def ask_all(addresses: Sequence[str], timeout_s: float) -> list[Status | None]:
    """Ask several workers at the same time."""
    if not addresses:
        return []
    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(lambda address: ask(address, timeout_s), addresses))


@functools.cache
def _answer_class() -> Any:
    """Return the class of the answer, of which TensorFlow's wheel has the fields' proto, and not its own."""
    attributes = device_attributes_file()
    file = descriptor_pb2.FileDescriptorProto(
        name="graphsplit/worker_status.proto", package="graphsplit", syntax="proto3", dependency=[attributes.name]
    )
    field = file.message_type.add(name="WorkerStatus").field.add(name="device_attributes", number=1)
    field.label, field.type, field.type_name = _REPEATED, _MESSAGE, ".tensorflow.DeviceAttributes"
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("graphsplit.WorkerStatus"))
