"""Microbenchmarks: what is timed in turns, and what figures are made of that. Nothing here is asserted of times."""

from __future__ import annotations

import statistics

import pytest
import tensorflow as tf

from graphsplit.planning.costs.families import FAMILIES
from graphsplit.simulate.measuring import microbenchmarks, timing


def test_what_is_smaller_takes_no_longer():
    curve = microbenchmarks._curve([(1.0, 0.1), (10.0, 10.0), (100.0, 20.0)])
    assert curve == ((1.0, 1.0), (10.0, 10.0), (100.0, 20.0))


def test_what_memory_takes_is_measured_with_operands_that_no_cache_has():
    assert len(microbenchmarks.operands_of(1_000_000)) == 64  # 256 MB
    few = microbenchmarks.operands_of(1000)
    assert len(few) == 400  # each of the longest chain its own
    read: dict[int, tf.Tensor] = {}
    step = microbenchmarks._of_others(lambda value: read.setdefault(id(value), value), few)
    for _ in few:
        step(few[0])
    assert len(read) == len(few)


def test_threads_are_slowed_by_each_other_at_most_as_if_they_took_turns():
    """One is not slowed by itself; three at once take no longer than three times one, and no less than one."""
    ratios = {("slowdown", "matmul", 2.0): 1.6, ("slowdown", "matmul", 3.0): 18.0, ("slowdown", "matmul", 4.0): 0.9}
    found = microbenchmarks._slowdowns({**ratios, ("call", "", 0.0): 1.0})
    assert found["matmul"] == (1.0, 1.6, 3.0, 1.0)
    assert found["movement"] == (1.0,)


def test_all_that_is_slowed_is_measured_by_family(monkeypatch: pytest.MonkeyPatch):
    """As many chains as threads, none of which waits for another one."""
    made: list[int] = []
    monkeypatch.setattr(microbenchmarks, "_POOL_BYTES", 20_000_000)
    monkeypatch.setattr(microbenchmarks, "chains", lambda devices, count, *rest: made.append(count))
    found = microbenchmarks._slowdown_probes(["/device:CPU:0", "/device:CPU:1"], 2)
    families = [family for _, family, _ in found]
    assert {"matmul", "convolution", "filter gradient", "elementwise", "movement"} < set(families) <= set(FAMILIES)
    assert made == [1, 2] * len(found)
    assert next(iter(found.values())).figure([2.0, 3.0]) == 1.5
    assert not microbenchmarks._slowdown_probes(["/device:GPU:0"], 0)


def test_the_optimizer_is_turned_off_once_for_all_calls_that_are_timed(monkeypatch: pytest.MonkeyPatch):
    """What a call takes besides its operations is otherwise mostly that."""
    probe = microbenchmarks.Probe((lambda: tf.constant(1.0),), sum)
    turned: list[dict[str, bool]] = []
    monkeypatch.setattr(tf.config.optimizer, "set_experimental_options", turned.append)
    timing.figures({"call": probe}, lambda: tf.constant(1.0), 0.0)
    assert [options["disable_meta_optimizer"] for options in turned] == [True, False]


def test_a_figure_is_of_one_turn_and_the_median_of_all(monkeypatch: pytest.MonkeyPatch):
    """What lies next to each other in time is compared, and a slow turn is one of several."""
    turns = [[1.0, 1.0, 9.0], [3.0, 5.0, 11.0], [2.0, 2.0, 2.0]]
    monkeypatch.setattr(timing, "relative_seconds_of_calls", lambda calls, beside, _: (turns, 0.5))
    difference = timing.Probe((str, str), lambda seconds: seconds[1] - seconds[0])
    found = timing.figures({"difference": difference, "third": timing.Probe((str,), sum)}, str, 1.0)
    assert found == {"difference": 1.0, "third": 1.0}


def test_an_operation_is_the_slope_between_chains_of_two_lengths(monkeypatch: pytest.MonkeyPatch):
    """As long as takes 10 ms; a slope that is nearly nothing is noise."""
    lengths: list[int] = []
    monkeypatch.setattr(timing, "chain", lambda step, x, devices: lengths.append(len(devices)) or str)
    monkeypatch.setattr(timing, "seconds_of_warm_call", lambda call: 2e-3)
    probe = timing.operation(tf.identity, tf.ones([1]), "/device:CPU:0")
    assert lengths == [2, 10]
    assert probe.figure([1.0, 5.0]) == 0.5
    assert probe.figure([1.0, 1.0]) == 0.025


def test_what_is_measured_besides_is_taken_off(monkeypatch: pytest.MonkeyPatch):
    """An operation's start; of what is given its operands, what that takes."""
    seconds = {"overhead": 1e-6, "argument": 3e-6, "call": 1e-4, "latency": -1.0, "device call": 5e-5}

    def figures(made, beside, least_s):
        return {key: seconds.get(key[0], 2e-5) for key in made}

    monkeypatch.setattr(microbenchmarks, "figures", figures)
    for module in (microbenchmarks, microbenchmarks):
        monkeypatch.setattr(module, "operation", lambda *_: timing.Probe((str,), sum))
    monkeypatch.setattr(microbenchmarks, "_POOL_BYTES", 20_000_000)
    found = microbenchmarks.measure(["/device:CPU:0", "/device:CPU:1"], 2)
    assert (found.host.call_s, found.host.argument_s, found.link.latency_s) == (1e-4, 3e-6, 1e-7)
    assert found.host.device_call_s == pytest.approx(5e-5)
    entries, rate = found.device.curves["elementwise"][-1]
    assert rate == pytest.approx(entries / 1.6e-5)
    assert found.device.matrix_flops_per_s["float64"] == pytest.approx(2 * 512**3 / 1.9e-5)
    alone = microbenchmarks.measure(["/device:CPU:0"], 1)
    assert alone.host.device_call_s == alone.link.latency_s == 0.0
    assert set(alone.host.slowdown_of.values()) == {(1.0,)}
    apart = microbenchmarks.measure(["/device:GPU:0", "/device:GPU:1"], 0)
    assert 0 < apart.link.bytes_per_s < found.link.bytes_per_s
    assert apart.link.copies
    assert not found.link.copies


def test_steps_are_timed_beside_a_reference(monkeypatch: pytest.MonkeyPatch):
    """A machine that is twice as slow for a while makes no step slower than another."""
    times = {"step": 3.0, "reference": 0.1}
    speeds = iter([1.0, 1.0, 1.0, 2.0, 2.0, 2.0] * 20)
    monkeypatch.setattr(timing, "_seconds", lambda call, count: times[call()] * next(speeds))
    found, beside_s = timing.relative_seconds_of_calls([lambda: "step", lambda: "step"], lambda: "reference", 1e-9)
    assert beside_s in (0.1, 0.2)
    for own in found:  # the speed may change between a step and its reference
        assert 20.0 < statistics.median(own) < 45.0


def test_calls_take_turns_and_each_is_timed_between_two_references(monkeypatch: pytest.MonkeyPatch):
    """Short calls run several times in a turn; slow ones have a few turns, however long they take."""
    ran: list[tuple[str, int]] = []
    took = {"short": 0.004, "long": 2.0, "reference": 0.005}

    def timed(call, count):
        ran.append((call(), count))
        return took[call()]

    monkeypatch.setattr(timing, "_seconds", timed)
    calls = [lambda: "short", lambda: "long"]
    found = timing.usual_seconds_of_calls(calls, lambda: "reference", 1e-9)
    assert found == pytest.approx([0.004, 2.0])
    turns = ran[-28:]
    assert turns == [("short", 5), ("reference", 1), ("long", 1), ("reference", 1)] * 7
    ran.clear()
    timing.usual_seconds_of_calls(calls, lambda: "reference", 1e9, most_turns=3)
    assert ran.count(("long", 1)) == 1 + 3  # once to see how long it takes


@pytest.mark.long
def test_what_devices_cost_is_a_difference():
    devices = ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]
    assert microbenchmarks._device_call(devices).figure([1.0, 2.0]) == 0.5
    assert microbenchmarks._argument(devices[0]).figure([1.0, 128.0]) == 1.0
    assert microbenchmarks._latency(devices[0], devices[1], 1).figure([1.0, 451.0, 1.0, 1.0]) == 1.0
