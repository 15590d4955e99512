"""Predictions on a mesh: the plan that would run there is replayed, on devices that need not exist."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.device_bytes import traffic
from tests.helpers.mesh_cases import PERCEPTRON, TRANSFORMER, WIDTH, devices_of, perceptron, transformer
from tests.helpers.staged_programs import perceptron as stages_of
from tests.helpers.staged_programs import rows as rows_of

MESH = {"batch": 2, "model": 2}
MACHINE = "8xH100-SXM5"
IDS = tf.TensorSpec([8, 6], tf.int64)


def test_as_variables_lie_and_as_they_would():
    """A prediction is the same whether variables are laid out or only would be, and of the plan that runs here."""
    laid, step = transformer(4)
    gs.set_variable_layout(laid, TRANSFORMER, devices_of(MESH), mesh=MESH)
    parallel = gs.parallelize(step, mesh=MESH, devices=devices_of(MESH))
    as_they_lie = gs.predict(parallel, IDS, machine=MACHINE)
    _, other = transformer(4)
    would = gs.predict(other, IDS, machine=MACHINE, mesh=MESH, variables=TRANSFORMER)
    assert would.step_s == as_they_lie.step_s
    assert would.memory_bytes == as_they_lie.memory_bytes
    assert would.used == len(would.of_devices) == 4
    plan = parallel.plan(IDS)
    rows = traffic(would.plan).sent["/device:CPU:0"] // 4  # of the first device, which has them here: it is the host's
    assert would.sent_bytes >= sum(traffic(plan).sent.values()) == sum(traffic(would.plan).sent.values()) - rows
    assert sum(memory.state_bytes for memory in would.memory.values()) == sum(
        own.shape.num_elements() * own.dtype.size for own in laid
    )
    assert "0/up: [-, model], 8 + 7, computed in place" in str(would.plan)
    assert str(as_they_lie).splitlines()[0].startswith(f"Prediction of step on 4 of {MACHINE}")
    assert {device[-1] for device, memory in would.memory.items() if memory.state_bytes} == {"0", "1"}  # the first row


ON_STAGES: dict[str, tuple[dict[str, int], Any]] = {
    "home": ({"stage": 2, "batch": 2}, None),
    "sharded": ({"stage": 2, "batch": 2}, "sharded"),
    "replicated": ({"batch": 2, "stage": 2}, "replicated"),
    "host": ({"stage": 2, "batch": 2}, "host"),
    "layers": ({"stage": 2, "model": 2}, {"*up*": (None, "model"), "*down*": ("model",), "*": "home"}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ON_STAGES)
def test_stages(case: str):
    """Before the first call, after it, and where no variable is laid out: the plan and the bytes of what runs."""
    mesh, layout = ON_STAGES[case]
    (laid, step), (_, other), batch = stages_of(), stages_of(), rows_of(8)
    if layout is not None:
        gs.set_variable_layout(laid, layout, mesh=mesh)
    options: Any = {"micro_batches": 2, "schedule": "1f1b"}
    parallel = gs.parallelize(step, mesh=mesh, **options)
    found = [gs.predict(parallel, *batch, machine=MACHINE)]
    parallel(*batch)
    found.append(gs.predict(parallel, *batch, machine=MACHINE))
    found.append(gs.predict(other, *batch, machine=MACHINE, mesh=mesh, variables=layout or "home", **options))
    state = [[memory.state_bytes for memory in own.of_devices.values()] for own in found]
    assert state[0] == state[1] == state[2]
    assert all(sum(half) > 0 for half in (state[0][:2], state[0][2:]))
    assert found[0].step_s == found[1].step_s == found[2].step_s
    plan = parallel.plan(*batch)
    ran, would = (traffic(own).by_kind for own in (plan, found[2].plan))
    if layout != "host":  # (the first device is the host here, and has its rows)
        assert {**ran, "scatter": 0} == {**would, "scatter": 0}
    points = gs.scaling(
        other, *batch, machine=MACHINE, mesh=mesh, devices=[4], kinds=["strong"], micro_batches=2
    ).points
    assert [point.devices for point in points] == [4]


@pytest.mark.long
def test_more_devices_than_there_are():
    """Four rows of eight columns on four hosts: each row's columns are on one host, and send more than rows do."""
    _, step = transformer(8, layers=2)
    mesh = {"batch": 4, "model": 8}
    found = gs.predict(step, IDS, machine=f"4x{MACHINE}", mesh=mesh, variables=TRANSFORMER)
    assert found.used == len(found.of_devices) == 32
    plan = found.plan
    assert {device.split("/task:")[1][0] for device in plan.mesh.devices} == {"0", "1", "2", "3"}
    assert 0 < traffic(plan).between_hosts < traffic(plan).within_hosts


def test_scaling_keeps_the_other_axis():
    x = tf.TensorSpec([8, WIDTH], tf.float32)
    variables = [tf.Variable(tf.zeros([WIDTH, WIDTH]), name=name) for name in ("up", "down")]
    function = lambda x: tf.nn.relu(x @ variables[0]) @ variables[1]  # noqa: E731
    layout: Any = {"up": (None, "model"), "down": ("model", None)}
    found = gs.scaling(
        function, x, machine=MACHINE, devices=[2, 4, 8], variables=[layout, "home"], mesh={"batch": 1, "model": 2}
    )
    assert [(p.kind, p.layout, p.devices, p.rows) for p in found.points if p.layout != "home"] == [
        ("strong", "by patterns", 2, 8),
        ("strong", "by patterns", 4, 8),
        ("strong", "by patterns", 8, 8),
        ("weak", "by patterns", 2, 8),
        ("weak", "by patterns", 4, 16),
        ("weak", "by patterns", 8, 32),
    ]
    one = gs.predict(function, x, machine=MACHINE, mesh={"batch": 2, "model": 2}, variables=layout)
    assert found.points[1].step_s == one.step_s


def forward() -> Any:
    up = tf.Variable(tf.zeros([WIDTH, 15]), name="up")
    return lambda x: x @ up


def laid_out() -> Any:
    (up, *others), step = perceptron()
    gs.set_variable_layout([up, *others], PERCEPTRON, devices_of(MESH), mesh=MESH)
    return step


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mesh": MESH, "devices": 8}, "has 2 x 2 = 4 devices, and there are 8"),
        ({"mesh": MESH, "variables": {"up": (None, "modle")}}, "has no axis 'modle'; it has 'batch', 'model'. Did you"),
        ({"variables": {"up": (None, "model")}}, "names axes of a mesh: pass the mesh"),
        ({"mesh": {"batch": 1, "model": 16}}, "has 8"),
    ],
)
def test_errors(options: dict[str, Any], expected: str):
    call = lambda: gs.predict(forward(), tf.TensorSpec([4, WIDTH]), machine=MACHINE, **options)  # noqa: E731
    with pytest.raises(gs.errors.ArgumentError) as found:
        call()
    assert expected in str(found.value)


def test_variables_along_an_axis_need_the_mesh():
    with pytest.raises(gs.errors.ArgumentError) as found:
        gs.predict(laid_out(), tf.TensorSpec([4, WIDTH], tf.float64), machine=MACHINE, devices=4)
    assert "These variables are cut along axes of a mesh, and the prediction has no mesh" in str(found.value)
    with pytest.raises(gs.errors.ArgumentError) as found:
        gs.scaling(forward(), tf.TensorSpec([4, WIDTH]), machine=MACHINE, devices=[2, 3], mesh={"batch": 1, "model": 2})
    assert "mesh (batch=1, model=2) has 2 devices along 'model', and 3 is no multiple" in str(found.value)
