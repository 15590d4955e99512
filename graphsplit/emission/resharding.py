"""Resharding: every tensor in the layout in which it is read, made once, however many operations read it."""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.core.graphdefs import constant_node, constant_value
from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Layout, Partial, Replicate, Shard
from graphsplit.emission import collectives
from graphsplit.emission.draft import Draft
from graphsplit.emission.local_operands import own_rows
from graphsplit.emission.row_counts import RowCounts
from graphsplit.planning.plan import Plan
from graphsplit.planning.steps import Pack
from graphsplit.program.program import SIZES, Op, Tensor

_SENT = "sent"  # the whole value as each shard takes it from a pack


class Resharding:
    """References of tensors in the layouts in which they are read.

    Args:
      plan: which tensor has which layout where.
      draft: what is written; what it takes to change layouts is added.
      counts: how many rows each shard has.
    """

    def __init__(self, plan: Plan, draft: Draft, counts: RowCounts):
        self._plan = plan
        self._program = plan.program
        self._draft = draft
        self._counts = counts
        self._made: dict[tuple[Tensor, Layout | str], list[str]] = {}
        self._constants: dict[tuple[int, Layout, int], str] = {}
        self._packed: dict[str, dict[Tensor, Pack]] = {"whole values": {}, "all-reduce": {}}
        for pack in plan.packs:
            self._packed[pack.kind].update(dict.fromkeys(pack.tensors, pack))

    def read(self, tensor: Tensor, layout: Layout, d: int | None = None) -> str:
        """Return the reference of `tensor` in `layout`, on device `d` or (None) at home; make it if need be."""
        op, step = self._program.ops[tensor.op], self._plan.steps[tensor.op]
        if self._plan.local and op.type == "Placeholder":
            return op.name
        if step.shards and step.shards.gives[tensor.index] == layout and (d is not None or not step.home):
            shard = self._draft.shards[0] if d is None else d
            return _reference(self._draft.prefixes[shard] + op.name, tensor.index)
        if d is not None and (op.type == "Const" or (op.is_constant and layout is REPLICATE)):
            return self._constant(op, layout, d)
        if isinstance(layout, Replicate):
            if d is not None and tensor in self._packed["whole values"]:
                return self._sent(tensor)[d]
            return _reference(op.name, tensor.index) if step.home else self._whole(tensor)
        if (tensor, layout) not in self._made:
            self._made[tensor, layout] = self._pieces(tensor, layout)
        return self._made[tensor, layout][d or 0]

    def _pieces(self, tensor: Tensor, layout: Layout) -> list[str]:
        """Cut a whole value, or make it the sum of itself and zeros."""
        kind = f"split_{layout.axis}" if isinstance(layout, Shard) else "zero_fill"
        name, whole, dtype = self._name(tensor, kind), self.read(tensor, REPLICATE), self._draft.dtype(tensor)
        home, devices = self._plan.home, self._plan.devices
        if isinstance(layout, Shard):
            nodes, references = collectives.split(name, whole, layout, self._counts, dtype, home, devices)
        else:
            shape = self._program.shape(tensor)
            nodes, references = collectives.zero_fill(name, whole, shape, self._counts, dtype, home, devices)
        self._draft.nodes += nodes
        return references

    def _whole(self, tensor: Tensor) -> str:
        """Gather or reduce what the shards have."""
        if (tensor, REPLICATE) not in self._made and tensor in self._packed["all-reduce"]:
            self._reduce_packed(tensor)
        if (tensor, REPLICATE) not in self._made:
            shards = self._plan.steps[tensor.op].shards
            assert shards is not None
            given, dtype = shards.gives[tensor.index], self._draft.dtype(tensor)
            home, devices = self._plan.home, self._plan.devices
            parts = [self.read(tensor, given, d) for d in range(len(devices))]
            if isinstance(given, Partial):
                name = self._name(tensor, "all_reduce")
                nodes, reference = collectives.all_reduce(
                    name, parts, given.reduction, self._counts, dtype, home, shards.divisor
                )
            else:
                assert isinstance(given, Shard)
                name = self._name(tensor, "all_gather")
                nodes, reference = collectives.all_gather(name, parts, given, self._counts, dtype, home, devices)
            self._draft.nodes += nodes
            self._made[tensor, REPLICATE] = [reference]
        return self._made[tensor, REPLICATE][0]

    def _sent(self, tensor: Tensor) -> list[str]:
        """Return the references, one for each shard, of a whole value that is sent together with others."""
        if (tensor, _SENT) not in self._made:
            name, pack, sizes = self._pack(tensor, "whole values")
            sources, dtype = [self.read(t, REPLICATE) for t in pack], self._draft.dtype(tensor)
            home, devices = self._plan.home, self._plan.devices
            nodes, references = collectives.send_packed(name, sources, sizes, dtype, home, devices)
            self._draft.nodes += nodes
            for k, packed in enumerate(pack):
                self._made[packed, _SENT] = [own[k] for own in references]
        return self._made[tensor, _SENT]

    def _reduce_packed(self, tensor: Tensor) -> None:
        """Reduce a tensor together with others."""
        name, pack, sizes = self._pack(tensor, "all-reduce")
        home, devices, dtype = self._plan.home, self._plan.devices, self._draft.dtype(tensor)
        parts = [[self.read(t, PARTIAL_SUM, d) for t in pack] for d in range(len(devices))]
        nodes, references = collectives.reduce_packed(name, parts, sizes, dtype, home, devices)
        self._draft.nodes += nodes
        self._made.update({(t, REPLICATE): [reference] for t, reference in zip(pack, references, strict=True)})

    def _pack(self, tensor: Tensor, kind: str) -> tuple[str, Sequence[Tensor], list[int]]:
        """Return a name for a tensor's pack, what is in it, and the size of each."""
        pack = self._packed[kind][tensor]
        name = f"{self._draft.scope}/packed/{kind.replace(' ', '_')}_{self._plan.packs.index(pack)}"
        return name, pack.tensors, [self._program.bytes(t) // self._draft.dtype(t).size for t in pack.tensors]

    def _name(self, tensor: Tensor, kind: str) -> str:
        """Return a name for what changes the layout of a tensor: it says how, and of which operation."""
        suffix = f"_{tensor.index}" if tensor.index else ""
        before = sum(key[0] == tensor for key in self._made)
        name = f"{self._draft.scope}/{kind}/{self._program.ops[tensor.op].name}{suffix}"
        return name + (f"_{before}" if before else "")

    def _constant(self, op: Op, layout: Layout, d: int) -> str:
        """Return device `d`'s own copy, whole or cut, of a constant: constants are re-made, not sent."""
        key = (op.index, layout, d)
        if key not in self._constants:
            cut = f"/{layout.axis}" + "".join(f"_{b}" for b in layout.blocks[:8]) if isinstance(layout, Shard) else ""
            name, device = f"{self._draft.prefixes[d]}{op.name}{cut}", self._draft.devices[d]
            if isinstance(layout, Shard):
                value = own_rows(constant_value(op.node), layout, self._plan.rows, d)
                self._draft.add(constant_node(name, value, op.out_dtypes[0], device), d)
            elif op.type == SIZES:
                assert op.yields is not None
                name = self._counts.operand(name, d, op.yields, op.out_dtypes[0])
            else:
                wait = self._counts.waits_for(d)
                self._draft.copy(op, name, device, [wait] if wait else [], d)
            self._constants[key] = name
        return self._constants[key]


def _reference(name: str, index: int) -> str:
    return f"{name}:{index}" if index else name
