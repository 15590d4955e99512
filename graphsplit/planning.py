"""Planning: Program + devices -> Plan. One pass forward, one pass back, no TensorFlow op is made.

Forward, every op gets its natural layout: rows flow from the sharded arguments through the rules. Backward, from what
the function returns and changes, every op learns in which layouts it is read. What nobody reads is dropped; what is
whole and is read in pieces is made in pieces where that moves fewer bytes; every other change of layout becomes one
reshard.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.errors import StrictError, bullet_list
from graphsplit.layouts import PARTIAL_SUM, REPLICATE, Layout, Partial, Replicate, Shard
from graphsplit.plans import Plan, Reshard, Step, format_bytes
from graphsplit.programs import Op, Program, Tensor
from graphsplit.rules import Declined, Sharded, answer, answer_for_output, rule_of

_DEEPEST_REMAKE = 24
_ON_SHARDS = "on shards"  # a whole value that the shards read; constants are then re-made, not sent
_Demand = Layout | str


def plan_program(
    program: Program,
    *,
    devices: Sequence[str],
    rows: Sequence[int],
    home: str,
    input_layouts: Sequence[Layout],
    strict: bool = False,
    notes: Sequence[str] = (),
) -> Plan:
    """Decide where every operation runs.

    Args:
      program: the traced function.
      devices, rows: the device and number of rows of each shard; every shard has at least one row.
      home: the device of whole operations.
      input_layouts: `Shard` or `Replicate` for each argument.
      strict: raise `StrictError` if an operation that carries the batch would run at home.

    Raises:
      StrictError: see `strict`.
    """
    natural = _Forward(program, input_layouts)
    backward = _Backward(program, natural)
    plan = Plan(
        program=program,
        devices=tuple(devices),
        rows=tuple(rows),
        home=home,
        input_layouts=tuple(input_layouts),
        steps=tuple(backward.steps),
        reshards=tuple(reversed(backward.reshards)),
        notes=tuple(notes),
    )
    if strict and plan.stayed_home:
        raise StrictError(_strict_message(plan))
    return plan


def _strict_message(plan: Plan) -> str:
    lines = []
    for op, reason in plan.stayed_home:
        where = plan.program.locate(op.name)
        gathered = format_bytes(plan.gathered_bytes(op))
        lines.append(f"{op.type} {op.name!r}{f' at {where}' if where else ''}: {gathered} gathered; {reason}")
    return (
        "strict=True, but these operations carry rows of the batch and would run at home:\n"
        f"{bullet_list(lines)}\n"
        "Rewrite them row by row, keep their argument whole with split={...: None}, or drop strict=True."
    )


class _Forward:
    """The natural form of every op: `answers[i]` for the shards, or None for home, with the reason if it has one."""

    def __init__(self, program: Program, input_layouts: Sequence[Layout]):
        self.program = program
        self.answers: list[Sharded | None] = []
        self.reasons: list[str] = []
        self.seen: list[tuple[Layout, ...]] = []  # the layout in which consumers meet each output
        self._wanted_whole = _tensors_wanted_whole(program)
        arguments = dict(zip(program.inputs, input_layouts, strict=True))
        for op in program.ops:
            if op.index in arguments:
                self._append(None, "", (arguments[op.index],))
            else:
                self._visit(op)

    def _append(self, given: Sharded | None, reason: str, seen: tuple[Layout, ...]) -> None:
        self.answers.append(given)
        self.reasons.append(reason)
        self.seen.append(seen)

    def _visit(self, op: Op) -> None:
        layouts = [self.seen[t.op][t.index] for t in op.inputs]
        whole = (REPLICATE,) * len(op.out_shapes)
        if all(layout is REPLICATE for layout in layouts):
            self._append(None, "", whole)
            return
        rule = rule_of(op.type)
        carries_rows = any(isinstance(layout, Shard) for layout in layouts)
        if op.stateful:
            self._append(None, "it has side effects, which happen once" if carries_rows else "", whole)
            return
        if rule is None:
            self._append(None, f"no rule for {op.type}" if carries_rows else "", whole)
            return
        given = answer(rule, op, layouts, [self.program.bytes(t) for t in op.inputs])
        if isinstance(given, Declined):
            self._append(None, given.reason if carries_rows else "", whole)
            return
        self._append(given, "", tuple([self._as_seen(op, k, layout) for k, layout in enumerate(given.gives)]))

    def _as_seen(self, op: Op, output: int, layout: Layout) -> Layout:
        """A partial sum stays partial only while every reader is linear in it: it is reduced once, not twice."""
        if isinstance(layout, Partial) and (layout != PARTIAL_SUM or Tensor(op.index, output) in self._wanted_whole):
            return REPLICATE
        return layout


def _tensors_wanted_whole(program: Program) -> set[Tensor]:
    wanted = set(program.outputs)
    for op in program.ops:
        rule = rule_of(op.type)
        if rule is None or op.stateful or not rule.keeps_partial:
            wanted.update(op.inputs)
    return wanted


class _Backward:
    """From what is read to what must run: `steps` and `reshards` of the plan."""

    def __init__(self, program: Program, natural: _Forward):
        self.program = program
        self.natural = natural
        self.steps: list[Step] = [Step()] * len(program.ops)
        self.reshards: list[Reshard] = []
        self._demands: list[dict[tuple[int, _Demand], None]] = [{} for _ in program.ops]
        self._required = set(program.effects) | set(program.captures) | set(program.inputs)
        self._costs: dict[tuple[Tensor, Layout], int] = {}
        self._inputs = set(program.inputs)
        self._moved: set[Reshard] = set()
        for tensor in program.outputs:
            self._demand(tensor, REPLICATE)
        for op in reversed(program.ops):
            if self._demands[op.index] or op.index in self._required:
                self.steps[op.index] = self._visit(op)
                self._required.update(op.controls)

    def _demand(self, tensor: Tensor, layout: _Demand) -> None:
        self._demands[tensor.op][tensor.index, layout] = None

    def _demand_inputs(self, op: Op, sharded: Sharded) -> None:
        for tensor, layout in zip(op.inputs, sharded.wants, strict=True):
            self._demand(tensor, _ON_SHARDS if layout is REPLICATE else layout)

    def _visit(self, op: Op) -> Step:
        given = self.natural.answers[op.index]
        if given is not None:
            self._demand_inputs(op, given)
            for (output, demand), _ in self._demands[op.index].items():
                layout = REPLICATE if demand is _ON_SHARDS else demand
                self._reshard(Tensor(op.index, output), given.gives[output], layout)
            return Step(shards=given)
        return self._visit_whole(op)

    def _visit_whole(self, op: Op) -> Step:
        """Visit an op whose natural form is whole: read whole, cut, or made in pieces from the start."""
        remade: Sharded | None = None
        home = op.index in self._required
        for (output, demand), _ in self._demands[op.index].items():
            tensor = Tensor(op.index, output)
            if isinstance(demand, Shard):
                if op.type == "Const":
                    continue
                if remade is None or remade.gives[output] != demand:
                    found = self._remake(tensor, demand)
                    if found is None or remade is not None:
                        self._reshard(tensor, REPLICATE, demand)
                        home = True
                    else:
                        remade = found
            elif demand is not _ON_SHARDS or op.type != "Const":
                home = True
        if remade is not None:
            self._demand_inputs(op, remade)
        if home:
            for tensor in op.inputs:
                self._demand(tensor, REPLICATE)
        return Step(home, remade, self.natural.reasons[op.index])

    def _reshard(self, tensor: Tensor, source: Layout, target: _Demand) -> None:
        if isinstance(target, str) or source == target:
            return
        if not isinstance(source, Replicate) and not isinstance(target, Replicate):
            self._reshard(tensor, source, REPLICATE)  # through home: gather or reduce, then cut
            source = REPLICATE
        move = Reshard(tensor, source, target)
        if move not in self._moved:
            self._moved.add(move)
            self.reshards.append(move)

    def _remake(self, tensor: Tensor, layout: Shard) -> Sharded | None:
        """Return how to make a whole tensor in pieces, if that moves fewer bytes than cutting it."""
        op = self.program.ops[tensor.op]
        rule = rule_of(op.type)
        if rule is None or op.stateful or op.controls or op.index in self._inputs:
            return None
        found = answer_for_output(rule, op, tensor.index, layout)
        if found is None:
            return None
        cost = sum(self._cost(t, want) for t, want in zip(op.inputs, found.wants, strict=True))
        return found if cost < self.program.bytes(tensor) else None

    def _cost(self, tensor: Tensor, layout: Layout, depth: int = 0) -> int:
        """Return the bytes that travel when the shards read `tensor` in `layout`."""
        if (tensor, layout) in self._costs:
            return self._costs[tensor, layout]
        op, size = self.program.ops[tensor.op], self.program.bytes(tensor)
        made = self.natural.answers[tensor.op]
        if op.type == "Const" or (made is not None and made.gives[tensor.index] == layout):
            cost = 0
        elif made is not None or layout is REPLICATE or depth > _DEEPEST_REMAKE:
            cost = size
        else:
            cost = min(size, self._remake_cost(op, tensor, layout, depth))
        self._costs[tensor, layout] = cost
        return cost

    def _remake_cost(self, op: Op, tensor: Tensor, layout: Layout, depth: int) -> int:
        rule = rule_of(op.type)
        size = self.program.bytes(tensor)
        if rule is None or op.stateful or op.controls or not isinstance(layout, Shard) or op.index in self._inputs:
            return size
        found = answer_for_output(rule, op, tensor.index, layout)
        if found is None:
            return size
        return sum(self._cost(t, want, depth + 1) for t, want in zip(op.inputs, found.wants, strict=True))
