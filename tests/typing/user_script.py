# mypy: warn-unused-ignores
"""What a type checker sees of a user's script; never run. `tests/test_typing.py` checks it with mypy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypedDict

from typing_extensions import assert_type

import graphsplit as gs


class Logs(TypedDict):
    loss: float


class Batch:
    """Rows and labels."""


def train_step(x: Batch, y: int, *, scale: float = 1.0) -> Logs:
    return {"loss": y * scale}


# A call, with and without options

step = gs.parallelize(train_step, devices=2, split={"x": 0}, shares=[3, 1], tuning={"bucket_bytes": 0})
assert_type(step(Batch(), 3), Logs)
assert_type(step(Batch(), y=3, scale=2.0), Logs)
assert_type(step.map([(Batch(), 3)]), Iterator[Logs])
assert_type(step.plan(Batch(), 3), gs.inspect.Plan)
assert_type(step.function(Batch(), 3), Logs)
assert_type(step.placement(Batch(), 3, actual=True), gs.inspect.Placement)
assert_type(gs.verify(step, Batch(), 3), gs.inspect.Report)
assert_type(step.plan(), gs.inspect.Plan)
assert_type(gs.parallelize(train_step)(Batch(), 3), Logs)
assert_type(gs.parallelize(step, devices=3)(Batch(), 3), Logs)
assert_type(gs.parallelize(lambda: 3)(), int)
assert_type(gs.make_parallel(train_step, 2, x=Batch(), y=1), Logs)
assert_type(gs.on_device(train_step, "GPU:1")(Batch(), 3), Logs)

step(3, 3)  # type: ignore[arg-type]
step(Batch())  # type: ignore[call-arg]
step(Batch(), 3, rate=2.0)  # type: ignore[call-arg]
step.plan(Batch(), "3")  # type: ignore[call-overload]
gs.verify(step, Batch(), "3")  # type: ignore[call-overload]
gs.parallelize(3)  # type: ignore[call-overload]
gs.parallelize(train_step, devises=2)  # type: ignore[call-overload]
gs.parallelize(train_step, split=2.5)  # type: ignore[call-overload]
gs.parallelize(train_step, tuning={"bucket_byte": 0})  # type: ignore[call-overload]
gs.parallelize(train_step, split={"x": {"a": [0, None]}, "y": None})


# Decorators


@gs.parallelize
def bare(x: Batch) -> int:
    return 1


@gs.parallelize(devices=2, strict=True)
def with_options(x: Batch, training: bool = False) -> str:
    return ""


assert_type(bare(Batch()), int)
assert_type(with_options(Batch(), training=True), str)
assert_type(with_options, gs.ParallelFunction[[Batch, bool], str])  # type: ignore[assert-type]  # it has names, too
bare(Batch(), 3)  # type: ignore[call-arg]


# Methods


class Model:
    @gs.parallelize(devices=2)
    def predict(self, x: Batch, training: bool = False) -> Logs:
        return {"loss": 1.0}

    @gs.parallelize
    def __call__(self, x: Batch) -> int:
        return 1

    @staticmethod
    @gs.parallelize(devices=2)
    def static(x: Batch) -> int:
        return 1


model = Model()
assert_type(model.predict(Batch()), Logs)
assert_type(model.predict(Batch(), training=True), Logs)
assert_type(Model.predict(model, Batch()), Logs)
assert_type(model(Batch()), int)
assert_type(Model.static(Batch()), int)
assert_type(model.predict.plan(Batch()), gs.inspect.Plan)
model.predict(3)  # type: ignore[arg-type]
model.predict(Batch(), True, 4)  # type: ignore[call-arg]


# Keras: a wrapped model is a model of the same class


class KerasModel:
    def fit(self) -> Literal["history"]:
        return "history"


wrapped = gs.multi_gpu_model(KerasModel(), gpus=2)
assert_type(wrapped, KerasModel)
assert_type(wrapped.fit(), Literal["history"])
