"""Sizes that a signature leaves open stay open: one trace and one plan for all of them, equal to one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close, assert_law, with_sums_at_once
from tests.helpers.unknown_sizes import last_plan

Made = tuple[Callable[..., Any], Sequence[tf.Variable]]
traces: list[str] = []


def numbers(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [sum(shape), seed], dtype=tf.float64)


def weights(*shape: int) -> tf.Variable:
    return tf.Variable(0.3 * numbers(*shape, seed=1))


def descend(variables: Sequence[tf.Variable], tape: tf.GradientTape, loss: tf.Tensor) -> None:
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(0.05 * tf.convert_to_tensor(gradient))


def spec(*shape: int | None, dtype: tf.DType = tf.float64) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype)


# Programs: a function that makes one, and a function from sizes to its arguments


def graph_network() -> Made:
    """Nodes with features, edges between them, graphs of them: as TF-GNN, spektral and others have batches."""
    own, sent, out = weights(5, 16), weights(21, 16), weights(32, 1)

    @tf.function(
        input_signature=[
            spec(None, 5), spec(None, 2, dtype=tf.int32), spec(None, 5), spec(None, dtype=tf.int32), spec(None, 1)
        ]
    )  # fmt: skip
    def step(nodes: tf.Tensor, ends: tf.Tensor, edges: tf.Tensor, graph_of: tf.Tensor, wanted: tf.Tensor) -> Any:
        traces.append("graph network")
        with tf.GradientTape() as tape:
            h = tf.tanh(nodes @ own)
            messages = tf.tanh(tf.concat([tf.gather(h, ends[:, 0]), edges], 1) @ sent)
            received = tf.math.unsorted_segment_sum(messages, ends[:, 1], tf.shape(h)[0])
            pooled = tf.math.unsorted_segment_mean(tf.concat([h, received], 1), graph_of, tf.shape(wanted)[0])
            loss = tf.reduce_mean((pooled @ out - wanted) ** 2)
        descend([own, sent, out], tape, loss)
        return loss, received

    return step, [own, sent, out]


def graphs(nodes: int, edges: int, count: int) -> tuple[tf.Tensor, ...]:
    rng = np.random.default_rng(nodes)
    ends = tf.constant(rng.integers(0, nodes, (edges, 2)), tf.int32)
    graph_of = tf.constant(np.sort(rng.integers(0, count, nodes)), tf.int32)
    return numbers(nodes, 5), ends, numbers(edges, 5), graph_of, numbers(count, 1)


def detector() -> Made:
    """Pictures of any number, each with so many boxes, as many for all of a batch; and embeddings of queries."""
    into, out = weights(12, 16), weights(16, 4)

    @tf.function(input_signature=[spec(None, None, 12), spec(None, None, 4), spec(None, 16)])
    def step(pictures: tf.Tensor, boxes: tf.Tensor, queries: tf.Tensor) -> Any:
        traces.append("detector")
        with tf.GradientTape() as tape:
            h = tf.tanh(pictures @ into)
            attention = tf.nn.softmax(tf.einsum("qd,bpd->bqp", queries, h))
            found = tf.einsum("bqp,bpd->bqd", attention, h) @ out
            distance = tf.reduce_sum(tf.abs(found[:, :, None] - boxes[:, None]), -1)
            loss = tf.reduce_mean(tf.reduce_min(distance, 1))
        descend([into, out], tape, loss)
        return loss, found

    return step, [into, out]


def pictures(count: int, patches: int, boxes: int, queries: int) -> tuple[tf.Tensor, ...]:
    return numbers(count, patches, 12), numbers(count, boxes, 4), numbers(queries, 16)


def lists() -> Made:
    """Rows, and a list for each of them: all entries one behind the other, and how many each row has."""
    into, out = weights(6, 16), weights(16, 3)

    @tf.function(input_signature=[spec(None, 6), spec(None, dtype=tf.int64), spec(None, 3)])
    def step(x: tf.Tensor, lengths: tf.Tensor, entries: tf.Tensor) -> Any:
        traces.append("lists")
        row_of = tf.repeat(tf.range(tf.shape(lengths)[0]), lengths)
        with tf.GradientTape() as tape:
            y = tf.tanh(x @ into) @ out
            loss = tf.reduce_mean((tf.gather(y, row_of) - entries) ** 2)
            loss += tf.reduce_mean(y**2)
        descend([into, out], tape, loss)
        return loss, y

    return step, [into, out]


def rows_and_lists(rows: int, entries: int) -> tuple[tf.Tensor, ...]:
    cuts = np.sort(np.random.default_rng(rows).integers(0, entries + 1, rows - 1))
    return numbers(rows, 6), tf.constant(np.diff([0, *cuts, entries])), numbers(entries, 3)


def sparse_network() -> Made:
    """Nodes, the sparse matrix of who is beside whom, and graphs."""
    into, out = weights(5, 16), weights(16, 1)

    @tf.function(input_signature=[spec(None, 5), tf.SparseTensorSpec([None, None], tf.float64), spec(None, 1)])
    def step(x: tf.Tensor, beside: tf.SparseTensor, wanted: tf.Tensor) -> Any:
        traces.append("sparse network")
        with tf.GradientTape() as tape:
            h = tf.tanh(tf.sparse.sparse_dense_matmul(beside, x @ into))
            y = tf.tanh(h @ out)
            loss = tf.reduce_mean(y**2) + tf.reduce_mean(wanted**2)
        descend([into, out], tape, loss)
        return loss, y

    return step, [into, out]


def neighbours(nodes: int, edges: int, count: int) -> tuple[Any, ...]:
    places = np.sort(np.random.default_rng(edges).choice(nodes * nodes, edges, replace=False))
    indices = np.stack([places // nodes, places % nodes], 1)
    return numbers(nodes, 5), tf.SparseTensor(indices, numbers(edges), (nodes, nodes)), numbers(count, 1)


def ragged() -> Made:
    """Rows, and a ragged tensor of as many."""
    into, out = weights(6, 16), weights(16, 1)

    @tf.function(input_signature=[spec(None, 6), tf.RaggedTensorSpec([None, None], tf.float64)])
    def step(x: tf.Tensor, wanted: tf.RaggedTensor) -> Any:
        traces.append("ragged")
        with tf.GradientTape() as tape:
            y = tf.tanh(x @ into) @ out
            loss = tf.reduce_mean((y - wanted.to_tensor()) ** 2)
        descend([into, out], tape, loss)
        return loss, y, wanted * 2.0

    return step, [into, out]


def rows_and_ragged(rows: int, entries: int) -> tuple[Any, ...]:
    x, lengths, values = rows_and_lists(rows, entries)
    return x, tf.RaggedTensor.from_row_lengths(values[:, 0], lengths)


class Case(NamedTuple):
    """A program, its arguments for some sizes, calls in a row, and what runs on the shards."""

    make: Callable[[], Made]
    arguments: Callable[..., Any]
    sizes: list[tuple[int, ...]]
    sharded: tuple[str, ...]

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        return [self.arguments(*one) for one in self.sizes]


NODES = [(12, 30, 3), (7, 41, 2), (20, 5, 6), (2, 9, 1), (13, 13, 13)]
PICTURES = [(5, 9, 4, 6), (2, 7, 3, 8), (1, 4, 6, 2), (7, 3, 1, 5)]
CASES = {
    "graph network": Case(graph_network, graphs, NODES, ("MatMul", "Tanh", "TanhGrad")),
    "detector": Case(detector, pictures, PICTURES, ("BatchMatMulV2", "Min")),
    "lists": Case(lists, rows_and_lists, [(5, 13), (7, 9), (2, 30), (4, 4), (1, 6)], ("MatMul", "Tanh", "TanhGrad")),
    "sparse network": Case(sparse_network, neighbours, [(9, 20, 4), (6, 17, 4), (11, 30, 2), (2, 3, 5)], ("MatMul",)),
    "ragged": Case(ragged, rows_and_ragged, [(5, 13), (7, 9), (2, 30), (9, 12)], ("MatMul", "Tanh", "TanhGrad")),
}
WAYS: dict[str, dict[str, Any]] = {
    "three devices": {"devices": 3},
    "sharded": {"devices": 2, "variables": "sharded"},
    "micro-batches": {"devices": 2, "micro_batches": 2},
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", CASES)
def test_one_trace_and_one_plan_for_all_sizes(name: str, ways: dict[str, Any]) -> None:
    case = CASES[name]
    traces.clear()
    plan = assert_law(case.make, case.calls, sharded=case.sharded, at_home=None, tolerance=1e-11, **ways)
    assert plan.program.batch_is_unknown
    assert len(plan.program.symbols) > 1
    runs = 1 if with_sums_at_once(plan, ways) is None else 2  # (both ways of sums)
    assert traces == [name] * 2 * runs  # once for one device, once for several
    parallel = gs.parallelize(case.make()[0], **ways)
    for call in case.calls:
        parallel(*call)
    assert len(parallel._traces.planned) == 1


@pytest.mark.parametrize("name", CASES)
def test_reduce_retracing_has_one_more(name: str) -> None:
    """The first shapes are known to one device, the second are open; so it is here."""
    case = CASES[name]
    traces.clear()

    def make() -> Made:
        step, variables = case.make()
        return tf.function(step.python_function, reduce_retracing=True), variables

    calls = case.calls
    assert_law(make, [*calls, calls[0]], at_home=None, tolerance=1e-11, devices=3)
    assert traces == [name] * len(traces)
    single, several = len(traces) // 2, len(traces) - len(traces) // 2
    assert single == several


def gathered() -> Made:
    """A function whose gradients are taken outside of it, of arguments of three sizes."""
    w = weights(5, 8)

    @tf.function(input_signature=[spec(None, 5), spec(None, dtype=tf.int32), spec(None, 8)])
    def forward(x: tf.Tensor, rows: tf.Tensor, others: tf.Tensor) -> Any:
        h = tf.tanh(x @ w)
        return h, tf.gather(h, rows) @ tf.transpose(others)

    return forward, [w]


@pytest.mark.parametrize("persistent", [False, True])
def test_gradients_from_outside(persistent: bool) -> None:
    results: list[Any] = []
    for devices in (1, 3):
        forward, [w] = gathered()
        function = forward if devices == 1 else gs.parallelize(forward, devices=devices)
        for rows, count, others in ((7, 9, 2), (5, 4, 6), (2, 11, 1)):
            x, more = numbers(rows, 5), numbers(others, 8)
            chosen = tf.constant(np.random.default_rng(count).integers(0, rows, count), tf.int32)
            with tf.GradientTape(persistent=persistent) as tape:
                tape.watch([x, more])
                h, y = function(x, chosen, more)
                loss = tf.reduce_sum(tf.sin(y)) + tf.reduce_sum(h**2)
            found = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, [w, x, more])]
            results.append([h, y, *found])
    half = len(results) // 2
    assert_close(results[half:], results[:half], tolerance=1e-11)
    assert len(function._traces.planned) == 1
    plan = last_plan(function)
    assert {"MatMul", "TanhGrad"} <= {op.type for op in plan.sharded_ops}, str(plan)


def test_sizes_that_contradict_the_plan_are_planned_once_more_and_said() -> None:
    """What was the same in all calls is one size, until a call says otherwise: then it is two, for good."""
    w = weights(4, 4)

    @tf.function(input_signature=[spec(None, 4), spec(None, 4), spec(None)])
    def f(x: tf.Tensor, y: tf.Tensor, z: tf.Tensor) -> Any:
        return tf.tanh(x @ w), y * 2.0, z + 1.0

    parallel = gs.parallelize(f, devices=2)
    same, other = [[numbers(rows, 4), numbers(count, 4), numbers(3)] for rows, count in ((5, 5), (6, 7))]
    assert_close(parallel(*same), f(*same))
    assert [str(layout) for layout in parallel.plan(*same).input_layouts] == ["shard(0)", "shard(0)", "whole"]
    with pytest.warns(gs.errors.RetracingWarning) as told:
        assert_close(parallel(*other), f(*other))
    assert [str(warning.message) for warning in told] == [
        "f was planned for calls in which x.shape[0] and y.shape[0] are the same size; in this call they are 6 and 7. "
        "It is planned once more, for sizes that differ. split={...: None} keeps an argument whole whose sizes only "
        "happen to be the batch's."
    ]
    assert told[0].filename == __file__
    for sizes in ((6, 7, 3), (7, 7, 7), (3, 9, 9), (1, 1, 2)):
        call = [numbers(sizes[0], 4), numbers(sizes[1], 4), numbers(sizes[2])]
        assert_close(parallel(*call), f(*call))
    assert len(parallel._traces.planned) == 2
    assert [str(layout) for layout in parallel.plan(*call).input_layouts] == ["shard(0)", "whole", "whole"]


def test_the_rows_are_those_that_split_names() -> None:
    made: dict[str, gs.ParallelFunction] = {}
    edges = {"nodes": None, "ends": 0, "edges": 0, "graph_of": None, "wanted": None}
    for name, split in {"nodes": 0, "edges": edges}.items():
        step, variables = graph_network()
        single, expected = graph_network()
        made[name] = gs.parallelize(step, devices=3, split=split)
        for sizes in NODES:
            assert_close(made[name](*graphs(*sizes)), single(*graphs(*sizes)), tolerance=1e-11)
        for a, b in zip(variables, expected, strict=True):
            assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), tolerance=1e-11)
        assert len(made[name]._traces.planned) == 1
    plans = {name: function.plan(*graphs(*NODES[0])) for name, function in made.items()}
    layouts = {name: [str(own) for own in plan.input_layouts] for name, plan in plans.items()}
    assert layouts == {
        "nodes": ["shard(0)", "whole", "whole", "shard(0)", "whole"],
        "edges": ["whole", "shard(0)", "shard(0)", "whole", "whole"],
    }
    assert plans["edges"].sharded_fraction > plans["nodes"].sharded_fraction > 0.2


def test_sizes_that_are_zero_are_planned_for_themselves() -> None:
    """What follows from symbols holds from one on. The other sizes stay open: no plan for each of them."""
    step, single = graph_network()[0], graph_network()[0]
    parallel = gs.parallelize(step, devices=3)
    for sizes in ((12, 30, 3), (7, 0, 2), (5, 0, 4), (9, 0, 1)):
        assert_close(parallel(*graphs(*sizes)), single(*graphs(*sizes)), tolerance=1e-11)
    assert len(parallel._traces.planned) == 2


def test_batches_sent_ahead() -> None:
    step, single = lists()[0], lists()[0]
    parallel = gs.parallelize(step, devices=3)
    batches = CASES["lists"].calls
    for actual, batch in zip(parallel.map(iter(batches)), batches, strict=True):
        assert_close(actual, single(*batch), tolerance=1e-11)
    assert len(parallel._traces.planned) == 1


def test_sizes_of_a_graph_around_are_each_their_own() -> None:
    """Nobody knows there which are the same; whatever they are, the numbers are one device's."""
    step, single = graph_network()[0], graph_network()[0]
    parallel = gs.parallelize(step, devices=2, split=dict.fromkeys(("ends", "edges", "graph_of", "wanted")))
    around = tf.function(parallel, input_signature=step.input_signature)
    for sizes in NODES:
        assert_close(around(*graphs(*sizes)), single(*graphs(*sizes)), tolerance=1e-11)


def test_more_open_sizes_than_symbols() -> None:
    """Of those that have none, nothing is concluded."""

    @tf.function(input_signature=[*[spec(None, None, None)] * 3, spec(None, None)])
    def f(a: tf.Tensor, b: tf.Tensor, c: tf.Tensor, d: tf.Tensor) -> Any:
        return tf.tanh(a) * 2.0, tf.reduce_sum(b, 0), tf.transpose(c), tf.nn.softmax(d)

    parallel = gs.parallelize(f, devices=2)
    for k in range(2, 5):
        shapes = np.arange(11) + k
        call = [numbers(*shapes[:3]), numbers(*shapes[3:6]), numbers(*shapes[6:9]), numbers(*shapes[9:])]
        assert_close(parallel(*call), f(*call))
    assert len(parallel._traces.planned) == 1
    assert "Tanh" in {op.type for op in parallel.plan(*call).sharded_ops}


def test_what_the_warning_of_many_signatures_advises_works() -> None:
    """The eighth pair of sizes is warned of; as advised, there are two traces and two plans, and no warning."""
    w = weights(4, 4)

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        return tf.tanh(x @ w), tf.reduce_sum(y)

    calls = [(numbers(5 + k, 4), numbers(9 + 2 * k, 2)) for k in range(9)]
    parallel = gs.parallelize(step, devices=2)
    with pytest.warns(gs.errors.RetracingWarning, match="8 signatures") as told:  # noqa: PT031
        for call in calls:
            parallel(*call)
    assert 'tuning={"reduce_retracing": True}' in str(told[0].message)
    parallel = gs.parallelize(step, devices=2, tuning={"reduce_retracing": True})
    for call in calls:
        assert_close(parallel(*call), step(*call))
    assert len(parallel._traces.planned) == 2


def test_the_plan_says_what_has_rows_of_its_own() -> None:
    plan = gs.parallelize(graph_network()[0], devices=2).plan(*graphs(12, 30, 3))
    note = next(note for note in plan.notes if note.startswith("ends, edges, wanted: "))
    assert note.endswith(
        "kept whole, and what follows from them alone runs on one device; split={...} says which are cut. Shares of "
        "the work count rows as 27720, edges.shape[0] as 1013, wanted.shape[0] as 1019"
    )


@pytest.mark.parametrize("shape", [(None, 200), (None, 2, 200)])
def test_spectra_of_any_number_of_sounds(shape: tuple[int | None, ...]) -> None:
    """`tf.signal.frame` takes the axes before time whole, by an end that it splits off the signal's shape."""

    def make() -> Made:
        filters = weights(33, 4)

        @tf.function(input_signature=[spec(*shape)])
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                y = tf.tanh(tf.abs(tf.signal.stft(x, 64, 16)) @ filters)
                loss = tf.reduce_mean(y**2)
            descend([filters], tape, loss)
            return loss, y

        return step, [filters]

    calls = [(numbers(count, *(size for size in shape[1:] if size)),) for count in (5, 7, 2, 1)]
    plan = assert_law(make, calls, sharded=["StridedSlice", "RFFT", "Tanh"], tolerance=1e-11)
    assert plan.program.batch_is_unknown
    assert plan.sharded_fraction > 0.99


def longer_of_two(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    most = tf.maximum(tf.shape(x)[1], tf.shape(y)[1])
    return sum(tf.pad(own, [[0, 0], [0, most - tf.shape(own)[1]]]) for own in (x, y))


def even(x: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    return tf.pad(x, [[0, 0], [0, tf.shape(x)[1] % 2]])


def halved_and_doubled(x: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    halves = tf.nn.conv1d(x[:, :, None], tf.ones((3, 1, 1), x.dtype), 2, "SAME")
    return tf.repeat(tf.tanh(halves), 2, axis=1)[:, :, 0]


def first_of_many(x: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    return 2 * x[:30_000]


def longer_than_five(x: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    return x[:, : tf.where(tf.shape(x)[1] > 5, tf.shape(x)[1], 1)]


def twice_the_other(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return 2 * x[:, : 2 * tf.shape(y)[1]]


def squared(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return 2 * x[:, : tf.shape(y)[1] ** 2]


def all_but_one_rest(x: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    return 2 * x[:, : tf.cond(tf.shape(x)[1] % 840 == 9, lambda: 1, lambda: tf.shape(x)[1])]


def none_of_few(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.tile(x, [1, tf.math.floormod(-((tf.shape(y)[1] // 4 + 4) // 5) * 5, 3) % 4])


SOMETIMES = [longer_of_two, even, halved_and_doubled, first_of_many, longer_than_five, twice_the_other]
SOMETIMES += [squared, all_but_one_rest, none_of_few]


@pytest.mark.parametrize("make", SOMETIMES)
def test_nothing_is_a_length_that_is_one_only_sometimes(make: Callable[..., tf.Tensor]) -> None:
    """Neither the longer one of two, nor one that is padded to an even number, nor the end of a slice."""

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = make(x, y)
            loss = tf.reduce_mean(made**2) * tf.cast(tf.size(made), made.dtype)
        return loss, tape.gradient(loss, x), tf.reduce_mean(tf.tanh(y))

    sizes = [((7, 5), (7, 8)), ((4, 9), (4, 2)), ((5, 6), (5, 6)), ((30_003, 1), (30_003, 2))]
    calls = [(numbers(*x), numbers(*y)) for x, y in sizes]
    function = tf.function(step, input_signature=[spec(None, None)] * 2)
    assert_law(lambda: (function, []), calls, sharded=["Tanh"], at_home=None)


def test_how_much_there_is_follows_from_no_stand_in() -> None:
    """`tf.where(a > 5, a, b)` was taken for `a`, and so was what `tf.size` says behind it: wrong, without an error."""

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        rows, others = tf.shape(x)[0], tf.shape(y)[0]
        chosen = y[: tf.where(others > 5, others, rows)]
        return tf.cast(tf.size(chosen), x.dtype) * tf.reduce_sum(chosen), tf.tanh(x)

    calls = [(numbers(a, 3), numbers(b, 3)) for a, b in ((3, 5), (4, 9), (1, 4), (6, 2), (2, 1))]
    function = tf.function(step, input_signature=[spec(None, 3), spec(None, 3)])
    assert_law(lambda: (function, []), calls, sharded=["Tanh"], at_home=None)


def test_gradients_of_rows_times_a_length_count_no_rows() -> None:
    """In a graph around, the gradient of an output is an argument, whose size was divided by a stand-in."""
    flat = tf.function(lambda x: tf.reshape(x, [-1]), input_signature=[spec(None, None)])

    def around(function: Callable[..., tf.Tensor], x: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.sin(function(x)))
            gradient = tape.gradient(loss, x)
        return gradient, outer.gradient(gradient, x)

    parallel = gs.parallelize(flat, devices=3)
    in_graph = tf.function(lambda x: around(parallel, x), input_signature=[spec(None, None)])
    for rows, length in ((5, 3), (4, 4), (1, 2)):
        x = numbers(rows, length)
        assert_close(in_graph(x), around(flat, x))
    assert "Reshape" in {op.type for op in parallel.plan(x).sharded_ops}


def test_products_of_two_lengths_are_known() -> None:
    """Images of any height and width, made flat by what `tf.shape` says, which is 32 bits."""

    def flat(x: tf.Tensor) -> Any:
        rows, height, width, _ = tf.unstack(tf.shape(x))
        pixels = tf.reshape(x, [rows, height * width, 3])
        return tf.nn.softmax(tf.tanh(pixels), 1), tf.reduce_sum(tf.reshape(x, [rows * height * width, 3]) ** 2, 0)

    calls = [(numbers(7, 5, 6, 3),), (numbers(4, 2, 9, 3),), (numbers(2, 1, 1, 3),)]
    function = tf.function(flat, input_signature=[spec(None, None, None, 3)])
    assert_law(lambda: (function, []), calls, sharded=["Tanh", "Softmax"])
