"""The backward pass of planning: from what is returned and changed, what must run, and in which layouts it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Layout, Replicate, Shard
from graphsplit.core.symbolic_sizes import has_sizes
from graphsplit.planning.forward_propagation import Forward
from graphsplit.planning.plan import Plan
from graphsplit.planning.steps import Reshard, Step
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.rules import Sharded, answer_for_output
from graphsplit.rules.random import STATEFUL_RANDOM, rule_to_make

_DEEPEST_REMAKE = 24
_INFINITE = 1 << 62
_SMALL = 1024  # bytes: less than the copy of a tensor between devices costs
_ON_SHARDS = "on shards"  # a whole value that the shards read; what follows from constants is then re-made, not sent
_REMADE_WHOLE = frozenset({"EmptyTensorList", "TensorListReserve"})
_Demand = Layout | str


class Backward:
    """From what is read to what must run.

    Args:
      program: what is planned.
      natural: its forward pass.
      output_layouts: the layouts in which the outputs are wanted.
      local: whether every shard runs the program by itself, as the body of a loop: then whole ops run on every shard,
        and there is nobody to exchange rows with.
      independent: whether shards may draw random numbers of their own.
      plan_bodies: plans the functions of a loop or branch that stays at home, given the layouts of its inputs.

    Attributes:
      steps: what becomes of each op.
      reshards: the changes of layout, last first.
      obstacles: for a local program, why it cannot run by itself.
    """

    def __init__(
        self,
        program: Program,
        natural: Forward,
        output_layouts: Sequence[Layout],
        local: bool = False,
        independent: bool = False,
        plan_bodies: Callable[[Op, Sequence[Layout]], Mapping[str, Plan]] | None = None,
    ):
        self.program = program
        self.natural = natural
        self.steps: list[Step] = [Step()] * len(program.ops)
        self.reshards: list[Reshard] = []
        self.obstacles: list[str] = []
        self._local = local
        self._independent = independent
        self._plan_bodies = plan_bodies
        self._demands: list[dict[tuple[int, _Demand], None]] = [{} for _ in program.ops]
        self._required = set(program.effects) | set(program.captures) | set(program.inputs)
        self._costs: dict[tuple[Tensor, Layout], int] = {}
        self._inputs = set(program.inputs)
        self._remade_whole: dict[int, bool] = {}
        self._moved: set[Reshard] = set()
        for tensor, layout in zip(program.outputs, output_layouts, strict=True):
            self._demand(tensor, layout)
        for op in reversed(program.ops):
            if self._demands[op.index] or op.index in self._required:
                self.steps[op.index] = self._visit(op)
                self._required.update(op.controls)
                if local:
                    self._check_local(op)

    def _check_local(self, op: Op) -> None:
        step = self.steps[op.index]
        if step.home and op.stateful:
            self.obstacles.append(f"{op.type} in it has side effects, which happen once")
        elif step.home and step.reason:
            self.obstacles.append(f"{op.type} in it: {step.reason}")

    def _demand(self, tensor: Tensor, layout: _Demand) -> None:
        self._demands[tensor.op][tensor.index, layout] = None

    def _demand_inputs(self, op: Op, sharded: Sharded) -> None:
        for i, (tensor, layout) in enumerate(zip(op.inputs, sharded.wants, strict=True)):
            if i not in sharded.makes:
                self._demand(tensor, _ON_SHARDS if layout is REPLICATE else layout)

    def _visit(self, op: Op) -> Step:
        given = self.natural.answers[op.index]
        if given is not None:
            if given.rescale and (divisor := self._divisor(op)):
                given = replace(given, rescale=False, divisor=divisor)
            self._demand_inputs(op, given)
            for (output, demand), _ in self._demands[op.index].items():
                layout = REPLICATE if demand is _ON_SHARDS else demand
                self._reshard(Tensor(op.index, output), given.gives[output], layout)
            return Step(shards=given)
        return self._visit_whole(op)

    def _divisor(self, op: Op) -> int:
        """Return what a mean divides by, if it may do so once: it is read whole only, and its sum does not overflow."""
        dtype, shapes = op.out_dtypes[0], (op.in_shapes[0], op.out_shapes[0])
        read_whole = all(demand is REPLICATE or demand is _ON_SHARDS for _, demand in self._demands[op.index])
        if not read_whole or dtype.size < (8 if dtype.is_complex else 4):
            return 0
        if any(shape is None or None in shape or has_sizes(shape) for shape in shapes):
            return 0
        before, after = (math.prod(size or 0 for size in shape or ()) for shape in shapes)
        return before // after if after else 0

    def _visit_whole(self, op: Op) -> Step:
        """Visit an op whose natural form is whole: read whole, cut, or made in pieces from the start."""
        remade: Sharded | None = None
        home = op.index in self._required
        if self._local and op.index in self._inputs:
            return self._visit_local_argument(op)
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
            elif demand is _ON_SHARDS and remade is None and self._is_remade_whole(op):
                remade = Sharded((REPLICATE,) * len(op.inputs), (REPLICATE,) * len(op.out_shapes))
            elif demand == PARTIAL_SUM:
                self._reshard(tensor, REPLICATE, PARTIAL_SUM)
                home = True
            elif demand is not _ON_SHARDS or not op.is_constant:
                home = True
        if remade is not None:
            self._demand_inputs(op, remade)
        if home:
            for tensor in op.inputs:
                self._demand(tensor, REPLICATE)
        reason = self.natural.reasons[op.index]
        if home and reason and op.bodies and self._plan_bodies is not None:
            bodies = self._plan_bodies(op, [self.natural.layout(tensor) for tensor in op.inputs])
            if any(body.sharded_ops for body in bodies.values()):
                return Step(home, remade, "", bodies)
        return Step(home, remade, reason)

    def _visit_local_argument(self, op: Op) -> Step:
        """Visit an argument of a local program: every shard has it, in the layout in which it is given."""
        given = self.natural.seen[op.index][0]
        for (_, demand), _ in self._demands[op.index].items():
            if demand != given and not (given is REPLICATE and demand is _ON_SHARDS):
                self.obstacles.append(f"argument {op.name}: it is given {given} and read {demand}")
        return Step(home=True)

    def _reshard(self, tensor: Tensor, source: Layout, target: _Demand) -> None:
        if isinstance(target, str) or source == target:
            return
        if self._local:
            name = self.program.ops[tensor.op].type
            self.obstacles.append(f"{name} in it: its rows would be exchanged between devices each time")
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
        rule = rule_to_make(op.type, self._independent)
        if rule is None or not self._may_repeat(op):
            return None
        found = answer_for_output(rule, op, tensor.index, layout)
        if found is None:
            return None
        cost = sum(self._cost(t, want) for t, want in zip(op.inputs, found.wants, strict=True))
        return found if cost < self._size(tensor, layout) else None

    def _cost(self, tensor: Tensor, layout: Layout, depth: int = 0) -> int:
        """Return the bytes that travel when the shards read `tensor` in `layout`."""
        if (tensor, layout) in self._costs:
            return self._costs[tensor, layout]
        op, size = self.program.ops[tensor.op], self._size(tensor, layout)
        made = self.natural.answers[tensor.op]
        if (
            op.type == "Const"
            or (op.is_constant and layout is REPLICATE)
            or (made is not None and made.gives[tensor.index] == layout)
        ):
            cost = 0
        elif made is not None or layout is REPLICATE or depth > _DEEPEST_REMAKE:
            cost = size
        else:
            cost = min(size, self._remake_cost(op, tensor, layout, depth))
        self._costs[tensor, layout] = cost
        return cost

    def _may_repeat(self, op: Op) -> bool:
        """Return whether an op may run on every shard instead of once: nobody could tell the difference."""
        if op.type in STATEFUL_RANDOM:
            return self._independent
        return not (op.stateful or op.controls or op.index in self._inputs)

    def _is_remade_whole(self, op: Op, depth: int = 0) -> bool:
        """Return whether each shard makes a whole value by itself: an empty list, or what follows from constants."""
        if self._local or not self._may_repeat(op) or depth > _DEEPEST_REMAKE:
            return False
        if op.index not in self._remade_whole:
            inputs = [self.program.ops[tensor.op] for tensor in op.inputs]
            small = bool(inputs) and sum(op.out_bytes) <= _SMALL and not op.bodies
            from_constants = small and all(i.is_constant or self._is_remade_whole(i, depth + 1) for i in inputs)
            self._remade_whole[op.index] = op.type in _REMADE_WHOLE or from_constants
        return self._remade_whole[op.index]

    def _size(self, tensor: Tensor, layout: Layout) -> int:
        """Return the bytes that travel when a tensor is cut. Lists cannot be: nothing is dearer."""
        opaque = self.program.ops[tensor.op].out_dtypes[tensor.index] == tf.variant
        return _INFINITE if opaque and layout is not REPLICATE else self.program.bytes(tensor)

    def _remake_cost(self, op: Op, tensor: Tensor, layout: Layout, depth: int) -> int:
        rule = rule_to_make(op.type, self._independent)
        size = self._size(tensor, layout)
        if rule is None or not self._may_repeat(op) or not isinstance(layout, Shard):
            return size
        found = answer_for_output(rule, op, tensor.index, layout)
        if found is None:
            return size
        return sum(self._cost(t, want, depth + 1) for t, want in zip(op.inputs, found.wants, strict=True))
