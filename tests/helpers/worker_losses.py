"""Calls over worker processes that are killed, frozen and started again."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import warnings

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.worker_scene import WAIT_S, Network, all_well, case, rows, same, trained, until


class Everywhere:
    """Variables in this process, on worker 0, copied on both workers; a step that writes them early and late."""

    def __init__(self):
        here, there = "/device:CPU:0", "/job:worker/replica:0/task:0/device:CPU:0"
        on_both = ["worker:0/CPU:0", "worker:1/CPU:0"]
        with tf.device(here):
            self.here = [tf.Variable(rows(40, 40)) for _ in range(3)]
        with tf.device(there):
            self.there = [tf.Variable(rows(40, 40)) for _ in range(3)]
            self.copied = [tf.Variable(rows(40, 40)) for _ in range(3)]
        gs.set_variable_layout(self.copied, "replicated", on_both)
        self.step = gs.parallelize(self.change, devices=on_both)

    def change(self, x):
        total = tf.constant(0.0, tf.float64)
        for group in (self.here, self.there, self.copied):
            for k, v in enumerate(group):
                y = x
                for _ in range(40 * k):  # some are written at once, and some late
                    y = tf.tanh(y @ tf.ones((40, 40), y.dtype) / 40)
                total += tf.reduce_sum(y)
                v.assign_add(tf.ones_like(v) + 0 * tf.reduce_sum(y))
        return total

    def values(self, also_copied: bool = True) -> list[np.ndarray]:
        return [v.numpy() for group in (self.here, self.there, self.copied if also_copied else []) for v in group]

    def copies(self) -> list[np.ndarray]:
        """Return what worker 0 has of the copied variables."""
        found = []
        for v in self.copied:
            parts = v._graphsplit_record.parts
            assert parts.in_parts
            found.append(tf.raw_ops.ReadVariableOp(resource=parts.handles()[0], dtype=v.dtype).numpy())
        return found


@case("lost")
def a_step_happens_or_does_not(workers, cluster) -> None:
    kill_in_steps(workers, cluster, times=2, seed=1)


@case("often")
def thirty_kills(workers, cluster) -> None:
    kill_in_steps(workers, cluster, times=30, seed=2)


def kill_in_steps(workers, cluster, times: int, seed: int) -> None:
    random = np.random.RandomState(seed)
    met = 0
    for _ in range(4 * times):
        if met == times:
            return
        state = Everywhere()
        x = rows(8, 40)
        state.step(x)
        begin = time.perf_counter()
        state.step(x)
        took = time.perf_counter() - begin
        before = state.values(False), state.copies()
        killer = threading.Timer(random.uniform(0, took), workers.kill, [1])
        killer.start()
        errors = []
        try:
            state.step(x)
        except gs.errors.WorkerLostError as error:
            errors.append((error.tasks, error.undone))
        killer.join()
        assert errors in ([], [((1,), True)]), errors
        met += len(errors)
        more = 0.0 if errors else 1.0
        same(state.values(False), [v + more for v in before[0]], "values", exact=True)
        same(state.copies(), [c + more for c in before[1]], "copies", exact=True)
        for v in state.copied:
            v._graphsplit_record.parts.forget(v)  # (half of them is gone)
        all_well(workers, cluster)
    raise AssertionError(f"{met} of {times} kills met a step")


@case("lost")
def a_frozen_worker_is_an_error(workers, cluster) -> None:
    network = Network()
    step = gs.parallelize(network.train)
    step(rows())
    before = network.values()
    cluster.deadline_s = 3.0
    workers.freeze(1)
    begin = time.monotonic()
    with pytest.raises(gs.errors.WorkerLostError, match="has not answered for") as raised:
        step(rows())
    assert time.monotonic() - begin < WAIT_S / 2
    assert raised.value.tasks == (1,)
    assert raised.value.undone  # a local worker is ended, and the step with it
    same(network.values(), before, exact=True)


@case("lost")
def a_frozen_worker_of_others(workers, cluster) -> None:
    network = Network()
    step = gs.parallelize(network.train)
    step(rows())
    before = network.values()
    cluster.deadline_s, end = 3.0, cluster.on_lost
    told = []
    cluster.on_lost = lambda task, address: told.append((task, address))
    workers.freeze(1)
    try:
        for _ in range(2):  # it stays an error as long as the worker stands still
            with pytest.raises(gs.errors.WorkerLostError, match="The call still waits for it") as raised:
                step(rows())
            assert not raised.value.undone
        assert told == [(1, workers.addresses[1])], told
    finally:
        cluster.on_lost = end
        workers.kill(1)
    all_well(workers, cluster)
    until(lambda: step_works(step, before, network))


def step_works(step, before, network) -> bool:
    """Run a step: what was stuck is taken back before, so exactly one step is between before and after."""
    try:
        step(rows())
    except gs.errors.WorkerLostError:
        return False
    same([network.count.numpy()], [before[-1] + 1])
    return True


def resilient_run(workers, cluster, events: dict[int, str], steps: int, layout: str, checkpoint: str = "") -> Network:
    """Train for some steps, while workers are killed, frozen and started again before some of them."""
    on_workers = layout != "home"
    network = Network(device="/job:worker/task:0/device:CPU:0" if on_workers else "CPU:0")
    if on_workers:
        gs.set_variable_layout(network, layout)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(network), checkpoint, 2) if checkpoint else None
    step = gs.workers.resilient(gs.parallelize(network.train), checkpoint=manager)
    cluster.deadline_s = 3.0
    for k in range(steps):
        print(f"step {k} {events.get(k, '')}", file=sys.stderr, flush=True)
        what = happen(workers, cluster, events.get(k, ""))
        if manager is not None and k % 3 == 0:
            step.save()
        step(rows(5 + k % 3))
        assert len(step.devices) == (4 if what in ("", "back") and not gone(events, k) else 2), (k, step.devices)
    return network


def happen(workers, cluster, event: str) -> str:
    """Kill, freeze or start a worker again; return which."""
    what, _, task = event.partition(" ")
    if what == "back":
        workers.restart(int(task))
        until(lambda: all(worker.answers for worker in cluster.health(2.0).workers))
        time.sleep(1.1)  # it is asked for once a second
    elif what:
        getattr(workers, what)(int(task))
    return what


def gone(events: dict[int, str], k: int) -> bool:
    """Return whether a worker is away in a step."""
    now = [what for step, what in sorted(events.items()) if step <= k]
    return bool(now) and not now[-1].startswith("back")


@case("lost")
def it_goes_on(workers, cluster) -> None:
    events = {2: "kill 1", 4: "back 1", 6: "freeze 0", 8: "back 0"}
    network = resilient_run(workers, cluster, events, 10, "home")
    same(network.values(), trained(10).values())


@case("lost")
def lost_state_comes_from_copies(workers, cluster) -> None:
    events = {2: "kill 0", 4: "back 0", 6: "kill 1"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = resilient_run(workers, cluster, events, 8, "replicated")
    same(network.values(), trained(8).values())


@case("lost")
def lost_state_comes_from_a_checkpoint(workers, cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        network = resilient_run(workers, cluster, {4: "kill 1", 6: "back 1"}, 8, "sharded", folder)
    same(network.values(), trained(8).values())


@case("lost")
def lost_state_that_was_divided_automatically(workers, cluster) -> None:
    width, steps, events = 100, 8, {3: "kill 1", 5: "back 1"}
    plain, network = Network(width), Network(width)
    one_device = tf.function(plain.train, reduce_retracing=True)
    cluster.deadline_s = 3.0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(network), folder, 2)
        step = gs.workers.resilient(gs.parallelize(network.train, variables="auto"), checkpoint=manager)
        for k in range(steps):
            happen(workers, cluster, events.get(k, ""))
            if k == 2:
                step.save()
            step(rows(5 + k % 3, width))
            one_device(rows(5 + k % 3, width))
            devices = step.devices
            lying = [w._graphsplit_record.parts.devices for w in (*network.weights, *network.momenta)]
            assert lying == [devices] * 4, (k, lying)
    assert len(devices) == 4
    for own, expected in zip(network.values(), plain.values(), strict=True):  # (gradients grow with the width)
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-12 * np.max(np.abs(expected)))


@case("lost")
def reading_lost_state_names_the_variable(workers, cluster) -> None:
    v = tf.Variable(rows(40, 40), name="in_parts")
    gs.set_variable_layout(v, "sharded", cluster.devices)
    gs.parallelize(lambda x: x @ v)(rows(8, 40))
    workers.kill(1)
    for read in (v.numpy, v.read_value, lambda: v + 1.0, lambda: gs.set_variable_layout(v, "home")):
        with pytest.raises(
            gs.errors.WorkerLostError, match=r"Variable 'in_parts:?0?' cannot be read: one of workers 0, 1"
        ):
            read()


@case("lost")
def lost_state_without_copy_or_checkpoint(workers, cluster) -> None:
    with tf.device("/job:worker/task:1/device:CPU:0"):
        w = tf.Variable(rows(6, 3), name="lonely")
    step = gs.workers.resilient(gs.parallelize(lambda x: tf.tanh(x @ w)))
    step(rows())
    workers.kill(1)
    with pytest.warns(UserWarning, match="lost worker 1"), pytest.raises(gs.errors.WorkerLostError) as raised:
        step(rows())
    assert str(raised.value).endswith(
        "These variables have no copy elsewhere:\n"
        "  - lonely:0\n"
        'Set their layout to "replicated", keep them in this process, or pass resilient(checkpoint=...) a '
        "tf.train.CheckpointManager that has saved a checkpoint."
    )


@case("often")
def fifty_steps(workers, cluster) -> None:
    events = {4: "kill 1", 8: "back 1", 12: "freeze 0", 16: "back 0", 20: "kill 0", 24: "back 0", 28: "kill 1"}
    events |= {32: "back 1", 36: "freeze 1", 40: "back 1", 44: "kill 0", 46: "back 0", 48: "kill 1"}
    network = resilient_run(workers, cluster, events, 50, "home")
    same(network.values(), trained(50).values())
