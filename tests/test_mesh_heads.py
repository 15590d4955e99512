"""Heads and their width in one dimension, cut along an axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import EvenCut, Shard, evenly
from graphsplit.planning.device_bytes import along, traffic
from graphsplit.rules.rows import blocks_beside
from tests.helpers.mesh_cases import HEAD, LENGTH, MESHES, WIDTH, Made, assert_law, ids_of, sgd, variable

LAYOUT = {**{f"{name}/kernel": (None, "model") for name in "qkv"}, "bias": ("model",), "output": ("model", None)}


def attention(heads: int) -> Callable[[], Made]:
    def make() -> Made:
        into = {name: variable(f"{name}/kernel", WIDTH, heads * HEAD, seed=k) for k, name in enumerate("qkv")}
        bias, output = variable("bias", heads * HEAD), variable("output", heads * HEAD, WIDTH)
        variables = [*into.values(), bias, output]

        def step(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            x = tf.one_hot(ids, WIDTH, dtype=tf.float64)

            def in_heads(name: str) -> tf.Tensor:
                merged = tf.reshape(x @ into[name] + bias, [-1, LENGTH, heads, HEAD])
                return tf.transpose(merged, [0, 2, 1, 3])

            with tf.GradientTape() as tape:
                q, k, v = map(in_heads, "qkv")
                found = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 2.0) @ v
                merged = tf.reshape(tf.transpose(found, [0, 2, 1, 3]), [-1, LENGTH, heads * HEAD])
                loss = tf.reduce_mean((merged @ output - x) ** 2)
            return loss, sgd(variables, loss, tape)

        return variables, step

    return make


@pytest.mark.parametrize(
    ("heads", "mesh"), [(4, MESHES[1]), pytest.param(3, MESHES[2], marks=pytest.mark.long)], ids=str
)
def test_merged_heads_that_divide(heads: int, mesh: dict[str, int]):
    """Each device has whole heads: one all-reduce of the result, and no activations."""
    parallel = assert_law(attention(heads), LAYOUT, mesh, [ids_of(5), ids_of(1)])
    plan, devices = parallel.plan(ids_of(5)), mesh["model"]
    assert not plan.state.gathered
    sums = 2 * (devices - 1) * 5 * LENGTH * WIDTH * 8
    ids = (devices - 1) * 5 * LENGTH * 8
    assert sums <= traffic(plan).by_kind[along("model")] - ids <= sums + 100  # a norm


@pytest.mark.long
def test_merged_heads_that_do_not_divide():
    """Three heads over two devices: a head would be on both, so activations move, and the numbers are the same."""
    assert_law(attention(3), LAYOUT, MESHES[1], [ids_of(5), ids_of(1)])


@pytest.mark.long
def test_merged_heads_for_any_number_of_rows():
    assert_law(
        attention(4), LAYOUT, MESHES[1], [ids_of(count) for count in (5, 1, 8, 2)], tuning={"reduce_retracing": True}
    )


def test_equal_parts_are_one_block_each():
    for length, parts, block in ((16, 2, 1), (15, 2, 1), (3, 3, 4), (4, 1, 2), (0, 2, 1)):
        own, plain = evenly(0, length, parts, block), Shard(0, (block,), EvenCut(length))
        ones = (1,) * parts
        assert [own.own(ones, d) for d in range(parts)] == [plain.own(ones, d) for d in range(parts)]
        assert own.size(0) == plain.size(0) == length * block


def test_zeros_beside_equal_parts_are_cut_alike():
    assert blocks_beside(evenly(0, 16, 2), 16) == (8, 8)
    assert blocks_beside(evenly(0, 15, 2), 2) == (1, 1)
    assert blocks_beside(Shard(0, (7,)), 14) == (1,) * 14


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("heads", "devices", "expected"),
    [
        (4, 2, f"[-, model], {2 * HEAD} + {2 * HEAD} (units of {HEAD}), computed in place"),
        (2, 2, f"[-, model], {HEAD} + {HEAD} (units of {HEAD}), computed in place"),
        (3, 2, f"[-, model], {2 * HEAD} + {HEAD} (units of {HEAD}), computed in place"),
        (
            2,
            4,
            "replicated along 'model' (it has fewer units, as heads, than 4 devices); on one device along 'batch'",
        ),
    ],
)
def test_the_plan_says_whether_heads_are_cut_and_by_how_many(heads: int, devices: int, expected: str):
    variables, step = attention(heads)()
    mesh = {"batch": 1, "model": devices}
    gs.set_variable_layout(variables, LAYOUT, mesh=mesh)
    text = str(gs.parallelize(step, mesh=mesh).plan(ids_of(5)))
    assert all(f"    {name}/kernel: {expected}" in text for name in "qkv")
