"""Recording what workers do: TensorFlow's profiler in their processes, started and ended from here.

Each of TensorFlow's servers has the profiler's service: `Profile` records until `Terminate` ends it, and answers with
what it has recorded. (`tf.profiler.experimental.client.trace`, the public way, records for a time that somebody has to
know beforehand, and servers may leave what they have recorded on disks of their own.)
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_SERVICE = "/tensorflow.ProfilerService"
_SENDS_NONE = "its TensorFlow sends no recordings"
_MOST_S = 600.0  # what nobody ends, ends by itself
_STARTS_S = 0.3  # a recording starts within milliseconds of being asked for, and does not say when
_ENDS_S = 60.0
_NOWHERE = "/dev/null"  # where older servers, which know nothing of `emit_xspace`, shall not leave files
_FIELD = descriptor_pb2.FieldDescriptorProto

# Numbers and types of the fields that are used, as in tsl/profiler/protobuf/profiler_{service,options}.proto; of the
# former, TensorFlow's wheel has no Python.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, Any]]] = {
    "Options": {
        "host_tracer_level": (2, _FIELD.TYPE_UINT32),
        "device_tracer_level": (3, _FIELD.TYPE_UINT32),
        "python_tracer_level": (4, _FIELD.TYPE_UINT32),
        "version": (5, _FIELD.TYPE_UINT32),
        "duration_ms": (9, _FIELD.TYPE_UINT64),
    },
    "ProfileRequest": {
        "duration_ms": (1, _FIELD.TYPE_UINT64),
        "opts": (4, _FIELD.TYPE_BYTES),
        "repository_root": (5, _FIELD.TYPE_STRING),
        "session_id": (6, _FIELD.TYPE_STRING),
        "emit_xspace": (9, _FIELD.TYPE_BOOL),
    },
    "ProfileResponse": {"xspace": (8, _FIELD.TYPE_BYTES)},
    "TerminateRequest": {"session_id": (1, _FIELD.TYPE_STRING)},
}


class WorkerRecording(NamedTuple):
    """What a worker recorded.

    Attributes:
      space: a serialized `XSpace`; empty if there is none.
      why_not: why there is none.
    """

    space: bytes
    why_not: str


@contextlib.contextmanager
def recorded(workers: Mapping[int, str], host_level: int, device_level: int) -> Iterator[dict[int, WorkerRecording]]:
    """Record workers while the `with` block runs; what they recorded is there afterwards, by their numbers.

    Args:
      workers: their addresses, by number.
      host_level, device_level: how much, see `tf.profiler.experimental.ProfilerOptions`.
    """
    recordings: dict[int, WorkerRecording] = {}
    session = f"graphsplit_{uuid.uuid4().hex}"
    request = _request(session, host_level, device_level)
    with contextlib.ExitStack() as stack:
        channels = {task: stack.enter_context(_channel(address)) for task, address in workers.items()}
        answers = {task: _call(channel, "Profile", request, _MOST_S) for task, channel in channels.items()}
        if workers:
            time.sleep(_STARTS_S)
        try:
            yield recordings
        finally:
            end = _message("TerminateRequest")(session_id=session)
            ends = [_call(channel, "Terminate", end, _ENDS_S) for channel in channels.values()]
            for task, answer in answers.items():
                recordings[task] = _recording(answer)
            for ending in ends:
                ending.cancel()


def _recording(answer: Any) -> WorkerRecording:
    try:
        space = answer.result(timeout=_ENDS_S).xspace
    except grpc.RpcError as error:
        details = str(error.details())  # type: ignore[attr-defined]  # (a future's error has them)
        return WorkerRecording(b"", _SENDS_NONE if _NOWHERE in details else details)
    except grpc.FutureTimeoutError:
        answer.cancel()
        return WorkerRecording(b"", f"it has not ended recording within {_ENDS_S:.0f} s")
    return WorkerRecording(space, "" if space else _SENDS_NONE)


def _request(session: str, host_level: int, device_level: int) -> Any:
    most_ms = round(1e3 * _MOST_S)
    options = _message("Options")(
        version=1,
        host_tracer_level=host_level,
        device_tracer_level=device_level,
        python_tracer_level=0,
        duration_ms=most_ms,
    )
    serialized_options = options.SerializeToString()
    fields = {"session_id": session, "repository_root": _NOWHERE, "emit_xspace": True}
    return _message("ProfileRequest")(duration_ms=most_ms, opts=serialized_options, **fields)


def _channel(address: str) -> grpc.Channel:
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
    return grpc.insecure_channel(address, options=options)


def _call(channel: grpc.Channel, method: str, request: Any, timeout_s: float) -> Any:
    """Call a method of the service, and return what will have its answer."""
    answer = _message("ProfileResponse").FromString  # (of `Terminate` nothing is read)
    call = channel.unary_unary(f"{_SERVICE}/{method}", type(request).SerializeToString, answer)
    return call.future(request, timeout=timeout_s)


@functools.cache
def _message(name: str) -> Any:
    """Return the class of a message."""
    path = f"graphsplit/{name}.proto"
    file = descriptor_pb2.FileDescriptorProto(name=path, package="graphsplit.profiling", syntax="proto3")
    message = file.message_type.add(name=name)
    for field, (number, kind) in _MESSAGES[name].items():
        message.field.add(name=field, number=number, type=kind, label=_FIELD.LABEL_OPTIONAL)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"graphsplit.profiling.{name}"))
