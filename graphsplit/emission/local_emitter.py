"""Emission of what a shard does by itself: a `LocalPlan` -> a function."""

from __future__ import annotations

from typing import Any

from graphsplit.core.layouts import REPLICATE, Layout, Shard
from graphsplit.core.protos.graphdefs import function_definition
from graphsplit.core.sizes.polynomials import Symbol
from graphsplit.core.sizes.symbolic_sizes import ROWS
from graphsplit.emission.constants import Constants
from graphsplit.emission.draft import Draft
from graphsplit.emission.shards.row_counts import FixedRows, RowCounts, Site, length_sizes
from graphsplit.emission.shards.shard_copies import ShardCopies, write_sizes, write_told
from graphsplit.planning.propagation.local_plan import LocalPlan
from graphsplit.program.graph.function_calls import named_by_content
from graphsplit.program.graph.inlining import XLA_ATTRIBUTE
from graphsplit.program.program import SIZES, Op, Tensor


def emit_local(plan: LocalPlan, name: str, d: int, carries: bool) -> tuple[str, dict[str, Any]]:
    """Return the name of the function in which shard `d` runs a body, and it and what it calls by their names.

    Its content gives it its name. If it `carries` its arguments to the next turn of a loop, it returns what it is told
    of rows as well.
    """
    draft = Draft(plan.program, range(d, d + 1), alike=True)
    told = write_told(draft, d, "")
    counts = _count_rows(plan, d, draft, told)
    return _LocalEmitter(plan, d, draft, counts, list(told.values())).emit(name, carries)


def _count_rows(plan: LocalPlan, d: int, draft: Draft, given: dict[Symbol, str]) -> RowCounts:
    site = Site("", {d: ""}, f"{draft.scope}/rows", draft.add_sizes, given)
    if ROWS in plan.program.symbols:
        return RowCounts(site)
    return FixedRows(plan.mesh.rows, site._replace(lengths=length_sizes(given)))


class _LocalEmitter:
    def __init__(self, plan: LocalPlan, d: int, draft: Draft, counts: RowCounts, told: list[str]):
        self._plan = plan
        self._d = d
        self._program = plan.program
        self._functions: dict[str, Any] = {}
        self._draft = draft
        self._counts = counts
        self._told = told
        self._constants = Constants(draft, counts, plan.mesh)
        self._copies = ShardCopies(draft, counts, plan.mesh, plan.random, self._functions, emit_local)

    def emit(self, name: str, carries: bool) -> tuple[str, dict[str, Any]]:
        for op, step in zip(self._program.ops, self._plan.steps, strict=True):
            if step.home:
                self._write_whole(op)
            if step.shards:
                wanted = enumerate(zip(op.inputs, step.shards.wants, strict=True))
                device = self._device(op)
                data = ["" if i in step.shards.makes else self._read(t, want, device) for i, (t, want) in wanted]
                self._copies.write(op, step.shards, self._d, device, data, self._controls(op))
        pairs = zip(self._program.outputs, self._plan.output_layouts, strict=True)
        outputs = [
            self._read(tensor, layout, self._device(self._program.ops[tensor.op])) for tensor, layout in pairs
        ] + (self._told if carries else [])
        inputs = [*[self._program.ops[i].name for i in self._program.inputs], *self._told]
        function = function_definition(name, self._draft.nodes, inputs, outputs, ())
        for original in self._program.library.function:
            if original.signature.name == name and XLA_ATTRIBUTE in original.attr:
                function.attr[XLA_ATTRIBUTE].CopyFrom(original.attr[XLA_ATTRIBUTE])
        function = named_by_content(function)
        self._functions[function.signature.name] = function
        return str(function.signature.name), self._functions

    def _write_whole(self, op: Op) -> None:
        """Write an operation on whole values, which every shard has for itself."""
        if op.type == SIZES:
            write_sizes(self._draft, self._counts, op, self._d, "")
            return
        device = self._device(op)
        data = [self._read(tensor, REPLICATE, device) for tensor in op.inputs]
        self._draft.copy(op, op.name, device, [*data, *self._controls(op)], self._d)

    def _device(self, op: Op) -> str:
        """Return the device of an operation in a column; "" where the loop or branch is."""
        mesh = self._plan.mesh
        return mesh.near(self._d, op) if mesh.column_of(op) else ""

    def _controls(self, op: Op) -> list[str]:
        return [f"^{self._name(c)}" for c in op.controls if self._program.ops[c].type != "Placeholder"]

    def _name(self, position: int) -> str:
        name = self._program.ops[position].name
        return name if self._plan.steps[position].home else self._draft.prefixes[self._d] + name

    def _read(self, tensor: Tensor, layout: Layout, device: str) -> str:
        op, step = self._program.ops[tensor.op], self._plan.steps[tensor.op]
        suffix = f":{tensor.index}" if tensor.index else ""
        if op.type == "Placeholder":
            return op.name
        if step.shards and step.shards.gives[tensor.index] == layout:
            return self._draft.prefixes[self._d] + op.name + suffix
        if op.is_constant and (isinstance(layout, Shard) or not step.home):
            return self._constants.get(op, layout, self._d, device)
        return op.name + suffix
