"""`graphsplit predict`, `machines`, `calibrate` and `validate`: what they do, once TensorFlow has started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.decorators import parallelize
from graphsplit.api.predicted.calibration import calibrated
from graphsplit.api.predicted.predictions import predict as predicted
from graphsplit.api.predicted.scaling import scaling
from graphsplit.cli.checks import CALIBRATED, why_not_calibrated
from graphsplit.cli.running import shown_progress
from graphsplit.cli.targets import check_specs, example, load_target, parse_spec
from graphsplit.core.devices import available_devices, use_logical_devices
from graphsplit.core.errors import ArgumentError
from graphsplit.core.gpus.logical_gpus import has_gpus
from graphsplit.core.storage import files
from graphsplit.costs.machine import Machine
from graphsplit.costs.machine_files import known_machines, machine_text
from graphsplit.costs.machine_files import machine as machine_of
from graphsplit.placement.recorded.timeline import timeline_of
from graphsplit.placement.sources import StateKeeper
from graphsplit.planning.amounts import aligned
from graphsplit.prediction.measuring.timing import reference, usual_seconds_of_calls
from graphsplit.prediction.predictions import amount


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


def machines(name: str | None) -> None:
    """Print the machines that come along, a line for each; or one, each figure with its source."""
    if name is not None:
        print(_machine_text(machine_of(name)))
        return
    rows: list[tuple[str, ...]] = [
        ("machine", "devices", "memory", "FLOP/s: float32", "bfloat16", "between devices"),
    ]
    for found in known_machines().values():
        device, rates = found.device, found.device.matrix_flops_per_s
        products = [amount(rates[kind]) if kind in rates else "" for kind in ("float32", "bfloat16")]
        held = f"{amount(device.memory_bytes)}B"
        rows.append((found.name, f"{found.devices} {device.name}", held, *products, _rate_text(found.link)))
    print(*aligned(rows, left=len(rows[0])), sep="\n")
    print("All figures of one, and where they come from: graphsplit machines dgx-a100.")
    print("So many devices of a box: 4xA100-SXM4-80GB. A cluster: 2x8xA100-SXM4-80GB, or 2xdgx-a100.")


def _machine_text(found: Machine) -> str:
    """Return what a machine file says, each figure with its source."""
    device = found.device
    products = ", ".join(f"{kind} {amount(rate)}" for kind, rate in device.matrix_flops_per_s.items())
    others = ", ".join(f"{kind} {amount(rate)}" for kind, rate in device.vector_flops_per_s.items())
    lines = [f"{found.name}: {found.devices} {device.name}"]
    groups = {
        "device": (
            f"products, FLOP/s: {products}",
            f"all else, FLOP/s: {others}",
            f"memory: {amount(device.memory_bytes)}B, {amount(device.bytes_per_s)}B/s",
        ),
        "link": (f"between devices: {_link_text(found.link)}",),
        "host_link": (f"between a device and the host: {_link_text(found.host_link)}",) if found.host_link else (),
        "host": (f"host: {_host_text(found.host)}",) if found.host_device else (),
        "network": (f"between hosts: {_link_text(found.network)}",) if found.network else (),
    }
    for source, texts in groups.items():
        lines += [f"  {text}" for text in texts]
        lines += [f"    from: {found.sources[source]}"] if texts else []
    return "\n".join(lines)


def _host_text(host: Any) -> str:
    return f"{amount(host.bytes_per_s)}B/s of memory, {amount(host.flops_per_s)}FLOP/s of float32"


def _link_text(link: Any) -> str:
    rate = _rate_text(link)
    return f"{link.name}: {rate}{' each way' if rate.endswith('/s') else ''}"


def _rate_text(link: Any) -> str:
    return "no copies" if link.bytes_per_s == float("inf") else f"{amount(link.bytes_per_s)}B/s"


def calibrate(
    output: str, target: str | None, specs: Sequence[str], devices: int | None, micro_batches: Sequence[int]
) -> None:
    """Measure this machine and write its file."""
    _start(devices)
    fn, arguments = (None, []) if target is None else _function(target, specs)
    with shown_progress("calibrating") as progress:
        examples = [example(spec) for spec in arguments]
        found = calibrated(fn, examples, micro_batches=micro_batches, progress=progress)
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
        (measured,) = usual_seconds_of_calls([lambda: split(*tensors)], beside, most_turns=steps)
    print(prediction)
    off = prediction.step_s / measured - 1
    print(
        f"Measured: {measured * 1e3:.2f} ms a step, the median of up to {steps} rounds. Predicted: "
        f"{prediction.step_s * 1e3:.2f} ms, {abs(off):.1%} {'more' if off > 0 else 'less'}."
    )
    print(prediction.beside(timeline_of(split, *tensors)))


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
