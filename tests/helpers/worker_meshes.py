"""Meshes over four worker processes, of which some are killed and started again."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.devices import short_name
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.automatic_plans import machine_of
from tests.helpers.pairs import Pair, Twin, batches
from tests.helpers.worker_scene import case, rows, same, until

MESH = {"batch": 2, "model": 2}
UP, DOWN = (None, "model"), ("model", None)
LAYOUT: dict[str, Any] = {
    "up_slot": ("batch", "model"),  # divided over the batch's axis, too, as by ZeRO
    "down_slot": (DOWN, "sharded"),
    "up": UP,  # only in the first row
    "down": (DOWN, "replicated"),  # a copy in each row
    "count": "replicated",
}


class Layers(tf.Module):
    """Two layers with the momentum of their optimizer and a counter; all in float64.

    Attributes:
      ran: called whenever a step runs.
    """

    def __init__(self, width: int = 6, hidden: int = 8, counts_on: str = "CPU:0"):
        up, down = rows(width, hidden) / width, rows(hidden, width) / width
        self.up, self.down = tf.Variable(up, name="up"), tf.Variable(down, name="down")
        self.slots = [tf.Variable(tf.zeros_like(v), name=f"{v.name[:-2]}_slot") for v in (self.up, self.down)]
        with tf.device(counts_on):
            self.count = tf.Variable(np.int64(0), name="count")
        self.ran = lambda: None

    def train(self, x):
        tf.py_function(lambda: self.ran(), [], [])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ self.up) @ self.down - x) ** 2)
        weights = (self.up, self.down)
        for w, m, g in zip(weights, self.slots, tape.gradient(loss, weights), strict=True):
            m.assign(0.9 * m + g)
            w.assign_sub(0.05 * m)
        self.count.assign_add(1)
        return loss

    def values(self) -> list[np.ndarray]:
        return [v.numpy() for v in (self.up, self.down, *self.slots, self.count)]

    def lies_on(self) -> set[str]:
        parted = [parts for v in (self.up, self.down, *self.slots) if (parts := parts_of_variable(v)) is not None]
        assert len(parted) == 4
        return {short_name(device) for parts in parted for device in parts.devices}


def workers_of(step) -> list[int]:
    return [int(short_name(device).partition(":")[2].partition("/")[0]) for device in step.devices]


def back(workers, cluster, *tasks: int) -> None:
    for task in tasks:
        workers.restart(task)
    until(lambda: all(worker.answers for worker in cluster.health(2.0).workers))
    time.sleep(1.1)  # they are asked for once a second


@case("meshes")
def as_long_as_a_row_is_left(workers, cluster) -> None:
    devices = [f"worker:{task}/CPU:0" for task in range(4)]
    one, own = Layers(), Layers(counts_on="/job:worker/task:3/device:CPU:0")  # (which no mesh of one row has at first)
    gs.set_variable_layout(own, LAYOUT, devices, mesh=MESH)
    inputs = [rows(5 + k % 3) for k in range(7)]
    losses, found = [one.train(x) for x in inputs], []
    with tempfile.TemporaryDirectory() as folder:
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(own), folder, 2)
        step = gs.workers.resilient(
            gs.parallelize(own.train, devices=devices, mesh=MESH, shares=[2, 1]), checkpoint=manager
        )

        def run(*expected: int) -> None:
            found.append(float(step(inputs[len(found)])))
            assert (workers_of(step), len(own.lies_on())) == ([*expected], len(expected))
            same(found, losses[: len(found)])

        run(0, 1, 2, 3)
        step.save()
        run(0, 1, 2, 3)
        workers.kill(1)
        with pytest.warns(
            UserWarning, match=r"lost worker 1 .* on worker:0/CPU:0, worker:2/CPU:0, mesh .batch=1, model=2"
        ):
            run(0, 2)
        own.ran = lambda: workers.kill(2)  # while a step runs
        with pytest.warns(UserWarning, match=r"lost worker 2 .* on worker:0/CPU:0, worker:3/CPU:0, mesh"):
            run(0, 3)
        own.ran = lambda: None
        workers.kill(3)
        for _ in range(2):  # it stays an error
            with pytest.raises(gs.errors.WorkerLostError) as raised:
                step(inputs[4])
            assert str(raised.value).endswith(
                "The step needs at least mesh={'batch': 1, 'model': 2}, and these devices are left: worker:0/CPU:0. "
                "Start the lost workers again at their addresses, and call again."
            )
            assert raised.value.tasks == (3,)
        with pytest.warns(UserWarning, match="no checkpoint now"):
            assert step.save() is None
        back(workers, cluster, 1, 2, 3)
        with pytest.warns(UserWarning, match="is back; the next step runs on .* mesh .batch=2, model=2"):
            assert step.save()  # with what the calls since the last one did
        workers.kill(0)
        with pytest.warns(UserWarning, match="lost worker 0"):
            run(1, 2)
        run(1, 2)
        back(workers, cluster, 0)
        run(0, 1, 2, 3)
    same(own.values(), one.values())


@case("meshes")
def a_worker_lost_while_calls_are_repeated(workers, cluster) -> None:
    one, own = Layers(), Layers()
    gs.set_variable_layout(own, "sharded", cluster.devices)
    ran: list[str] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(own), folder, 2)
        step = gs.workers.resilient(gs.parallelize(own.train), checkpoint=manager)
        for k in range(6):
            if k == 1:
                step.save()
            if k == 5:
                workers.kill(1)
                ran.clear()
                own.ran = lambda: (ran.append(""), workers.kill(2) if len(ran) == 3 else None)
            same([step(rows(5 + k % 3))], [one.train(rows(5 + k % 3))])
    assert len(ran) >= 8  # three until the second loss, then the four calls since the checkpoint, and the last one
    assert len(step.devices) == 2
    same(own.values(), one.values())


PROGRAMS: list[tuple[str, ...]] = [
    ("stages=2",),
    ('mesh={"stage": 2}', '"sharded"'),
    ('mesh={"stage": 2}', '"replicated"'),
    ('mesh={"model": 2}', "ZeRO-1"),
    ("experts in place", "micro_batches=2"),
]


@case("meshes")
def a_worker_that_is_lost_and_comes_back(workers, cluster) -> None:
    devices = [f"worker:{task}/CPU:0" for task in range(4)]
    for names in PROGRAMS:
        pair = Pair(*names, devices=devices)
        one, own = Twin(pair, False), Twin(pair, True)
        count = len(pair.devices)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept = tf.train.Checkpoint(own=own.own, slots=own.slots)
            manager = tf.train.CheckpointManager(kept, folder, max_to_keep=1)
            step = gs.workers.resilient(own.parallel(own.step), checkpoint=manager)
            step.save()
            for k, batch in enumerate(batches(pair) * 2):
                if k == 1:
                    workers.kill(1)
                elif k == 3:
                    back(workers, cluster, 1, 2)  # (2 ended between two calls, and nobody noticed)
                same(step(*batch), one.step(*batch), str(names))
                assert len(step.devices) == (count // 2 if k in (1, 2) else count), (names, k, step.devices)
        same([v.numpy() for v in own.variables], [v.numpy() for v in one.variables], str(names))
        print(f"{names}: well", file=sys.stderr, flush=True)


@case("meshes")
def a_mesh_that_a_plan_chose(workers, cluster) -> None:
    """It is chosen again for the devices that are left."""
    rates = {"float32": 1e6, "float64": 1e6}  # so slow that one row is worth sharing
    found = replace(machine_of().device, matrix_flops_per_s=rates, vector_flops_per_s=rates)
    machine = replace(machine_of(link=1e12), device=found)
    one, own = Layers(64, 255), Layers(64, 255)
    meshes = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(own), folder, 2)
        step = gs.workers.resilient(gs.parallelize(own.train, plan=machine), checkpoint=manager)
        step.save()
        for k in range(5):
            if k == 1:
                workers.kill(1)
            elif k == 3:
                back(workers, cluster, 1)
            same([step(rows(1, 64))], [one.train(rows(1, 64))])
            meshes.append((len(own.lies_on()), own.up._graphsplit_record.parts.layout))
    assert meshes == [(count, UP) for count in (4, 3, 3, 4, 4)], meshes
    same(own.values(), one.values())
