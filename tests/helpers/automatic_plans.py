"""Training steps, and machines, for which plans are chosen."""

from __future__ import annotations

import tensorflow as tf

from graphsplit.planning.costs.machine import Device, Host, Link, Machine


def machine_of(rate: float = 1e9, link: float = 1e9, memory: float = 1e9) -> Machine:
    """Logical CPU devices with a thread each."""
    device = Device("core", "CPU", {"float32": rate}, {"float32": rate}, 1e12, memory)
    return Machine("cores", device, 64, Link("memory", link, 0.0, shared=True), host=Host(threads=64))


class Deep:
    """Eight layers of one small kernel: what is held are activations."""

    def __init__(self):
        self.kernels = [tf.Variable(tf.eye(64) / 2, name="kernel")]

    def step(self, x):
        with tf.GradientTape() as tape:
            for _ in range(8):
                x = tf.nn.tanh(x @ self.kernels[0])
            loss = tf.reduce_sum(x)
        self.kernels[0].assign_sub(1e-3 * tape.gradient(loss, self.kernels[0]))
        return loss


class Momentum:
    """Eight layers whose variables are most of what is held."""

    def __init__(self, layers: int = 8):
        self.kernels = [tf.Variable(tf.fill([256, 256], 1 / 256), name=f"kernel_{k}") for k in range(layers)]
        self.slots = [tf.Variable(tf.zeros([256, 256]), name=f"kernel_{k}_momentum") for k in range(layers)]

    def step(self, x):
        with tf.GradientTape() as tape:
            for kernel in self.kernels:
                x = tf.nn.tanh(x @ kernel)
            loss = tf.reduce_mean(x)
        for gradient, kernel, slot in zip(tape.gradient(loss, self.kernels), self.kernels, self.slots, strict=True):
            slot.assign(0.9 * slot + gradient)
            kernel.assign_sub(slot)
        return loss
