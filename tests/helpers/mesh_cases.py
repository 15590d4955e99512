"""Programs with variables on a mesh, and their law: the numbers of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.axes import columns
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission import check_emitted, emit
from tests.helpers.law import with_sums_at_once

WIDTH, HIDDEN, LENGTH, VOCABULARY, HEAD = 12, 15, 6, 11, 4

Step = Callable[..., Any]
Made = tuple[list[tf.Variable], Step]


def message(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as found:
        call()
    return str(found.value)


def numbers(*shape: int, seed: int = 0, scale: float = 0.3) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape) * scale


def variable(name: str, *shape: int, seed: int = 0) -> tf.Variable:
    return tf.Variable(numbers(*shape, seed=seed), name=name)


def sgd(variables: Sequence[tf.Variable], loss: tf.Tensor, tape: tf.GradientTape) -> tf.Tensor:
    """Clip by the norm of all gradients, and step; return the norm."""
    found = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
    gradients, norm = tf.clip_by_global_norm(found, 0.5)
    for own, gradient in zip(variables, gradients, strict=True):
        own.assign_sub(0.1 * gradient)
    return norm


def perceptron() -> Made:
    up, down = variable("up", WIDTH, HIDDEN), variable("down", HIDDEN, WIDTH)
    inner, outer = variable("inner", HIDDEN), variable("outer", WIDTH)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            y = tf.nn.relu(x @ up + inner) @ down + outer
            loss = tf.reduce_mean((y - x) ** 2)
        return loss, sgd([up, down, inner, outer], loss, tape), y

    return [up, down, inner, outer], step


PERCEPTRON = {"up": (None, "model"), "down": ("model", None), "inner": ("model",), "*": "home"}


def transformer(heads: int, layers: int = 1) -> Made:
    def block(n: int) -> dict[str, tf.Variable]:
        into = {name: variable(f"{n}/{name}", WIDTH, heads, HEAD, seed=n + k) for k, name in enumerate("qkv")}
        out = {"o": variable(f"{n}/o", heads, HEAD, WIDTH, seed=n), "up": variable(f"{n}/up", WIDTH, HIDDEN, seed=n)}
        return {
            **into,
            **out,
            "down": variable(f"{n}/down", HIDDEN, WIDTH, seed=n),
            "scale": variable(f"{n}/scale", WIDTH),
        }

    blocks = [block(n) for n in range(layers)]
    table, last = variable("table", VOCABULARY, WIDTH), variable("last", WIDTH, VOCABULARY)
    variables = [*[own for block in blocks for own in block.values()], table, last]

    def attend(x: tf.Tensor, own: dict[str, tf.Variable]) -> tf.Tensor:
        scaled = x * own["scale"]
        q, k, v = (tf.einsum("btd,dhe->bhte", scaled, own[name]) for name in "qkv")
        weights = tf.nn.softmax(tf.einsum("bhte,bhse->bhts", q, k) / 2.0)
        return tf.einsum("bhte,hed->btd", tf.einsum("bhts,bhse->bhte", weights, v), own["o"])

    def step(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            x = tf.gather(table, ids)
            for own in blocks:
                x += attend(x, own)
                x += (
                    tf.nn.gelu(x * tf.math.rsqrt(tf.reduce_mean(x**2, -1, keepdims=True) + 1e-6) @ own["up"])
                    @ own["down"]
                )
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(ids, x @ last))
        return loss, sgd(variables, loss, tape)

    return variables, step


HEADS = {f"*/{name}": (None, "model") for name in "qkv"}
TRANSFORMER = {**HEADS, "*/o": ("model",), "*/up": (None, "model"), "*/down": ("model",), "*": "home"}


def ids_of(count: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(count).integers(0, VOCABULARY, (count, LENGTH)))


def devices_of(mesh: dict[str, int]) -> list[str]:
    return [f"CPU:{i}" for i in range(int(np.prod(list(mesh.values()))))]


def bytes_of(variables: Sequence[tf.Variable]) -> dict[str, int]:
    """Return the bytes of variables that each device has."""
    found: dict[str, int] = {}
    for own in variables:
        parts = parts_of_variable(own)
        held = {own.device: own.dtype.size * own.shape.num_elements()} if parts is None else parts.bytes_on_devices()
        for device, size in held.items():
            found[device] = found.get(device, 0) + size
    return found


def boxes(own: tf.Variable) -> dict[str, tuple[int, ...]]:
    """Return the shape of the part that each device has."""
    parts = parts_of_variable(own)
    assert parts is not None
    return {device[-5:]: shape for device, shape in zip(parts.devices, parts.shapes, strict=True)}


@contextlib.contextmanager
def axes_checked() -> Iterator[list[gs.inspect.Plan]]:
    """Check each plan that is made of an axis, and what is written for it; yield the list that takes them."""
    found: list[gs.inspect.Plan] = []
    plan_axis = columns.planned_along

    def checked(*given: Any) -> gs.inspect.Plan:
        plan = plan_axis(*given)
        plan.check()
        check_emitted(plan, emit(plan))
        found.append(plan)
        return plan

    with mock.patch.object(columns, "planned_along", checked):
        yield found


def assert_law(
    make: Callable[[], Made], layout: dict[str, Any], mesh: dict[str, int], batches: Sequence[tf.Tensor], **options: Any
) -> gs.ParallelFunction[..., Any]:
    """Run steps on one device and on a mesh, and compare what they return and leave; both ways, see `law`."""
    parallel, plan = _assert_law(make, layout, mesh, batches, options)
    if (at_once := with_sums_at_once(plan, options)) is not None:
        _assert_law(make, layout, mesh, batches[:1], at_once)
    return parallel


def _assert_law(
    make: Callable[[], Made],
    layout: dict[str, Any],
    mesh: dict[str, int],
    batches: Sequence[tf.Tensor],
    options: dict[str, Any],
) -> tuple[gs.ParallelFunction[..., Any], gs.inspect.Plan]:
    variables, step = make()
    laid, other = make()
    gs.set_variable_layout(laid, layout, devices_of(mesh), mesh=mesh)
    parallel = gs.parallelize(other, mesh=mesh, devices=devices_of(mesh), **options)
    for batch in batches:
        with axes_checked():
            plan = parallel.plan(batch)
        plan.check()
        check_emitted(plan, emit(plan))
        for _ in range(2):
            tf.nest.map_structure(
                lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-10), step(batch), parallel(batch)
            )
        for own in laid:
            parts = parts_of_variable(own)
            if parts is not None and not isinstance(parts.layout, str):
                assert parts.in_parts  # the step left them where they are
                assert sum(size > 0 for size in parts.bytes_on_devices().values()) == len(set(parts.devices))
    for one, own in zip(variables, laid, strict=True):
        np.testing.assert_allclose(one.numpy(), own.numpy(), 1e-9, 1e-10)
    return parallel, plan


MESHES = [
    {"batch": 1, "model": 2},
    {"batch": 2, "model": 2},
    {"model": 3},
    {"model": 2, "batch": 2},
    {"batch": 4, "model": 1},
]


def forward(own: list[tf.Variable]) -> Step:
    return lambda x: tf.nn.relu(x @ own[0] + own[2]) @ own[1] + own[3]


def assert_gradients_from_outside(layout: Any, mesh: dict[str, int]) -> None:
    """Compare the gradients of a tape around a perceptron's forward function, by its variables."""
    (variables, _), (laid, _) = perceptron(), perceptron()
    gs.set_variable_layout(laid, layout, devices_of(mesh), mesh=mesh)
    x = tf.constant(numbers(5, WIDTH))
    parallel = gs.parallelize(forward(laid), mesh=mesh, devices=devices_of(mesh))
    found = []
    for function, own in ((forward(variables), variables), (parallel, laid)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x) ** 2)
        found.append([loss, *map(tf.convert_to_tensor, tape.gradient(loss, own))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-10)
