"""How much of the exchange of gradients a step hides behind its backward pass, in a timeline of workers behind links.

python -m benchmarks.overlap [--workers 2] [--mbit 1000] [--workloads resnet50,transformer] [--batch 32] [--rounds 3]

Each worker has one thread, and a link of that many megabits a second each way (see `benchmarks.links`). A timeline
shows when the backward passes of the shards begin and end, when each gradient is ready to be sent, and when whoever
reads it begins. *Hidden* is the part of the time that the busiest link needs for all gradients which is over when the
backward passes are; *at best* is that part if the link were busy all the while. A reader also waits for other shards,
so a gradient may have been there before. Workers that share cores compute more slowly than machines of their own.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.links import linked_workers
from benchmarks.workloads import WORKLOADS, data, workload
from graphsplit.planning.costs.families import family_of
from graphsplit.planning.schedule.scheduling import COSTLY

_MESSAGES = ("_Send", "_Recv", "_HostSend", "_HostRecv")
_SUMS = ("reduce", "reduce-scatter", "all-reduce")


def main() -> None:
    """Record and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--workloads", default="resnet50,transformer", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--batch", type=int, help="rows; by default each workload's own")
    parser.add_argument("--rounds", type=int, default=3, help="timelines; the medians are printed")
    parser.add_argument("--save", help="a .json file for the last timeline, which ui.perfetto.dev opens")
    options = parser.parse_args()
    import graphsplit as gs

    with linked_workers(options.workers, options.mbit) as workers:
        devices = gs.connect(workers).devices
        for name in options.workloads.split(","):
            found = overlaps(name, devices, options)
            print(f"{name}, {len(devices)} workers, {options.mbit} Mbit/s: {text(found)}", flush=True)


@dataclass(frozen=True)
class Overlap:
    """The exchange of gradients beside the backward pass in one step.

    Attributes:
      backward_s: from the first operation of the backward pass of any shard to the end of the last one.
      gradient_bytes: that the busiest worker sends, or receives.
      link_s: what its link needs for these.
      tail_s: from the end of the backward pass until whoever reads the last gradient begins.
      buckets, full: buckets of small gradients; those that are ready before the backward pass ends.
    """

    backward_s: float
    gradient_bytes: int
    link_s: float
    tail_s: float
    buckets: int
    full: int

    @property
    def hidden(self) -> float:
        """The part of the link's time that is over when the backward pass is."""
        return min(1.0, max(0.0, 1 - self.tail_s / self.link_s))

    @property
    def at_best(self) -> float:
        """That part if the link were busy during all of the backward pass."""
        return min(1.0, self.backward_s / self.link_s)


def text(found: Sequence[Overlap]) -> str:
    """Return the medians, for people."""
    middle = {name: statistics.median([getattr(own, name) for own in found]) for name in Overlap.__dataclass_fields__}
    hidden, best = (statistics.median([getattr(own, name) for own in found]) for name in ("hidden", "at_best"))
    backward, link, tail = (1e3 * middle[name] for name in ("backward_s", "link_s", "tail_s"))
    size = middle["gradient_bytes"] / 1e6
    return (
        f"backward {backward:.0f} ms; gradients {size:.1f} MB, {link:.0f} ms on the busiest link; the last is read "
        f"{tail:.0f} ms after the backward pass ended: {hidden:.0%} hidden, at best {best:.0%}; "
        f"{middle['full']:.0f} of {middle['buckets']:.0f} buckets are ready before it ends"
    )


def overlaps(name: str, devices: Sequence[str], options: argparse.Namespace) -> list[Overlap]:
    """Return what timelines of a workload's training step show."""
    import tensorflow as tf

    import graphsplit as gs
    from benchmarks.steps import make_parts, single_device_step

    own = workload(name, small=False, batch=options.batch)
    with tf.device(devices[0]):
        parts = make_parts(own)
    arguments = [tf.constant(array) for array in data(own, own.batch)]
    step = gs.parallelize(single_device_step(parts, "training"), devices=devices, variables="auto")
    step(*arguments)
    found = []
    for _ in range(options.rounds):
        timeline = gs.inspect.timeline(step, *arguments)
        found.append(overlap_in(timeline, options.mbit))
    if options.save:
        timeline.save(options.save)
    return found


def overlap_in(timeline: Any, mbit: int) -> Overlap:
    """Return how the exchange of gradients lies beside the backward pass of a step."""
    began, ended, ops = dict[tuple[str, str], float](), dict[str, float](), timeline.placement.ops
    for event in timeline.events:
        if event.type not in _MESSAGES:
            began.setdefault((event.name, event.device), event.start_s)
            ended[event.name] = event.start_s + event.duration_s
    on_shards = {name for name in ended if name in ops and ops[name].shard is not None}
    products = {name for name in on_shards if ops[name].backward and family_of(ops[name].type) in COSTLY}
    begin = min([start for (name, _), start in began.items() if name in products])
    end = max([ended[name] for name in on_shards])
    sums = [
        (ended[sent.source], min(starts), sent)
        for sent in timeline.placement.transfers
        if (starts := [began[name, sent.target_device] for name in sent.readers if (name, sent.target_device) in began])
        and any(ops[name].role in _SUMS for name in sent.readers)
        and ended.get(sent.source, 0.0) >= begin
    ]
    passed = Counter[tuple[str, str]]()
    for _, _, sent in sums:
        passed[sent.source_device, "out"] += sent.bytes
        passed[sent.target_device, "in"] += sent.bytes
    buckets = [at < end for at, _, sent in sums if "/bucket" in sent.source]
    most = max(passed.values())
    tail_s = max(0.0, max([read for _, read, _ in sums]) - end)
    return Overlap(end - begin, most, 8e-6 * most / mbit, tail_s, len(buckets), sum(buckets))


if __name__ == "__main__":
    main()
