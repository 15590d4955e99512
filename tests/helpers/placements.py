"""Placements with known answers, made by hand."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from graphsplit.core.protos import constant_node, make_node
from graphsplit.inspect import Edge, PlacedOp, Placement


def placeholder(name, shape, device):
    value = tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto())
    return make_node(name, "Placeholder", [], device, dtype=tf.float32, shape=value)


def two_device_graph():
    """x [8, 16] on CPU:0, times w [16, 4] on CPU:1, and the product's relu back on CPU:0; a branch that is shorter."""
    graph = tf.compat.v1.GraphDef()
    graph.versions.producer = tf.version.GRAPH_DEF_VERSION
    graph.node.append(placeholder("x", [8, 16], "/device:CPU:0"))
    graph.node.append(constant_node("w", np.ones((16, 4), np.float32), tf.float32, "/device:CPU:1"))
    graph.node.append(make_node("product", "MatMul", ["x", "w"], "/cpu:1", T=tf.float32))
    graph.node.append(make_node("relu", "Relu", ["product"], "/job:localhost/device:CPU:0", T=tf.float32))
    graph.node.append(make_node("twice", "AddV2", ["product", "product"], "/device:CPU:0", T=tf.float32))
    graph.node.append(make_node("short", "Neg", ["x", "^relu"], "/device:CPU:0", T=tf.float32))
    return graph


def synthetic(count, shards=4):
    """A placement of `count` operations in nested scopes on several devices."""
    ops = [PlacedOp("x", "Placeholder", "/device:GPU:0", shapes=((64, 32),), dtypes=("float32",), output_bytes=8192)]
    edges = []
    for d in range(shards):
        last = "x"
        for i in range((count - 2) // shards):
            name = f"shard_{d}/block_{i // 100}/layer_{i // 10 % 10}/op_{i % 10}"
            kind, device = "MatMul" if i % 10 == 0 else "Relu", f"/device:GPU:{d}"
            ops.append(PlacedOp(name, kind, device, shard=d, shapes=((8, 32),), dtypes=("float32",), flops=2048))
            edges.append(Edge(last, name, 0, 1024 if i else 8192, "float32"))
            last = name
        edges.append(Edge(last, "loss", 0, 1024, "float32"))
    ops.append(PlacedOp("loss", "AddN", "/device:GPU:0", shapes=((8, 32),), dtypes=("float32",), flops=100))
    return Placement(ops, edges, rows=[8] * shards, title="synthetic")
