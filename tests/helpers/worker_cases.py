"""Cases over worker processes: `python -m tests.helpers.worker_cases GROUP [NAME]`, one JSON object of what they said.

A process connects once, and before it makes anything, so a group of cases has a process of its own.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs

GROUPS: dict[str, dict[str, Callable]] = {"calls": {}, "lost": {}, "often": {}}
LIMIT_S = float(os.environ.get("GRAPHSPLIT_TEST_CASE_S", "800"))  # of a case
WAIT_S = 200  # machines that run tests are slow


def case(group: str):
    def register(fn):
        GROUPS[group][fn.__name__] = fn
        return fn

    return register


def main() -> None:
    group = sys.argv[1]
    chosen = {name: fn for name, fn in GROUPS[group].items() if sys.argv[2:] in ([], [name])}
    gs.use_logical_devices(2)
    found = {}
    with gs.LocalWorkers(2, devices=2) as workers:
        cluster = gs.connect(workers, timeout_s=WAIT_S)
        for name, fn in chosen.items():
            begin = time.perf_counter()
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # (the workers end with this process)
            try:
                fn(workers, cluster)
                found[name] = ""
            except BaseException:
                found[name] = traceback.format_exc()
            print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
            all_well(workers, cluster)
            faulthandler.cancel_dump_traceback_later()
    print(json.dumps(found))


def all_well(workers, cluster) -> None:
    """Start what is lost again."""
    for task in cluster.health(2.0).lost:
        if not cluster.health(2.0).workers[task].answers:
            workers.restart(task)
    until(lambda: all(worker.answers for worker in cluster.health(2.0).workers))
    cluster.reconnect()
    cluster.deadline_s = None


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def rows(count: int = 7, width: int = 6) -> tf.Tensor:
    return tf.random.stateless_normal((count, width), [1, 2], dtype=tf.float64)


class Network(tf.Module):
    """Two layers with the momentum of their optimizer and a counter; all in float64."""

    def __init__(self, width: int = 6, device: str = "CPU:0"):
        self.width = width
        with tf.device(device):
            self.weights = [tf.Variable(rows(width, width) / width + k, name=f"w{k}") for k in range(2)]
            self.momenta = [tf.Variable(tf.zeros_like(w), name=f"m{k}") for k, w in enumerate(self.weights)]
            self.count = tf.Variable(np.int64(0), name="count")

    def train(self, x):
        with tf.GradientTape() as tape:
            h = tf.tanh(x @ self.weights[0]) @ self.weights[1]
            loss = tf.reduce_mean((h - tf.reduce_mean(h, 0)) ** 2)
        for w, m, g in zip(self.weights, self.momenta, tape.gradient(loss, self.weights), strict=True):
            m.assign(0.9 * m + g)
            w.assign_sub(0.05 * m)
        self.count.assign_add(1)
        return loss

    def values(self) -> list[np.ndarray]:
        return [v.numpy() for v in (*self.weights, *self.momenta, self.count)]


def same(a, b, what: str = "", exact: bool = False) -> None:
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x, y) if exact else np.allclose(x, y, rtol=1e-12, atol=1e-12), (what, x, y)


def trained(steps: int, batches: Callable[[int], tf.Tensor] = lambda k: rows(5 + k % 3)) -> Network:
    """Return a network trained on one device of this process."""
    network = Network()
    step = tf.function(network.train, reduce_retracing=True)
    for k in range(steps):
        step(batches(k))
    return network


# --- calls -----------------------------------------------------------------------------------------------------------


@case("calls")
def devices_by_default(workers, cluster) -> None:
    assert gs.available_devices() == cluster.devices
    assert [gs.core.devices.short_name(d) for d in cluster.devices] == [
        *("worker:0/CPU:0", "worker:0/CPU:1"),
        *("worker:1/CPU:0", "worker:1/CPU:1"),
    ]
    assert gs.parallelize(lambda x: x).devices == cluster.devices
    assert gs.parallelize(lambda x: x, devices=["CPU:1", "worker:1/CPU:0"]).devices == (
        *("/device:CPU:1", "/job:worker/replica:0/task:1/device:CPU:0"),
    )
    assert gs.connect(workers) is cluster
    assert [worker.is_well for worker in cluster.health().workers] == [True, True]


@case("calls")
def train_steps(workers, cluster) -> None:
    expected = trained(3)
    for options in (
        {},
        {"devices": ["CPU:0", "worker:0/CPU:1", "worker:1/CPU:0"]},
        {"home": "worker:1/CPU:1"},
        {"micro_batches": 2},
    ):
        network = Network()
        step = gs.parallelize(network.train, **options)
        for k in range(3):
            step(rows(5 + k % 3))
        same(network.values(), expected.values(), str(options))


@case("calls")
def state_on_workers(workers, cluster) -> None:
    expected = trained(3)
    for layout in ("home", "mirrored", "sharded"):
        network = Network(device="/job:worker/task:0/device:CPU:0")
        gs.set_variable_layout(network, layout)
        step = gs.parallelize(network.train)
        for k in range(3):
            step(rows(5 + k % 3))
        same(network.values(), expected.values(), layout)
        gs.set_variable_layout(network, "home")


@case("calls")
def tapes_outside(workers, cluster) -> None:
    w = tf.Variable(rows(6, 3))
    f = gs.parallelize(lambda x: tf.nn.softplus(x @ w))
    x = rows(5)
    for fn in (f, lambda x: tf.nn.softplus(x @ w)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        gradients = tape.gradient(y, [x, w])
        if fn is f:
            found = [y, *gradients]
        else:
            same(found, [y, *gradients])


@case("calls")
def batches_ahead(workers, cluster) -> None:
    batches = [rows(n) for n in (5, 4, 5, 1)]
    f = gs.parallelize(lambda x: tf.cumsum(x, axis=1) * 2)
    same(list(f.map(batches)), [tf.cumsum(x, axis=1) * 2 for x in batches])


@case("calls")
def loops_draws_and_tables(workers, cluster) -> None:
    keys = tf.lookup.KeyValueTensorInitializer(tf.range(4, dtype=tf.int64), tf.range(4, dtype=tf.int64) ** 2)
    table = tf.lookup.StaticHashTable(keys, -1)

    def f(x):
        for _ in tf.range(3):
            x = tf.sin(x) + tf.random.stateless_uniform(tf.shape(x), [3, 4], dtype=x.dtype)
        return x, table.lookup(tf.cast(tf.argmax(x, 1), tf.int64)), tf.random.stateless_normal(tf.shape(x), [5, 6])

    same(tf.nest.flatten(gs.parallelize(f)(rows())), tf.nest.flatten(tf.function(f)(rows())))


@case("calls")
def callbacks_run_in_the_client(workers, cluster) -> None:
    seen = []

    def note(values):
        seen.append((os.getpid(), values.tolist()))
        return values.sum()

    def f(x):
        y = 2 * x
        total = tf.numpy_function(note, [y], tf.float64)
        tf.print("total:", total, output_stream=sys.stderr)
        return y / total

    x = tf.range(1, 6, dtype=tf.float64)[:, None]
    same([gs.parallelize(f, home="worker:1/CPU:0")(x)], [x / 15])
    assert seen == [(os.getpid(), [[2.0], [4.0], [6.0], [8.0], [10.0]])], seen


@case("calls")
def what_really_ran(workers, cluster) -> None:
    w = tf.Variable(rows(6, 3))
    products = gs.parallelize(lambda x: tf.tanh(x @ w)).placement(rows(8), actual=True).select("MatMul")
    assert sorted(op.actual for op in products) == sorted(cluster.devices), products


@case("calls")
def verified(workers, cluster) -> None:
    network = Network()
    report = gs.verify(gs.parallelize(network.train), rows())
    assert str(report).startswith("PASS"), str(report)


@case("calls")
def stages(workers, cluster) -> None:
    first, second = tf.Variable(rows(6, 6)), tf.Variable(rows(6, 6))

    one = gs.on_device(lambda x: tf.tanh(x @ first), "worker:0/CPU:0")
    other = gs.on_device(lambda h: h @ second, "worker:1/CPU:1")
    f = gs.parallelize(lambda x: other(one(x)), devices=["worker:0/CPU:0"])
    same([f(rows())], [tf.tanh(rows() @ first) @ second])
    assert "worker:1/CPU:1" in str(f.plan(rows()))


@case("calls")
def keras_fit(workers, cluster) -> None:
    """A model whose last batch is uneven, with BatchNormalization, dropout, metrics and Adam, under fit and predict."""
    import keras

    def trained_model(parallel: bool):
        keras.utils.set_random_seed(1)
        layers = [
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
        ]
        model = keras.Sequential([keras.Input((6,), dtype="float64"), *layers, keras.layers.Dense(1)])
        model = gs.multi_gpu_model(model) if parallel else model
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        x = rows(22).numpy()
        history = model.fit(x, x.sum(1), batch_size=8, epochs=2, shuffle=False, verbose=0)
        return [*history.history["loss"], *history.history["mae"], model.predict(x, verbose=0), *model.get_weights()]

    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        expected, found = trained_model(False), trained_model(True)
    finally:
        keras.config.set_floatx(before)
    for a, b in zip(found, expected, strict=True):
        assert np.allclose(a, b, rtol=1e-9, atol=1e-9), (a, b)


@case("calls")
def errors_name_the_line(workers, cluster) -> None:
    table = tf.Variable(tf.ones((4, 2)))
    f = gs.parallelize(lambda ids: tf.gather(table, ids))
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        f(tf.constant([0, 1, 2, 100]))
    assert str(raised.value).startswith("worker:1/CPU:1, row 3, worker_cases.py:"), raised.value
    assert "indices[0] = 100 is not in [0, 4)" in str(raised.value), raised.value


@case("calls")
def another_cluster(workers, cluster) -> None:
    with pytest.raises(gs.UnsupportedError) as raised:
        gs.connect(["127.0.0.1:9"])
    assert str(raised.value) == (
        f"connect(['127.0.0.1:9']): this process is connected to {', '.join(workers)} already, and TensorFlow would "
        "lose what is assigned to variables from then on. Other workers need a new client process: start this one "
        "again."
    )


# --- lost ------------------------------------------------------------------------------------------------------------


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
        gs.set_variable_layout(self.copied, "mirrored", on_both)
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
            parts = v._graphsplit_parts
            assert parts.in_parts
            found.append(tf.raw_ops.ReadVariableOp(resource=parts.handle(0), dtype=v.dtype).numpy())
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
        except gs.WorkerLostError as error:
            errors.append((error.tasks, error.undone))
        killer.join()
        assert errors in ([], [((1,), True)]), errors
        met += len(errors)
        more = 0.0 if errors else 1.0
        same(state.values(False), [v + more for v in before[0]], "values", exact=True)
        same(state.copies(), [c + more for c in before[1]], "copies", exact=True)
        for v in state.copied:
            v._graphsplit_parts.forget(v)  # (half of them is gone)
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
    with pytest.raises(gs.WorkerLostError, match="has not answered for") as raised:
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
            with pytest.raises(gs.WorkerLostError, match="The call still waits for it") as raised:
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
    except gs.WorkerLostError:
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
    step = gs.resilient(gs.parallelize(network.train), checkpoint=manager)
    cluster.deadline_s = 3.0
    for k in range(steps):
        what, _, task = events.get(k, "").partition(" ")
        print(f"step {k} {what} {task}", file=sys.stderr, flush=True)
        if what == "back":
            workers.restart(int(task))
            until(lambda: all(worker.answers for worker in cluster.health(2.0).workers))
            time.sleep(1.1)  # it is asked for once a second
        elif what:
            getattr(workers, what)(int(task))
        if manager is not None and k % 3 == 0:
            step.save()
        step(rows(5 + k % 3))
        assert len(step.devices) == (4 if what in ("", "back") and not gone(events, k) else 2), (k, step.devices)
    return network


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
        network = resilient_run(workers, cluster, events, 8, "mirrored")
    same(network.values(), trained(8).values())


@case("lost")
def lost_state_comes_from_a_checkpoint(workers, cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        network = resilient_run(workers, cluster, {4: "kill 1", 6: "back 1"}, 8, "sharded", folder)
    same(network.values(), trained(8).values())


@case("lost")
def lost_state_without_copy_or_checkpoint(workers, cluster) -> None:
    with tf.device("/job:worker/task:1/device:CPU:0"):
        w = tf.Variable(rows(6, 3), name="lonely")
    step = gs.resilient(gs.parallelize(lambda x: tf.tanh(x @ w)))
    step(rows())
    workers.kill(1)
    with pytest.warns(UserWarning, match="lost worker 1"), pytest.raises(gs.WorkerLostError) as raised:
        step(rows())
    assert str(raised.value).endswith(
        'Of these variables there is no copy elsewhere:\n  - lonely:0\nLay them out as "mirrored", keep them in this '
        "process, or give resilient(checkpoint=...) a tf.train.CheckpointManager that has saved one."
    )


@case("often")
def fifty_steps(workers, cluster) -> None:
    events = {4: "kill 1", 8: "back 1", 12: "freeze 0", 16: "back 0", 20: "kill 0", 24: "back 0", 28: "kill 1"}
    events |= {32: "back 1", 36: "freeze 1", 40: "back 1", 44: "kill 0", 46: "back 0", 48: "kill 1"}
    network = resilient_run(workers, cluster, events, 50, "home")
    same(network.values(), trained(50).values())


if __name__ == "__main__":
    main()
