"""Loops on a mesh: a decoder and a recurrent layer, and what is in a program's loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from graphsplit.program.program import Op, Program
from tests.helpers.mesh_cases import HIDDEN, VOCABULARY, WIDTH, Made, sgd, variable

TURNS = 4


def flows(program: Program) -> list[Op]:
    """Return the loops and branches of a program, and those in them."""
    found = [op for op in program.ops if op.bodies]
    return found + [inner for op in found for body in op.bodies.values() for inner in flows(body)]


def recurrent() -> Made:
    """An LSTM whose units are cut: what it carries is in parts, and so are the stacks of the forward pass."""
    kernel, again = variable("kernel", WIDTH, 4, HIDDEN), variable("again", HIDDEN, 4, HIDDEN)
    bias, last = variable("bias", 4, HIDDEN), variable("last", HIDDEN, WIDTH)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        def cell(state: tuple[tf.Tensor, tf.Tensor], now: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            h, c = state
            z = tf.einsum("bw,wgu->bgu", now, kernel) + tf.einsum("bv,vgu->bgu", h, again) + bias
            i, g, f, o = tf.unstack(z, axis=1)
            c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
            return tf.sigmoid(o) * tf.tanh(c), c

        with tf.GradientTape() as tape:
            zeros = tf.zeros((x.shape[0], HIDDEN), x.dtype)
            h, c = tf.scan(cell, tf.transpose(x, [1, 0, 2]), (zeros, zeros))
            y = tf.einsum("tbu,uw->btw", h, last)
            loss = tf.reduce_mean((y - x) ** 2)
        return loss, sgd([kernel, again, bias, last], loss, tape), c[-1]

    return [kernel, again, bias, last], step


LSTM = {"kernel": (None, None, "model"), "again": (None, None, "model"), "bias": (None, "model"), "last": ("model",)}
WAYS: dict[str, Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "scatter": lambda cache, i, now: tf.tensor_scatter_nd_update(cache, [[i]], now[None]),
    "dynamic_update_slice": lambda cache, i, now: keras.ops.slice_update(cache, [i, 0, 0, 0], now[None]),
    "where": lambda cache, i, now: tf.where((tf.range(TURNS) == i)[:, None, None, None], now[None], cache),
    "concat": lambda cache, i, now: tf.concat([cache[1:], now[None]], 0),
}


def decoding(way: str, heads: int = 3) -> Made:
    """Two blocks with a cache of keys and values, cut by heads: one word after the other."""
    size = 4

    def block(n: int) -> dict[str, tf.Variable]:
        into = {name: variable(f"{n}/{name}", WIDTH, heads, size, seed=n + k) for k, name in enumerate("qkv")}
        up, down = variable(f"{n}/up", WIDTH, HIDDEN, seed=n), variable(f"{n}/down", HIDDEN, WIDTH, seed=n)
        return {**into, "o": variable(f"{n}/o", heads, size, WIDTH, seed=n), "up": up, "down": down}

    blocks, table = [block(n) for n in range(2)], variable("table", VOCABULARY, WIDTH)

    def attend(x: tf.Tensor, own: dict[str, tf.Variable], i: tf.Tensor, caches: list[tf.Tensor]) -> list[tf.Tensor]:
        q, k, v = (tf.einsum("bd,dhe->bhe", x, own[name]) for name in "qkv")
        keys, values = (WAYS[way](cache, i, now) for cache, now in zip(caches, (k, v), strict=True))
        scores = tf.einsum("bhe,tbhe->bht", q, keys)
        weights = tf.nn.softmax(tf.where(tf.range(TURNS) <= i, scores, -1e9) if way != "concat" else scores)
        x += tf.einsum("bhe,hed->bd", tf.einsum("bht,tbhe->bhe", weights, values), own["o"])
        return [x + tf.nn.gelu(x @ own["up"]) @ own["down"], keys, values]

    def step(ids: tf.Tensor) -> tuple[tf.Tensor, ...]:
        def turn(i: tf.Tensor, ids: tf.Tensor, caches: list[tf.Tensor], found: tf.TensorArray) -> tuple[Any, ...]:
            x, after = tf.gather(table, ids), []
            for n, own in enumerate(blocks):
                x, *more = attend(x, own, i, caches[2 * n : 2 * n + 2])
                after += more
            ids = tf.argmax(x @ tf.transpose(table), -1)
            return i + 1, ids, after, found.write(i, x)

        empty = [tf.zeros((TURNS, ids.shape[0], heads, size), table.dtype) for _ in range(4)]
        start = (0, ids, empty, tf.TensorArray(table.dtype, TURNS))
        _, ids, caches, found = tf.while_loop(lambda i, *_: i < TURNS, turn, start)
        return ids, found.stack(), tf.reduce_sum(caches[0] ** 2)

    return [own for block in blocks for own in block.values()] + [table], step


DECODING = {f"*/{name}": (None, "model") for name in ("q", "k", "v", "up")} | {"*/o": ("model",), "*/down": ("model",)}
