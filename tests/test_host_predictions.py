"""Predictions of variables in the host's memory: whose bytes they are, what the update and the copies take."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.costs.machine import Device, Host, Link, Machine
from graphsplit.simulate.measuring import microbenchmarks
from graphsplit.simulate.search import chosen_plans
from graphsplit.simulate.search.candidates import Candidate, Table
from graphsplit.simulate.search.plan_search import Question, Search
from tests.helpers.messages import raises

SIDE, ROWS = 512, 64
SIZE = 4 * SIDE * SIDE  # of a weight, and of its slot
HOST = {"*momentum": "host"}


def machine_of(host: float | None = 1e9, host_link: float | None = 1e9, **options: Any) -> Machine:
    """GPUs that compute at once, and whose host takes a while."""
    device = Device("card", "GPU", {"float32": 1e15}, {"float32": 1e15}, 1e15, 1e9)
    between = None if host_link is None else Link("a bus", host_link, 0.0)
    of_host = Host(4, bytes_per_s=host, flops_per_s=None if host is None else 1e15)
    return Machine("cards", device, 4, Link("a cable", 1e15, 0.0), host=of_host, host_link=between, **options)


class Trained:
    """Layers, and a step of momentum."""

    def __init__(self, layers: int = 2):
        start = tf.random.stateless_normal([SIDE, SIDE], [1, 2]) / SIDE**0.5
        self.kernels = [tf.Variable(start, name=f"kernel_{k}") for k in range(layers)]
        self.slots = [tf.Variable(0 * start, name=f"kernel_{k}_momentum", trainable=False) for k in range(layers)]

    def step(self, x):
        with tf.GradientTape() as tape:
            y = x
            for kernel in self.kernels:
                y = tf.nn.tanh(y @ kernel)
            loss = tf.reduce_mean(tf.square(y - 1))
        for gradient, kernel, slot in zip(tape.gradient(loss, self.kernels), self.kernels, self.slots, strict=True):
            slot.assign(0.9 * slot + gradient)
            kernel.assign_sub(0.1 * slot)
        return loss


SPEC = tf.TensorSpec([ROWS, SIDE])


def predicted(machine: Machine | str, layout: Any = HOST, devices: int = 1, layers: int = 2) -> gs.simulate.Prediction:
    return gs.predict(Trained(layers).step, SPEC, machine=machine, devices=devices, variables=layout)


def test_hosts_are_shown_beside_however_many_devices():
    lines = str(predicted(replace(machine_of(), devices=10), devices=10)).splitlines()
    shown = [line.split()[0] for line in lines if "  computing " in line]
    assert shown == [*[f"GPU:{d}" for d in range(8)], "CPU:0"]
    assert "  ... and 2 more devices" in lines


def test_a_host_that_waits_is_no_device_that_does():
    """It has little to do, and the device computes all the time: no other plan would spare it a wait."""
    device = Device("card", "GPU", {"float32": 1e9}, {"float32": 1e9}, 1e15, 1e9)
    machine = replace(machine_of(host=1e15, host_link=1e15), device=device)
    found = predicted(machine)
    assert found.shares["/device:CPU:0"].waiting > 0.9
    assert found.shares["/device:GPU:0"].computing > 0.9
    assert list(found.of_devices) == ["/device:GPU:0"]
    table = Table((1,), ("home",), {"recompute": (None,), "micro_batches": (1,)})
    question = Question("A step", ROWS, [SIZE], machine, 1e9, table, lambda *_: found.plan)
    assert Search(question).look_at(Candidate(1, "home")).idle < 0.1


@pytest.mark.parametrize("devices", [1, 3])
def test_slots_are_bytes_of_the_host_and_travel_never(devices: int):
    home, host = (predicted(machine_of(), layout, devices) for layout in ("home", HOST))
    assert home.memory["/device:GPU:0"].state_bytes - host.memory["/device:GPU:0"].state_bytes == 2 * SIZE
    assert host.memory["/device:CPU:0"].state_bytes == 2 * SIZE
    assert home.memory["/device:CPU:0"].state_bytes == 0  # (it has the rows)
    assert host.sent_bytes - home.sent_bytes == 2 * 2 * SIZE  # the gradients there, the updates back
    assert set(host.of_devices) == {f"/device:GPU:{d}" for d in range(devices)}


def test_a_step_takes_the_update_and_the_copies_longer():
    home, host = (predicted(machine_of(), layout, layers=1) for layout in ("home", HOST))
    computing = sum(event.end_s - event.start_s for event in host.events if event.place == "CPU:0")
    moved = [event for event in host.events if "->" in event.place and event.bytes >= SIZE]  # (without the rows)
    # 0.9 * slot: 2 of its size, + gradient: 3, assigned: 1; 0.1 * slot: 2
    assert computing == pytest.approx(8 * SIZE / 1e9, rel=0.2)
    assert [event.bytes for event in moved] == [SIZE, SIZE]
    copying = sum(event.end_s - event.start_s for event in moved)
    assert copying == pytest.approx(2 * SIZE / 1e9, rel=0.01)
    # the gradient is sent while the host multiplies the slot
    assert host.step_s - home.step_s == pytest.approx(computing + copying - SIZE / 1e9, rel=0.01)
    assert host.limit.startswith("computing on CPU:0")


def test_what_is_faster_takes_less_and_what_the_file_lacks_is_said():
    slow = predicted(machine_of())
    assert predicted(machine_of(host=1e10)).step_s < slow.step_s > predicted(machine_of(host_link=1e10)).step_s
    assert "the host: 1 GB/s of memory and 1 PFLOP/s, one operation at a time" in str(slow)
    assert "between the host and a device a bus: 1 GB/s each way" in str(slow)
    as_link = predicted(machine_of(host_link=None))
    assert as_link.step_s < slow.step_s
    assert "between the host and a device as between devices: the file has no [host_link]" in str(as_link)
    assert "the host: " not in str(predicted(machine_of(), "home"))


def test_operations_on_a_host_take_turns():
    found = predicted(machine_of(), layers=3)
    spans = sorted((event.start_s, event.end_s) for event in found.events if event.place == "CPU:0")
    assert all(later[0] >= earlier[1] - 1e-12 for earlier, later in itertools.pairwise(spans))


def test_a_file_that_does_not_say_how_fast_its_host_is():
    with raises(
        gs.errors.ArgumentError,
        "Variables are in the host's memory, and the machine 'cards' does not say how fast its host computes. Add "
        "bytes_per_s, of its memory, and flops_per_s under [host] to its file 'here.toml', or measure both: graphsplit "
        "calibrate -o here.toml.",
    ):
        predicted(machine_of(host=None, file="here.toml"))
    predicted(machine_of(host=None), "home")


def test_variables_that_lie_on_the_host_are_predicted_so():
    with tf.device("CPU:1"):
        trained = Trained()
    gs.set_variable_layout(trained.slots, "host", devices=["CPU:1", "CPU:2"])
    lying = gs.predict(trained.step, SPEC, machine=machine_of(), devices=2)
    asked = predicted(machine_of(), devices=2)
    assert lying.step_s == asked.step_s
    assert {device: own.peak_bytes for device, own in lying.memory.items()} == {
        device: own.peak_bytes for device, own in asked.memory.items()
    }
    assert not lying.notes


def test_where_devices_are_cpus_the_hosts_memory_is_theirs():
    found = predicted("cpu", devices=2)
    assert found.notes == (
        "the devices are CPUs, whose memory is the host's: variables with layout 'host' count as those of CPU:0",
    )
    assert found.memory["/device:CPU:0"].state_bytes == 4 * SIZE
    assert found.step_s == predicted("cpu", "home", devices=2).step_s


def test_the_host_has_room_for_what_no_device_has():
    small = machine_of()
    small = replace(small, device=replace(small.device, memory_bytes=1.5 * SIZE))
    found = predicted(small)
    assert found.memory_bytes["CPU:0"] > small.device.memory_bytes
    assert set(found.over()) == {"GPU:0"}
    assert max(point.peak_bytes for point in _scaling(small).points) == found.memory_bytes["GPU:0"]


def _scaling(machine: Machine) -> gs.simulate.Scaling:
    return gs.scaling(Trained().step, SPEC, machine=machine, devices=[1], variables=[HOST], kinds=["strong"])


def test_each_of_several_hosts_has_its_share():
    two = replace(machine_of(), network=Link("a net", 1e9, 0.0), devices=2).cluster(2)
    found = predicted(two, devices=4)
    memory = {device: own.state_bytes for device, own in found.memory.items() if two.is_host(device)}
    hosts = {device: size for device, size in memory.items() if size}  # (the process that has the rows has none)
    assert sum(hosts.values()) == 2 * SIZE
    assert len(hosts) == 2


@pytest.mark.long
def test_a_host_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(microbenchmarks, "rate_probes", lambda _: {})
    monkeypatch.setattr(microbenchmarks, "rates_of", lambda *_: ({}, {"float32": 1.0}))
    found = microbenchmarks.measure(["/device:CPU:1"], 0, 0.1)
    assert 1e8 < found.host.bytes_per_s < 1e13
    assert 1e8 < found.host.flops_per_s < 1e14
    assert found.host_link is not None
    assert found.host_link.latency_s > 0
    assert found.host_link.bytes_per_s > 0


class Wide:
    """Layers of 64-bit numbers on a device that is not the host, which stands for a GPU, and a step of momentum."""

    def __init__(self, device: str = "CPU:1"):
        with tf.device(device):
            start = [tf.random.stateless_normal([64, 64], [3, k], dtype=tf.float64) / 8 for k in range(4)]
            self.kernels = [tf.Variable(value, name=f"kernel_{k}") for k, value in enumerate(start)]
            self.slots = [tf.Variable(0 * v, name=f"kernel_{k}_momentum", trainable=False) for k, v in enumerate(start)]

    step = Trained.step


def cards(**options: Any) -> Machine:
    """GPUs whose host takes a while; they compute 64-bit numbers, too."""
    rates = {"float32": 1e15, "float64": 1e15}
    return replace(machine_of(), device=Device("card", "GPU", rates, rates, 1e15, 1e9, overhead_s=1e-6), **options)


def stand_for_gpus(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Let logical CPU devices that are not the host count as the devices of a machine."""
    monkeypatch.setattr(chosen_plans, "machine_like", lambda *_: machine)


WIDE = tf.random.stateless_normal([11, 64], [5, 6], dtype=tf.float64)
HELD = 8 * 64 * 64  # bytes of a kernel, and of its slot


def chosen(plan: gs.inspect.Plan) -> str:
    [note] = [note for note in plan.notes if note.startswith("chosen automatically: ")]
    return note.removeprefix("chosen automatically: ")


def test_memory_puts_slots_on_the_host_where_only_that_fits(monkeypatch: pytest.MonkeyPatch):
    stand_for_gpus(monkeypatch, cards())
    plain, model, layout = Wide(), Wide(), {"*momentum": "host"}
    least = gs.predict(model.step, WIDE, machine=cards(), devices=1, variables=layout, micro_batches=8)
    limit = least.memory_bytes["GPU:0"] + HELD // 2
    step = gs.parallelize(model.step, devices=["CPU:1"], memory=limit)
    single = tf.function(plain.step)
    for _ in range(3):
        np.testing.assert_allclose(step(WIDE), single(WIDE), rtol=1e-12)
    for own, expected in zip(model.kernels + model.slots, plain.kernels + plain.slots, strict=True):
        np.testing.assert_allclose(own.numpy(), expected.numpy(), rtol=1e-10, atol=1e-13)
    assert all(parts_of_variable(slot).layout == "host" for slot in model.slots)
    assert "kernel_0_momentum, kernel_1_momentum, kernel_2_momentum, kernel_3_momentum host" in chosen(step.plan(WIDE))


def test_memory_leaves_slots_where_they_fit(monkeypatch: pytest.MonkeyPatch):
    stand_for_gpus(monkeypatch, cards())
    plan = gs.parallelize(Wide().step, devices=["CPU:1"], memory="1GB").plan(WIDE)
    assert "host" not in " ".join(plan.notes)


def test_memory_says_why_slots_are_not_on_the_host(monkeypatch: pytest.MonkeyPatch):
    stand_for_gpus(monkeypatch, cards(host=Host()))
    model = Wide()
    peak = gs.predict(model.step, WIDE, machine=cards(), devices=1).memory_bytes["GPU:0"]
    plan = gs.parallelize(model.step, devices=["CPU:1"], memory=peak - 100).plan(WIDE)
    assert "not compared: slots on the host: cards does not say how fast its host computes" in plan.notes


def test_memory_of_cpus_is_the_hosts():
    model = Wide("CPU:0")
    peak = gs.predict(model.step, WIDE, machine="cpu", devices=1).memory_bytes["CPU:0"]
    plan = gs.parallelize(model.step, devices=["CPU:0"], memory=peak - 100).plan(WIDE)
    assert "host" not in " ".join(plan.notes)
