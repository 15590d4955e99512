"""A shard's copy of an operation: its operands resized, its numbers drawn, the functions that it calls its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.graphdefs import make_node
from graphsplit.core.layouts import PARTIAL_MEAN, Shard
from graphsplit.core.polynomials import Polynomial, Symbol
from graphsplit.core.symbolic_sizes import OWN, ROWS
from graphsplit.emission import random_numbers
from graphsplit.emission.draft import Draft
from graphsplit.emission.emitted_graph import Origin
from graphsplit.emission.loop_inputs import bring_loop_inputs
from graphsplit.emission.row_counts import BEGIN, RowCounts
from graphsplit.graph.function_calls import CONTROL_FLOW, function_names, hand_over, rename_functions
from graphsplit.planning.local_plan import LocalPlan
from graphsplit.planning.mesh import Mesh
from graphsplit.program.program import Op
from graphsplit.rules import Sharded
from graphsplit.rules.factors import LIST, Place, Shift
from graphsplit.rules.local_operands import resized

_PART = "part"
EmitLocal = Callable[[LocalPlan, str, int, bool], tuple[str, dict[str, Any]]]


class ShardCopies:
    """Writes copies of operations.

    Args:
      draft: what is written.
      counts: how many rows each shard has.
      mesh: the shards.
      random: `"exact"` or `"independent"`.
      functions: takes the functions that loops and branches call, by name.
      emit_local: makes the function in which a shard runs a body: see `local_emitter`.
    """

    def __init__(
        self,
        draft: Draft,
        counts: RowCounts,
        mesh: Mesh,
        random: str,
        functions: dict[str, Any],
        emit_local: EmitLocal,
    ):
        self._draft = draft
        self._counts = counts
        self._mesh = mesh
        self._random = random
        self._functions = functions
        self._emit_local = emit_local

    def write(self, op: Op, sharded: Sharded, d: int, device: str, data: Sequence[str], controls: Sequence[str]) -> Any:
        """Write the copy of an operation for shard `d`, and return its node.

        Args:
          op, sharded: the operation, and how it runs on the shards.
          device: where.
          data: what it reads; "" for operands that the shard makes for itself.
          controls: what it waits for, `^node`.
        """
        name = self._draft.prefixes[d] + op.name
        inputs = list(data)
        for i, value in resized(op, sharded, lambda extent: self._extent(extent, d)).items():
            inputs[i] = self._counts.operand(
                f"{name}/graphsplit_operand_{i}", d, value, self._draft.dtype(op.inputs[i])
            )
        for i, shift in sharded.shift.items():
            inputs[i] = self._shifted(op, i, shift, inputs[i], d, device)
        inputs += controls
        if sharded.draw:
            return self._draw(op, sharded, inputs, d, device)
        if sharded.weighted and self._mesh.shards > 1:
            return self._weighted(op, sharded, inputs, d, device)
        node = self._draft.copy(op, name, device, inputs, d)
        if PARTIAL_MEAN in sharded.gives and self._mesh.shards > 1:
            node.op = "Sum"  # what they add up to is divided once
        if op.type == "TensorListStack" and isinstance(rows := sharded.wants[0], Shard) and rows.axis == LIST:
            node.attr["num_elements"].i = -1  # as many as the shard has rows
        if op.type in CONTROL_FLOW:
            if sharded.bodies:  # else it runs as it is, on whole values that each shard has
                self._localise_bodies(op, node, sharded, d)
            bring_loop_inputs(node, self._draft)
        return node

    def _extent(self, extent: Shard | Place, d: int) -> Polynomial:
        if isinstance(extent, Shard):
            return self._counts.own(extent, d)
        first = self._counts.before(extent.layout, d)
        return Polynomial.of(first + self._counts.own(extent.layout, d)) if extent.end else first

    def _shifted(self, op: Op, operand: int, shift: Shift, source: str, d: int, device: str) -> str:
        """Return a shard's numbers of its own rows, given those that these rows have in the whole."""
        name, dtype = (
            f"{self._draft.prefixes[d]}{op.name}/graphsplit_own_{operand}",
            self._draft.dtype(op.inputs[operand]),
        )
        before = self._counts.before(shift.layout, d)
        place = [before, *[Polynomial.of(0)] * (shift.columns - 1), None]
        value = np.array(place, object)[:-1] if shift.columns else np.array(place, object)[0:1].reshape(())
        less = self._counts.operand(f"{name}/before", d, value, dtype)
        self._draft.add(make_node(name, "Sub", [source, less], device, T=dtype), Origin(op.index, d, "shift"))
        return name

    def _weighted(self, op: Op, sharded: Sharded, inputs: Sequence[str], d: int, device: str) -> Any:
        """Write the mean of a shard's own rows times its share of all rows."""
        name, dtype = self._draft.prefixes[d] + op.name, op.out_dtypes[0]
        averaged = sharded.wants[0]
        assert isinstance(averaged, Shard)
        share = self._counts.share(f"{name}/graphsplit_share", d, dtype, averaged)
        local = self._draft.copy(op, f"{name}/graphsplit_local", device, inputs, d, _PART)
        node = make_node(name, "Mul", [local.name, share], device, T=dtype)
        self._draft.add(node, Origin(op.index, d, "op"))
        return node

    def _draw(self, op: Op, sharded: Sharded, inputs: Sequence[str], d: int, device: str) -> Any:
        """Write a random op that draws the numbers of shard `d`."""
        name, layout, draw = self._draft.prefixes[d] + op.name, sharded.gives[0], sharded.draw
        assert isinstance(layout, Shard)
        assert draw is not None
        shape = [size or 0 for size in op.out_shapes[0] or ()]
        if self._random == "independent":
            nodes = random_numbers.own_stream(op.node, name, inputs, draw, d)
        elif self._draft.program.symbols:
            each = [Polynomial.of(size) for size in (*shape[1:], layout.blocks[0])]
            place = np.array([math.prod(each, start=Polynomial.of(BEGIN)), None], object)[0:1].reshape(())
            first = self._counts.operand(f"{name}/graphsplit_first", d, place, tf.int64)
            nodes = random_numbers.measured_rows(op.node, name, inputs, draw, first, self._counts.writers[d])
        else:
            [rows] = replace(layout, blocks=(1,)).pieces(self._mesh.rows)
            nodes = random_numbers.own_rows(op.node, name, inputs, shape, layout.blocks[0], draw, rows, d)
        for node in nodes:
            node.device = device
            self._draft.add(node, Origin(op.index, d, "op" if node.name == name else _PART))
        return nodes[-1]

    def _localise_bodies(self, op: Op, node: Any, sharded: Sharded, d: int) -> None:
        """Let a loop or branch call bodies made for shard `d`. Shards of the same size share them."""
        names = {}
        for name, plan in sharded.bodies.items():
            names[name], functions = self._emit_local(plan, name, d, carries(op, name))
            self._functions.update(functions)
        rename_functions(node, names)
        hand_over(node, self._counts.told(d, told_sizes(self._draft.program.symbols, on_shard=True)))
        if "output_shapes" in node.attr:  # of the whole; TensorFlow infers them again
            del node.attr["output_shapes"].list.shape[:]


def told_sizes(symbols: Sequence[Symbol], *, on_shard: bool) -> list[Symbol]:
    """Return of which sizes the body of a loop is told, in this order."""
    rows = ([OWN, ROWS, BEGIN] if on_shard else [ROWS]) if ROWS in symbols else []
    return [*rows, *[symbol for symbol in symbols if symbol != ROWS]]


def write_told(draft: Draft, d: int | None, device: str) -> dict[Symbol, str]:
    """Write the placeholders by which the body of a loop is told sizes, of shard `d` or at home; return their names."""
    symbols = told_sizes(draft.program.symbols, on_shard=d is not None)
    told = {symbol: f"{draft.scope}/rows/given_{k}" for k, symbol in enumerate(symbols)}
    for name in told.values():
        draft.add_sizes(make_node(name, "Placeholder", [], device, dtype=tf.int64), d)
    return told


def write_sizes(draft: Draft, counts: RowCounts, op: Op, d: int | None, device: str) -> None:
    """Write integers that follow from sizes, which a program has as an operation, as shard `d` or home reads them."""
    assert op.yields is not None
    source = counts.operand(f"{op.name}/graphsplit_value", d, op.yields, op.out_dtypes[0])
    draft.add(make_node(op.name, "Identity", [source], device, T=op.out_dtypes[0]), Origin(op.index, d, "op"))


def carries(op: Op, name: str) -> bool:
    """Return whether a function of a control-flow op returns what it is given, for the next turn of a loop."""
    return CONTROL_FLOW[op.type].loops and name == function_names(op.node)[1]
