"""Locks: graphs that are emitted for programs are the recorded ones, whatever their nodes are called; so are texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import tensorflow as tf

from graphsplit.core.protos import constant_node, function_definition, make_node
from tests.helpers.emitted_graphs import NAMES, VERSIONS, Function, functions_of, record_of, recorded
from tests.helpers.graph_digests import digest_of, reached
from tests.helpers.printed_texts import FOLDER, TEXTS, file_of, text_of

pytestmark = pytest.mark.sampled(quick=34)

HEAD, RECORDS = recorded()
AGAIN = (
    "A commit that moves or renames leaves every graph as it is. If this one is meant to be another, "
    "`python ci/emitted_graphs.py` records all graphs anew, and the commit says why they changed."
)


recorded_here = pytest.mark.skipif(HEAD != VERSIONS, reason=f"the record is of {HEAD}, and this is {VERSIONS}")


@recorded_here
@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_the_recorded_one(name: str):
    before, now = RECORDS[name], record_of(name)
    assert now == before, (
        f"{name!r} is emitted as another graph: {before.operations} operations and {before.sends} sends before, "
        f"{now.operations} and {now.sends} now. {AGAIN}"
    )


def test_every_program_is_recorded():
    assert list(RECORDS) == list(NAMES), AGAIN


REVIEW = "`python ci/printed_texts.py` records all texts anew; review the diff."


@recorded_here
@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_the_reviewed_one(name: str):
    assert text_of(name) == file_of(name).read_text(encoding="utf-8"), REVIEW


def test_every_text_is_of_a_program():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(file_of(name).name for name in TEXTS), REVIEW


# The digest


def changed(function: Function, change: Callable[[dict[str, Any]], None]) -> str:
    """Return the digest of copies in which something was changed."""
    copies = {}
    for one in reached(*function):
        copies[one.signature.name] = type(one)()
        copies[one.signature.name].CopyFrom(one)
    change(copies)
    return digest_of(copies[function.definition.signature.name], copies.values())


def places(function: Function, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, int]]:
    """Yield the nodes that are wanted: the functions that they are in, the called ones too, and their positions."""
    for one in reached(*function):
        yield from ((one.signature.name, k) for k, node in enumerate(one.node_def) if wanted(node))


def data(node: Any) -> list[str]:
    return [reference for reference in node.input if reference[0] != "^"]


def another_edge(node: Any, function: Any) -> None:
    node.input[0] = next(a.name for a in reversed(function.signature.input_arg) if a.name != node.input[0])


def other_order(node: Any, function: Any) -> None:
    node.input[0], node.input[1] = node.input[1], node.input[0]


def another_device(node: Any, function: Any) -> None:
    node.device = "/device:CPU:4" if node.device != "/device:CPU:4" else "/device:CPU:3"


def another_constant(node: Any, function: Any) -> None:
    array = tf.make_ndarray(node.attr["value"].tensor)
    other = array + b"x" if array.dtype == object else ~array if array.dtype == bool else array + 1
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(other, node.attr["dtype"].type, array.shape))


def one_attribute_less(node: Any, function: Any) -> None:
    del node.attr[min(name for name in node.attr if name != "_class")]


def another_attribute(node: Any, function: Any) -> None:
    node.attr["T"].type = tf.complex128.as_datatype_enum


def another_type(node: Any, function: Any) -> None:
    node.op = "Other"


def one_wait_less(node: Any, function: Any) -> None:
    del node.input[-1]


def one_wait_more(node: Any, function: Any) -> None:
    node.input.append(f"^{next(other.name for other in function.node_def if not other.input)}")


def one_node_more(node: Any, function: Any) -> None:
    copy = function.node_def.add()
    copy.CopyFrom(node)
    copy.name = f"{node.name}_again"


CHANGES: dict[Callable[[Any, Any], None], Callable[[Any], bool]] = {
    another_edge: lambda node: bool(data(node)),
    other_order: lambda node: len(set(data(node)[:2])) == 2,
    another_device: lambda node: True,
    another_constant: lambda node: node.op == "Const" and tf.make_ndarray(node.attr["value"].tensor).size > 0,
    one_attribute_less: lambda node: bool(set(node.attr) - {"_class"}),
    another_attribute: lambda node: "T" in node.attr and bool(node.attr["T"].type),
    another_type: lambda node: True,
    one_wait_less: lambda node: bool(node.input) and node.input[-1][0] == "^",
    one_wait_more: lambda node: len(node.input) > 0,
    one_node_more: lambda node: True,
}


@pytest.fixture(scope="module")
def function() -> Function:
    """A loop with a variable that every turn changes, for shards that may have no rows."""
    [found] = functions_of("loop that writes, any rows")
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_of_any_node_is_another_digest(change: Callable[[Any, Any], None], function: Function):
    known = digest_of(*function)
    found = list(places(function, CHANGES[change]))
    assert len(found) >= 5
    assert len({name for name, _ in found}) > 1, "those of called functions count as well"
    for name, k in found:

        def change_one(functions: dict[str, Any], name: str = name, k: int = k) -> None:
            change(functions[name].node_def[k], functions[name])

        assert changed(function, change_one) != known, f"{change.__name__} of node {k} of {name}"


def test_what_is_taken_returned_and_run_counts(function: Function):
    own, known = function.definition.signature.name, digest_of(*function)

    def results_exchanged(functions: dict[str, Any]) -> None:
        returned = functions[own].ret
        returned["r0"], returned["r1"] = returned["r1"], returned["r0"]

    def nothing_must_run(functions: dict[str, Any]) -> None:
        functions[own].control_ret.clear()

    def arguments_exchanged(functions: dict[str, Any]) -> None:
        first, second = functions[own].signature.input_arg[:2]
        first.name, second.name = second.name, first.name

    def compiled(functions: dict[str, Any]) -> None:
        functions[own].attr["_XlaMustCompile"].b = True

    for change in (results_exchanged, nothing_must_run, arguments_exchanged, compiled):
        assert changed(function, change) != known, change.__name__


def rename_all(functions: dict[str, Any]) -> None:
    """Give all functions and what is in them other names, in another order."""
    calls = {name: f"function_{k}" for k, name in enumerate(reversed(functions))}
    for one in functions.values():
        one.signature.name = calls[one.signature.name]
        own = [thing.name for things in (one.signature.input_arg, one.node_def) for thing in things]
        names = {old: f"node_{k}" for k, old in enumerate(reversed(own))}
        for thing in (*one.signature.input_arg, *one.node_def):
            thing.name = names[thing.name]
        nodes = list(one.node_def)
        for node in nodes:
            waits = [reference for reference in node.input if reference[0] == "^"]
            node.input[:] = [renamed(reference, names) for reference in (*data(node), *reversed(waits))]
            node.attr["_class"].list.s[:] = [b"loc:@somewhere"]
            for value in node.attr.values():
                for called in [value.func] if value.HasField("func") else value.list.func:
                    called.name = calls[called.name]
        for table in (one.ret, one.control_ret):
            for key, reference in list(table.items()):
                table[key] = renamed(reference, names)
        del one.node_def[:]
        one.node_def.extend(reversed(nodes))


def renamed(reference: str, names: dict[str, str]) -> str:
    sign, name = "^" * (reference[0] == "^"), reference.lstrip("^")
    head, colon, output = name.partition(":")
    return f"{sign}{names[head]}{colon}{output}"


@pytest.mark.parametrize("name", ["loop that writes, any rows", "lstm", "compiled", "branch that writes", "map"])
def test_names_and_the_order_of_nodes_do_not_count(name: str):
    for function in functions_of(name):
        assert changed(function, rename_all) == digest_of(*function)


def handmade(read: Sequence[str]) -> Any:
    """Return a function of two equal constants, of which three operations read these."""
    nodes = [constant_node(name, tf.constant(2.0).numpy(), tf.float32) for name in ("a", "b")]
    nodes += [make_node("sum", "AddV2", read[:2], T=tf.float32), make_node("less", "Neg", read[2:], T=tf.float32)]
    return function_definition("handmade", nodes, [], ["sum", "less"], [])


def test_equal_nodes_are_told_apart_by_what_reads_them():
    found = {read: digest_of(handmade(read), []) for read in itertools.product("ab", repeat=3)}
    assert len(set(found.values())) == 4, "which of the two it is does not count; who shares one does"
    for read, digest in found.items():
        assert digest == found[tuple("ba"["ab".index(name)] for name in read)]
