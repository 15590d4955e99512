"""A network one stage of which has devices of its own."""

from __future__ import annotations

import tensorflow as tf

import graphsplit as gs

OUTER, STAGE = ["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]


def rows(count: int = 5, width: int = 6, seed: int = 1) -> tf.Tensor:
    return tf.random.stateless_normal([count, width], [count, seed], dtype=tf.float64)


def network(place=lambda fn: fn):
    """An encoder of tanh and a head of leaky_relu, which nothing else uses, and their variables."""
    shapes = {"e1": (6, 8), "e2": (8, 8), "head": (8, 3)}
    w = {name: tf.Variable(rows(*shape, seed=i)) for i, (name, shape) in enumerate(shapes.items())}

    def encoder(x):
        h = tf.tanh(x @ w["e1"])
        return h + tf.tanh(h @ w["e2"])

    encode = place(encoder)
    return lambda x: tf.nn.leaky_relu(encode(x) @ w["head"]), list(w.values())


def training(place=lambda fn: fn):
    forward, variables = network(place)
    count = tf.Variable(0)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((forward(x) - x[:, :3]) ** 2)
        for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(0.1 * g)
        count.assign_add(1)
        return loss

    return step, [*variables, count]


def on(devices):
    return lambda fn: gs.on_device(fn, devices)


def devices_by_type(graphs, types):
    """Return where nodes of these types ran, from TensorFlow's partition graphs: (type, shard or -1, device)."""
    found = set()
    for node in (node for graph in graphs for node in graph.node if node.op in types):
        shard = int(node.name.split("shard_")[1].split("/")[0]) if "shard_" in node.name else -1
        found.add((node.op, shard, node.device.rsplit("device:", 1)[-1]))
    return found


def expected(types, devices):
    return {(kind, d, device) for kind in types for d, device in enumerate(devices)}


TANH, LEAKY = ("Tanh", "TanhGrad"), ("LeakyRelu", "LeakyReluGrad")
