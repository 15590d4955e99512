"""What one executed step looked like: which operation ran when on which device. Measured, not modelled.

What enters: a call that is run once, under TensorFlow's profiler. What leaves: the step as a `Timeline`.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from graphsplit.core.addresses import host_and_port, own_addresses
from graphsplit.core.devices import short_name, task_of
from graphsplit.core.hosts import host_name
from graphsplit.core.intervals import covered
from graphsplit.core.notebooks import text_html
from graphsplit.core.storage import forms
from graphsplit.core.tensorflow_internals import parse_profile, partition_graphs
from graphsplit.errors import StorageError, UnsupportedError
from graphsplit.inspect.actual import plain_name, require_runnable
from graphsplit.inspect.graph import natural_order
from graphsplit.inspect.placements import Placement, placement_of_source, source_of
from graphsplit.inspect.reading import full_name
from graphsplit.inspect.sources import PlacementSource, StateKeeper
from graphsplit.inspect.views.timeline_views import trace_place, trace_span
from graphsplit.planning.amounts import format_bytes
from graphsplit.workers.cluster import current_cluster
from graphsplit.workers.profiling import recorded


def timeline(fn: Any, *args: Any, **kwargs: Any) -> Timeline:
    """Run a function under TensorFlow's profiler and return what ran when on which device.

    The function runs three times: to learn where each operation runs, to warm up, and to be recorded. Variables get
    their values back. The recorded step is slower than others. Workers record, too; if one does not, the timeline's
    `note` names the devices without times.

    Args:
      fn: a function made by `parallelize`, or anything that `placement` takes but directories.
      *args, **kwargs: its arguments, tensors.

    Raises:
      ArgumentError: if arguments are specifications and not tensors.

    >>> import tensorflow as tf, graphsplit as gs
    >>> gs.inspect.timeline(tf.function(lambda x: tf.linalg.matmul(x, x)), tf.ones([64, 64])).slowest(1)[0].device
    '/device:CPU:0'
    """
    source, arguments, title = source_of(fn, args, kwargs)
    return timeline_of_source(source, arguments, title)


def timeline_of_source(source: PlacementSource, arguments: Sequence[Any], title: str, steps: int = 1) -> Timeline:
    """Return the timeline of a graph run on flat arguments, so many times one after the other."""
    require_runnable(source, arguments)
    assert source.make_run is not None
    run = source.make_run()
    with StateKeeper(source.state()):
        with partition_graphs() as graphs:
            run(arguments)
        run(arguments)
        recordings, notes = record_hosts(lambda: _repeat(lambda: run(arguments), steps), graphs)
    events = read_events(recordings, graphs)
    note = "; ".join([*notes, *missing_in(recordings, events, graphs)])
    return Timeline(title, tuple(events), placement_of_source(source, title, graphs), note)


def _repeat(step: Callable[[], Sequence[Any]], times: int) -> None:
    """Take so many steps, each until its results are there."""
    for _ in range(times):
        for tensor in step():
            if hasattr(tensor, "numpy"):
                tensor.numpy()


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step as TensorFlow's profiler saw it. `print` it, or `save` it for ui.perfetto.dev.

    Attributes:
      events: every execution of an operation, by start.
      placement: the actual placement of the same graph.
      note: what is missing in the recording, "" if nothing is.
    """

    title: str
    events: tuple[OpEvent, ...]
    placement: Placement
    note: str = ""

    @property
    def duration_s(self) -> float:
        """The time from the first operation's start to the last one's end, in seconds."""
        return max((e.start_s + e.duration_s for e in self.events), default=0.0)

    @property
    def busy(self) -> dict[str, float]:
        """The share of the step in which at least one operation or copy runs on the device, by device."""
        return self._shares(self.events)

    @property
    def copying(self) -> dict[str, float]:
        """The share of the step in which a GPU copies something to or from somewhere; of devices that do."""
        return self._shares([event for event in self.events if event.copied])

    @property
    def moved_bytes(self) -> dict[tuple[str, str], int]:
        """The bytes sent from one device to another, by (from, to); in the iterations of a loop, once."""
        moved: dict[tuple[str, str], int] = defaultdict(int)
        for transfer in self.placement.transfers:
            moved[transfer.source_device, transfer.target_device] += transfer.bytes
        return dict(moved)

    def _shares(self, events: Sequence[OpEvent]) -> dict[str, float]:
        spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in events:
            spans[event.device].append((event.start_s, event.start_s + event.duration_s))
        whole = self.duration_s or 1.0
        return {device: covered(spans[device]) / whole for device in sorted(spans, key=natural_order)}

    def slowest(self, most: int = 10) -> list[OpEvent]:
        """Return the executions that took longest."""
        return sorted(self.events, key=lambda e: -e.duration_s)[:most]

    def chrome_trace(self) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format (chrome://tracing, ui.perfetto.dev): a process per device."""
        number = {device: i for i, device in enumerate(sorted({e.device for e in self.events}, key=natural_order))}
        trace = [trace_place(i, short_name(device)) for device, i in number.items()]
        for e in self.events:
            kind, span = "copy" if e.copied else "operation", (e.start_s, e.duration_s)
            trace.append(trace_span(e.type, number[e.device], e.thread, span, kind, op=e.name))
        return {"traceEvents": trace, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as `.json`, which ui.perfetto.dev and chrome://tracing open.

        Raises:
          ArgumentError: for another suffix.
          StorageError: if writing fails, or if graphsplit did not write the file at `path`. That file is not changed.
        """
        path = os.fspath(path)
        forms.check_trace_suffix(path, "a timeline")
        forms.write_json(path, self.chrome_trace())

    def __str__(self) -> str:
        lines = [f"Timeline of {self.title}: {len(self.events)} executions in {self.duration_s * 1e3:.2f} ms"]
        copying = self.copying
        for device, share in self.busy.items():
            copies = f", copying {copying[device]:.0%}" if device in copying else ""
            lines.append(f"  {short_name(device)}  busy {share:.0%}{copies}")
        for (a, b), count in sorted(self.moved_bytes.items(), key=lambda pair: -pair[1])[:8]:
            lines.append(f"  {short_name(a)} -> {short_name(b)}  {format_bytes(count)} moved")
        for event in self.slowest(5):
            lines.append(
                f"  {event.duration_s * 1e3:8.3f} ms  {event.type} on {short_name(event.device)}  {event.name}"
            )
        return "\n".join([line[:100] for line in lines] + ([f"  note: {self.note}"] if self.note else []))

    __repr__ = __str__  # what a prompt, and an assertion that fails, show

    def _repr_html_(self) -> str:
        return text_html(str(self), "the devices, what moved, and the slowest operations")


_OP_EVENT = re.compile(r"^(?P<name>[A-Za-z0-9._][\w.\-/>\\]*):(?P<type>_?[A-Z]\w*)$")
# Beside its streams, a GPU has lines that sum up what is on them, by step, operation and scope (xplane_schema.h).
_STREAM, _COPY = "Stream #", "Memcpy"
_ENVIRONMENT, _STARTED = "Task Environment", "profile_start_time"  # a plane, and what it says
HOST_LEVEL, DEVICE_LEVEL = 3, 1  # how much is recorded
_NO_STREAMS = (
    "no stream of a GPU was recorded, so the times on GPUs are launch times on the host. The profiler needs CUPTI "
    "and the right to use it: https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)
_CLOCKS = "times of different machines are aligned by their clocks, which may differ by milliseconds"


@dataclass(frozen=True)
class OpEvent:
    """One execution of one operation.

    Attributes:
      start_s, duration_s: seconds, from the first event of the step.
      thread: the thread or stream that it ran on, a number that is the same for events of one.
      copied: whether it is no computation, but a copy on a stream of a GPU: its type is `MemcpyH2D` (from the host),
        `MemcpyD2H`, `MemcpyD2D` or `MemcpyP2P`.
    """

    name: str
    type: str
    device: str
    start_s: float
    duration_s: float
    thread: int
    copied: bool = False


def record(run: Callable[[], Any]) -> Any:
    """Run something under TensorFlow's profiler and return what it recorded, an `XSpace`.

    Raises:
      UnsupportedError: if the profiler is in use.
      StorageError: if the recording could not be written for a moment.
    """
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=HOST_LEVEL, python_tracer_level=0, device_tracer_level=DEVICE_LEVEL
    )
    with tempfile.TemporaryDirectory(prefix="graphsplit_profile_") as folder:
        try:
            tf.profiler.experimental.start(folder, options=options)
        except tf.errors.AlreadyExistsError as error:
            raise UnsupportedError(
                "TensorFlow's profiler is recording something else, and records one thing at a time. Call "
                "tf.profiler.experimental.stop() before taking a timeline."
            ) from error
        try:
            run()
        finally:
            tf.profiler.experimental.stop()
        files = glob.glob(os.path.join(folder, "plugins", "profile", "*", "*.xplane.pb"))
        if not files:
            raise StorageError(f"TensorFlow's profiler left no recording in {folder!r}; is there room on that disk?")
        return parse_profile(Path(files[0]).read_bytes())


@dataclass(frozen=True)
class Recorded:
    """What the profiler recorded in one process.

    Attributes:
      space: an `XSpace`.
      host: the process, as `host_name` has it; "" for this one.
    """

    space: Any
    host: str = ""

    @property
    def started_ns(self) -> int:
        """When recording began, by the clock of its machine; 0 if that is not known."""
        for plane in self.space.planes:
            for stat in plane.stats if plane.name == _ENVIRONMENT else ():
                if plane.stat_metadata[stat.metadata_id].name == _STARTED:
                    return int(getattr(stat, stat.WhichOneof("value")))
        return 0


def read_events(recordings: Sequence[Recorded], graphs: Iterable[Any]) -> list[OpEvent]:
    """Return the operations of recordings that were made at the same time, by start.

    Args:
      recordings: of several processes, side by side by their machines' clocks.
      graphs: the partition graphs that ran. The profiler says on which thread an operation ran, and not for which
        device; on which GPU, and not on which logical one: they do.
    """
    device_of = {node.name: full_name(node.device) for graph in graphs for node in graph.node}
    events: list[tuple[float, OpEvent]] = []
    threads = itertools.count(1)
    began_ns = [recording.started_ns for recording in recordings]
    for recording in recordings:
        later_s = (recording.started_ns - began_ns[0]) * 1e-9 if all(began_ns) else 0.0
        has_streams = any(is_gpu(plane) for plane in recording.space.planes)
        for plane, line in _lines(recording.space):
            thread, events_of_line = next(threads), list(_events(plane, line))
            ops: Sequence[OpEvent | None] = (
                _on_stream(recording.host + plane.name, plane, events_of_line, thread, device_of)
                if is_gpu(plane)
                else [_on_host(plane, event, thread, device_of, has_streams) for event, _ in events_of_line]
            )
            for (event, _), op in zip(events_of_line, ops, strict=True):
                if op is not None:
                    events.append((later_s + line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12, op))
    first = min((begin for begin, _ in events), default=0.0)
    shifted = [replace(event, start_s=begin - first) for begin, event in events]
    return sorted(shifted, key=lambda e: e.start_s)


def _lines(space: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the lines that operations are on, each with its plane."""
    for plane in space.planes:
        for line in plane.lines:
            if not is_gpu(plane) or line.name.startswith(_STREAM):
                yield plane, line


def is_gpu(plane: Any) -> bool:
    """Return whether a plane is that of a GPU."""
    return bool(plane.name.startswith("/device:GPU"))


def _events(plane: Any, line: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    for event in line.events:
        stats = {}
        for stat in event.stats:
            kind = stat.WhichOneof("value")
            value = getattr(stat, kind) if kind else None
            stats[plane.stat_metadata[stat.metadata_id].name] = (
                plane.stat_metadata[value].name if kind == "ref_value" else value
            )
        yield event, stats


def _on_stream(
    gpu: str, plane: Any, recorded: Iterable[tuple[Any, Mapping[str, Any]]], thread: int, device_of: Mapping[str, str]
) -> list[OpEvent]:
    """Return the kernels and copies of one stream of a GPU.

    The profiler knows GPUs, each with the streams of all logical GPUs on it. A stream belongs to one of these: to that
    of most of its operations.
    """
    events = []
    for event, stats in recorded:
        kernel = plane.event_metadata[event.metadata_id].name
        name, _, kind = str(stats.get("tf_op") or "").partition(":")
        copied = kernel.startswith(_COPY) or "memcpy_details" in stats
        type_ = kernel if copied else kind or "kernel"
        device = device_of.get(name, "")
        device_of_kernel = device if "GPU" in device else ""  # a copy may bear the name of who waits for it, on a host
        events.append(
            OpEvent(plain_name(name or kernel), type_, device_of_kernel, 0.0, event.duration_ps * 1e-12, thread, copied)
        )
    count_by_device = Counter(event.device for event in events if event.device)
    usual = count_by_device.most_common(1)[0][0] if count_by_device else full_name(gpu)
    return [event if event.device else replace(event, device=usual) for event in events]


def _on_host(plane: Any, event: Any, thread: int, device_of: Mapping[str, str], has_streams: bool) -> OpEvent | None:
    """Return an operation's execution; those of a GPU are only launches, and left out where streams were recorded."""
    match = _OP_EVENT.match(plane.event_metadata[event.metadata_id].name)
    if match is None or match["name"] not in device_of:
        return None
    device = device_of[match["name"]]
    if has_streams and "GPU" in device:
        return None
    return OpEvent(plain_name(match["name"]), match["type"], device, 0.0, event.duration_ps * 1e-12, thread)


def record_hosts(run: Callable[[], Any], graphs: Iterable[Any]) -> tuple[list[Recorded], list[str]]:
    """Run something under TensorFlow's profiler here and on the workers that it runs on.

    Args:
      run: what to run.
      graphs: its partition graphs, which tell the workers.

    Returns:
      The recordings, that of this process first; and what is missing in them.

    Raises:
      UnsupportedError: if the profiler is in use.
      StorageError: if the recording of this process could not be written for a moment.
    """
    devices = _devices(graphs)
    tasks = {task: host_name(device) for device in devices if (task := task_of(device)) is not None}
    cluster = current_cluster()
    addresses = {} if cluster is None else {number: cluster.workers[number] for _, number in tasks}
    with recorded(addresses, HOST_LEVEL, DEVICE_LEVEL) as recording_by_task:
        recordings = [Recorded(record(run))]
    notes = []
    for (job, number), host in tasks.items():
        recording = recording_by_task.get(number)
        if recording is None or not recording.space:
            why = "this process is not connected by graphsplit.connect" if recording is None else recording.why_not
            notes.append(f"{job}:{number} has sent no recording: {why}")
        else:
            recordings.append(Recorded(parse_profile(recording.space), host))
    if len(recordings) > 1 and not all(recording.started_ns for recording in recordings):
        notes.append("a process did not report when its recording began: its times are not aligned with the others")
    elif any(host_and_port(address)[0] not in {"localhost", *own_addresses()} for address in addresses.values()):
        notes.append(_CLOCKS)
    return recordings, notes


def missing_in(recordings: Sequence[Recorded], events: Sequence[OpEvent], graphs: Iterable[Any]) -> list[str]:
    """Return what recordings lack of what ran: workers' devices without times, and streams of GPUs."""
    devices, timed = _devices(graphs), {event.device for event in events}
    silent = [device for device in devices if task_of(device) is not None and device not in timed]
    notes = [f"no times of {', '.join(map(short_name, silent))}"] if silent else []
    with_gpus = {host_name(device) for device in devices if "GPU" in device}
    without = [recording for recording in recordings if not any(is_gpu(plane) for plane in recording.space.planes)]
    return [*notes, *([_NO_STREAMS] if with_gpus.intersection([recording.host for recording in without]) else [])]


def _devices(graphs: Iterable[Any]) -> list[str]:
    """Return the devices that nodes of graphs run on."""
    return sorted({full_name(node.device) for graph in graphs for node in graph.node} - {""}, key=natural_order)
