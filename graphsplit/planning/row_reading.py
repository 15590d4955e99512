"""Rows that are read from a variable itself: a lookup that tracing took apart is put together again.

Rules know gathers and layouts of values, so a `ResourceGather` is planned as a read and a gather. But a read copies the
whole variable, each time, once a sparse operation has touched it: 118 ms instead of 0.5 for a million rows of 32.
Where all that reads the value are such gathers, beside the variable or a copy of it, they read their rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphsplit.core.protos import is_of_variable, make_node
from graphsplit.planning.plan import Plan
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program, Tensor


def with_rows_read(plan: Plan) -> tuple[Program, tuple[Step, ...]] | None:
    """Return a plan's program and steps, with lookups that read from variables themselves; None if there are none."""
    reader = _RowReader(plan)
    reader.read()
    ops = tuple(reader.ops)
    return None if ops == plan.program.ops else (replace(plan.program, ops=ops), tuple(reader.steps))


class _RowReader:
    def __init__(self, plan: Plan):
        self.ops = list(plan.program.ops)
        self.steps = list(plan.steps)
        self._plan = plan
        self._moved = {move.tensor for move in plan.moves}
        self._readers: dict[Tensor, list[Op]] = {}
        self._waiting: dict[int, list[int]] = {}  # for each operation

    def read(self) -> None:
        """Let gathers read from variables where they can."""
        live = [op for op, step in zip(self.ops, self.steps, strict=True) if step.once or step.shards]
        for op in live:
            for tensor in dict.fromkeys(op.inputs):
                self._readers.setdefault(tensor, []).append(op)
            for control in op.controls:
                self._waiting.setdefault(control, []).append(op.index)
        for op in live:
            if op.type == "ReadVariableOp" and self.steps[op.index].once:
                self._visit(op)

    def _visit(self, op: Op) -> None:
        """Let the gathers of a variable's value read from the variable, or the copy beside them, instead."""
        value, handle = Tensor(op.index, 0), op.inputs[0]
        gathers = self._readers.get(value, [])
        if not gathers or value in self._plan.program.outputs or value in self._moved:
            return
        if not all(is_of_variable(g.node) and g.inputs[0] == value and value not in g.inputs[1:] for g in gathers):
            return
        copies = self._plan.program.copied.get(handle.op)
        if copies is not None and not all(self._is_there(gather, copies.devices) for gather in gathers):
            return
        later = self._later(handle, op)
        if later and min(later) <= max(g.index for g in gathers):
            return
        self.steps[op.index] = Step()
        for gather in gathers:
            self._write(gather, handle, op.controls)
        gather_positions = [gather.index for gather in gathers]
        for i in later:
            controls = [c for c in self.ops[i].controls if self.steps[c].once or self.steps[c].shards]
            self.ops[i] = replace(self.ops[i], controls=tuple(dict.fromkeys([*controls, *gather_positions])))

    def _is_there(self, gather: Op, copies: Sequence[str]) -> bool:
        """Return whether a copy is on each device that looks up its rows, by an operation that XLA does not compile."""
        devices = self._plan.places.running(gather, self._plan.steps[gather.index])
        return devices <= {*copies} and not self._plan.jit_compile

    def _later(self, handle: Tensor, read: Op) -> list[int]:
        """Return what waits for a read of a variable, or writes it after that."""
        writers = [op.index for op in self._readers[handle] if op.writes and op.index > read.index]
        return list(dict.fromkeys([*writers, *self._waiting.get(read.index, ())]))

    def _write(self, gather: Op, source: Tensor, controls: Sequence[int]) -> None:
        """Write a gather that reads from what a handle stands for."""
        is_nd = gather.type == "GatherNd"
        attributes = {"dtype": gather.attr("Tparams"), "Tindices": gather.attr("Tindices")}
        if not is_nd:
            attributes["batch_dims"] = gather.attr("batch_dims")
        node = make_node(gather.name, "ResourceGatherNd" if is_nd else "ResourceGather", [], **attributes)
        step, indices = self.steps[gather.index], gather.inputs[1]
        self.ops[gather.index] = replace(
            gather,
            type=node.op,
            node=node,
            inputs=(source, indices),
            in_shapes=(self.ops[source.op].out_shapes[source.index], gather.in_shapes[1]),
            controls=tuple(dict.fromkeys([*gather.controls, *controls])),
            constants={k: value for k, value in gather.constants.items() if k == 1},
            symbols={k: value for k, value in gather.symbols.items() if k == 1},
            stateful=True,
        )
        if step.shards:
            self.steps[gather.index] = replace(step, shards=replace(step.shards, wants=step.shards.wants[:2]))
