"""Units of dimensions that an axis' name alone cuts, and partners: the variables that had better be cut where one is.

Units are heads that a reshape takes apart, and fused blocks that a split does. What is gathered along the axis is read
by an operation whose rule says how it could be cut instead. That is followed back to variables, by the rules, and
tried; it stays if fewer bytes move. In a loop (the gates of an LSTM) they move in each iteration.

Behind a product whose columns are cut comes one whose rows fit these, and beside it one that is multiplied with it:
column then row, as in Megatron-LM (Shoeybi et al. 2019), and all kernels of the same heads. Nobody names these schemes
here: an operation that reads something whole and would have it in parts, says its rule, asks for that, and who made it
is asked in turn, back to variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphsplit.axes.plans import AxisPlanner
from graphsplit.core.layouts import REPLICATE, EvenCut, Layout, Partial, Shard, evenly, is_whole
from graphsplit.core.polynomials import UndecidedError
from graphsplit.planning.propagation.forward_propagation import NaturalForms, with_operand
from graphsplit.planning.variables.laid_variables import READS
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.reading.trip_counts import iterations_of, origin
from graphsplit.rules import Declined, Sharded, answer, answer_for_output, rule_of
from graphsplit.rules.registry import Rule

_LINK = 32  # how much longer a byte takes that is sent than one that is made: from 7 (NVLink) to 60 (PCIe) times


@dataclass(frozen=True, eq=False)
class _LaidProgram:
    """A program, or a function in it that a loop or branch calls, and how it lies along the axis.

    Attributes:
      program, natural: see there.
      iterations: how often it runs.
      caller: the loop or branch, and what that is in; None for the program itself.
    """

    program: Program
    natural: NaturalForms
    iterations: int = 1
    caller: tuple[_LaidProgram, Op] | None = None

    def outside(self, op: Op) -> list[Tensor] | None:
        """Return what an argument is in the scope of the caller; None for one that is another in each iteration."""
        assert self.caller is not None
        call, number = self.caller[1], self.program.inputs.index(op.index)
        flow = CONTROL_FLOW[call.type]
        if flow.loops:  # its condition is given what its body returns, too
            body = call.bodies[function_names(call.node)[1]]
            if origin(body, body.outputs[number]) != Tensor(body.inputs[number], 0):
                return None
        return [call.inputs[flow.chooses + number]]


Wish = tuple[_LaidProgram, Tensor, Shard]  # what would be cut, and how: into blocks, each an `EvenCut` of so many units


@dataclass(frozen=True)
class UnitSearch:
    """Finds units; `run` does.

    Args:
      program, laid: as of `planned_along`.
      planner: of the axis.
      alike: captures that are cut between any two entries, by position, with those that are cut alike: optimizers'
        slots.
    """

    program: Program
    planner: AxisPlanner
    laid: Mapping[str, Layout]
    alike: Mapping[int, Sequence[int]]

    def run(self) -> dict[int, Shard]:
        """Return how captures had better be cut, by position."""
        best_cuts, scopes = dict[int, Shard](), self._scopes({})
        cost, wishes, met, looked_at = self._cost(scopes), self._asked(scopes), set[object](), list[dict[int, Shard]]()
        while key := next((key for key in wishes if key not in met), None):
            met.add(key)  # (what is asked first may be what keeps others from being asked)
            best = best_cuts, scopes, cost
            for way in wishes[key].values():
                cuts = {**best_cuts, **self._behind(way)}
                if cuts != best_cuts and cuts not in looked_at:
                    looked_at.append(cuts)
                    other = self._scopes(cuts)
                    best = min(best, (cuts, other, self._cost(other)), key=lambda trial: trial[2])
            if best[0] is not best_cuts:
                best_cuts, scopes, cost = best
                wishes = self._asked(scopes)
        return best_cuts

    def _scopes(self, cuts: Mapping[int, Shard]) -> list[_LaidProgram]:
        """Return the program with variables that are cut so, and the functions in it."""
        cut_layouts = {self.program.ops[i].name: self.layout_of(cut) for i, cut in cuts.items()}
        scopes = [_LaidProgram(self.program, self.planner.forward(self.program, {**self.laid, **cut_layouts}))]
        for scope in scopes:  # those that are found on the way, too
            calls = [op for op in scope.program.ops if op.bodies and not CONTROL_FLOW[op.type].compiled]
            scopes += [self._inside(scope, op, body) for op in calls for body in op.bodies.values()]
        return scopes

    def _inside(self, scope: _LaidProgram, op: Op, body: Program) -> _LaidProgram:
        call_answer, iterations = scope.natural.answers[op.index], iterations_of(op)
        wants = (
            call_answer.wants[CONTROL_FLOW[op.type].chooses :]
            if call_answer is not None
            else (REPLICATE,) * len(body.inputs)
        )
        pairs = zip(body.inputs, wants, strict=True)
        laid = {body.ops[i].name: want if isinstance(want, Shard) else REPLICATE for i, want in pairs}
        return _LaidProgram(
            body,
            self.planner.forward(body, laid),
            scope.iterations * (int(iterations.number) if iterations else 1),
            (scope, op),
        )

    def layout_of(self, cut: Shard) -> Layout:
        """Return the layout of what has such units: the same on all devices where these are more."""
        units = cut.partition.length if isinstance(cut.partition, EvenCut) else 0
        if units < self.planner.columns:
            return REPLICATE
        return evenly(cut.axis, units, self.planner.columns, cut.blocks[0]).repeated(len(cut.blocks))

    def _axis(self, capture: Op) -> int | None:
        """Return the axis along which a capture is cut, which stays as it was asked for."""
        layout = self.laid[capture.name]
        return layout.axis if isinstance(layout, Shard) else None

    def _asked(self, scopes: Sequence[_LaidProgram]) -> dict[object, dict[object, list[Wish]]]:
        """Return how operations would have what they read cut; for those that are alike, as in layers, together."""
        wishes_by_kind: dict[object, dict[object, list[Wish]]] = {}
        for scope, op in [(laid_program, op) for laid_program in scopes for op in laid_program.program.ops]:
            natural = scope.natural
            layouts = tuple([natural.layout(tensor) for tensor in op.inputs])
            rule = None if op.stateful or op.bodies else rule_of(op.type)
            if rule is None or not any(isinstance(layout, Shard) for layout in layouts):
                continue
            ways = _ways if natural.answers[op.index] is None else _fitting
            for i, way in ways(rule, op, layouts):
                group = wishes_by_kind.setdefault((op.type, op.in_shapes, layouts), {})
                group.setdefault((i, way), []).append((scope, op.inputs[i], way))
        return wishes_by_kind

    def _behind(self, wishes: Sequence[Wish]) -> dict[int, Shard]:
        """Return how captures are to be cut for what is made of them to be cut so, where they can be."""
        cuts: dict[int, Shard] = {}
        for wish in wishes:
            cuts_of_wish, pending, seen = dict[int, Shard](), [wish], set[Wish]()
            while pending:
                scope, tensor, way = pending.pop()
                op, caller = scope.program.ops[tensor.op], scope.caller
                if not isinstance(way.partition, EvenCut) or len(set(way.blocks)) != 1:
                    next_wishes = None  # it has no units, or of several sizes
                elif caller is None and op.index in self.alike:
                    if way.axis == self._axis(op) and cuts_of_wish.setdefault(op.index, way) == way:
                        continue
                    next_wishes = None
                elif caller is not None and op.index in scope.program.inputs:
                    outside = scope.outside(op)
                    next_wishes = None if outside is None else [(caller[0], outer, way) for outer in outside]
                else:
                    pairs = self._read(op, tensor.index, way, scope.natural)
                    next_wishes = None if pairs is None else [(scope, *pair) for pair in pairs]
                if next_wishes is None:
                    cuts_of_wish = {}
                    break
                pending += [other for other in next_wishes if other not in seen]
                seen.update(next_wishes)
            cuts |= {k: way for position, way in cuts_of_wish.items() for k in self.alike[position]}
        return cuts

    def _read(self, op: Op, output: int, way: Shard, natural: NaturalForms) -> Sequence[tuple[Tensor, Shard]] | None:
        """Return how an operation reads what is cut of what it reads, to make what is cut so; None if it cannot."""
        cut = [(k, t, layout) for k, t in enumerate(op.inputs) if isinstance(layout := natural.layout(t), Shard)]
        if op.type == "ReadVariableOp":
            return [(op.inputs[0], way)]
        whole = [(tensor, Shard(layout.axis, (layout.size(0),), EvenCut(1))) for _, tensor, layout in cut]
        if self.layout_of(way) == REPLICATE:  # each makes the product of a kernel, with its bias, and not a layer
            ranks = [len(op.in_shapes[k] or ()) for k, *_ in cut]
            return whole if ranks.count(len(op.out_shapes[0] or ())) < 2 else None
        answer_needed = _for_output(op, output, way, natural.answers[op.index])
        if answer_needed is None:
            return None
        if op.provenance.is_gradient and any(not isinstance(answer_needed.wants[k], Shard) for k, *_ in cut):
            return None  # a layer is not copied for what its gradient reads
        wants = zip(cut, whole, strict=True)
        return [
            (t, want) if isinstance(want := answer_needed.wants[k], Shard) else whole_one
            for (k, t, _), whole_one in wants
        ]

    def _cost(self, scopes: Sequence[_LaidProgram]) -> tuple[float, int]:
        """Return roughly what bytes cost that move or that every device makes; and how many operations are not cut."""
        costs = [(scope.iterations * _cost(scope.program, scope.natural), scope.natural.answers) for scope in scopes]
        return sum(cost for cost, _ in costs), sum(answers.count(None) for _, answers in costs)


def _cost(program: Program, natural: NaturalForms) -> float:
    moved, whole = dict[Tensor, int](), 0
    for op, natural_answer in zip(program.ops, natural.answers, strict=True):
        whole += sum(op.out_bytes) if natural_answer is None or REPLICATE in natural_answer.gives else 0
        for i, tensor in enumerate(op.inputs):
            layout = natural.layout(tensor)
            if isinstance(layout, Shard) and (natural_answer is None or natural_answer.wants[i] != layout):
                moved.setdefault(tensor, program.bytes(tensor))
        for k, result_layout in enumerate(natural_answer.gives if natural_answer is not None else ()):
            if isinstance(result_layout, Partial) and not isinstance(natural.seen[op.index][k], Partial):
                moved[Tensor(op.index, k)] = 2 * op.out_bytes[k]
    return _LINK * sum(moved.values()) + whole


def _ways(rule: Rule, op: Op, layouts: Sequence[Layout]) -> Iterator[tuple[int, Shard]]:
    """Yield how an operation that does without parts of its operands could have each of them cut."""
    try:
        factors = rule.factors(op)
    except UndecidedError:
        return
    result_shape = op.out_shapes[0] or ()
    for i, layout in enumerate(layouts):
        dims = None if isinstance(factors, Declined) else factors.inputs[i]
        if dims is None or not isinstance(layout, Shard):
            continue
        axis, size = layout.axis, layout.size(0)
        if isinstance(merged := dims[axis], tuple):  # each of its factors could be cut
            for _, outer, inner in merged:
                if type(outer) is int and type(inner) is int and size > outer * inner:
                    yield i, Shard(axis, (inner,) * outer, EvenCut(size // outer // inner))
        part = result_shape[axis] if merged is None and len(result_shape) == len(dims) else None
        if type(part) is int and 1 < part < size and size % part == 0:  # of equal blocks: a split, or a slice
            yield i, Shard(axis, (1,) * (size // part), EvenCut(part))


def _fitting(rule: Rule, op: Op, layouts: Sequence[Layout]) -> Iterator[tuple[int, Shard]]:
    """Yield how each operand would be cut to fit one of the others that stays where it is."""
    shard_layouts = [REPLICATE if is_whole(layout) else layout for layout in layouts]
    cut = [i for i, layout in enumerate(layouts) if isinstance(layout, Shard)]
    for k in cut:
        fitting_answer = with_operand(rule, op, shard_layouts, k)
        pairs = [(i, fitting_answer.wants[i]) for i in cut if i != k] if isinstance(fitting_answer, Sharded) else []
        yield from [(i, want) for i, want in pairs if isinstance(want, Shard) and want != layouts[i]]


def _for_output(op: Op, output: int, way: Shard, natural_answer: Sharded | None) -> Sharded | None:
    """Return how an operation can make what is cut so: by its factors, or of the blocks that it takes apart."""
    rule = rule_of(op.type)
    if rule is None or op.stateful or op.bodies:
        return None
    by_factors, natural_layout = (
        answer_for_output(rule, op, output, way),
        natural_answer.gives[output] if natural_answer is not None else None,
    )
    if by_factors is not None or natural_answer is None or not isinstance(natural_layout, Shard):
        return by_factors
    count, cut = len(natural_layout.blocks), [want for want in natural_answer.wants if isinstance(want, Shard)]
    if any(len(want.blocks) % count for want in cut):
        return None
    way_by_want = {want: way.along(want.axis).repeated(len(want.blocks) // count) for want in cut}
    wants = [way_by_want[want] if isinstance(want, Shard) else want for want in natural_answer.wants]
    again = answer(rule, op, wants, [0] * len(wants))
    return again if isinstance(again, Sharded) and again.gives[output] == way else None


@dataclass(frozen=True)
class Partners:
    """Finds the partners of a variable; `of` does.

    Args:
      program: the function, for one device.
      planner: of the axis.
      shapes: of the captured variables that may be cut, by position.
      alike: for each of them all captures that lie as it does: the same variable once more, and slots of its shape.
    """

    program: Program
    planner: AxisPlanner
    shapes: Mapping[int, Sequence[int]]
    alike: Mapping[int, Sequence[int]]

    def alone(self, position: int, dimension: int) -> dict[int, Shard]:
        """Return a variable, and what lies as it does, cut along a dimension."""
        cut = evenly(dimension, self.shapes[position][dimension], self.planner.columns)
        return self._in_units(dict.fromkeys(self.alike[position], cut))

    def of(self, cuts: Mapping[int, Shard]) -> dict[int, Shard]:
        """Return how variables are cut, and with them their partners."""
        all_cuts = dict(cuts)
        while new_cuts := {i: cut for i, cut in self._wishes(all_cuts).items() if i not in all_cuts}:
            all_cuts |= self._in_units({k: cut for i, cut in new_cuts.items() for k in self.alike[i]})
        return all_cuts

    def laid(self, cuts: Mapping[int, Shard]) -> dict[str, Layout]:
        """Return how variables lie, by the names of their placeholders."""
        return {self.program.ops[i].name: cut for i, cut in cuts.items()}

    def _in_units(self, cuts: dict[int, Shard]) -> dict[int, Shard]:
        """Return how variables are cut where the program tells of which units they consist."""
        alike = {i: [k for k in self.alike[i] if k in cuts] for i in cuts}
        search = UnitSearch(self.program, self.planner, self.laid(cuts), alike)
        layout_by_position = {i: search.layout_of(cut) for i, cut in search.run().items()}
        return cuts | {i: layout for i, layout in layout_by_position.items() if isinstance(layout, Shard)}

    def _wishes(self, cuts: Mapping[int, Shard]) -> dict[int, Shard]:
        """Return how variables would be cut that lie whole, for what is read of them to be in parts."""
        natural = self.planner.forward(self.program, self.laid(cuts))
        wished_cuts, pending = dict[int, Shard](), list[tuple[Tensor, Shard]]()
        for op, needed in zip(self.program.ops, natural.answers, strict=True):
            pairs = zip(op.inputs, needed.wants if needed is not None else (), strict=False)
            pending += [(t, want) for t, want in pairs if isinstance(want, Shard) and is_whole(natural.layout(t))]
        seen = set(pending)
        while pending:
            tensor, way = pending.pop()
            op = self.program.ops[tensor.op]
            if op.type in READS and (cut := self._of_variable(op.inputs[0].op, way)) is not None:
                wished_cuts.setdefault(op.inputs[0].op, cut)
            rule = rule_of(op.type)
            if op.type in READS or natural.answers[op.index] is not None or rule is None or op.stateful or op.bodies:
                continue
            needed = answer_for_output(rule, op, tensor.index, way)
            pairs = zip(op.inputs, needed.wants if needed is not None else (), strict=False)
            next_wishes = [(t, want) for t, want in pairs if isinstance(want, Shard) and (t, want) not in seen]
            seen.update(next_wishes)
            pending += next_wishes
        return wished_cuts

    def _of_variable(self, position: int, way: Shard) -> Shard | None:
        """Return how a variable is cut for what is read of it to be cut so; None if it may not be."""
        variable_shape = self.shapes.get(position)
        is_it = (
            variable_shape is not None
            and way.axis < len(variable_shape)
            and way.size(0) == variable_shape[way.axis] >= self.planner.columns
        )
        return way if is_it else None
