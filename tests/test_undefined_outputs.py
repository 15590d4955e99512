"""What TensorFlow allocates and does not write: known by name, depended on by nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import Partial
from graphsplit.core.protos import make_node, output_names
from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.program.undefined_outputs import MAY_BE_UNDEFINED, undefined_outputs
from tests.helpers.broken_plans import position, sharded, with_op, with_step
from tests.rule_cases import CASES

pytestmark = pytest.mark.sampled(quick="all")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def plan() -> gs.inspect.Plan:
    def normalize(x):
        results = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=[1.0], offset=[0.0], mean=[0.0], variance=[1.0], is_training=False
        )
        return results.y, tf.tanh(results.reserve_space_1)

    return gs.parallelize(normalize, devices=3).plan(tf.ones((7, 2, 2, 1)))


@pytest.mark.parametrize("op_type", sorted(MAY_BE_UNDEFINED))
def test_the_table_names_outputs_that_exist(op_type: str):
    flags = [a.name for a in op_definition(op_type).attr if a.type == "bool"]
    settings = [dict.fromkeys(flags, value) for value in (False, True)]
    found = [undefined_outputs(make_node("n", op_type, [], **setting)) for setting in settings]
    assert frozenset().union(*found) <= set(range(len(output_names(make_node("n", op_type, [])))))
    defaults = {a.name: a.default_value.b for a in op_definition(op_type).attr if a.type == "bool"}
    stripped, whole = make_node("n", op_type, []), make_node("n", op_type, [], **defaults)
    assert undefined_outputs(stripped) == undefined_outputs(whole)
    assert any(found), op_type


def test_nothing_is_folded_from_them(plan: gs.inspect.Plan):
    plan.program.check()
    broken = with_op(plan.program, "Tanh", constants={0: np.zeros(1, np.int32)})
    name = plan.program.ops[position(plan.program, "FusedBatchNormV3")].name
    message = f"Operation 'Tanh' takes output 3 of {name!r} for known, which TensorFlow leaves undefined."
    with pytest.raises(gs.errors.CheckError) as caught:
        broken.check()
    assert str(caught.value) == message


def test_nothing_travels_for_them(plan: gs.inspect.Plan):
    plan.check()
    step = plan.steps[position(plan.program, "FusedBatchNormV3")]
    assert step.shards
    gives = [*step.shards.gives]
    gives[2] = Partial("sum")
    broken = with_step(plan, "FusedBatchNormV3", sharded(gives=tuple(gives)))
    name = plan.program.ops[position(plan.program, "FusedBatchNormV3")].name
    with pytest.raises(gs.errors.CheckError) as caught:
        broken.check()
    assert str(caught.value) == (
        f"{name!r} gives partial(sum) as output 2, which TensorFlow leaves undefined: nothing may travel for it."
    )


@pytest.mark.parametrize(("positions", "known"), [([0, 2, 1], True), ([0, 3, 1], False)])
def test_gaps_of_a_stitch_are_not_known(positions: list[int], known: bool):
    def f(x):
        return x, tf.raw_ops.DynamicStitch(indices=[positions[:1], positions[1:]], data=[tf.shape(x)[:1], [2, 3]])

    ops = gs.parallelize(f, devices=2).plan(tf.ones((7, 6))).program.ops
    assert ("DynamicStitch" not in {op.type for op in ops}) == known


DIGESTS = """
import hashlib, json
import numpy as np, tensorflow as tf
from tests.rule_cases import CASES

def digest(tensor):
    value = tensor.numpy()
    return hashlib.md5(repr(value.tolist()).encode() if value.dtype == object else value.tobytes()).hexdigest()

found = {}
for case in CASES:
    tf.random.set_seed(0)
    found[case.name] = [digest(t) for t in case.run(5, case.make_arguments(5)) if t.dtype != tf.variant]
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.parametrize("onednn", ["0", "1"])
def test_no_other_result_depends_on_what_memory_held(onednn: str):
    """Every op with a rule, on memory filled with two different bytes (glibc's MALLOC_PERTURB_)."""
    found = []
    for byte in ("90", "165"):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_ENABLE_ONEDNN_OPTS": onednn,
            "MALLOC_PERTURB_": byte,
        }
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout))
    assert len(found[0]) == len({case.name for case in CASES})
    assert [name for name, digests in found[0].items() if found[1][name] != digests] == []
