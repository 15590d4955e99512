"""The search for meshes and layouts beside an exhaustive one, and at the shapes of a block of a model of 70B.

python -m benchmarks.mesh_search [--blocks 20] [--first 0] [--large]

Blocks are random: their kind, their widths and how many rows there are. Each is predicted for three machines, one of
them with a slow link. Compared are predicted times: of what the search finds, and of the best of all meshes and all
layouts, of each variable for itself.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

import graphsplit as gs
from graphsplit.core.device_mesh import MeshAxes
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.machine_files import machine
from graphsplit.simulate.calls import PredictedCall, predicted_call
from graphsplit.simulate.search.candidates import Candidate, axes_to_cut_along
from graphsplit.simulate.search.chosen_plans import choose, table_for, variables_to_cut
from graphsplit.simulate.search.plan_search import Question, Search

_SLOW = 2e9  # bytes a second: gigabit links, four of them
Step = Callable[[tf.Tensor], Any]


def machines() -> list[Machine]:
    """Return the machines: GPUs joined by NVLink, others by PCIe, and some by a slow link."""
    fast = machine("8xH100-SXM5")
    slow = replace(fast, name="8xH100-SXM5, slow link", link=replace(fast.link, bytes_per_s=_SLOW))
    return [fast, machine("4xT4"), slow]


@dataclass(frozen=True)
class Block:
    """A block of a network, and a step of training it.

    Attributes:
      kind: of it, and its sizes.
      step: takes a tensor.
      x: what is known of that tensor.
      devices: how many there are.
    """

    kind: str
    step: Step
    x: tf.TensorSpec
    devices: int


def blocks(count: int, first: int = 0) -> Iterator[Block]:
    """Yield random blocks, each by its number: without values, so that large ones cost nothing."""
    for seed in range(first, first + count):
        drawn = random.Random(seed)
        kind = list(_KINDS)[seed % len(_KINDS)]
        width, hidden = drawn.choice([256, 512, 1024, 2048]), drawn.choice([384, 1024, 4096, 8192])
        rows, length = drawn.choice([1, 2, 8]), drawn.choice([128, 512, 2048])
        with gs.keras.without_values():
            shapes, forward = _KINDS[kind](width, hidden)
            weights = {name: tf.Variable(tf.zeros(shape), name=f"block/{name}") for name, shape in shapes.items()}
        name = f"{seed}: {kind}, width {width}, hidden {hidden}, {rows} x {length}"
        devices = 2 if len(weights) > 3 else 4
        yield Block(name, training(forward, weights), tf.TensorSpec((rows, length, width)), devices)


def _perceptron(width: int, hidden: int) -> tuple[dict[str, tuple[int, ...]], Callable[..., Any]]:
    shapes: dict[str, tuple[int, ...]] = {"up": (width, hidden), "down": (hidden, width)}
    return shapes, lambda x, w: x + tf.nn.gelu(x @ w["up"]) @ w["down"]


def _gated(width: int, hidden: int) -> tuple[dict[str, tuple[int, ...]], Callable[..., Any]]:
    shapes: dict[str, tuple[int, ...]] = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return shapes, lambda x, w: x + (tf.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def _chain(width: int, hidden: int) -> tuple[dict[str, tuple[int, ...]], Callable[..., Any]]:
    shapes: dict[str, tuple[int, ...]] = {"a": (width, hidden), "b": (hidden, hidden), "c": (hidden, width)}
    return shapes, lambda x, w: tf.tanh(tf.tanh(x @ w["a"]) @ w["b"]) @ w["c"]


def _attention(width: int, _: int) -> tuple[dict[str, tuple[int, ...]], Callable[..., Any]]:
    heads, size = 8, width // 8
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key", "value", "output"), (width, width))

    def forward(x: tf.Tensor, w: dict[str, tf.Variable]) -> tf.Tensor:
        shape = (*x.shape[:2], heads, size)
        query, key, value = [tf.reshape(x @ w[name], shape) for name in ("query", "key", "value")]
        scores = tf.nn.softmax(tf.einsum("bthe,bshe->bhts", query, key) / size**0.5)
        return x + tf.reshape(tf.einsum("bhts,bshe->bthe", scores, value), x.shape) @ w["output"]

    return shapes, forward


_KINDS = {"perceptron": _perceptron, "gated": _gated, "chain": _chain, "attention": _attention}


def training(forward: Callable[..., Any], weights: dict[str, tf.Variable]) -> Step:
    """Return a step of gradient descent."""

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = forward(x, weights)
            loss = tf.reduce_mean(tf.cast(y, tf.float32) ** 2)
        for own, gradient in zip(weights.values(), tape.gradient(loss, list(weights.values())), strict=True):
            own.assign_sub(tf.cast(0.1, own.dtype) * gradient)
        return loss

    return step


def compare(
    block: Block,
    others: Sequence[Machine],
    mesh: MeshAxes = MeshAxes(),  # noqa: B008  # frozen
) -> list[tuple[str, Candidate, float, Candidate, float, int]]:
    """Return, for each machine, what the search finds and what an exhaustive one does, on a mesh that is given or any.

    Each is the machine, the plan that is found and its seconds, the best of all and its seconds, how many there are.
    """
    call = predicted_call(block.step, [block.x], {})
    plans: dict[object, Any] = {}

    def make_plan(names: Sequence[str], candidate: Candidate) -> Any:
        if (tuple(names), candidate) not in plans:
            plans[tuple(names), candidate] = call.plan(names, candidate.layouts, **candidate.options)
        return plans[tuple(names), candidate]

    found = []
    for own in others:
        question = question_of(call, block, own, make_plan, mesh)
        chosen, search = choose(question), Search(question)
        looked = dict.fromkeys([*chosen.looked, *exhaustive(question)])
        best = min(looked, key=lambda candidate: search.look_at(candidate).step_s)
        seconds = search.look_at(chosen.chosen).step_s, search.look_at(best).step_s
        found.append((own.name, chosen.chosen, seconds[0], best, seconds[1], len(looked)))
    return found


def question_of(
    call: PredictedCall,
    block: Block,
    own: Machine,
    make_plan: Callable[..., Any],
    mesh: MeshAxes = MeshAxes(),  # noqa: B008  # frozen
) -> Question:
    """Return the question of `plan="auto"`."""
    variables = variables_to_cut(call.trace)
    sizes = {variable.name: variable.all_bytes for variable in variables}
    rows = int(block.x.shape[0])
    options = replace(call.options, plan="auto", mesh=mesh)
    table = table_for(options, rows, mesh.count or block.devices, 1, sizes)
    table = replace(table, stages=())  # (they are searched as before)
    limit, title = own.device.memory_bytes, block.kind
    return Question(title, rows, list(sizes.values()), own, limit, table, make_plan, call.trace.program, variables)


def exhaustive(question: Question) -> Iterator[Candidate]:
    """Yield all plans on all meshes: each variable is cut in any dimension, or not, all along the same axes."""
    meshes = [(mesh, axes) for mesh in question.table.meshes for axes in axes_to_cut_along(mesh)]
    for mesh, axes in meshes:
        columns = math.prod(mesh.others[name] for name in axes)
        ways = [[None, *[k for k, n in enumerate(own.shape) if n >= columns]] for own in question.variables]
        for chosen in itertools.product(*ways):
            pairs = zip(question.variables, chosen, strict=True)
            along = tuple([(own.name, k) for own, k in pairs if k is not None])
            yield from question.table.on_mesh(mesh, along, axes)


def large_block() -> tuple[Step, tf.TensorSpec]:
    """Return a step of training a block of a model of 70B, without values, and what it takes."""
    width, hidden, heads, size = 8192, 28672, 64, 128
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key", "value"), (width, heads, size))
    shapes |= {"output": (heads, size, width), "gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    with gs.keras.without_values():
        weights = {name: tf.Variable(tf.zeros(own, tf.bfloat16), name=f"block/{name}") for name, own in shapes.items()}

    def normal(x: tf.Tensor) -> tf.Tensor:
        return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-5)

    def forward(x: tf.Tensor, w: dict[str, tf.Variable]) -> tf.Tensor:
        query, key, value = [tf.einsum("btd,dhe->bhte", normal(x), w[name]) for name in ("query", "key", "value")]
        scores = tf.nn.softmax(tf.einsum("bhte,bhse->bhts", query, key) / size**0.5)
        x += tf.einsum("bhte,hed->btd", tf.einsum("bhts,bhse->bhte", scores, value), w["output"])
        return x + (tf.nn.silu(normal(x) @ w["gate"]) * (normal(x) @ w["up"])) @ w["down"]

    return training(forward, weights), tf.TensorSpec((1, 4096, width), tf.bfloat16)


def large() -> tuple[float, float, Any]:
    """Return how long it takes to plan a block of 70B: by the clock, and of the processor; and the plan."""
    step, x = large_block()
    devices = [f"GPU:{k}" for k in range(8)]
    parallel = gs.parallelize(step, devices=devices, plan="8xH100-SXM5")
    start = time.perf_counter(), time.process_time()
    plan = parallel.plan(x)
    return time.perf_counter() - start[0], time.process_time() - start[1], plan


def main() -> None:
    """Compare and print."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--large", action="store_true", help="the block of 70B instead")
    options = parser.parse_args()
    if options.large:
        wall_s, processor_s, plan = large()
        print(f"planned in {wall_s:.1f} s, {processor_s:.1f} s of the processor\n{plan.explain()}")
        return
    ratios = []
    for block in blocks(options.blocks, options.first):
        for name, found, found_s, best, best_s, count in compare(block, machines()):
            ratios.append(found_s / best_s)
            print(f"{block.kind}; {name}: {found_s * 1e3:.3f} ms, {ratios[-1]:.3f} of the best of {count}", flush=True)
            if ratios[-1] > 1.005:
                print(f"    found {found}\n    best  {best}", flush=True)
    within = sum(ratio <= 1.02 for ratio in ratios)
    print(f"{within} of {len(ratios)} within 2 %; most {max(ratios):.3f}")


if __name__ == "__main__":
    main()
