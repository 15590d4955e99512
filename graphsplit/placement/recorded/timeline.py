"""What one executed step looked like: which operation ran when on which device. Measured, not modelled."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from graphsplit.core.devices import short_name
from graphsplit.core.storage import forms
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.placement.builders import source_of
from graphsplit.placement.flattening import flatten
from graphsplit.placement.placements import Placement
from graphsplit.placement.reading import bytes_of, read_ops
from graphsplit.placement.recorded.actual import match, require_runnable
from graphsplit.placement.recorded.profiles import SendEvent, missing_in, read_events, record_hosts
from graphsplit.placement.recorded.recorded_steps import RecordedStep, TurnSpan
from graphsplit.placement.sources import PlacementSource, StateKeeper
from graphsplit.placement.views.pages import in_frame
from graphsplit.placement.views.timeline_views import chrome_trace, figure, page, stages_text
from graphsplit.planning.amounts import format_bytes


class Timeline(RecordedStep):
    """One step as TensorFlow's profiler saw it. `print` it, or `save` it as `.html`, `.json`, `.png` or `.svg`."""

    def chrome_trace(self) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format (chrome://tracing, ui.perfetto.dev): a process per device."""
        return chrome_trace(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline: `.html` a page, `.json` a Chrome trace, `.png` or `.svg` a picture.

        Raises:
          ArgumentError: for another suffix.
          UnsupportedError: for a picture, if matplotlib is not installed.
          StorageError: if writing fails, or if graphsplit did not write the file at `path`. That file is not changed.
        """
        path = os.fspath(path)
        forms.check_suffix(path, "a timeline", forms.TIMELINE_SUFFIXES)
        if forms.suffix_of(path) == ".json":
            forms.write_json(path, self.chrome_trace())
        elif forms.suffix_of(path) == ".html":
            forms.write(path, page(self, str(self)).encode())
        else:
            forms.write_figure(path, figure(self))

    def __str__(self) -> str:
        lines = [f"Timeline of {self.title}: {len(self.events)} executions in {self.duration_s * 1e3:.2f} ms"]
        copying = self.copying
        for device, share in self.busy.items():
            copies = f", copying {copying[device]:.0%}" if device in copying else ""
            lines.append(f"  {short_name(device)}  busy {share:.0%}{copies}{_turns_text(self.turns, device)}")
        for (a, b), count in sorted(self.moved_bytes.items(), key=lambda item: -item[1])[:8]:
            lines.append(f"  {short_name(a)} -> {short_name(b)}  {format_bytes(count)} moved")
        for event in self.slowest(5):
            lines.append(
                f"  {event.duration_s * 1e3:8.3f} ms  {event.type} on {short_name(event.device)}  {event.name}"
            )
        return "\n".join([line[:100] for line in lines] + ([f"  note: {self.note}"] if self.note else []))

    __repr__ = __str__  # what a prompt, and an assertion that fails, show

    def _repr_html_(self) -> str:
        return in_frame(page(self, str(self)), height=420)


def _turns_text(turns: Sequence[TurnSpan], device: str) -> str:
    """Say which stages and shards have turns on a device."""
    own = [turn for turn in turns if turn.device == device]
    return f"{stages_text(own, device)}, {len({turn.shard for turn in own})} shards in turns" if own else ""


def timeline_of(fn: Any, *args: Any, **kwargs: Any) -> Timeline:
    """Run a function under TensorFlow's profiler and return what ran when on which device.

    The function runs three times: to learn where each operation runs, to warm up, and to be recorded. Variables get
    their values back. The recorded step is slower than others. Workers record, too; if one does not, the timeline's
    `note` names the devices without times.

    Args:
      fn: a function made by `parallelize`, or anything that `placement_of` takes but directories.
      *args, **kwargs: its arguments, tensors.

    Raises:
      ArgumentError: if arguments are specifications and not tensors.

    >>> import tensorflow as tf, graphsplit as gs
    >>> gs.timeline_of(tf.function(lambda x: tf.linalg.matmul(x, x)), tf.ones([64, 64])).slowest(1)[0].device
    '/device:CPU:0'
    """
    source, arguments, title = source_of(fn, args, kwargs)
    return timeline_of_source(source, arguments, title)


def timeline_of_source(source: PlacementSource, arguments: Sequence[Any], title: str, steps: int = 1) -> Timeline:
    """Return the timeline of a graph run on flat arguments, so many times one after the other."""
    require_runnable(source, arguments)
    assert source.make_run is not None
    run = source.make_run()
    with StateKeeper(source.state):
        with partition_graphs() as graphs:
            run(arguments)
        run(arguments)
        recordings, notes = record_hosts(lambda: _repeat(lambda: run(arguments), steps), graphs)
    events, sends = read_events(recordings, graphs)
    flat = flatten(source.graph)
    ops, edges = read_ops(source, flat)
    ops, added = match(ops, flat, source, graphs)
    placement = Placement(ops, edges, actual=True, rows=source.rows, graph_def=source.graph, added=added, title=title)
    note = "; ".join([*notes, *missing_in(recordings, events, graphs)])
    return Timeline(title, tuple(events), _moved(sends, placement), placement, note)


def _repeat(step: Callable[[], Sequence[Any]], times: int) -> None:
    """Take so many steps, each until its results are there."""
    for _ in range(times):
        for tensor in step():
            if hasattr(tensor, "numpy"):
                tensor.numpy()


def _moved(sends: Sequence[SendEvent], placement: Placement) -> dict[tuple[str, str], int]:
    """Return the bytes that the recorded sends carried: each tensor as often as it was sent."""
    moved: dict[tuple[str, str], int] = defaultdict(int)
    for send in sends:
        op, output = placement.ops.get(send.source), send.output
        if op is not None and output >= len(op.shapes):  # oneDNN's operation makes what another one was to make, too
            op, output = placement.ops.get(send.asked_of), 0
        if op is not None:  # (no operation sends the signals that carry control dependencies)
            size = bytes_of(op.shapes[output], op.dtypes[output])
            moved[send.source_device, send.target_device] += size
    return {route: count for route, count in moved.items() if count}
