"""Growth: what many devices have to do, told by what few and some more have to do.

Devices do the same as others, so of hundreds only some are emitted, twice: for few of them and for some more. What is
in both tells how it grows: seconds and bytes by a constant and a part that grows with the number of devices, as what is
gathered at home does, or shrinks with it, as a slice of a variable does. A tensor that goes from one group of devices
to others (from host to host, or from device to device where there is one host) goes to as many more as there are
groups more: the links of both ends are busy with those, too, which nobody is there to send or receive.

Exact where all devices are ready at the same time, and where one serves the others one after the other: the first that
is there stands for the first that is served, the last for the last, and the others are spread out evenly between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graphsplit.placement.questions import natural_order
from graphsplit.prediction.buffers import Buffer
from graphsplit.prediction.graph_tasks import GraphTasks, Placed
from graphsplit.prediction.replay import Task


@dataclass(frozen=True)
class Counts:
    """Numbers of devices, and of groups of them.

    Attributes:
      few, more, many: devices that are emitted first, and then, and that are asked about.
      groups: of each, how many hosts they are, or, on one host, devices.
    """

    few: int
    more: int
    many: int
    groups: tuple[int, int, int]

    def fitted(self, few: float, more: float) -> float:
        """Return what a figure of few and more devices is of many: it grows with them, or shrinks to a least one.

        >>> counts = Counts(2, 4, 8, (2, 4, 8))
        >>> counts.fitted(3, 5), counts.fitted(6, 4), counts.fitted(7, 7)
        (9.0, 3.0, 7)
        """
        if more == few:
            return few
        if more > few:
            return few + (more - few) / (self.more - self.few) * (self.many - self.few)
        falling = (few - more) / (1 / self.few - 1 / self.more)
        return max(few - falling * (1 / self.few - 1 / self.many), 0.0)

    def times(self, few: int, more: int) -> float:
        """Return how many times as often something is sent among many groups as among few."""
        a, b, c = self.groups
        return max((few + (max(more, few) - few) / (b - a) * (c - a)) / few, 1.0)


@dataclass(frozen=True)
class Grown:
    """What many devices have to do.

    Attributes:
      tasks: of those that stand for all.
      matched: the share of the time of few devices whose counterpart among more was found.
    """

    tasks: GraphTasks
    matched: float


GroupOf = Callable[[str], object]


def grown(few: GraphTasks, more: GraphTasks, counts: Counts, group_of: GroupOf, launch_s: float = 0.0) -> Grown:
    """Return what the few devices have to do where there are many.

    Args:
      few, more: the tasks of one plan for few devices, and of the same for some more, who have names in both.
      counts: how many.
      group_of: device -> its group; all groups but the first are alike.
      launch_s: the least that an operation of a device takes.
    """
    return _Grower(few, more, counts, group_of, launch_s).grow()


class _Grower:
    def __init__(self, few: GraphTasks, more: GraphTasks, counts: Counts, group_of: GroupOf, launch_s: float):
        self._few = few
        self._more = more
        self._counts = counts
        self._group_of = group_of
        self._launch_s = launch_s
        self._keys = _keys(few)
        self._place = {key: j for j, key in enumerate(_keys(more))}
        self._sends = [_sends_by_end(tasks, group_of) for tasks in (few, more)]
        self._turns = _turns(few, self._keys, self._sends[0], group_of)
        self._alike = [Counter(map(_class, _keys(tasks))) for tasks in (few, more)]
        self._tasks: list[Task] = []
        self._placed: list[Placed] = []
        self._now: list[tuple[int, ...]] = []  # of each task of few: what others wait for now
        self._others: dict[int, tuple[int, float]] = {}  # what it receives from devices that are not there
        self._both: dict[int, float] = {}  # how many times it is received together with those
        self._known_s = self._all_s = 0.0

    def grow(self) -> Grown:
        for i, task in enumerate(self._few.tasks):
            self._write(i, task)
        self._spread()
        few, more = self._few, self._more
        tasks = replace(
            few,
            tasks=tuple(self._tasks),
            placed=tuple(self._placed),
            buffers=tuple(self._buffers()),
            arguments=self._by_device(few.arguments, more.arguments),
            unknown=tuple(dict.fromkeys([*few.unknown, *more.unknown])),
            given=round(self._counts.fitted(few.given, more.given)),
            sent_bytes=round(self._counts.fitted(few.sent_bytes, more.sent_bytes)),
        )
        return Grown(tasks, self._known_s / self._all_s if self._all_s else 1.0)

    def _by_device(self, few: dict[str, int], more: dict[str, int]) -> dict[str, int]:
        return {device: round(self._counts.fitted(size, more.get(device, size))) for device, size in few.items()}

    def _write(self, i: int, task: Task) -> None:
        placed, counterpart = self._few.placed[i], self._place.get(self._keys[i])
        seconds, size = task.seconds, placed.bytes
        self._all_s += seconds
        if counterpart is not None:
            self._known_s += seconds
            seconds = self._counts.fitted(seconds, self._more.tasks[counterpart].seconds)
            size = round(self._counts.fitted(size, self._more.placed[counterpart].bytes))
        if placed.kind == "compute":
            alike = _class(self._keys[i])
            times = self._counts.times(self._alike[0][alike], self._alike[1][alike])
            seconds = max(seconds, min(task.seconds, self._launch_s)) * times
        after = tuple(dict.fromkeys([now for source in task.after for now in self._now[source]]))
        placed = placed if size == placed.bytes else placed._replace(bytes=size)
        grown_task = Task(task.name, task.uses, seconds, after, task.delay_s, task.rank)
        if placed.kind == "send" and self._group_of(placed.device) != self._group_of(placed.target):
            self._send(i, grown_task, placed)
        else:
            self._now.append((self._add(grown_task, placed),))

    def _send(self, i: int, task: Task, placed: Placed) -> None:
        """Write a tensor that is sent, and what the links at both ends are busy with besides, for other devices."""
        gives, takes = (self._times(end, self._keys[i]) for end in (0, 1))
        both = min(gives, takes)
        others = task._replace(rank=self._turns.others[i])
        is_first = others.rank > task.rank
        if gives > both and not is_first:
            self._add_part(others, placed, gives - both, task.uses[:1])
        waited = [self._add_part(task, placed, both, task.uses)]
        if gives > both and is_first:
            self._add_part(others, placed, gives - both, task.uses[:1])
        if takes > both:
            waited.append(self._add_part(task, placed, takes - both, task.uses[-1:]))
            self._others[i] = waited[-1], takes - both
        self._both[i] = both
        self._now.append(tuple(waited))

    def _add_part(self, task: Task, placed: Placed, times: float, uses: tuple[str, ...]) -> int:
        own = task._replace(seconds=times * task.seconds, uses=uses)
        return self._add(own, placed._replace(bytes=round(times * placed.bytes)))

    def _spread(self) -> None:
        """Let others be received from the time on at which the device before was ready to send."""
        for i, (place, _) in self._others.items():
            before = self._turns.before.get(i)
            if before is not None:
                sources = self._few.tasks[before].after
                after = tuple(dict.fromkeys([now for source in sources for now in self._now[source]]))
                self._tasks[place] = self._tasks[place]._replace(after=after)

    def _times(self, end: int, key: Key) -> float:
        """Return how many times as often as among few the maker, or the reader, of something sent does the same."""
        group = self._sends[0][end].of[key]
        return self._counts.times(self._sends[0][end].number[group], self._sends[1][end].number[group])

    def _add(self, task: Task, placed: Placed) -> int:
        self._tasks.append(task)
        self._placed.append(placed)
        return len(self._tasks) - 1

    def _buffers(self) -> list[Buffer]:
        """Return the buffers, as large as they are now, and what is received from devices that are not there."""
        made, made_of_more = _made_bytes(self._few), _made_bytes(self._more)
        found, others = list[Buffer](), list[Buffer]()
        for buffer in self._few.buffers:
            maker, key = buffer.maker, (buffer.device, self._keys[buffer.maker])
            grows = self._counts.fitted(made[key], made_of_more.get(key, made[key])) / made[key] if made[key] else 1.0
            is_received = maker in self._both and self._few.placed[maker].target == buffer.device
            size = buffer.bytes * grows * (self._both[maker] if is_received else 1.0)
            readers = tuple([now for reader in buffer.readers for now in self._now[reader]])
            own = replace(buffer, bytes=round(size), maker=self._now[maker][0], readers=readers)
            found.append(own)
            if is_received and maker in self._others:
                place, times = self._others[maker]
                name, more = f"{buffer.name} of other devices", round(size * times / self._both[maker])
                others.append(replace(own, name=name, bytes=more, maker=place, onto=()))
        return [*found, *others]  # (buffers name those that they are written over by position)


Key = tuple[object, ...]


def _keys(tasks: GraphTasks) -> list[Key]:
    """Return what tasks are called among few devices and among more."""
    return [placed.key for placed in tasks.placed]


def _class(key: Key) -> Key:
    """Return what operations of a device have in common that do the same for other devices: all but for which."""
    return (*key[:2], *key[3:5])


def _made_bytes(tasks: GraphTasks) -> Counter[tuple[str, Key]]:
    """Return the bytes of all that each operation makes on a device: of more pieces each is smaller."""
    found: Counter[tuple[str, Key]] = Counter()
    for buffer in tasks.buffers:
        found[buffer.device, tasks.placed[buffer.maker].key] += buffer.bytes
    return found


def _first_readers(tasks: GraphTasks) -> dict[int, int]:
    """Return the first task that waits for each."""
    found: dict[int, int] = {}
    for i, task in enumerate(tasks.tasks):
        for source in task.after:
            found.setdefault(source, i)
    return found


@dataclass(frozen=True)
class _End:
    """What an end of the links sends or receives together.

    Attributes:
      of: by the key of something sent, what it is sent together with: what operations that are alike made, or read.
      number: of each, how many of them there are.
    """

    of: dict[Key, object]
    number: Counter[object]


@dataclass(frozen=True)
class _Turns:
    """When devices that are not there have their turn.

    Attributes:
      others: by what is sent, the rank of what is sent to others besides: behind the first group, before any later one.
      before: by what is received, what was received last of the group before; none for the first group.
    """

    others: dict[int, int]
    before: dict[int, int]


def _turns(tasks: GraphTasks, keys: Sequence[Key], ends: tuple[_End, _End], group_of: GroupOf) -> _Turns:
    found = _Turns({}, {})
    for own in _together(keys, ends[0]):
        turns = [(group_of(tasks.placed[i].target), tasks.tasks[i].rank // tasks.turn) for i in own]
        first = min(turns, key=lambda pair: pair[1])[0]
        for i, (group, _) in zip(own, turns, strict=True):
            of_group = [turn for other, turn in turns if other == group]
            found.others[i] = ((max(of_group) + 1) if group == first else min(of_group)) * tasks.turn - 1
    for own in _together(keys, ends[1]):
        own.sort(key=lambda i: natural_order(tasks.placed[i].device))
        groups = [group_of(tasks.placed[i].device) for i in own]
        for i, group in zip(own, groups, strict=True):
            at = groups.index(group)
            if at:
                found.before[i] = own[at - 1]
    return found


def _together(keys: Sequence[Key], end: _End) -> list[list[int]]:
    """Return what operations that are alike made, or read, together."""
    found: dict[object, list[int]] = {}
    for i, key in enumerate(keys):
        if key in end.of:
            found.setdefault(end.of[key], []).append(i)
    return list(found.values())


def _sends_by_end(tasks: GraphTasks, group_of: GroupOf) -> tuple[_End, _End]:
    """Return what is sent to other groups, by the operation that made it, and by the first that reads it."""
    keys, readers = _keys(tasks), _first_readers(tasks)
    ends = _End({}, Counter()), _End({}, Counter())
    for i, placed in enumerate(tasks.placed):
        if placed.kind != "send" or group_of(placed.device) == group_of(placed.target):
            continue
        maker, reader = tasks.tasks[i].after[:1], readers.get(i)
        groups: Sequence[object] = (
            ("made by", _class(keys[maker[0]]) if maker else None),
            ("read by", None if reader is None else _class(keys[reader])),
        )
        for end, group in zip(ends, groups, strict=True):
            end.of[keys[i]] = group
            end.number[group] += 1
    return ends
