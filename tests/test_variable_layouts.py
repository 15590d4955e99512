"""Variables in parts: the law with state divided over devices; one truth for everybody; bytes really divided."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.devices import canonical_name
from graphsplit.core.errors import CheckError
from graphsplit.core.layouts import Cut
from graphsplit.core.parted_variables import parts_of_variable
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.emission.checks import check_emitted
from graphsplit.emission.emitter import emit
from graphsplit.planning.division import divide
from graphsplit.planning.partitioning import Held, shares
from graphsplit.planning.traffic import traffic
from tests.helpers.law import assert_close, assert_law

ROWS = 11


def numbers(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.cast(np.random.default_rng(seed).standard_normal(shape), tf.float32)


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


def train(layout: str, devices: int, calls: int = 3, **options: Any) -> tuple[Optimizer, gs.Plan]:
    made = Optimizer(**options)
    if layout != "home":
        gs.set_variable_layout(made.variables, layout, devices)
    step = gs.parallelize(made.step, devices=devices)
    for _ in range(calls):
        step(X, Y)
    return made, step.plan(X, Y)


@pytest.mark.parametrize("devices", [1, 2, 5])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_give_the_same_bits(name: str, devices: int):
    home, _ = train("home", devices, update=ELEMENTWISE[name])
    sharded, plan = train("sharded", devices, update=ELEMENTWISE[name])
    for a, b in zip(sharded.variables, home.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    plan.check()
    plan.program.check()
    check_emitted(plan, emit(plan))


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_the_parts_of_a_variable_is_exact(name: str, devices: int):
    def make() -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
        made = Optimizer(**COUPLED[name])
        if laid_out:  # the second, which is parallelized
            gs.set_variable_layout(made.variables, "sharded", devices)
        laid_out.append(made)
        return made.step, made.variables

    laid_out: list[Optimizer] = []
    plan = assert_law(make, [(X, Y), (X[:4], Y[:4])], devices=devices, sharded=["MatMul"])
    assert any(part for _, part in plan.state.parts)


def test_state_is_divided():
    sharded, plan = train("sharded", 4, update=adam)
    held = [parts_of_variable(variable) for variable in sharded.variables]
    bytes_on: dict[str, int] = {}
    for variable, parts in zip(sharded.variables, held, strict=True):
        on = {variable.device: variable.dtype.size} if parts is None else parts.bytes_on_devices()
        for device, size in on.items():
            bytes_on[device] = bytes_on.get(device, 0) + size
    total = sum(v.dtype.size * v.shape.num_elements() for v in sharded.variables)
    assert sum(bytes_on.values()) == total  # nothing is anywhere twice
    largest = max(v.dtype.size * max(p.shape_of(0)[0], 1) for v, p in zip(sharded.variables, held, strict=True) if p)
    assert len(bytes_on) == 4
    assert max(bytes_on.values()) <= total / 4 + 150 * 4 + largest
    optimizers = {plan.owners.of_ops[op.index] for op in plan.home_ops if op.type == "Sqrt"}
    assert len(optimizers) == 4  # and the optimizer's work with it
    moved = [move for move in plan.moves if move.kind == "send" and plan.program.bytes(move.tensor) > 16]
    assert not moved  # a slot never travels


def crossing(graphs: Sequence[Any]) -> Counter[tuple[str, str]]:
    """Count what TensorFlow's own partitions send from device to device."""
    sends = [node for graph in graphs for node in graph.node if node.op in ("_Send", "_HostSend")]
    pairs = [(n.attr["send_device"].s.decode(), n.attr["recv_device"].s.decode()) for n in sends]
    return Counter((canonical_name(a), canonical_name(b)) for a, b in pairs)


@pytest.mark.parametrize("devices", [2, 4])
def test_traffic_is_spread_over_the_devices(devices: int):
    """Each weight is sent by its owner, and each gradient to its owner: twice (N - 1) / N of the bytes, each way."""
    found = {}
    for layout in ("home", "sharded"):
        weights = [tf.Variable(tf.ones((64, 64)), name=f"weight_{k}") for k in range(8)]
        if layout == "sharded":
            gs.set_variable_layout(weights, layout, devices)

        def step(x: tf.Tensor, weights: list[tf.Variable] = weights) -> tf.Tensor:
            with tf.GradientTape() as tape:
                h = x
                for weight in weights:
                    h = tf.nn.tanh(h @ weight)
                loss = tf.reduce_sum(h)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        parallel = gs.parallelize(step, devices=devices)
        plan = parallel.plan(tf.ones((8, 64)))
        with partition_graphs() as graphs:
            parallel(tf.ones((8, 64)))
        sends = crossing(graphs)
        assert sends
        found[layout] = traffic(plan).busiest, sends
    size = 8 * 64 * 64 * 4
    (_, sent, received), star = found["home"]
    assert sent >= (devices - 1) * size
    assert received >= (devices - 1) * size
    (_, sent, received), spread = found["sharded"]
    assert max(sent, received) <= 1.05 * 2 * (devices - 1) / devices * size
    others = [count for (a, b), count in star.items() if "CPU:0" not in a and "CPU:0" not in b]
    assert not others  # with one home, all goes through it
    between = [count for (a, b), count in spread.items() if "CPU:0" not in a and "CPU:0" not in b]
    assert len(between) == (devices - 1) * (devices - 2)
    assert all(count >= 2 * 8 // devices for count in between)  # weights one way, gradients the other


@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_any_number_of_rows(rows: int):
    home, sharded = (train(layout, 4, calls=1, update=momentum)[0] for layout in ("home", "sharded"))
    x, y = numbers(rows, 7, seed=3), numbers(rows, 5, seed=4)
    for made in (home, sharded):
        gs.parallelize(made.step, devices=4)(x, y)
    for a, b in zip(sharded.variables, home.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_unknown_numbers_of_rows():
    home, sharded = Optimizer(adam), Optimizer(adam)
    gs.set_variable_layout(sharded.variables, "sharded", 3)
    signature = [tf.TensorSpec((None, 7)), tf.TensorSpec((None, 5))]
    step = gs.parallelize(tf.function(sharded.step, input_signature=signature), devices=3)
    plain = tf.function(home.step)
    for rows in (11, 2, 6):
        assert_close(step(X[:rows], Y[:rows]), plain(X[:rows], Y[:rows]))
    for a, b in zip(sharded.variables, home.variables, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), tolerance=1e-4)  # 3 steps of Adam amplify
    assert step.plan(X, Y).program.batch_is_unknown


def test_a_tape_outside():
    weight = tf.Variable(numbers(40, 50, seed=7))
    gs.set_variable_layout(weight, "sharded", 3)
    apply = gs.parallelize(lambda x: tf.nn.tanh(x @ weight), devices=3)
    x = numbers(7, 40, seed=8)
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(apply(x) ** 2)
        found = tape.gradient(loss, [x, weight])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.nn.tanh(x @ weight) ** 2)
        assert_close(found, tape.gradient(loss, [x, weight]))
        weight.assign_sub(0.1 * found[1])


def test_everybody_else_finds_the_value():
    weight = tf.Variable(numbers(30, 40), name="weight")
    before = weight.numpy()
    read_earlier = tf.function(lambda: weight + 0.0)
    read_earlier()
    gs.set_variable_layout(weight, "sharded", 3)
    double = gs.parallelize(lambda x: (weight.assign(2 * weight), x)[1], devices=3)
    read = tf.function(lambda: tf.reduce_sum(weight))
    write = tf.function(lambda: weight.assign_add(tf.ones_like(weight)))
    expected = before
    for _ in range(3):
        double(tf.ones(3))
        expected = 2 * expected
        parts = parts_of_variable(weight)
        assert parts is not None
        assert parts.in_parts
        assert_close(read(), tf.reduce_sum(tf.constant(expected)))  # traced once, and told of the parts at each call
        double(tf.ones(3))
        write()
        expected = 2 * expected + 1
        np.testing.assert_array_equal(weight.numpy(), expected)
        assert not parts.in_parts
        double(tf.ones(3))
        expected = 2 * expected
        assert float(weight[2, 3]) == expected[2, 3]
        double(tf.ones(3))
        expected = 2 * expected
        assert_close(tf.reduce_sum(weight), tf.reduce_sum(tf.constant(expected)))
    double(tf.ones(3))
    assert read_earlier().shape[0] == 0  # traced before the parts were: nothing there that could be old
    gs.set_variable_layout(weight, "home")
    np.testing.assert_array_equal(weight.numpy(), 2 * expected)
    np.testing.assert_array_equal(read_earlier(), 2 * expected)
    assert parts_of_variable(weight) is None
    double(tf.ones(3))  # planned again
    np.testing.assert_array_equal(weight.numpy(), 4 * expected)


def test_in_a_function_of_the_users():
    weight = tf.Variable(numbers(30, 40))
    gs.set_variable_layout(weight, "sharded", 3)
    apply = gs.parallelize(lambda x: x @ weight, devices=3)

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        return apply(x) * 2.0

    x = numbers(5, 30)
    for _ in range(2):
        assert_close(outer(x), 2.0 * (x @ tf.constant(weight.numpy())))
        weight.assign_add(tf.ones_like(weight))  # puts it together: the next call of `outer` takes it apart


def test_what_takes_a_variable_whole_has_it_whole():
    table = tf.Variable(numbers(300, 4))
    expected = tf.Variable(table)
    gs.set_variable_layout(table, "sharded", 3)

    def update(to: tf.Variable, x: tf.Tensor) -> tf.Tensor:
        to.scatter_nd_add([[2], [7]], tf.ones((2, 4)))
        return x @ tf.transpose(to)

    step = gs.parallelize(lambda x: update(table, x), devices=3)
    x = numbers(5, 4)
    for _ in range(2):
        assert_close(step(x), update(expected, x))
        np.testing.assert_array_equal(table.numpy(), expected.numpy())
    assert "ResourceScatterNdAdd" in str(step.plan(x))


def test_files_do_not_know_of_it(tmp_path: Path):
    module = tf.Module()
    module.weight = tf.Variable(numbers(30, 40), name="weight")
    value = module.weight.numpy()
    gs.set_variable_layout(module, "sharded", 3)
    gs.parallelize(lambda x: x @ module.weight, devices=3)(numbers(2, 30))
    tf.train.Checkpoint(m=module).write(str(tmp_path / "saved"))
    other = tf.Module()
    other.weight = tf.Variable(tf.zeros((30, 40)))
    tf.train.Checkpoint(m=other).read(str(tmp_path / "saved")).assert_consumed()
    np.testing.assert_array_equal(other.weight.numpy(), value)
    gs.set_variable_layout(other, "sharded", 5)
    apply = gs.parallelize(lambda x: x @ other.weight, devices=5)
    apply(numbers(2, 30))
    module.weight.assign(tf.ones((30, 40)))
    tf.train.Checkpoint(m=module).write(str(tmp_path / "ones"))
    tf.train.Checkpoint(m=other).read(str(tmp_path / "ones"))
    assert_close(apply(tf.ones((2, 30))), tf.fill((2, 40), 30.0))


def test_saved_models(tmp_path: Path):
    module = tf.Module()
    module.weight = tf.Variable(numbers(30, 40), name="weight")
    gs.set_variable_layout(module, "sharded", 3)
    gs.parallelize(lambda x: x @ module.weight, devices=3)(numbers(2, 30))
    x = numbers(4, 30)

    def serve() -> Any:
        return tf.function(lambda x: x @ module.weight, input_signature=[tf.TensorSpec((None, 30))])

    module.serve = serve()
    tf.saved_model.save(module, str(tmp_path / "model"))
    expected = module.serve(x)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert_close(loaded.serve(x), expected)
    module.serve = serve()
    module.serve(x)
    with pytest.raises(gs.UnsupportedError, match="'weight:0' lies in parts, and these functions were traced since"):
        tf.saved_model.save(module, str(tmp_path / "again"))
    gs.set_variable_layout(module, "home")
    module.serve = serve()
    module.serve(x)
    tf.saved_model.save(module, str(tmp_path / "again"))
    loaded = tf.saved_model.load(str(tmp_path / "again"))
    assert_close(loaded.serve(x), expected)


def test_born_in_parts():
    with gs.variable_layout("sharded", devices=3):
        model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(64), keras.layers.Dense(8)])
        plain = tf.Variable(numbers(50, 40))
    held = [parts_of_variable(variable.value) for variable in model.variables]
    assert [parts is not None and parts.in_parts for parts in held].count(True) >= 2
    assert parts_of_variable(plain) is not None
    after = tf.Variable(numbers(50, 40))
    assert parts_of_variable(after) is None


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


def test_keras_fit(tmp_path: Path):
    x, y = numbers(21, 6, 6, 3).numpy(), np.arange(21) % 5
    results = []
    for layout in ("home", "sharded"):
        template = keras_model()
        model = gs.multi_gpu_model(template, gpus=3, variables=layout)
        callbacks = [
            keras.callbacks.ModelCheckpoint(tmp_path / f"{layout}.weights.h5", save_weights_only=True),
            keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (1 + epoch)),
        ]
        history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=callbacks).history
        parted = [v.path for v in template.optimizer.variables if parts_of_variable(v.value) is not None]
        assert any("dense" in path for path in parted) == (layout == "sharded")
        evaluated = model.evaluate(x, y, batch_size=8, verbose=0)
        template.save(tmp_path / f"{layout}.keras")
        template.load_weights(tmp_path / f"{layout}.weights.h5")
        results.append((history, evaluated, model.predict(x, verbose=0), template.get_weights()))
    for a, b in zip(*map(tf.nest.flatten, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, float(np.max(np.abs(b)))))
    weights = [keras.models.load_model(tmp_path / f"{layout}.keras").get_weights() for layout in ("home", "sharded")]
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, float(np.max(np.abs(b)))))


def test_by_name_and_back():
    model = keras_model()
    gs.set_variable_layout(model, {"*dense*": "sharded", "*": "home"}, 3)
    parted = [v.path for v in model.variables if parts_of_variable(v.value) is not None]
    assert parted
    assert all("dense" in path for path in parted)
    weights = model.get_weights()
    gs.set_variable_layout(model, "home")
    assert all(parts_of_variable(v.value) is None for v in model.variables)
    for a, b in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_copies_and_verify():
    made, _ = train("sharded", 3, update=adam)
    copied = copy.deepcopy(made.weights[0])
    np.testing.assert_array_equal(copied.numpy(), made.weights[0].numpy())
    assert gs.verify(gs.parallelize(made.step, devices=3), X, Y).largest < 1e-4


def test_the_page():
    text = (Path(__file__).parent.parent / "docs" / "variables.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {}
    exec(compile(code, "docs/variables.md", "exec"), found)
    assert any(parts_of_variable(variable.value) is not None for variable in found["larger"].variables)
    assert all(parts_of_variable(variable.value) is None for variable in found["model"].variables)


def test_errors():
    variable = tf.Variable(numbers(20, 20), name="table")
    with pytest.raises(gs.ArgumentError, match="There is no variable layout 'split'; there are 'home', 'sharded'"):
        gs.set_variable_layout(variable, "split")
    with pytest.raises(gs.ArgumentError, match=r"No variable's name fits 'tabel\*'. The variables are:\n  - table"):
        gs.set_variable_layout(variable, {"tabel*": "sharded"})
    with pytest.raises(gs.ArgumentError, match="found no variables in"):
        gs.set_variable_layout([], "sharded")
    with pytest.raises(gs.ArgumentError, match="are for variables, modules, models and optimizers, got 3"):
        gs.set_variable_layout(3, "sharded")
    with pytest.raises(gs.UnsupportedError, match='The layout "mirrored"'):
        gs.set_variable_layout(variable, "mirrored")
    with pytest.raises(gs.DeviceError):
        gs.set_variable_layout(variable, "sharded", 99)
    gs.set_variable_layout(variable, "sharded", ["CPU:3", "CPU:4"])
    with pytest.raises(gs.ArgumentError, match="These variables lie on other devices than CPU:0, CPU:1"):
        gs.set_variable_layout(variable, "sharded", 2)
    with pytest.raises(gs.UnsupportedError, match="while a graph is built"):
        tf.function(lambda: gs.set_variable_layout(variable, "home"))()


@pytest.mark.parametrize("seed", range(12))
def test_shares(seed: int):
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(1, 9))
    variables = [
        Held(f"v{k}", tuple(int(s) for s in rng.integers(1, 60, rng.integers(0, 4))), int(rng.choice([1, 2, 4, 8])))
        for k in range(int(rng.integers(1, 30)))
    ]
    load = [0] * devices
    slice_bytes = 0
    for variable, share in zip(variables, shares(variables, devices), strict=True):
        if share is None:
            continue
        assert len(set(share.devices)) == len(share.devices) == share.cut.parts
        assert sum(share.cut.lengths) == variable.shape[share.cut.axis]
        assert min(share.cut.lengths) > 0
        for d, length in zip(share.devices, share.cut.lengths, strict=True):
            load[d] += variable.bytes // share.cut.length * length
            slice_bytes = max(slice_bytes, variable.bytes // share.cut.length * length)
    assert max(load) <= sum(load) / devices + slice_bytes + sum(v.bytes for v in variables) / devices / 4


def test_a_program_in_parts_is_a_program():
    made = Optimizer(adam)
    program = gs.parallelize(made.step, devices=2).plan(X, Y).program
    name = program.ops[program.captures[0]].name
    divided = divide(program, {name: Cut(0, 7, 3)})
    divided.program.check()
    assert divided.origins[:3] == ((0, 0), (0, 1), (0, 2))
    assert len(divided.program.captures) == len(program.captures) + 2
    with pytest.raises(CheckError):  # (the check can fail)
        type(program)(**{**divided.program.__dict__, "ops": divided.program.ops[:-5]}).check()
