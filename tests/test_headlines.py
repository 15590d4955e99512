"""The first line of a plan counts the devices that work, and says what it does not know."""

from __future__ import annotations

import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import rows

MESH = {"batch": 2, "model": 2}


def headline(plan) -> str:
    return str(plan).splitlines()[0]


@pytest.mark.parametrize("layout", [MESH, {"devices": 3, "stages": 3, "micro_batches": 2, "schedule": "gpipe"}])
def test_all_devices_that_work_are_counted(layout: dict):
    up, down = tf.Variable(rows(6, 8), name="up"), tf.Variable(rows(8, 6), name="down")
    if layout is MESH:
        gs.set_variable_layout([up, down], {"up": (None, "model"), "down": ("model", None)}, mesh=MESH)
        layout = {"mesh": MESH}
    step = gs.parallelize(lambda x: tf.nn.relu(x @ up) @ down, **layout)
    report, plan = gs.verify(step, rows(5, 6)), step.plan(rows(5, 6))
    assert report.passed
    assert f" on {len(report.devices)} devices, " in headline(plan)
    assert plan.compare(plan).startswith(f"A plan for {len(report.devices)} devices against ")
    if "mesh" in layout:
        assert "\n  shard 1: CPU:2 and CPU:3, 2 rows\n" in str(plan)
