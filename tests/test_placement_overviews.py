"""What a large placement is at first sight: lanes, shards that are alike, what moves, what is left closed."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.inspect import Edge, PlacedOp, Placement
from graphsplit.inspect.views.lanes import alike_lanes, default_device_of, lanes_of
from graphsplit.inspect.views.pages import moves_of, page_data, ways_text
from graphsplit.inspect.views.pictures import picture
from graphsplit.inspect.views.summaries import folded_scopes, page_paths, summarize
from graphsplit.planning.amounts import format_bytes

CPU = [f"/device:CPU:{d}" for d in range(4)]


def step_by_hand(shards: int = 3) -> Placement:
    """A weight and an argument go out, gradients come back, an optimizer updates; packed on each device."""
    ops = [
        PlacedOp("w", "VarHandleOp", CPU[0], shapes=((),), dtypes=("resource",), variable="model/dense/kernel"),
        PlacedOp("model/dense/Read", "ReadVariableOp", CPU[0], output_bytes=400),
        PlacedOp("tensors_0", "Placeholder", CPU[0], argument="x"),
        PlacedOp("graphsplit/scatter_0/tensors_0", "SplitV", CPU[0], role="scatter"),
        PlacedOp("graphsplit/reduce_1/total", "AddN", CPU[0], backward=True, role="reduce"),
        PlacedOp("adam/mul", "Mul", CPU[0]),
        PlacedOp("adam/AssignVariableOp", "AssignVariableOp", CPU[0]),
    ]
    edges = [
        Edge("w", "model/dense/Read", dtype="resource"),
        Edge("tensors_0", "graphsplit/scatter_0/tensors_0", 0, 96, "float32"),
        Edge("graphsplit/reduce_1/total", "adam/mul", 0, 400, "float32"),
        Edge("adam/mul", "adam/AssignVariableOp", 0, 400, "float32"),
    ]
    for d in range(shards):
        work, back, pack = (
            f"shard_{d}/model/dense/MatMul",
            f"shard_{d}/gradient_tape/MatMul",
            f"graphsplit/reduce_1/pack_{d}",
        )
        ops += [
            PlacedOp(work, "MatMul", CPU[d], shard=d, flops=2000),
            PlacedOp(back, "MatMul", CPU[d], shard=d, backward=True, flops=4000),
            PlacedOp(pack, "ConcatV2", CPU[d], backward=True, role="reduce"),
        ]
        edges += [
            Edge("model/dense/Read", work, 0, 400, "float32"),
            Edge("graphsplit/scatter_0/tensors_0", work, d, 32, "float32", operand=1),
            Edge(work, back, 0, 32, "float32"),
            Edge(back, pack, 0, 400, "float32"),
            Edge(pack, "graphsplit/reduce_1/total", 0, 400, "float32", operand=d),
        ]
    return Placement(ops, edges, rows=[4, 4, 3][:shards], title="by hand")


def test_what_runs_once_beside_shards_has_no_lane_of_its_own():
    placement = step_by_hand()
    lanes = {name: str(lane) for name, lane in lanes_of(placement.ops.values()).items()}
    assert default_device_of(placement.ops.values()) == CPU[0]
    assert lanes["adam/mul"] == lanes["graphsplit/reduce_1/pack_0"] == "CPU:0"
    assert lanes["graphsplit/reduce_1/pack_2"] == lanes["shard_2/model/dense/MatMul"] == "shard 2 on CPU:2"
    assert sorted(set(lanes.values())) == ["CPU:0", "shard 0 on CPU:0", "shard 1 on CPU:1", "shard 2 on CPU:2"]
    assert default_device_of([]) == ""


def test_one_shard_stands_for_those_that_do_the_same():
    placement = step_by_hand()
    lane_of = lanes_of(placement.ops.values())
    once, group = alike_lanes(placement, lane_of)
    assert (once.title, once.devices, group.title) == ("runs once", "CPU:0", "shards 0 to 2 \u00d7 3")
    assert (str(group), group.devices, group.shown.shards) == ("shards 0 to 2", "CPU:0 to 2", (1,))
    lanes = page_data(placement)["lanes"]
    assert [lane["alike"] for lane in lanes] == [1, 3, 3, 3]
    assert len({lane["like"] for lane in lanes}) == 2
    assert lanes[1]["notes"] == "CPU:0 to 2, 3 to 4 rows each"
    assert (lanes[0]["note"], lanes[3]["note"]) == ("CPU:0", "CPU:2, 3 rows")


def test_shards_that_do_something_else_stand_for_themselves():
    placement = step_by_hand()
    more = PlacedOp("shard_1/model/more", "Relu", CPU[1], shard=1)
    placement = Placement([*placement.ops.values(), more], placement.edges)
    groups = alike_lanes(placement, lanes_of(placement.ops.values()))
    assert [str(group) for group in groups] == ["", "shards 0, 2", "shard 1"]
    assert groups[1].devices == "CPU:0, CPU:2"


def test_what_moves_is_called_as_in_plans():
    moves = moves_of(step_by_hand())
    assert [(moved.kind, len(moved.transfers), moved.bytes) for moved in moves] == [
        ("broadcast", 2, 800),
        ("reduce", 2, 800),
        ("scatter", 2, 64),
    ]
    assert [ways_text(moved.ways) for moved in moves] == [
        "CPU:0 -> 2 devices",
        "2 devices -> CPU:0",
        "CPU:0 -> 2 devices",
    ]
    data = page_data(step_by_hand())
    assert data["moves"][0]["text"] == "broadcast: 2 tensors, 800 B"
    assert [transfer[5] for transfer in data["transfers"]] == [1, 1, 0, 0, 2, 2]


def test_what_moves_where_nothing_is_split():
    ops = [PlacedOp("a", "Tanh", CPU[0]), PlacedOp("b", "Tanh", CPU[1])]
    [moved] = moves_of(Placement(ops, [Edge("a", "b", 0, 8, "float32")]))
    assert (moved.kind, ways_text(moved.ways)) == ("values", "CPU:0 -> 1")


def test_the_largest_are_named_once_and_as_users_call_them():
    largest = page_data(step_by_hand())["largest"]
    assert [(tensor["bytes"], tensor["way"], tensor["name"]) for tensor in largest] == [
        (400, "2 devices → CPU:0", "pack (reduce_1)"),
        (400, "CPU:0 → 2 devices", "model/dense/kernel"),
        (32, "CPU:0 → 1", "rows of x"),
        (32, "CPU:0 → 2", "rows of x"),
    ]


def test_optimizers_are_folded_and_layers_are_not():
    placement = step_by_hand()
    paths = page_paths(placement)
    assert folded_scopes(placement, paths) == {"adam": "adam: 1 update"}
    home = PlacedOp("adam/Unique", "Unique", CPU[0], unsharded_reason="needs all rows at once")
    placement = Placement([*placement.ops.values(), home], placement.edges)
    assert folded_scopes(placement, page_paths(placement)) == {}


def test_labels_are_what_users_call_things():
    paths = page_paths(step_by_hand())
    assert paths["w"] == ["model/dense/kernel"]
    assert paths["tensors_0"] == ["x"]
    assert paths["graphsplit/scatter_0/tensors_0"][-1] == "rows of x"
    assert paths["shard_1/model/dense/MatMul"] == ["model", "dense", "MatMul"]


def test_layers_in_a_model_are_called_as_in_it():
    """Variables of a functional model do not name the model; its operations do, with numbers."""
    handle = PlacedOp("net_1/conv_1/Read/resource", "Placeholder", CPU[0], variable="conv/kernel")
    work = PlacedOp("shard_0/net_1/conv_1/Conv2D", "Conv2D", CPU[0], shard=0)
    assert page_paths(Placement([handle, work], []))[work.name] == ["net", "conv", "Conv2D"]
    exact = PlacedOp("net_1/conv/Read/resource", "Placeholder", CPU[0], variable="conv/kernel")  # as Keras 2 has it
    assert page_paths(Placement([exact, work], []))[work.name] == ["net_1", "conv_1", "Conv2D"]


@pytest.mark.parametrize("layout", ["home", "sharded"])
def test_a_training_step(layout: str):
    """Arguments have their names; what a device runs once is in its lane, optimizers of divided variables too."""
    net = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(8)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(net.trainable_variables)
    gs.set_variable_layout([net, optimizer], layout, devices=4)

    @gs.parallelize(devices=4)
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(images) - labels) ** 2)
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return loss

    placement = step.placement(tf.TensorSpec([32, 64]), tf.TensorSpec([32, 8]))
    assert [op.argument for op in placement.ops.values() if op.argument] == ["images", "labels"]
    lanes = sorted({str(lane) for lane in lanes_of(placement.ops.values()).values()})
    assert lanes == ["CPU:0", *[f"shard {d} on CPU:{d}" for d in range(4)]]
    moves = {moved.kind: moved for moved in moves_of(placement)}
    assert max(transfer.bytes for transfer in moves["scatter"].transfers) == 8 * 64 * 4
    plan = str(step.plan(tf.TensorSpec([32, 64]), tf.TensorSpec([32, 8])))
    for kind in ("scatter", "broadcast", "reduce"):
        [line] = [line for line in plan.splitlines() if line.startswith(f"  {kind}: ")]
        assert line.endswith(f", {format_bytes(moves[kind].bytes)} sent")


def test_layers_of_a_mesh_are_called_as_in_their_model():
    mesh = {"batch": 2, "model": 2}
    layers = [keras.layers.Dense(8, "relu", name=f"block_{k}") for k in range(7)]
    net = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(8, name="last")])
    gs.set_variable_layout(
        net, {"block_*/kernel": (None, "model"), "block_*/bias": ("model",), "last/kernel": ("model",)}, mesh=mesh
    )

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(x) ** 2)
        return tape.gradient(loss, net.trainable_variables)

    parallel = gs.parallelize(step, mesh=mesh)
    placement = parallel.placement(tf.ones((5, 8)))
    paths = page_paths(placement)
    outer = {path[0] for path in paths.values() if len(path) > 1}
    assert not {scope for scope in outer if scope.startswith(("shard", "graphsplit"))}, outer
    products = [op for op in placement.ops.values() if op.type == "MatMul" and not op.backward]
    own = {"/".join(paths[op.name]) for op in products}
    assert own == {f"{net.name}/{layer.name}/MatMul" for layer in net.layers}, own
    text = str(parallel.plan(tf.ones((5, 8))))
    assert f"    7 of {net.name}/block_*/kernel: [-, model], 4 + 4, computed in place\n" in text
    assert f"    7 of {net.name}/block_*/bias: [model], 4 + 4, computed in place\n" in text
    assert f"    {net.name}/last/kernel: [model, -], 4 + 4, computed in place\n" in text


def test_an_optimizer_is_drawn_below_what_it_follows():
    """Its counter is read before all else; and labels are on white, whatever converts the picture."""
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    placement = gs.parallelize(step, devices=2).placement(tf.TensorSpec((8, 12)))
    [once] = [boxes for lane, boxes in summarize(placement).lanes.items() if not lane.shown.work.startswith("shard")]
    labels = [box.label for box in once]
    gradients = [k for k, label in enumerate(labels) if label.startswith("gradient_tape/")]
    assert labels.index(next(label for label in labels if label.startswith("adam: "))) > max(gradients), labels
    drawn = picture(placement)
    assert "paint-order" not in drawn
    assert drawn.count(' fill="#fff"/><text ') == drawn.count('font-weight="bold"')
