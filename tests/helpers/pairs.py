"""Options, layouts and ways to call beside each other: each pair is equal to one device, or refused in a sentence.

`FEATURES` lists what a user combines, `REFUSED` the pairs that are refused, and with which words; `NOTED` what the plan
says of pairs that are equal, but gain less than each of the two alone. All other pairs are equal, but for those of
which nobody can ask for both. `ci/pairs.py` writes `docs/pairs.md`; `tests/test_pairs.py` runs a program for each pair.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.devices import canonical_name
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.plan import Plan

WIDTH, HIDDEN, EXPERTS, IDS = 6, 8, 4, 11
MACHINE = "8xA100-SXM4-80GB"


@dataclass(frozen=True)
class Feature:
    """What a user asks for.

    Attributes:
      kind: what it is, for the page.
      options: of `parallelize`.
      axis: of the mesh, beside the batch's, with two devices. Variables are cut along each but "stage".
      layout: of the variables.
      needs: options without which it means little: they are given as well, unless the other feature says otherwise.
      has: what the function has.
      call: how it is called; "" for a call of the parallelized function.
      takes: the options that such a call has; None: all.
      word: by which messages call it; "" for the first of its name.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    axis: str = ""
    layout: Any = None
    needs: Mapping[str, Any] = field(default_factory=dict)
    has: str = ""
    call: str = ""
    takes: frozenset[str] | None = None
    word: str = ""


OF_MODELS = frozenset(
    {"mesh", "shares", "micro_batches", "schedule", "stages", "strict", "recompute", "plan", "memory", "jit_compile"}
)
_OPEN, _DEVICE = [
    f'tuning={{"{key}": {value}}}' for key, value in (("reduce_retracing", "True"), ("default_device", '"CPU:1"'))
]
FEATURES: dict[str, Feature] = {
    'mesh={"model": 2}': Feature("mesh", axis="model"),
    'mesh={"expert": 2}': Feature("mesh", axis="expert"),
    'mesh={"stage": 2}': Feature("mesh", axis="stage"),
    'mesh={"fsdp": 2}': Feature("mesh", axis="fsdp"),
    "stages=2": Feature("options", {"stages": 2}),
    'schedule="1f1b"': Feature("options", {"schedule": "1f1b"}, needs={"stages": 2, "micro_batches": 2}),
    "on_device": Feature("options", has="stage"),
    "micro_batches=2": Feature("options", {"micro_batches": 2}),
    "recompute=0.5": Feature("options", {"recompute": 0.5}),
    "jit_compile=True": Feature("options", {"jit_compile": True}),
    "shares=[2, 1]": Feature("options", {"shares": [2, 1]}),
    _OPEN: Feature("options", {"tuning": {"reduce_retracing": True}}, word="size of the batch is not known"),
    _DEVICE: Feature("options", {"tuning": {"default_device": "CPU:1"}}),
    "strict=True": Feature("options", {"strict": True}),
    'memory="1GB"': Feature("options", {"memory": "1GB"}),
    'plan="auto"': Feature("options", {"plan": "auto"}),
    'variables="auto"': Feature("options", {"variables": "auto"}),
    '"replicated"': Feature("layouts", layout="replicated"),
    '"sharded"': Feature("layouts", layout="sharded"),
    '"host"': Feature("layouts", layout="host"),
    "ZeRO-1": Feature("layouts", layout={"*slot*": "sharded", "*": "replicated"}),
    "experts in place": Feature(
        "layouts", layout={"*experts*": (gs.cut("batch", in_place=True),)}, has="experts", word="in_place"
    ),
    "rows of a sharded table": Feature("layouts", layout={"*table*": "sharded"}, has="table"),
    "a loop": Feature("functions", has="loop"),
    "dropout": Feature("functions", has="dropout"),
    "a tape outside": Feature("calls", call="tape", word="gradient tape"),
    "a tf.function outside": Feature("calls", call="tf.function", word="graph"),
    "step.map": Feature("calls", call="map", word=".map"),
    "Keras fit": Feature("calls", call="keras", takes=OF_MODELS),
    "tf_keras fit": Feature("calls", call="tf_keras", takes=OF_MODELS),
    "predict, scaling": Feature("calls", call="predict"),
    "a transpiled SavedModel": Feature("calls", call="transpile", takes=frozenset({"strict"})),
    "resilient": Feature("calls", call="resilient"),
}
TWO_CALLS = {("a tape outside", "step.map"), ("a tf.function outside", "step.map")}
"""Ways to call, of which one can be asked for inside of the other. All others are alternatives."""

_OWN, _CHOSEN = (
    "would cut the function into stages, but it already has stages from on_device",
    ('memory="1GB"', 'plan="auto"'),
)
REFUSED: dict[tuple[str, str], str] = {
    (one, other): said
    for one, others, said in (
        ('mesh={"stage": 2}', ["on_device"], _OWN),
        ("stages=2", ["on_device"], _OWN),
        ("recompute=0.5", ["jit_compile=True"], "XLA merges equal computations, so nothing would be recomputed"),
        ('mesh={"fsdp": 2}', ["experts in place"], "in_place=True is for parts of which there is one each"),
        (_OPEN, _CHOSEN, "predicts the time of a step, and the size of the batch is not known"),
        ("on_device", ["resilient"], "names devices that may be lost"),
        ("shares=[2, 1]", _CHOSEN, "it compares plans with equal shares, with the first device as default device"),
        (_DEVICE, _CHOSEN, "it compares plans with equal shares, with the first device as default device"),
        ("a tape outside", ["step.map"], "put the tape inside of the function, or call the function batch by batch"),
        ("a tf.function outside", ["step.map"], "runs batch by batch, eagerly; it is called while a graph is built"),
    )
    for other in others
}
REFUSED |= {
    (mesh, '"host"'): "'host' has a variable whole, and an axis of mesh"
    for mesh in ('mesh={"model": 2}', 'mesh={"expert": 2}')
}
"""What the message of a pair says, beside the names of both."""

NOTED: dict[tuple[str, str], str] = {
    (
        "micro_batches=2",
        "experts in place",
    ): "experts is gathered before it is used: devices have several micro-batches",
}
"""What the plan says of a pair that is equal."""


def pairs() -> list[tuple[str, str]]:
    """Return all pairs that can be asked for."""
    return [pair for pair in itertools.combinations(FEATURES, 2) if not are_alternatives(*pair)]


def are_alternatives(one: str, other: str) -> bool:
    """Return whether nobody can ask for both: two ways to call, two layouts of all, an option that a call has not."""
    first, second = FEATURES[one], FEATURES[other]
    if first.call and second.call:
        return (one, other) not in TWO_CALLS
    for way, beside in ((first, second), (second, first)):
        asked = {*beside.options, *(["mesh"] if beside.axis else []), *(["stages"] if beside.has == "stage" else [])}
        if way.takes is not None and not asked <= way.takes:
            return True
    return None not in (first.layout, second.layout) and not first.has and not second.has


class Pair:
    """A program in which features meet, and the devices that it has.

    Attributes:
      has, call, options: what its function has, how it is called, and with which options.
      axes: of the mesh, with their devices.
      devices: their names.
      lose: called between two calls.
    """

    def __init__(self, *names: str, devices: Sequence[str], lose: Callable[[], None] = lambda: None):
        features = [FEATURES[name] for name in names]
        axes = [own.axis for own in features if own.axis]
        self.has, self.lose = {own.has for own in features} - {""}, lose
        self.call = "-".join([own.call for own in features if own.call])
        self.options = {name: value for own in features for name, value in {**own.needs, **own.options}.items()}
        self.options |= {name: value for own in features for name, value in own.options.items()}
        if "tuning" in self.options:
            self.options["tuning"] = {k: v for own in features for k, v in own.options.get("tuning", {}).items()}
        if "stage" in (*axes, *self.has) and "stages=2" not in names:
            self.options.pop("stages", None)
        self.axes = dict.fromkeys(axes, 2)
        parts = math.prod(self.axes.values()) * (2 if "stages" in self.options and "stage" not in axes else 1)
        rows = max(min(2, len(devices) // parts), 1)
        self.devices = list(devices[: rows * parts])
        if axes or "experts" in self.has:
            self.options["mesh"] = {**({"batch": rows} if rows > 1 else {}), **self.axes}
        if "shares" in self.options:
            self.options["shares"] = ([2, 1] * 2)[: rows * self.axes.get("fsdp", 1)]
        self._layouts = [own.layout for own in features if own.layout is not None]

    @property
    def layout(self) -> dict[str, Any] | None:
        """The layout of the variables: along the axes, and as the features say otherwise; None if they say nothing."""
        others: dict[str, Any] = {}
        for own in self._layouts:
            others |= own if isinstance(own, Mapping) else {"*": own}
        cut = [name for name in self.axes if name not in ("stage", "fsdp")]
        if "fsdp" in self.axes:
            others.setdefault("*", "sharded")
        if not cut:
            return {**others, "*": others.get("*", "home")} if others else None
        up = (None, *cut)[-2:]
        along: dict[str, Any] = {"up_*": up, "down_*": up[::-1]}
        slots = {f"*{name}slot*": (own, "sharded") for name, own in along.items() if "*slot*" in others}
        found = {f"*{name}": (own, others["*"]) if "*" in others else own for name, own in along.items()}
        return {**slots, **found, **others, "*": others.get("*", "home")}

    def devices_of(self, mesh: Mapping[str, int] | None) -> list[str]:
        """Return the devices on which variables are laid out: of stages that the mesh does not name, the first's."""
        return self.devices if mesh is None else self.devices[: math.prod(mesh.values())]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape) / 2


def batches(pair: Pair) -> list[tuple[tf.Tensor, tf.Tensor]]:
    sizes = (7, 6, 5) if "reduce_retracing" in pair.options.get("tuning", {}) else (7, 7)
    return [(tf.constant(numbers(n, WIDTH, seed=1)), tf.constant(numbers(n, WIDTH, seed=2))) for n in sizes]


def values(has: set[str]) -> dict[str, np.ndarray]:
    """Return what variables begin with."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("one", "two"):
        shapes |= {f"up_{name}": (WIDTH, HIDDEN), f"down_{name}": (HIDDEN, WIDTH)}
    more = {"table": (IDS, WIDTH), "experts": (EXPERTS, WIDTH, WIDTH), "loop": (WIDTH, WIDTH)}
    shapes |= {name: more[name] for name in sorted(has & more.keys())}
    return {name: numbers(*shape, seed=len(name)) for name, shape in shapes.items()}


def forward(own: Mapping[str, Any], has: set[str], devices: Sequence[str], x: tf.Tensor) -> tf.Tensor:
    """Return what two layers, and what the features ask for, make of rows; the second on `devices`, if it has some."""
    if "table" in has:
        x += tf.gather(own["table"], tf.cast(tf.abs(x[:, 0]) * 9, tf.int32) % IDS)
    x = tf.tanh(tf.nn.relu(x @ own["up_one"]) @ own["down_one"])
    if "dropout" in has:
        x = tf.nn.experimental.stateless_dropout(x, 0.3, [1, 2])
    if "loop" in has:
        turn = lambda k, h: (k + 1, tf.tanh(h @ own["loop"]))  # noqa: E731
        x = tf.while_loop(lambda k, _: k < 3, turn, (0, x), maximum_iterations=3)[1]  # (XLA wants to know how often)
    if "experts" in has:
        seats = tf.one_hot(tf.argmax(x[:, :EXPERTS], -1), EXPERTS, dtype=x.dtype)[:, None, :, None]
        made = tf.tanh(tf.einsum("egcm,emh->egch", tf.einsum("gsec,gsm->egcm", seats, x[:, None]), own["experts"]))
        x += tf.einsum("gsec,egcm->gsm", seats, made)[:, 0]

    def second(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.nn.relu(x @ own["up_two"]) @ own["down_two"])

    return gs.on_device(second, list(devices))(x) if "stage" in has and devices else second(x)


class Twin:
    """A pair's program with variables of its own, on one device or on the pair's."""

    def __init__(self, pair: Pair, is_split: bool):
        self.pair, self.is_split = pair, is_split
        copied = is_split and pair.call == "resilient" and "replicated" in str(pair.layout)
        with tf.device(
            canonical_name(pair.devices[0]) if copied else None
        ):  # (one of the copies is the variable itself)
            self.own = {name: tf.Variable(value, name=name) for name, value in values(pair.has).items()}
            self.slots = {name: tf.Variable(own * 0, name=f"{name}_slot") for name, own in self.own.items()}
        self.plan: Plan | None = None
        if is_split and pair.layout is not None and "keras" not in pair.call:
            mesh = pair.options.get("mesh")
            gs.set_variable_layout(self.variables, pair.layout, pair.devices_of(mesh), mesh=mesh)

    @property
    def variables(self) -> list[tf.Variable]:
        return [*self.own.values(), *self.slots.values()]

    def forward(self, x: tf.Tensor) -> tf.Tensor:
        return forward(self.own, self.pair.has, self.pair.devices[::-1] if self.is_split else [], x)

    def update(self, gradients: Sequence[Any]) -> tf.Tensor:
        found, norm = tf.clip_by_global_norm([tf.convert_to_tensor(own) for own in gradients], 0.5)
        for (name, own), gradient in zip(self.own.items(), found, strict=True):
            self.slots[name].assign(0.9 * self.slots[name] + gradient)
            own.assign_sub(0.1 * self.slots[name])
        return norm

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.forward(x) - y) ** 2)
        return loss, self.update(tape.gradient(loss, list(self.own.values())))

    def parallel(self, fn: Callable[..., Any]) -> Any:
        """Return the function on the pair's devices; itself on one."""
        return gs.parallelize(fn, devices=self.pair.devices, **self.pair.options) if self.is_split else fn

    def run(self) -> list[Any]:
        """Return what calls give, and leave in the variables."""
        return [*tf.nest.flatten(CALLS[self.pair.call](self)), *[own.numpy() for own in self.variables]]


def called(twin: Twin) -> list[Any]:
    step = twin.parallel(twin.step)
    found = [step(*batch) for batch in batches(twin.pair)]
    if twin.is_split:
        twin.plan = step.plan(*batches(twin.pair)[-1])  # (of open sizes, once they have differed)
    return found


def under_a_tape(twin: Twin) -> list[Any]:
    function, found = twin.parallel(twin.forward), list[Any]()
    for x, y in batches(twin.pair):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((function(x) - y) ** 2)
        found += [loss, twin.update(tape.gradient(loss, list(twin.own.values())))]
    if twin.is_split:
        twin.plan = function.plan(batches(twin.pair)[-1][0])
    return found


def in_a_function(twin: Twin) -> list[Any]:
    step = tf.function(twin.parallel(twin.step))
    return [step(*batch) for batch in batches(twin.pair)]


def mapped(twin: Twin) -> list[Any]:
    step = twin.parallel(twin.step)
    return list(step.map(batches(twin.pair))) if twin.is_split else [step(*batch) for batch in batches(twin.pair)]


def mapped_under_a_tape(twin: Twin) -> list[Any]:
    with tf.GradientTape():
        return mapped(twin)


def mapped_in_a_function(twin: Twin) -> list[Any]:
    return tf.function(lambda: mapped(twin))()


def predicted(twin: Twin) -> list[Any]:
    """Return nothing: what is predicted is compared with the plan that runs."""
    if twin.is_split:
        step, batch, count = twin.parallel(twin.step), batches(twin.pair)[0], len(twin.pair.devices)
        found = gs.predict(step, *batch, machine=MACHINE, devices=count)
        scaled = gs.scaling(step, *batch, machine=MACHINE, devices=[count], kinds=["strong"])
        assert [point.step_s for point in scaled.points] == [found.step_s]
        twin.plan = step.plan(*batch)
        assert len(found.plan.program.ops) == len(twin.plan.program.ops)
        assert found.plan.mesh.rows == twin.plan.mesh.rows
    return []


def transpiled(twin: Twin) -> list[Any]:
    module, x = tf.Module(), batches(twin.pair)[0][0]
    if not twin.is_split:
        return [twin.forward(x)]
    module.own = twin.own
    module.serve = tf.function(twin.forward, input_signature=[tf.TensorSpec([None, WIDTH], tf.float64, name="x")])
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, f"{folder}/one", signatures=module.serve)
        report = gs.serving.transpile_saved_model(
            f"{folder}/one", f"{folder}/two", twin.pair.devices, strict="strict" in twin.pair.options
        )
        twin.plan = report.plans["serving_default"]
        return list(tf.saved_model.load(f"{folder}/two").signatures["serving_default"](x=x).values())


def resilient(twin: Twin) -> list[Any]:
    """Call it, lose a worker, and call it again."""
    step = twin.parallel(twin.step)
    if not twin.is_split:
        return [step(*batch) for batch in batches(twin.pair)]
    with tempfile.TemporaryDirectory() as folder:
        kept = tf.train.Checkpoint(own=twin.own, slots=twin.slots)
        step = gs.workers.resilient(step, checkpoint=tf.train.CheckpointManager(kept, folder, max_to_keep=1))
        step.save()
        found = []
        for batch in batches(twin.pair):
            found.append(step(*batch))
            twin.pair.lose()
        if not {"memory", "plan"} & twin.pair.options.keys():  # (which may choose one device)
            assert len(step.devices) == len(twin.pair.devices) // 2
        if twin.pair.axes:
            lying = [parts.devices for own in twin.variables if (parts := parts_of_variable(own)) is not None]
            assert {*itertools.chain(*lying)} == {*step.devices}
        return found


def fitted(name: str, twin: Twin) -> list[Any]:
    """Return what a model of Keras gives, and leaves in its weights."""
    keras, pair = importlib.import_module(name), twin.pair
    before = keras.backend.floatx()
    keras.backend.set_floatx("float64")
    try:
        template = _model(keras, pair, pair.devices[::-1] if twin.is_split else [])
        options, compiled = dict(pair.options), {}
        if "jit_compile" in options:
            compiled = {"jit_compile": options.pop("jit_compile") and twin.is_split}
        if twin.is_split:
            layout = {name.replace("*slot*", "slots of *"): own for name, own in (pair.layout or {}).items()}
            model = gs.multi_gpu_model(template, pair.devices, variables=layout or "auto", **options)
        else:
            model = template
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5), "mse", **compiled)
        x, y = (numbers(13, WIDTH, seed=seed) for seed in (1, 2))
        history = model.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0).history["loss"]
        if twin.is_split:
            twin.plan = model.plan(x[:7], y[:7])
        return [*history, model.predict(x, batch_size=7, verbose=0), *template.get_weights()]
    finally:
        keras.backend.set_floatx(before)


def _model(keras: Any, pair: Pair, devices: Sequence[str]) -> Any:
    """Return a model of one layer that computes `forward`."""

    class Net(keras.layers.Layer):  # type: ignore[misc]
        def build(self, _: Any) -> None:
            shapes = {name: value.shape for name, value in values(pair.has).items()}
            self.own = {k: self.add_weight(name=k, shape=shape, initializer="zeros") for k, shape in shapes.items()}
            self.built = True

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return forward({name: tf.convert_to_tensor(own) for name, own in self.own.items()}, pair.has, devices, x)

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.net = Net(name="net", dtype="float64")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.net(x)

    model = Model()
    model(tf.zeros((2, WIDTH), tf.float64))
    model.set_weights(list(values(pair.has).values()))
    return model


CALLS: dict[str, Callable[[Twin], list[Any]]] = {
    "": called,
    "tape": under_a_tape,
    "tf.function": in_a_function,
    "map": mapped,
    "tape-map": mapped_under_a_tape,
    "tf.function-map": mapped_in_a_function,
    "keras": functools.partial(fitted, "keras"),
    "tf_keras": functools.partial(fitted, "tf_keras"),
    "predict": predicted,
    "transpile": transpiled,
    "resilient": resilient,
}


def check(*names: str, devices: Sequence[str], lose: Callable[[], None] = lambda: None) -> str:
    """Check that a pair is what the tables say; return the text of its plan, if there is one."""
    pair, refused = Pair(*names, devices=devices, lose=lose), REFUSED.get(names)  # type: ignore[arg-type]
    if refused is not None:
        with pytest.raises(gs.GraphsplitError, match=re.escape(refused)) as error:
            Twin(pair, True).run()
        words = [FEATURES[name].word or re.split(r"[=,{ ]", name.strip('"'))[0] for name in names]
        assert all(word.strip('"') in str(error.value) for word in words), f"{words}: {error.value}"
        return ""
    single, split = Twin(pair, False), Twin(pair, True)
    for one, other in zip(single.run(), split.run(), strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-10)
    plan = split.plan
    if plan is None:
        return ""
    plan.check()
    check_emitted(plan, emitted := emit(plan))
    if not {"memory", "plan"} & pair.options.keys():  # (which may choose one device)
        assert {canonical_name(device) for device in pair.devices} <= {node.device for node in emitted.nodes}
        assert plan.sharded_ops or plan.mesh.columns
    if pair.layout is not None and pair.layout["*"] != "host" and "keras" not in pair.call:  # (CPU:0 is the host)
        assert any(parts_of_variable(own) is not None for own in split.variables)
    assert NOTED.get(names, "") in str(plan)  # type: ignore[call-overload]
    return str(plan)
