"""How near the predicted peak of memory is to that of TensorFlow's allocator, for training steps of eleven networks.

python -m benchmarks.peaks [--networks 'mlp;U-Net'] [--devices 1,2] [--small]

Each network has a process of its own, in which TensorFlow's CPU allocator is the one of GPUs and counts. Logical CPU
devices share one memory, so that what is sent takes none, and the peak is that of all of them together. Beside what a
step holds at most besides variables and arguments (the allocator's: the median of some steps, over what it has handed
out before) stand what `gs.predict` says of it and what the plan's table "peak memory" says, which counts what is sent
as if each device had a memory of its own.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from typing import Any, NamedTuple

from benchmarks.processes import in_a_process

NETWORKS = (
    *("mlp", "resnet50", "mini_googlenet_bn", "lstm", "transformer", "transformer, recompute"),  # of `workloads`
    *("U-Net", "WaveNet", "Transformer decoder", "GAN", "Siamese"),  # of `coverage_models`
)
NEAR = 0.15
_ROWS = 1024  # of the networks of `coverage_models`
_STEPS = 5
COUNTED = {"TF_CPU_ALLOCATOR_USE_BFC": "1"}


class Peak(NamedTuple):
    """What a step holds at most, in bytes.

    Attributes:
      network, devices: which step, on how many.
      state: variables and arguments.
      predicted, planned, measured: besides these: by `gs.predict`, by the plan's table, by the allocator.
    """

    network: str
    devices: int
    state: int
    predicted: int
    planned: int
    measured: int

    @property
    def off(self) -> float:
        """How far the predicted peak is from the allocator's, as a part of that."""
        return self.predicted / self.measured - 1

    @property
    def off_in_all(self) -> float:
        """The same of the peak with variables and arguments."""
        return (self.state + self.predicted) / (self.state + self.measured) - 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=";".join(NETWORKS), help="their names, with ; between them")
    parser.add_argument("--devices", default="1,2")
    parser.add_argument("--small", action="store_true", help="small networks, to see that everything works")
    options = parser.parse_args()
    counts = [int(count) for count in options.devices.split(",")]
    found = []
    for name in options.networks.split(";"):
        own = peaks_of(name, counts, options.small)
        found += own
        print(f"{name}: {', '.join(f'{peak.off:+.0%} on {peak.devices}' for peak in own)}", flush=True)
    print(table(found))


def peaks_of(name: str, counts: list[int], small: bool) -> list[Peak]:
    """Return what a network's training step holds on so many devices, in a process whose allocator counts."""
    return list(in_a_process(_peaks_of, name, counts, small, environment=COUNTED))


def _peaks_of(name: str, counts: list[int], small: bool) -> list[Peak]:
    from benchmarks.prediction_worker import start

    start(max(counts))
    return [peak_of(name, count, small) for count in counts]


def table(found: list[Peak]) -> str:
    """Return what was found as a table, and how many are near."""
    lines = ["| network | devices | variables, arguments | plan | predicted | allocator | off | off in all |"]
    lines.append("|---|" + "---:|" * 7)
    for own in found:
        sizes = " | ".join(f"{size / 1e6:.1f} MB" for size in (own.state, own.planned, own.predicted, own.measured))
        lines.append(f"| {own.network} | {own.devices} | {sizes} | {own.off:+.0%} | {own.off_in_all:+.0%} |")
    near, in_all = [
        sum(abs(off) <= NEAR for off in offs) for offs in zip(*[(o.off, o.off_in_all) for o in found], strict=True)
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"Of {len(found)} peaks, {in_all} are within {NEAR:.0%} in all; {near} without what is there before.",
        ]
    )


def peak_of(name: str, devices: int, small: bool) -> Peak:
    """Return what a network's training step holds. The process is one whose allocator counts."""
    import keras
    import tensorflow as tf

    import graphsplit as gs
    from benchmarks.prediction_worker import most_together, step_bytes
    from graphsplit.planning.device_bytes import live_bytes

    keras.utils.set_random_seed(1)
    function, arguments, options = training_step(name, small)
    step = gs.parallelize(function, devices=devices, **options)
    prediction = gs.predict(step, *arguments, machine="cpu", devices=devices)
    step(*arguments)
    gc.collect()
    measured = [step_bytes(lambda: tf.nest.map_structure(lambda t: t.numpy(), step(*arguments))) for _ in range(_STEPS)]
    state = sum(memory.state_bytes + memory.argument_bytes for memory in prediction.memory.values())
    predicted, planned = most_together(prediction.memory.values()), sum(live_bytes(step.plan(*arguments)).values())
    return Peak(name, devices, state, predicted, planned, int(statistics.median(measured)))


def training_step(name: str, small: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a training step, its arguments, and options of `parallelize`."""
    import tensorflow as tf

    from benchmarks.coverage_models import MODELS
    from benchmarks.steps import make_parts, single_device_step
    from benchmarks.workloads import data, workload

    if name in MODELS:
        training = MODELS[name]()
        return training.step, training.inputs(8 if small else _ROWS), {}
    network, _, recompute = name.partition(", ")
    found = workload(network, small)
    x, y = data(found, found.batch)
    step = single_device_step(make_parts(found), "training")
    return step, (tf.constant(x), tf.constant(y)), {"recompute": "blocks"} if recompute else {}


if __name__ == "__main__":
    main()
