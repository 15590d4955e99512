"""Choices that were made on CPUs, measured on whatever is here: does each pay on GPUs?

python -m benchmarks.choices [--kind gpu --memory-mb 3000] [--devices 4] [--workload mini_googlenet_bn] [--rounds 9]

A training step is compiled as graphsplit does it and in other ways, all in one process, and timed in turns. Printed is
each other way's step as a multiple of graphsplit's own: above 1, the choice pays. The medians go to a JSON file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import graphsplit as gs
from benchmarks.environment import environment
from benchmarks.timing import in_turns, ratios
from benchmarks.workloads import WORKLOADS, Workload, data, workload
from graphsplit.core.storage import forms

RESULTS = Path(__file__).parent / "results"
Step = Callable[[], Any]

NOT_HERE = """\
Not measured here, because one process has one setting of it: memory that grows (TF_FORCE_GPU_ALLOW_GROWTH=true or
false before `python -m benchmarks --gpu`), the allocator (TF_GPU_ALLOCATOR)."""


def main() -> None:
    """Measure, print and write."""
    options = _options()
    if options.kind == "gpu":
        devices = gs.use_logical_devices(options.devices, kind="GPU", memory_mb=options.memory_mb)
        host = "CPU:0"
    else:
        *devices, host = gs.use_logical_devices(options.devices + 1, threads_per_device=1)
    found = workload(options.workload, options.small)
    print(f"{options.workload}, training on {len(devices)} {options.kind} devices: each as a multiple of what is done")
    results: dict[str, dict[str, float]] = {}
    for choice, ways in choices(host).items():
        results[choice] = measure(found, devices, ways, options.rounds, options.steps)
        for way, ratio in results[choice].items():
            print(f"  {choice + ':':18} {way:34} {ratio:.2f}", flush=True)
    print(NOT_HERE)
    path = options.output or RESULTS / f"choices_{options.kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(options).items() if key != "output"}
    forms.write_json(str(path), {"environment": environment(), "settings": settings, "ratios": results}, indent=1)
    print(f"Written: {path}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--memory-mb", type=int, help="of each logical GPU")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--workload", choices=WORKLOADS, default="mini_googlenet_bn")
    parser.add_argument("--small", action="store_true", help="the small network")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="in each round")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


class Way:
    """How a step is compiled: what is replaced in graphsplit meanwhile, and where variables and whole values are.

    Args:
      replaced: module and name -> what stands there while the step is compiled.
      home: a device for variables and whole values, if not the first.
    """

    def __init__(self, replaced: Mapping[tuple[Any, str], Any] | None = None, home: str | None = None):
        self.replaced = replaced or {}
        self.default_device = home

    @contextmanager
    def held(self) -> Iterator[None]:
        """Replace, as long as this lasts."""
        with ExitStack() as stack:
            for (module, name), value in self.replaced.items():
                stack.enter_context(mock.patch.object(module, name, value))
            yield


def choices(host: str) -> dict[str, dict[str, Way]]:
    """Return the choices, each with the other ways; `host` is a device for variables beside the others."""
    from graphsplit.planning.communication import bucketing
    from graphsplit.runtime import executable

    config = (executable, "optimizer_config")
    packed = (bucketing, "SMALL_BYTES")
    return {
        "graph optimizer": {
            "all of it": Way({config: lambda *_: None}),
            "nothing of it": Way({config: lambda *_: _optimizer(off=True)}),
            "all but layouts of images": Way({config: lambda *_: _optimizer(layout=False)}),
        },
        "home": {"variables and sums on the host": Way(home=host)},
        "reductions": {"pairwise additions": Way({(executable, "emit"): emit_pairwise})},
        "packing": {
            "nothing": Way({packed: 0}),
            "vectors of up to 64 kB": Way({packed: 65_536}),
            "vectors of up to 1 MB": Way({packed: 1_048_576}),
        },
    }


def _optimizer(off: bool = False, layout: bool = True) -> bytes:
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.disable_meta_optimizer = off
    if not layout:
        rewrites.layout_optimizer = rewrites.OFF
    return bytes(config.SerializeToString())


def emit_pairwise(plan: Any) -> Any:
    """Emit a plan with a chain of additions for each sum over devices."""
    import tensorflow as tf

    from graphsplit.core.protos import make_node
    from graphsplit.emission import emit

    graph = emit(plan)
    nodes, origins = [], dict(graph.origins)
    for node in graph.nodes:
        if node.op != "AddN" or origins[node.name].role != "reduce" or len(node.input) < 3:
            nodes.append(node)
            continue
        upto, dtype = node.input[0], tf.as_dtype(node.attr["T"].type)
        for k, part in enumerate(node.input[1:], 1):
            name = node.name if k == len(node.input) - 1 else f"{node.name}/upto_{k}"
            nodes.append(make_node(name, "AddV2", [upto, part], node.device, T=dtype))
            origins[name] = origins[node.name]
            upto = name
    return replace(graph, nodes=tuple(nodes), origins=origins)


def measure(
    found: Workload, devices: Sequence[str], ways: Mapping[str, Way], rounds: int, steps: int
) -> dict[str, float]:
    """Return the other ways' steps as multiples of graphsplit's: medians over rounds in which each is timed in turn."""
    made = {"": compiled(found, devices, Way()), **{name: compiled(found, devices, way) for name, way in ways.items()}}
    found = in_turns(made, rounds, steps)
    return {name: ratios(found[name], found[""]).wall for name in ways}


def compiled(found: Workload, devices: Sequence[str], way: Way) -> Step:
    """Return a training step that has run once, compiled in a way of its own."""
    import tensorflow as tf

    from benchmarks.steps import make_parts, single_device_step

    with way.held(), tf.device(way.default_device or devices[0]):
        parts = make_parts(found)
        step = gs.parallelize(
            single_device_step(parts, "training"), devices=list(devices), tuning={"default_device": way.default_device}
        )
        arguments = [tf.constant(array) for array in data(found, found.batch)]
        step(*arguments).numpy()
    return lambda: step(*arguments)


if __name__ == "__main__":
    main()
