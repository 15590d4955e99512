"""Functions and models whose variables are laid out: plain optimizers, a Keras model, and what crosses devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.devices import canonical_name
from graphsplit.core.protos import split_reference
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.device_bytes import traffic
from tests.helpers.law import assert_close, assert_law

ROWS = 11


def numbers(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.cast(np.random.default_rng(seed).standard_normal(shape), tf.float32)


LAYOUTS: dict[str, dict[str, Any]] = {
    "home": {"layout": "home"},
    "sharded": {"layout": "sharded", "devices": 3},
    "replicated": {"layout": "replicated", "devices": 3},
    "axes": {"layout": {"*kernel*": ((None, "model"), "sharded"), "*": "home"}, "mesh": {"batch": 2, "model": 2}},
    "blocks": {
        "layout": {"*kernel*": ((None, gs.cut("model", blocks=3)), "sharded"), "*": "home"},
        "mesh": {"batch": 2, "model": 2},
    },
}
"""What `variable_layout` is given for the kernels of `small_network`, each in a layout of its own."""


def small_network(library: Any = keras) -> tuple[Any, Any]:
    """Return a network of 31 features, the same each time, and an optimizer that is built for it."""
    library.utils.set_random_seed(1)
    layers = [library.layers.Dense(60, "relu", name="one"), library.layers.BatchNormalization(name="norm")]
    layers += [library.layers.Dropout(0.5), library.layers.Dense(45, name="two")]
    model = library.Sequential([library.layers.Input((31,)), *layers], name="net")
    optimizer = library.optimizers.Adam(0.01, name="adam")
    optimizer.build(model.trainable_variables)
    return model, optimizer


def held_by_device(variables: Sequence[tf.Variable]) -> dict[str, int]:
    """Return the bytes that devices hold of variables, laid out or not."""
    held: Counter[str] = Counter()
    for own in variables:
        parts = parts_of_variable(own)
        whole = {own.device: own.shape.num_elements() * own.dtype.size}
        held.update(whole if parts is None else parts.bytes_on_devices())
    return dict(held)


X, Y = numbers(ROWS, 7, seed=1), numbers(ROWS, 5, seed=2)


class Optimizer:
    """Steps of an optimizer on two weights and a bias, as plain assignments to variables and slots."""

    def __init__(self, update: Callable[..., None], clip: Callable[..., Any] = lambda g: g, slots: int = 2):
        self.weights = [tf.Variable(0.4 * numbers(*s, seed=len(s) + s[0])) for s in ((7, 150), (150,), (150, 5))]
        self.slots = [[tf.Variable(tf.zeros_like(w)) for _ in range(slots)] for w in self.weights]
        self.count = tf.Variable(0.0)
        self._update, self._clip = update, clip

    @property
    def variables(self) -> list[tf.Variable]:
        return [*self.weights, *[slot for slots in self.slots for slot in slots], self.count]

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        first, bias, second = self.weights
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.nn.tanh(x @ first + bias) @ second - y) ** 2)
        gradients = self._clip(tape.gradient(loss, self.weights))
        self.count.assign_add(1.0)
        for weight, slots, gradient in zip(self.weights, self.slots, gradients, strict=True):
            self._update(weight, slots, gradient, self.count)
        return loss


def sgd(weight: tf.Variable, slots: Any, gradient: tf.Tensor, count: tf.Variable) -> None:
    weight.assign_sub(0.1 * gradient)


def momentum(weight: tf.Variable, slots: Any, gradient: tf.Tensor, count: tf.Variable) -> None:
    slots[0].assign(0.9 * slots[0] + gradient)
    weight.assign_sub(0.1 * (gradient + 0.9 * slots[0] + 1e-3 * weight))


def adam(weight: tf.Variable, slots: Any, gradient: tf.Tensor, count: tf.Variable) -> None:
    rate = 0.1 * tf.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    slots[0].assign_add(0.1 * (gradient - slots[0]))
    slots[1].assign_add(1e-3 * (tf.square(gradient) - slots[1]))
    weight.assign_sub(rate * slots[0] / (tf.sqrt(slots[1]) + 1e-3))


def fused_adam(weight: tf.Variable, slots: Any, gradient: tf.Tensor, count: tf.Variable) -> None:
    tf.raw_ops.ResourceApplyAdam(
        var=weight.handle, m=slots[0].handle, v=slots[1].handle, beta1_power=0.9**count, beta2_power=0.999**count,
        lr=0.1, beta1=0.9, beta2=0.999, epsilon=1e-3, grad=gradient,
    )  # fmt: skip


def lamb(weight: tf.Variable, slots: Any, gradient: tf.Tensor, count: tf.Variable) -> None:
    slots[0].assign(0.9 * slots[0] + 0.1 * gradient)
    update = slots[0] / (tf.abs(gradient) + 1.0)
    weight.assign_sub(0.01 * update * tf.norm(weight) / (tf.norm(update) + 1e-3))


def orthogonal(weight: tf.Variable, slots: Any, gradient: tf.Tensor, count: tf.Variable) -> None:
    """One step of Newton and Schulz, which mixes all of a matrix."""
    if len(weight.shape) == 2:
        g = gradient / (tf.norm(gradient) + 1e-3)
        gradient = 1.5 * g - 0.5 * tf.matmul(tf.matmul(g, g, transpose_b=True), g)
    weight.assign_sub(0.1 * gradient)


def by_global_norm(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    return tf.clip_by_global_norm(gradients, 0.3)[0]


ELEMENTWISE = {"sgd": sgd, "momentum": momentum, "adam": adam, "fused_adam": fused_adam}


COUPLED: dict[str, dict[str, Any]] = {
    "global_norm": {"update": adam, "clip": by_global_norm},
    "lamb": {"update": lamb},
    "orthogonal": {"update": orthogonal},
    "clip_by_value": {"update": sgd, "clip": lambda gs: [tf.clip_by_value(g, -0.01, 0.01) for g in gs]},
}


def train(layout: str, devices: int, calls: int = 3, **options: Any) -> tuple[Optimizer, gs.inspect.Plan]:
    made = Optimizer(**options)
    if layout != "home":
        gs.set_variable_layout(made.variables, layout, devices)
    step = gs.parallelize(made.step, devices=devices)
    for _ in range(calls):
        step(X, Y)
    return made, step.plan(X, Y)


def assert_same_bits(layout: str, name: str, devices: int) -> Optimizer:
    """Train with an elementwise optimizer at home and by a layout, compare bit by bit, and return the latter."""
    home, _ = train("home", devices, update=ELEMENTWISE[name])
    made, plan = train(layout, devices, update=ELEMENTWISE[name])
    for a, b in zip(made.variables, home.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    plan.check()
    plan.program.check()
    check_emitted(plan, emit(plan))
    return made


def assert_coupled_law(layout: str, name: str, devices: int) -> tuple[Optimizer, gs.inspect.Plan]:
    """Compare what couples all of a variable, by a layout, with the function itself; return what was laid out."""
    both = [Optimizer(**COUPLED[name]), Optimizer(**COUPLED[name])]
    gs.set_variable_layout(both[1].variables, layout, devices)
    ways = iter([(one.step, one.variables) for one in both])
    return both[1], assert_law(lambda: next(ways), [(X, Y), (X[:4], Y[:4])], devices=devices, sharded=["MatMul"])


def crossing(graphs: Sequence[Any]) -> Counter[tuple[str, str]]:
    """Count what TensorFlow's own partitions send from device to device."""
    sends = [node for graph in graphs for node in graph.node if node.op in ("_Send", "_HostSend")]
    pairs = [(n.attr["send_device"].s.decode(), n.attr["recv_device"].s.decode()) for n in sends]
    return Counter((canonical_name(a), canonical_name(b)) for a, b in pairs)


def bytes_sent(graphs: Sequence[Any], plan: gs.inspect.Plan) -> dict[tuple[str, str], int]:
    """Count the bytes of what operations made that TensorFlow's own partitions send from device to device."""
    origins, found = emit(plan).origins, Counter[tuple[str, str]]()
    for node in (node for graph in graphs for node in graph.node if node.op in ("_Send", "_HostSend")):
        name, index = split_reference(node.input[0])
        origin = origins.get(name)
        if origin is not None and origin.op is not None and origin.role == "op":
            sizes = plan.program.ops[origin.op].out_bytes
            pair = [canonical_name(node.attr[f"{end}_device"].s.decode()) for end in ("send", "recv")]
            found[pair[0], pair[1]] += sizes[index] if sizes else 0  # (without results: a mere signal)
    return found


def ancestors_of(graphs: Sequence[Any]) -> dict[str, set[str]]:
    """Return all nodes that have run before each node of TensorFlow's own partitions, on whichever device."""
    sources: dict[str, list[str]] = {}
    sent = {n.attr["tensor_name"].s: n.name for g in graphs for n in g.node if n.op in ("_Send", "_HostSend")}
    for node in (node for graph in graphs for node in graph.node):
        own = [split_reference(reference.lstrip("^"))[0] for reference in node.input]
        received = [sent[node.attr["tensor_name"].s]] if node.op in ("_Recv", "_HostRecv") else []
        sources[node.name] = own + received
    found: dict[str, set[str]] = {}

    def visit(name: str) -> set[str]:
        if name not in found:
            found[name] = set()
            for source in sources.get(name, ()):
                found[name] |= {source, *visit(source)}
        return found[name]

    for name in sources:
        visit(name)
    return found


def keras_model() -> Any:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6, 6, 3)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(5),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=1.0, use_ema=True, ema_overwrite_frequency=3)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    optimizer.build(model.trainable_variables)
    return model


def deep_step(weights: Sequence[tf.Variable]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a training step of layers that follow each other, each with one of the weights."""

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.nn.tanh(h @ weight)
            loss = tf.reduce_sum(h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step


def weights_and_slots(names: str) -> tuple[list[list[tf.Variable]], Callable[[tf.Tensor], tf.Tensor]]:
    """Return weights and two slots of each, named alike by a letter for each kind, and a step of Adam by hand."""
    shapes = ((40, 30), (30, 30), (30, 30), (30, 30), (30, 90), (90, 30), (30, 30))
    named = [[(shape, f"{kind}{k}") for kind in names] for k, shape in enumerate(shapes)]
    own = [[tf.Variable(0.1 * np.ones(shape, np.float32), name=name) for shape, name in group] for group in named]

    def step(x: tf.Tensor) -> tf.Tensor:
        weights = [weight for weight, *_ in own]
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.nn.tanh(y @ weight)
            loss = tf.reduce_mean(y**2)
        for (weight, mean, square), gradient in zip(own, tape.gradient(loss, weights), strict=True):
            mean.assign_add(0.1 * (gradient - mean))
            square.assign_add(1e-3 * (tf.square(gradient) - square))
            weight.assign_sub(0.01 * mean / (tf.sqrt(square) + 1e-3))
        return loss

    return own, step


def assert_law_under_tapes_outside(weight: tf.Variable, devices: Sequence[str] | int) -> None:
    """Compare the gradients of a tape around calls, between which a variable of 40 by 50 changes; it is laid out."""
    apply = gs.parallelize(lambda x: tf.nn.tanh(x @ weight), devices=devices)
    x = numbers(7, 40, seed=8)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(apply(x) ** 2)
        found = tape.gradient(loss, weight)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.tanh(x @ weight) ** 2)
        assert_close(found, tape.gradient(loss, weight))
        weight.assign_sub(0.1 * found)


def assert_no_device_sends_more(parallel: Any, x: tf.Tensor, most: float) -> None:
    """Assert that no device sends, or receives, more bytes in a call, by the plan and by TensorFlow's own graphs."""
    plan = parallel.plan(x)
    _, sent, received = traffic(plan).busiest
    assert max(sent, received) <= most
    with partition_graphs() as graphs:
        parallel(x)
    found = bytes_sent(graphs, plan)
    for device in plan.devices:
        assert sum(count for (a, _), count in found.items() if a == device) <= most
        assert sum(count for (_, b), count in found.items() if b == device) <= most
