"""Recordings of one step in all processes that take part in it, and what is missing in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graphsplit.clusters.addresses import host_and_port, own_addresses
from graphsplit.clusters.cluster import current_cluster
from graphsplit.clusters.profiling import recorded
from graphsplit.core.devices import short_name, task_of
from graphsplit.core.hosts import host_name
from graphsplit.core.tensorflow_internals import parse_profile
from graphsplit.placement.profiles import DEVICE_LEVEL, HOST_LEVEL, OpEvent, Recorded, is_gpu, record
from graphsplit.placement.questions import natural_order
from graphsplit.placement.reading import full_name

_NO_STREAMS = (
    "no stream of a GPU was recorded, so the times on GPUs are those of launches on the host. The profiler needs CUPTI "
    "and the right to use it: https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)
_CLOCKS = "times of several machines are set side by side by their clocks, which may be milliseconds apart"


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
    with recorded(addresses, HOST_LEVEL, DEVICE_LEVEL) as found:
        recordings = [Recorded(record(run))]
    notes = []
    for (job, number), host in tasks.items():
        recording = found.get(number)
        if recording is None or not recording.space:
            why = "this process is not connected by graphsplit.connect" if recording is None else recording.why_not
            notes.append(f"{job}:{number} has sent no recording: {why}")
        else:
            recordings.append(Recorded(parse_profile(recording.space), host))
    if len(recordings) > 1 and not all(each.started_ns for each in recordings):
        notes.append("a process did not say when its recording began: its times do not lie beside those of others")
    elif any(host_and_port(address)[0] not in {"localhost", *own_addresses()} for address in addresses.values()):
        notes.append(_CLOCKS)
    return recordings, notes


def missing_in(recordings: Sequence[Recorded], events: Sequence[OpEvent], graphs: Iterable[Any]) -> list[str]:
    """Return what recordings lack of what ran: workers' devices without times, and streams of GPUs."""
    devices, timed = _devices(graphs), {event.device for event in events}
    silent = [device for device in devices if task_of(device) is not None and device not in timed]
    found = [f"no times of {', '.join(map(short_name, silent))}"] if silent else []
    with_gpus = {host_name(device) for device in devices if "GPU" in device}
    without = [each for each in recordings if not any(is_gpu(plane) for plane in each.space.planes)]
    return [*found, *([_NO_STREAMS] if with_gpus.intersection([each.host for each in without]) else [])]


def _devices(graphs: Iterable[Any]) -> list[str]:
    """Return the devices that nodes of graphs run on."""
    return sorted({full_name(node.device) for graph in graphs for node in graph.node} - {""}, key=natural_order)
