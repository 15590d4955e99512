"""`graphsplit predict`, `machines`, `calibrate` and `validate`: what they do, once TensorFlow has started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from graphsplit.api.calibration import calibrate as calibrated
from graphsplit.api.decorators import parallelize
from graphsplit.api.parallel_function import ParallelFunction
from graphsplit.api.predictions import predict as predicted
from graphsplit.api.scaling import scaling
from graphsplit.cli.checks import CALIBRATED, why_not_calibrated
from graphsplit.cli.targets import check_specs, example, load_target, parse_spec
from graphsplit.core import files
from graphsplit.core.devices import available_devices, use_logical_devices
from graphsplit.core.errors import ArgumentError
from graphsplit.core.logical_gpus import has_gpus
from graphsplit.costs.machine_files import known_machines, machine_text
from graphsplit.costs.machine_files import machine as machine_of
from graphsplit.placement.sources import StateKeeper
from graphsplit.placement.timeline import timeline_of
from graphsplit.prediction.assumptions import amount
from graphsplit.prediction.timing import reference, usual_seconds_of_calls


def predict(
    target: str,
    *,
    specs: Sequence[str],
    machine: str,
    devices: Sequence[int],
    layouts: Sequence[str],
    micro_batches: int | None,
    weak: bool,
    outputs: Sequence[str],
) -> None:
    """Print the prediction of a function; for several numbers of devices, the table of all."""
    machine_of(machine)  # what is wrong with it is said before the user's module is imported
    fn, arguments = _function(target, specs)
    several = len(devices) > 1 or len(layouts) > 1 or weak
    found: Any
    if several:
        found = scaling(
            fn,
            *arguments,
            machine=machine,
            devices=devices,
            layouts=layouts or None,
            kinds=("strong", "weak") if weak else ("strong",),
            micro_batches=micro_batches,
        )
    else:
        layout = layouts[0] if layouts else None
        found = predicted(
            fn, *arguments, machine=machine, devices=devices[0], layout=layout, micro_batches=micro_batches
        )
    print(found)
    for path in outputs:
        found.save(path)
        print(f"Written: {path}")


def machines() -> None:
    """Print the machines that come along, each figure with its source."""
    console = Console()
    for found in known_machines().values():
        device = found.device
        table = Table(title=f"{found.name}: {found.devices} {device.name}", title_justify="left", show_header=False)
        products = ", ".join(f"{name} {amount(rate)}" for name, rate in device.matrix_flops_per_s.items())
        others = ", ".join(f"{name} {amount(rate)}" for name, rate in device.vector_flops_per_s.items())
        memory = f"{amount(device.memory_bytes)}B, {amount(device.bytes_per_s)}B/s"
        for name, text, source in (
            ("products, FLOP/s", products, "device"),
            ("all else, FLOP/s", others, "device"),
            ("memory", memory, "device"),
            ("between devices", _link_text(found.link), "link"),
            *([("between hosts", _link_text(found.network), "network")] if found.network else []),
        ):
            table.add_row(name, text, found.sources[source])
        console.print(table)
    print("So many devices of a box: 4xA100-SXM4-80GB. A cluster: 2x8xA100-SXM4-80GB, or 2xdgx-a100.")


def _link_text(link: Any) -> str:
    rate = "no copies" if link.bytes_per_s == float("inf") else f"{amount(link.bytes_per_s)}B/s each way"
    return f"{link.name}: {rate}"


def calibrate(
    output: str, target: str | None, specs: Sequence[str], devices: int | None, micro_batches: Sequence[int]
) -> None:
    """Measure this machine and write its file."""
    _start(devices)
    if target is None:
        found = calibrated()
    else:
        fn, arguments = _function(target, specs)
        found = calibrated(fn, *[example(spec) for spec in arguments], micro_batches=micro_batches)
    files.write(output, f"# {CALIBRATED}\n{machine_text(found)}".encode(), why_not_calibrated)
    print(f"Written: {output}. Name it as the machine: graphsplit predict ... --machine {output}")


def validate(
    target: str,
    *,
    specs: Sequence[str],
    machine: str,
    devices: int,
    micro_batches: int,
    steps: int,
    outputs: Sequence[str] = (),
) -> None:
    """Run steps of a function and print what was predicted beside what was measured."""
    machine_found = machine_of(machine)
    _start(devices)
    fn, arguments = _function(target, specs)
    function = fn.function if isinstance(fn, ParallelFunction) else fn
    prediction = predicted(function, *arguments, machine=machine_found, devices=devices, micro_batches=micro_batches)
    split = parallelize(function, devices=devices, micro_batches=micro_batches)
    tensors = [example(spec) for spec in arguments]
    state = [(v.handle, v.dtype) for v in split.variables(*tensors)]
    with StateKeeper(state):
        beside = reference(available_devices()[0])
        (measured,), reference_s = usual_seconds_of_calls([lambda: split(*tensors)], beside, most_turns=steps)
    print(prediction)
    off = prediction.step_s / measured - 1
    print(
        f"Measured: {measured * 1e3:.2f} ms a step, the median of up to {steps} rounds. Predicted: "
        f"{prediction.step_s * 1e3:.2f} ms, {abs(off):.1%} {'more' if off > 0 else 'less'}."
    )
    if machine_found.host.reference_s:
        now = reference_s / machine_found.host.reference_s
        print(
            f"The machine itself takes {now:.2f} times as long for the same products and sums as when {machine} was "
            "written; who else uses it may make the difference."
        )
    recorded = timeline_of(split, *tensors)
    print(prediction.beside(recorded))
    for path in outputs:
        prediction.save(path, measured=recorded)
        print(f"Written: {path}")


def _start(devices: int | None) -> None:
    """Make logical CPU devices where there are no GPUs: each as good as a core, as predictions take them to be."""
    if not has_gpus():
        count = devices or 2
        use_logical_devices(max(count, 2), threads_per_device=1)
        tf.config.threading.set_inter_op_parallelism_threads(min(count, os.cpu_count() or 1))


def _function(target: str, specs: Sequence[str]) -> tuple[Any, list[tf.TensorSpec]]:
    fn, declared = load_target(target, "serving_default")
    if declared:
        raise ArgumentError(f"{target!r} is a SavedModel; predict takes a function, module:function.")
    arguments = [parse_spec(text) for text in specs]
    check_specs(target, fn, {}, arguments)
    return fn, arguments
