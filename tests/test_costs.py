"""What operations do: FLOPs and bytes by formulas that can be checked by hand, and how long that takes."""

from __future__ import annotations

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.protos import make_node
from graphsplit.emission.shards.sizes import Sizes
from graphsplit.planning.alike_shards import kinds_of_shards
from graphsplit.planning.costs.families import family_of
from graphsplit.planning.costs.machine import Device, Host, Link, Machine, Sample
from graphsplit.planning.costs.seconds import Costs
from graphsplit.planning.costs.work import Work, work_of
from graphsplit.simulate.search.chosen_plans import machine_of_gpu

F32 = tf.float32


def work(op_type, inputs, outputs, **attributes):
    node = make_node("op", op_type, [], **attributes)
    return work_of(op_type, lambda name: node.attr[name], [(s, F32) for s in inputs], [(s, F32) for s in outputs])


def test_depthwise_convolutions_have_work():
    """Each number of the result is a sum over the filter's places; a forward pass and both gradients alike."""
    image, kernel, result = (2, 8, 8, 4), (3, 3, 4, 2), (2, 8, 8, 8)
    each = 2 * 9 * 2 * 8 * 8 * 8
    assert work("DepthwiseConv2dNative", [image, kernel], [result]).flops == each
    assert work("DepthwiseConv2dNativeBackpropInput", [(4,), kernel, result], [image]).flops == each
    assert work("DepthwiseConv2dNativeBackpropFilter", [image, (4,), result], [kernel]).flops == each
    assert family_of("DepthwiseConv2dNative") == "depthwise"


@pytest.mark.parametrize(
    ("equation", "inputs", "flops"),
    [
        ("...ij,jk->...ik", [(5, 2, 3), (3, 4)], 2 * 5 * 2 * 3 * 4),
        ("...i, ...i -> ...", [(5, 1, 3), (2, 3)], 2 * 5 * 2 * 3),
        ("bij,bjk->bik", [(5, 2, 3), (5, 3, 4)], 2 * 5 * 2 * 3 * 4),
    ],
)
def test_products_with_broadcast_axes_have_work(equation: str, inputs, flops: int):
    assert work("Einsum", inputs, [(1,)], equation=tf.compat.v1.AttrValue(s=equation.encode())).flops == flops


def test_what_is_read_and_written_through_handles_counts():
    """A handle has no size; the variable behind it is read and written all the same."""
    handle, value = ((), tf.resource), ((100,), F32)

    def nothing(_):
        return None

    assert work_of("AssignSubVariableOp", nothing, [handle, value], []).bytes == 3 * 400
    assert work_of("ResourceApplyAdam", nothing, [handle, handle, handle, value], []).bytes == 7 * 400
    assert work_of("AssignVariableOp", nothing, [handle, value], []).bytes == 400  # takes over what it is given


def test_a_product_without_a_formula_takes_as_long_as_its_bytes():
    """A curve that was measured says nothing of it; it is never free."""
    device = Device("core", "CPU", {"float32": 1e9}, {"float32": 1e9}, 1e6, 1e9, curves={"convolution": ((1.0, 1e9),)})
    assert Costs(device).seconds(Work("convolution", "float32", 0.0, 1e6)) == 1.0


def test_shards_with_as_many_rows_may_differ():
    """5000 columns on three devices are 1667, 1667 and 1666: whatever works on them takes longer on the first two."""
    split = gs.parallelize(lambda x: tf.cumsum(tf.tanh(x), 0) * 2.0, devices=3)
    plan = split.plan(tf.ones([63, 5000]))
    assert len(set(plan.rows)) == 1
    assert kinds_of_shards(plan) == [0, 0, 1]


def test_a_prediction_is_forgotten_with_its_graph():
    """Nothing that lives as long as the process holds the plans and graphs of predictions."""
    assert not hasattr(Sizes._of_op, "cache_info")


def test_captured_tensors_take_memory():
    table = tf.ones([1000, 64])
    device = Device("unit", "GPU", {"float32": 1e9}, {"float32": 1e30}, 1e30, 1e9)
    machine = Machine("unit box", device, 8, Link("cable", 1e9, 0.0), host=Host())
    found = gs.predict(lambda x: x @ table, tf.TensorSpec([8, 1000]), machine=machine, devices=1)
    assert found.memory["/device:GPU:0"].state_bytes >= 1000 * 64 * 4


def test_slices_have_their_own_sizes():
    """Three rows on two devices are two and one."""
    table = tf.Variable(tf.ones([3, 40_000]), name="three_rows")
    device = Device("unit", "GPU", {"float32": 1e9}, {"float32": 1e30}, 1e30, 1e9)
    machine = Machine("unit box", device, 8, Link("cable", 1e9, 0.0), host=Host())
    found = gs.predict(lambda x: x @ table, tf.TensorSpec([8, 3]), machine=machine, devices=2, variables="sharded")
    held = sorted(memory.state_bytes for memory in found.memory.values())
    assert sum(held) == 3 * 40_000 * 4


@pytest.mark.parametrize(
    ("model", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE-16GB"),
        ("NVIDIA H200", "H200-SXM"),
        ("Tesla T4", "T4"),
    ],
)
def test_the_machine_of_a_gpu_is_that_of_its_variant(model: str, device: str):
    found = machine_of_gpu(model)
    assert found is not None
    assert found.device.name == device


def test_a_gpu_that_no_machine_has():
    assert machine_of_gpu("NVIDIA GeForce RTX 4090") is None


def sampled(samples: dict[str, tuple[float, float]], bytes_per_s: float = 1.0) -> Costs:
    """A device on which operations were measured: by key, what each moves and how long it takes."""
    found = {key: Sample(Work("elementwise", "float32", 0.0, moved), s) for key, (moved, s) in samples.items()}
    return Costs(Device("core", "CPU", {"float32": 1e30}, {"float32": 1e30}, bytes_per_s, 1e9, samples=found))


def test_what_was_measured_of_another_size_is_scaled_from_the_nearest():
    """Nearest by their ratio; what the shortest takes is no work, and is not scaled."""
    costs = sampled({"Mul float32[1] -> float32[1]": (8.0, 1e-7), "Mul float32[64] -> float32[64]": (512.0, 11e-7)})
    half = Work("elementwise", "float32", 0.0, 256.0)
    assert costs.seconds(half, "Mul float32[32] -> float32[32]") == pytest.approx(1e-7 + 10e-7 / 2)
    assert costs.seconds(half, "Mul float32[64] -> float32[64]") == 11e-7


def test_what_was_measured_of_next_to_nothing_tells_no_rate():
    """A join of a kilobyte takes 8 us, to start; one of 10 MB takes its bytes and that, not 8,000 times as long."""
    costs = sampled({"ConcatV2 small": (1e3, 8e-6), "Tile large": (1e6, 3e-4)}, bytes_per_s=1e10)
    large, twice = (Work("movement", "float32", 0.0, moved) for moved in (1e7, 2e6))
    assert costs.seconds(large, "ConcatV2 large") == pytest.approx(1e-3 + 8e-6 - 1e-7)
    assert costs.seconds(twice, "Tile larger") == pytest.approx(1e-6 + 2 * (3e-4 - 1e-6))


def test_what_was_measured_without_its_sizes_is_no_measure_for_others():
    """Sizes may follow from data: it is found where they are not known either, and nothing is scaled by it."""
    costs = sampled({"TanhGrad float32[...] float32[8,4] -> float32[?,4]": (4.0, 3.0)})
    work = Work("elementwise", "float32", 0.0, 96.0)
    assert costs.seconds(work, "TanhGrad float32[...] float32[8,4] -> float32[?,4]") == 3.0
    assert costs.seconds(work, "TanhGrad float32[4,4] float32[4,4] -> float32[4,4]") == 96.0
