"""The replay, on graphs whose schedule is known exactly."""

from __future__ import annotations

import itertools
import random

import pytest

from graphsplit.errors import CheckError
from graphsplit.simulate.prediction.buffers import Buffer, live_memory
from graphsplit.simulate.prediction.replay import Resource, Task, replay

ONE = Resource()


def threads(count: int) -> Resource:
    return Resource(count, newest_first=True)


def test_a_chain_takes_the_sum():
    tasks = [Task("a", ("d",), 1), Task("b", ("d",), 2, (0,)), Task("c", ("e",), 4, (1,))]
    found = replay(tasks, {"d": ONE, "e": ONE})
    assert (found.starts, found.ends, found.seconds) == ((0, 1, 3), (1, 3, 7), 7)
    assert found.critical_path() == [0, 1, 2]


def test_a_fork_takes_the_longer_branch():
    tasks = [Task("a", ("d",), 1), Task("b", ("d",), 5, (0,)), Task("c", ("e",), 2, (0,)), Task("j", ("d",), 1, (1, 2))]
    found = replay(tasks, {"d": ONE, "e": ONE})
    assert (found.starts, found.seconds) == ((0, 1, 1, 6), 7)
    assert found.critical_path() == [0, 1, 3]


def test_on_one_stream_a_fork_takes_the_sum():
    tasks = [Task("a", ("d",), 1), Task("b", ("d",), 5, (0,)), Task("c", ("d",), 2, (0,)), Task("j", ("d",), 1, (1, 2))]
    found = replay(tasks, {"d": ONE})
    assert (found.starts, found.seconds) == ((0, 1, 6, 8), 9)
    assert found.critical_path() == [0, 1, 2, 3]  # the third waited for the stream, which the second had


def test_rank_decides_among_what_is_ready_at_the_same_time():
    tasks = [Task("a", ("d",), 1, rank=1), Task("b", ("d",), 1, rank=0)]
    assert replay(tasks, {"d": ONE}).starts == (1, 0)


def test_who_was_ready_first_is_first():
    tasks = [
        Task("late", ("d",), 1, (2,)),
        Task("busy", ("d",), 5),
        Task("x", ("e",), 2),
        Task("early", ("d",), 1, rank=9),
    ]
    assert replay(tasks, {"d": ONE, "e": ONE}).starts == (6, 0, 0, 5)


def test_an_order_edge_lets_wait_what_could_run():
    free = [Task("a", ("d",), 3), Task("b", ("e",), 1)]
    assert replay(free, {"d": ONE, "e": ONE}).seconds == 3
    ordered = [free[0], free[1]._replace(after=(0,))]
    assert replay(ordered, {"d": ONE, "e": ONE}).starts == (0, 3)


def test_a_shared_link_sends_one_after_the_other():
    tasks = [Task("to b", ("link",), 2), Task("to c", ("link",), 2)]
    assert replay(tasks, {"link": ONE}).seconds == 4
    apart = [Task("to b", ("link to b",), 2), Task("to c", ("link to c",), 2)]
    assert replay(apart, {"link to b": ONE, "link to c": ONE}).seconds == 2


def test_latency_lets_the_reader_wait_and_not_the_link():
    tasks = [Task("1", ("link",), 2, delay_s=10), Task("2", ("link",), 2, delay_s=10), Task("r", ("d",), 1, (0,))]
    found = replay(tasks, {"link": ONE, "d": ONE})
    assert (found.starts, found.seconds) == ((0, 2, 12), 14)


def test_both_ends_of_a_link_are_busy():
    tasks = [
        Task("a to c", ("from a", "to c"), 2),
        Task("b to c", ("from b", "to c"), 2, rank=1),
        Task("b to d", ("from b", "to d"), 2, rank=2),
    ]
    found = replay(tasks, dict.fromkeys(("from a", "from b", "to c", "to d"), ONE))
    assert found.starts == (0, 2, 0)  # b sends to d while c is busy


def test_a_pool_runs_as_many_as_it_has_threads():
    tasks = [Task(str(i), ("pool",), 1) for i in range(5)]
    assert replay(tasks, {"pool": threads(2)}).seconds == 3
    slowed = [task._replace(slowdown=(1.0, 1.5)) for task in tasks]
    assert replay(slowed[:4], {"pool": threads(2)}).seconds == 3  # both work, half as slow again
    assert replay(slowed[:1], {"pool": threads(2)}).seconds == 1


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_all_reduce_of_the_textbook(devices: int):
    """Each device adds up its chunk and sends it to all: `2 (n-1)/n S/B`, with additions that take no time."""
    size, rate = 120.0, 10.0
    chunk_s = size / devices / rate
    tasks: list[Task] = []
    sums = {}

    def send(a: int, b: int, after: tuple[int, ...]) -> int:
        tasks.append(Task(f"{a} to {b}", (f"from {a}", f"to {b}"), chunk_s, after, rank=(b - a) % devices))
        return len(tasks) - 1

    everyone = range(devices)
    for b in everyone:
        parts = tuple([send(a, b, ()) for a in everyone if a != b])
        tasks.append(Task(f"sum on {b}", (), 0.0, parts))
        sums[b] = len(tasks) - 1
    for a in everyone:
        for b in everyone:
            if a != b:
                send(a, b, (sums[a],))
    links = {f"{way} {d}": ONE for way in ("from", "to") for d in everyone}
    assert replay(tasks, links).seconds == pytest.approx(2 * (devices - 1) / devices * size / rate)


def test_circles_and_unknown_resources_are_refused():
    with pytest.raises(CheckError, match=r"^2 tasks wait for each other, 'a' among them\.$"):
        replay([Task("a", (), 1, (1,)), Task("b", (), 1, (0,))], {})
    with pytest.raises(CheckError, match=r"^Tasks use \['gpu'\], which the machine does not have\.$"):
        replay([Task("a", ("gpu",), 1)], {})


def _random_tasks(seed: int) -> list[Task]:
    rng = random.Random(seed)
    tasks = []
    for i in range(60):
        after = tuple(sorted(rng.sample(range(i), min(i, rng.randint(0, 3)))))
        uses = rng.choice([("d",), ("e",), ("pool",), ("from", "to"), ("from",), ()])
        tasks.append(Task(str(i), uses, rng.choice([0.5, 1.0, 2.0]) if uses else 0.0, after, rng.choice([0, 0.25]), i))
    return tasks


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_obey_edges_and_capacities(seed: int):
    tasks = _random_tasks(seed)
    resources = {"d": ONE, "e": ONE, "pool": threads(2), "from": ONE, "to": ONE}
    capacity = {**dict.fromkeys(resources, 1), "pool": 2}
    found = replay(tasks, resources)
    for i, task in enumerate(tasks):
        assert all(found.starts[i] >= found.ends[k] + tasks[k].delay_s for k in task.after)
        assert found.ends[i] == found.starts[i] + task.seconds
    for name in resources:
        mine = [i for i, task in enumerate(tasks) if name in task.uses]
        for i in mine:
            together = [k for k in mine if found.starts[k] <= found.starts[i] < found.ends[k]]
            assert len(together) <= capacity[name]
    work = {name: sum(t.seconds for t in tasks if name in t.uses) / n for name, n in capacity.items()}
    assert found.seconds >= max(work.values())
    path = found.critical_path()
    assert found.ends[path[-1]] == max(found.ends)
    assert all(found.starts[b] >= found.ends[a] for a, b in itertools.pairwise(path))


def test_a_thread_follows_what_it_has_made_ready():
    """Two devices' chains on one thread: not in turns. Of what an operation makes ready, it goes on with the last."""
    chains = [Task(f"{d}{i}", ("pool",), 1, (3 * d + i - 1,) if i else (), rank=i) for d in range(2) for i in range(3)]
    assert replay(chains, {"pool": threads(1)}).starts == (3, 4, 5, 0, 1, 2)
    fork = [Task("a", ("pool",), 1), *[Task(name, ("pool",), 1, (0,)) for name in "bcd"], Task("e", ("pool",), 1, (3,))]
    assert replay(fork, {"pool": threads(1)}).starts == (0, 4, 3, 1, 2)


def test_what_is_ready_from_the_start_is_taken_from_the_end():
    """TensorFlow gives all of a graph's first operations to its threads, of which each takes what is newest."""
    tasks = [Task(str(i), ("pool",), 1, rank=-i) for i in range(4)]
    assert replay(tasks, {"pool": threads(1)}).starts == (0, 1, 2, 3)
    assert replay([t._replace(rank=0) for t in tasks], {"pool": threads(1)}).starts == (3, 2, 1, 0)


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.1])
def test_more_bandwidth_is_never_slower_on_a_chain(factor: float):
    chain = [Task(str(i), ("link" if i % 2 else "d",), 1.0 + i, (i - 1,) if i else ()) for i in range(10)]
    faster = [t._replace(seconds=t.seconds * factor) if "link" in t.uses else t for t in chain]
    before, after = (replay(tasks, {"link": ONE, "d": ONE}).seconds for tasks in (chain, faster))
    assert after == pytest.approx(before - (1 - factor) * sum(t.seconds for t in chain if "link" in t.uses))


def test_buffers_live_from_their_maker_to_their_last_reader():
    tasks = [Task("a", ("d",), 1), Task("b", ("d",), 1, (0,)), Task("c", ("d",), 1, (1,)), Task("e", ("d",), 1, (2,))]
    buffers = [Buffer("a", "d", 10, 0, (1, 3)), Buffer("b", "d", 5, 1, (2,)), Buffer("c", "d", 7, 2, kept=True)]
    memory = live_memory(buffers, replay(tasks, {"d": ONE}))["d"]
    assert memory.live_bytes == 22
    assert memory.largest == (("a", 10), ("c", 7), ("b", 5))
    assert memory.steps == ((0, 10), (1, 15), (2, 22), (3, 17), (4, 0))


def test_an_operation_writes_over_an_operand_that_nobody_else_reads():
    tasks = [Task("a", ("d",), 1), Task("b", ("d",), 1, (0,)), Task("c", ("d",), 1, (1,)), Task("e", ("d",), 1, (2,))]
    schedule = replay(tasks, {"d": ONE})
    chain = [Buffer("a", "d", 10, 0, (1,)), Buffer("b", "d", 10, 1, (2,), (0,)), Buffer("c", "d", 10, 2, (3,), (1,))]
    assert live_memory(chain, schedule)["d"].live_bytes == 10
    also_read = [chain[0]._replace(readers=(1, 3)), *chain[1:]]
    assert live_memory(also_read, schedule)["d"].live_bytes == 20
    returned = [chain[0]._replace(kept=True), *chain[1:]]
    assert live_memory(returned, schedule)["d"].live_bytes == 20


@pytest.mark.parametrize("seed", range(5))
def test_memory_is_at_least_each_buffer_and_at_most_all(seed: int):
    rng, tasks = random.Random(seed), _random_tasks(seed)
    readers = {i: tuple([k for k, task in enumerate(tasks) if i in task.after]) for i in range(len(tasks))}
    buffers = [Buffer(str(i), rng.choice("de"), rng.randint(1, 9), i, readers[i]) for i in range(len(tasks))]
    schedule = replay(tasks, {"d": ONE, "e": ONE, "pool": threads(2), "from": ONE, "to": ONE})
    for device, memory in live_memory(buffers, schedule).items():
        own = [buffer.bytes for buffer in buffers if buffer.device == device]
        assert max(own) <= memory.live_bytes <= sum(own)
        assert memory.steps[-1][1] == 0
