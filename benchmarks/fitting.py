"""Ways to fit a model that is too large for one device: the step of each, the memory of devices, and bytes sent.

python -m benchmarks.fitting [--kind gpu --memory-mb 3500] [--devices 4] [--ways host,mesh] [--rounds 5] [--small]

A training step of a transformer with Adam runs on one device as it is, with slots in the host's memory, recomputed,
with both; and on all devices with divided variables, on a mesh, and under `keras.distribution`. Printed are the step's
median seconds, the bytes of variables on the fullest device, and of what a step makes: as the plan counts it, and on
GPUs as TensorFlow does. Each way's loss is compared with that of the first.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import graphsplit as gs
from benchmarks.gpus import peak_bytes, reset_peaks
from benchmarks.timing import medians, took

HOST = "CPU:0"
ALLOWED = 1e-3  # of the loss after a few steps: on GPUs other shapes have other kernels
CUT = {  # patterns of names, for both: of graphsplit, and with ".*" for "*" of Keras
    **{f"*{name}/kernel": (None, "model", None) for name in ("query", "key", "value")},
    "*attention_output/kernel": ("model", None, None),
    "*up*/kernel": (None, "model"),
    "*down*/kernel": ("model", None),
    "*table/embeddings": ("model", None),
    "*head/kernel": (None, "model"),
}


class Way(NamedTuple):
    """How a step fits.

    Attributes:
      layout: of the variables, as `set_variable_layout` takes it.
      recompute: see `parallelize`.
      count: of devices; 0 for all.
      columns: of the mesh that the devices are; 0 for no mesh.
      by_keras: whether a distribution of Keras says so.
    """

    layout: Any = "home"
    recompute: str | None = None
    count: int = 0
    columns: int = 0
    by_keras: bool = False


WAYS = {
    "as it is": Way(count=1),
    "host": Way({"adam*": "host"}, count=1),
    "recompute": Way(recompute="blocks", count=1),
    "host, recompute": Way({"adam*": "host"}, "blocks", count=1),
    "sharded": Way("sharded"),
    "sharded, host": Way({"adam*": "host", "*": "sharded"}),
    "mesh": Way(CUT, columns=2),
    "keras.distribution": Way(CUT, columns=2, by_keras=True),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--memory-mb", type=int, help="of each logical GPU")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--ways", default=";".join(WAYS), help="their names, with ; between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="the small network, to see that everything works")
    options = parser.parse_args()
    if options.kind == "gpu":
        devices = gs.use_logical_devices(options.devices, kind="GPU", memory_mb=options.memory_mb)
    else:
        _, *devices = gs.use_logical_devices(options.devices + 1, threads_per_device=1)  # the first is the host
    first = None
    for name in options.ways.split(";"):
        loss, text = measured(WAYS[name], devices, options.rounds, options.small)
        first = loss if first is None else first
        print(f"  {name:18} {text}; loss {loss:.5f}", flush=True)
        if not abs(loss - first) <= ALLOWED * abs(first):
            raise SystemExit(f"{name}: the loss is {loss}, and that of the first way {first}.")


def measured(way: Way, devices: Sequence[str], rounds: int, small: bool) -> tuple[float, str]:
    """Run a way; return the loss after its steps, and what it took, for people."""
    import tensorflow as tf

    used = list(devices[: way.count or len(devices)])
    mesh = {"batch": len(used) // way.columns, "model": way.columns} if way.columns else None
    with tf.device(used[0]), contextlib.ExitStack() as stack:
        keras_distribution = stack.enter_context(_distribution(used, mesh or {})) if way.by_keras else None
        model, x, y = transformer(small)
        if keras_distribution is None:
            options: dict[str, Any] = {"variables": way.layout, "mesh": mesh, "recompute": way.recompute}
            model = gs.multi_gpu_model(model, gpus=used, **options)
        reset_peaks(used)
        model.train_on_batch(x, y)
        found = [took(lambda: model.train_on_batch(x, y)) for _ in range(rounds)]
        loss = float(model.train_on_batch(x, y))
        asked = keras_distribution.plan(model, x, y) if keras_distribution else _plan_of(model, x, y)
        held = _held([*model.variables, *model.optimizer.variables])
    return loss, f"{1000 * medians(found).wall:9.1f} ms; {_memory(asked, held, peak_bytes(used))}"


def _memory(plan: Any, held: Mapping[str, int], peaks: Mapping[str, int]) -> str:
    """Return the bytes of variables on the fullest device and the host, of what a step makes, and what is sent."""
    from graphsplit.core.devices import short_name
    from graphsplit.planning.device_bytes import live_bytes, traffic

    texts = [f"{max([size for name, size in held.items() if name != HOST]) / 1e6:.1f} MB of variables on a device"]
    texts.append(f"{held.get(HOST, 0) / 1e6:.1f} MB on the host")
    if plan is not None:
        alive = {short_name(device): size for device, size in live_bytes(plan).items()}
        texts.append(f"{max([size for name, size in alive.items() if name != HOST]) / 1e6:.1f} MB peak of activations")
        texts.append(f"{sum(traffic(plan).sent.values()) / 1e6:.1f} MB sent")
    return ", ".join([*texts, *([f"peak {max(peaks.values()) / 1e6:.1f} MB"] if peaks else [])])


def _plan_of(model: Any, x: Any, y: Any) -> Any:
    return model.plan(x, y) if hasattr(model, "plan") else None  # (one device as it is has none)


def _held(variables: Sequence[Any]) -> dict[str, int]:
    """Return the bytes of variables of Keras on each device."""
    from graphsplit.core.devices import canonical_name, short_name
    from graphsplit.core.variables.parted_variables import parts_of_variable

    found: dict[str, int] = {}
    for value in [variable.value for variable in variables]:
        parts = parts_of_variable(value)
        own = (
            {value.device: value.dtype.size * value.shape.num_elements()} if parts is None else parts.bytes_on_devices()
        )
        for device, size in own.items():
            name = short_name(canonical_name(device))
            found[name] = found.get(name, 0) + size
    return found


@contextlib.contextmanager
def _distribution(devices: Sequence[str], mesh: Mapping[str, int]) -> Iterator[Any]:
    """Let Keras run models on a mesh, as its layout map says."""
    import keras

    names = [device.lower() for device in devices]
    layout_map = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(tuple(mesh.values()), list(mesh), names))
    for pattern, own in CUT.items():
        layout_map[pattern.replace("*", ".*")] = own
    chosen = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with gs.keras.enable_distribution() as enabled, chosen.scope():
        yield enabled


def transformer(small: bool) -> tuple[Any, Any, Any]:
    """Return a compiled model, made the same way each time, and a batch of words and of those to be found."""
    import keras
    import numpy as np
    from keras import layers

    count, width, words, tokens, rows = (1, 32, 64, 8, 8) if small else (8, 512, 8192, 128, 16)
    keras.utils.set_random_seed(1)
    first = layers.Input((tokens,), dtype="int32")
    x = layers.Embedding(words, width, name="table")(first)
    for k in range(count):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(8, width // 8, name=f"attention_{k}")(h, h)
        h = layers.Dense(4 * width, "gelu", name=f"up_{k}")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width, name=f"down_{k}")(h)
    model = keras.Model(first, layers.Dense(words, name="head")(x))
    optimizer = keras.optimizers.Adam(1e-3, name="adam")
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    numbers = np.random.default_rng(0).integers(0, words, (2, rows, tokens)).astype("int32")
    return model, numbers[0], numbers[1]


if __name__ == "__main__":
    main()
