"""Runs small programs on fewer rows than there are shards, in a process that a test ends if one never returns.

Prints a line for each: its name, and how far it is from a `tf.function` of the same lines. Usage: KIND.
"""

from __future__ import annotations

import itertools
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import graphsplit as gs

gs.use_logical_devices(5)
keras.utils.set_random_seed(1)
WEIGHTS = tf.Variable(tf.random.stateless_normal((3, 3), [1, 1]))
COUNT = tf.Variable(0.0)
LAYERS = {name: getattr(keras.layers, name)(4) for name in ("LSTM", "GRU", "SimpleRNN")}


def arrays(x):
    state, given = tf.zeros_like(x[:, 0]), tf.TensorArray(tf.float32, 4).unstack(tf.transpose(x, [1, 0, 2]))
    made = tf.TensorArray(tf.float32, 4)
    for t in tf.range(4):
        state = tf.tanh((state + given.read(t)) @ WEIGHTS)
        made = made.write(t, state)
    return tf.reduce_sum(made.stack()), tf.transpose(made.stack(), [1, 0, 2])


def effects(x):
    for _ in tf.range(3):
        COUNT.assign_add(tf.reduce_sum(x))
        x = tf.tanh(x)
    return tf.reduce_sum(x), x + COUNT


def rows(x):
    return tf.reduce_sum(tf.map_fn(lambda row: tf.tanh(row @ WEIGHTS), x)), x


def scanned(x):
    found = tf.scan(lambda a, b: tf.tanh(a + b), tf.transpose(x, [1, 0, 2]))
    return tf.reduce_sum(found), found[-1]


def branches(x):
    for t in tf.range(3):
        x = tf.cond(t > 0, lambda x=x: tf.tanh(x @ WEIGHTS), lambda x=x: x * 2.0)
    return tf.reduce_sum(x), x


def training(x):
    with tf.GradientTape() as tape:
        loss = arrays(x)[0] ** 2
    return loss, tape.gradient(loss, WEIGHTS)


KINDS = {f.__name__: f for f in (arrays, effects, rows, scanned, branches, training)}
KINDS |= {name: lambda x, layer=layer: (tf.reduce_sum(layer(x)), layer(x)) for name, layer in LAYERS.items()}

kind = KINDS[sys.argv[1]]
function = tf.function(kind, input_signature=[tf.TensorSpec([None, 4, 3])])
for devices, parts in itertools.product((2, 3, 5), (1, 2, 3)):
    parallel = gs.parallelize(function, devices=devices, micro_batches=parts)
    for count in sorted({1, 2, devices, devices + 1, devices * parts - 1, devices * parts, 11}):
        x = tf.random.stateless_normal((count, 4, 3), [count, 1])
        COUNT.assign(0.0)
        expected = tf.nest.flatten(function(x))
        COUNT.assign(0.0)
        print(sys.argv[1], devices, parts, count, end=" ", flush=True)
        found = tf.nest.flatten(parallel(x))
        assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
        pairs = zip(found, expected, strict=True)
        print(max(float(tf.reduce_max(abs(a - b)) / (1 + tf.reduce_max(abs(b)))) for a, b in pairs), flush=True)
print("all", flush=True)
