"""Large layers on a mesh: what cutting weights along an axis gains and costs, on logical devices of one thread each.

python -m benchmarks.meshes [--parts rows,tokens,steps,planning] [--rounds 9] [--small]

`rows`: one row of 64 tokens through four layers on two devices, beside one device. `tokens`: one token through larger
layers, which the memory bounds that all cores share, beside two processes that have half of the weights each and
exchange nothing. `steps`: a transformer's training step on several meshes. `planning`: many layers on 2 x 8 devices.
Each part runs in a process of its own, in which everything is timed in turns; ratios are medians of those within each
round. `python -m benchmarks.layouts_over_workers` has meshes over a network.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.processes import Group, in_a_process
from benchmarks.timing import Took, in_turns, medians, ratios, took

LAYOUTS = {
    "*/query/kernel": (None, "model", None),
    "*/key/kernel": (None, "model", None),
    "*/value/kernel": (None, "model", None),
    "*/query/bias": ("model", None),
    "*/key/bias": ("model", None),
    "*/value/bias": ("model", None),
    "*/attention_output/kernel": ("model", None, None),
    "up*/kernel": (None, "model"),
    "up*/bias": ("model",),
    "down*/kernel": ("model", None),
}
"""Megatron-LM's layout of a transformer (https://arxiv.org/abs/1909.08053, section 3)."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="small networks, to see that everything works")
    options = parser.parse_args()
    for part in options.parts.split(","):
        print(part)
        for line in in_a_process(PARTS[part], options.rounds, options.small):
            print(f"  {line}", flush=True)


def rows(rounds: int, small: bool) -> list[str]:
    """One row of 64 tokens through four layers: two devices beside one."""
    import tensorflow as tf

    width = 256 if small else 2048
    steps = chain(width)  # (divides the CPU)
    x = tf.random.normal((1, 64, width))
    found = in_turns({name: functools.partial(step, x) for name, step in steps.items()}, rounds, 5, prepare=2)
    return [f"two devices are {ratios(found['one'], found['two']).wall:.2f} x as fast as one ({milliseconds(found)})"]


def tokens(rounds: int, small: bool) -> list[str]:
    """One token through four layers on two devices, beside two processes with half of the weights each."""
    import tensorflow as tf

    width = 256 if small else 4096
    two = chain(width)["two"]  # (divides the CPU)
    step, both, own = functools.partial(two, tf.random.normal((1, 1, width))), [], []
    step()
    with Group(2, "cpu", 600.0) as group:
        group.ask("start", devices=1, kind="cpu")
        group.ask("half", width=width)
        for _ in range(rounds):
            own.append(max(answer["seconds"] for answer in group.ask("time", steps=50)) / 50)
            both.append(took(step, 50).wall)
    times = statistics.median(a / b for a, b in zip(both, own, strict=True))
    return [
        f"two devices take {times:.2f} x of two processes with half of the weights each "
        f"({1e3 * statistics.median(both):.1f} and {1e3 * statistics.median(own):.1f} ms)"
    ]


def half(width: int) -> Callable[[], Any]:
    """Return what one of the two processes runs: half of each weight, on one device, and nothing exchanged."""
    import tensorflow as tf

    up = [tf.Variable(tf.random.normal((width, width // 2)) / width**0.5) for _ in range(2)]
    down = [tf.Variable(tf.random.normal((width // 2, width)) / width**0.5) for _ in range(2)]
    x = tf.random.normal((1, 1, width))

    @tf.function(jit_compile=False)
    def forward(x: Any) -> Any:
        for first, second in zip(up, down, strict=True):
            x = tf.tanh(tf.nn.relu(x @ first) @ second)
        return x

    return lambda: forward(x)


def chain(width: int) -> dict[str, Callable[..., Any]]:
    """Return a forward pass through four layers on one device, and on two columns of a mesh."""
    import tensorflow as tf

    import graphsplit as gs

    devices = gs.use_logical_devices(2, threads_per_device=1)
    weights = {}
    for way in ("one", "two"):
        weights[way] = [tf.Variable(tf.random.normal((width, width)) / width**0.5, name=f"w{k}") for k in range(4)]
    layout = {f"w{k}": ((None, "model"), ("model", None))[k % 2] for k in range(4)}
    gs.set_variable_layout(weights["two"], layout, mesh={"model": 2}, devices=devices)

    def forward(own: Sequence[Any]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            for first, second in zip(own[::2], own[1::2], strict=True):
                x = tf.tanh(tf.nn.relu(x @ first) @ second)
            return x

        return call

    return {
        "one": gs.parallelize(forward(weights["one"]), devices=devices[:1]),
        "two": gs.parallelize(forward(weights["two"]), mesh={"model": 2}, devices=devices),
    }


def steps(rounds: int, small: bool) -> list[str]:
    """A transformer's training step: rows along two devices as a mesh and as devices, columns, and both."""
    import tensorflow as tf

    import graphsplit as gs

    devices = gs.use_logical_devices(4, threads_per_device=1)
    ways: dict[str, dict[str, Any]] = {
        "1 device": {"devices": devices[:1]},
        "1 device on one core": {"devices": devices[:1]},
        "2 devices": {"devices": devices[:2]},
        "2x1": {"mesh": {"batch": 2, "model": 1}, "devices": devices[:2]},
        "1x2": {"mesh": {"batch": 1, "model": 2}, "devices": devices[:2]},
        "2x2": {"mesh": {"batch": 2, "model": 2}, "devices": devices},
    }
    size = (64, 16, 32, 4, 2, 4) if small else (1000, 128, 256, 8, 4, 8)
    x, y = (tf.random.uniform(s, 0, 10, tf.int32, 1) for s in ((size[5], size[1]), (size[5],)))
    calls = {name: functools.partial(training(how, *size), x, y) for name, how in ways.items()}
    found = in_turns(calls, rounds, 5, prepare=2, within={"1 device on one core": on_one_core})
    return [
        f"2x1 takes {ratios(found['2x1'], found['2 devices']).wall:.3f} x of 2 devices",
        f"1x2 is {ratios(found['1 device on one core'], found['1x2']).wall:.2f} x as fast as 1 device on one core, "
        f"{ratios(found['1 device'], found['1x2']).wall:.2f} x as fast as 1 device whose operations run on both",
        f"2x2 takes {ratios(found['2x2'], found['1 device']).processor:.2f} x the processor time of 1 device",
        milliseconds(found),
    ]


def training(how: Mapping[str, Any], words: int, length: int, width: int, heads: int, blocks: int, _: int) -> Any:
    """Return a transformer's training step on devices or on a mesh."""
    import keras
    import tensorflow as tf

    import graphsplit as gs

    model = transformer(words, length, width, heads, blocks)
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(model.trainable_variables)
    if how.get("mesh", {}).get("model", 1) > 1:
        gs.set_variable_layout(model, LAYOUTS, mesh=how["mesh"], devices=how["devices"])

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return gs.parallelize(step, **how)


def transformer(words: int, length: int, width: int, heads: int, blocks: int) -> Any:
    """Return encoder blocks whose layers have names that `LAYOUTS` fits."""
    import keras
    from keras import layers

    inputs = layers.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(inputs)
    for k in range(blocks):
        normalized = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads, name=f"attention{k}")(normalized, normalized)
        hidden = layers.Dense(4 * width, "gelu", name=f"up{k}")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width, name=f"down{k}")(hidden)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def planning(_: int, small: bool) -> list[str]:
    """Training steps of a few and of many layers on 2 x 8 devices: traced, planned, emitted."""
    import tensorflow as tf

    import graphsplit as gs
    from graphsplit.emission import emit

    devices = gs.use_logical_devices(16, threads_per_device=1)
    found = []
    for blocks in (2,) if small else (8, 80):
        how = {"mesh": {"batch": 2, "model": 8}, "devices": devices}
        step = training(how, 100, 32, 64, 8, blocks, 8)
        x, y = tf.zeros((8, 32), tf.int32), tf.zeros((8,), tf.int32)
        traced = took(functools.partial(tf.function(step.function).get_concrete_function, x, y)).processor
        planned = took(functools.partial(step.plan, x, y)).processor
        plan = step.plan(x, y)
        emitted = took(functools.partial(emit, plan)).processor
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        line = (
            f"{blocks} layers: {len(plan.program.ops)} operations; a tf.function's trace takes {traced:.1f} s, our "
            f"trace and plan {planned:.1f} s, emission {emitted:.1f} s of the processor; {peak / 1e9:.1f} GB at most"
        )
        if blocks <= 8:
            line += f"; first call {took(functools.partial(step, x, y)).wall:.1f} s"
        found.append(line)
    return found


PARTS: dict[str, Callable[[int, bool], list[str]]] = {
    "rows": rows,
    "tokens": tokens,
    "steps": steps,
    "planning": planning,
}


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Let all threads of this process that there are run on one core, then on all that it may.

    A device of one thread still runs operations that do not wait for each other side by side, on other cores.
    """
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    before = os.sched_getaffinity(0)
    _put(threads, {min(before)})
    try:
        yield
    finally:
        _put(threads, before)


def _put(threads: Sequence[int], cores: set[int]) -> None:
    """Let threads run on these cores."""
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # threads end
            os.sched_setaffinity(thread, cores)


def milliseconds(found: Mapping[str, Sequence[Took]]) -> str:
    """Return the medians, for people."""
    return ", ".join(f"{name} {1e3 * medians(own).wall:.1f} ms" for name, own in found.items())


if __name__ == "__main__":
    main()
