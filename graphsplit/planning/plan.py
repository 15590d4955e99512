"""Plan: the single decision from which the multi-device graph follows. Made once, checked, printed, then emitted.

Under `strict=True`, a plan that lets work on the batch run once is refused (`check_strict`).
"""

from __future__ import annotations

from functools import cached_property

from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.layouts import PARTIAL_SUM
from graphsplit.core.notebooks import text_html
from graphsplit.errors import CheckError, StrictError
from graphsplit.planning.chains import ExchangeChain, longest_chain
from graphsplit.planning.communication.bucketing import check_buckets
from graphsplit.planning.communication.moves import find_moves
from graphsplit.planning.communication.transfer_checks import check_transfers
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.propagation.sharding_checks import check_size, check_step
from graphsplit.planning.rows_kept import behind_results
from graphsplit.planning.schedule.automatic_stages import check_stage_starts
from graphsplit.planning.schedule.phases import check_phases, check_turns_taken
from graphsplit.planning.schedule.scheduling import check_order
from graphsplit.planning.steps import Step
from graphsplit.planning.work_shares import balance_of, computing_devices, shares_of
from graphsplit.program.program import Op, Program, Tensor


class Plan(Decisions):
    """Where every operation of a program runs, and what has to travel: print it, check it.

    Attributes:
      devices, rows: of each shard, the device, and how many rows of the batch it has.
      batch: how many rows the whole batch has, 0 if nothing is split.
      schedule: the order in which shards go through stages, if there are any.
      unsharded_ops: the operations on rows of the batch that run on one device all the same, and why.
      notes: one sentence for each thing that you might not expect.
    """

    @collection_paused()
    def check(self) -> None:
        """Raise `CheckError` unless every tensor is made in, or moved into, the layouts in which it is read.

        Plans of what loops and branches do in each iteration are checked as well.
        """
        self.mesh.check()
        for op, step in zip(self.program.ops, self.steps, strict=True):
            for tensor, layout in check_step(self.program, op, step, self.mesh):
                check_size(self.program, tensor, layout, self.mesh)
        self._check_made()
        self._check_moves()
        check_buckets(self.program, self.steps, self.buckets)
        check_transfers(self.program, self.places, self.moves, self.collectives)
        check_order(self.program, self.steps, self.order)
        if self.stage_starts is not None:
            check_stage_starts(self.program, self.steps, self.stage_starts)
        if self.mesh.has_turns:
            check_phases(self.flow, self.collectives, self.phases)
            check_turns_taken(self.phases, self.mesh, self.turns)
        for schedule in self.schedules.values():
            schedule.check()

    def _check_made(self) -> None:
        """Raise `CheckError` if something is read of an operation that does not run."""
        pairs = [(op.name, t) for op, step in zip(self.program.ops, self.steps, strict=True) for t in _read(op, step)]
        for reader, tensor in [*pairs, *(("the result", tensor) for tensor in self.program.outputs)]:
            op, step = self.program.ops[tensor.op], self.steps[tensor.op]
            if not (step.once or step.shards or self.state.is_everywhere(op) or op.type == "Const"):
                raise CheckError(f"{reader!r} reads {op.name!r}, which is not made.")

    def _check_moves(self) -> None:
        """Raise `CheckError` unless the moves are those that follow from the steps."""
        expected = find_moves(self.program, self.steps, self.places, self.state, self.output_layouts)
        missing, idle = set(expected) - set(self.moves), set(self.moves) - set(expected)
        for move in [*missing, *idle]:
            name, what = self.program.ops[move.tensor.op].name, "is missing" if move in missing else "serves nobody"
            raise CheckError(f"The {move.kind} of {name!r} from {move.source} to {move.target} {what}.")
        if len(set(self.moves)) < len(self.moves):
            raise CheckError("A move is made twice.")
        bucketed = [move for bucket in self.buckets for move in bucket.moves]
        if any(len({(m.source, m.target) for m in bucket.moves}) > 1 for bucket in self.buckets):
            raise CheckError("A bucket holds moves between different places.")
        if any(move.kind != "broadcast" and move.source != PARTIAL_SUM for move in bucketed):
            raise CheckError("A bucket holds moves that cannot be made as one.")

    @property
    def sharded_fraction(self) -> float:
        """The fraction of the floating-point operations that are sharded, as the first line says; 1 if there are none.

        It counts each operation once, and says how much of the work is on rows; `balance` says how evenly devices work.
        """
        shares = shares_of(self)
        return shares.sharded_flops / shares.flops if shares.flops else 1.0

    @cached_property
    def longest_chain(self) -> ExchangeChain:
        """The exchanges between devices of which each waits for the one before it, where these are most.

        `print(plan.longest_chain)` says how many there are, and in which layers: `101 exchanges, 98 of them of
        BatchNormalization`. Each takes at least the latency of a link, so `assert len(plan.longest_chain) < 110` keeps
        a step from waiting more often.
        """
        return longest_chain(self)

    @property
    def balance(self) -> float:
        """How evenly devices work: their floating-point operations, over their number times those of the busiest.

        1 if all compute alike, 1 / N if one of N computes everything. What several devices compute alike counts on each
        of them; sums that carry out moves do not count. `assert step.plan(x).balance > 0.9` keeps a later change from
        taking work off the devices.
        """
        return balance_of(shares_of(self), computing_devices(self))

    def compare(self, other: Plan) -> str:
        """Return how another plan of the same function differs: what devices compute, send and store."""
        from graphsplit.inspect.plans.plan_comparison import compare  # imported when it is asked for

        return compare(self, other)

    def explain(self) -> str:
        """Explain the plan: one line for each thing that you might not expect.

        For `plan="auto"`: what was chosen, what it was compared with, and what the predictions assume.
        """
        from graphsplit.inspect.plans.plan_text import explain  # imported when it is asked for

        return explain(self)

    def __str__(self) -> str:
        from graphsplit.inspect.plans.plan_text import describe  # imported when a plan is printed

        return describe(self)

    __repr__ = __str__  # what a prompt, and an assertion that fails, show

    def _repr_html_(self) -> str:
        return text_html(str(self), "the whole plan")


def _read(op: Op, step: Step) -> list[Tensor]:
    if step.once:
        return list(op.inputs)
    if step.shards:
        return [tensor for i, tensor in enumerate(op.inputs) if i not in step.shards.makes]
    return []


_LARGEST_SHARE = 0.01  # of all FLOPs, that `strict=True` leaves to what follows from rows born whole
_OF_IDS = frozenset({"Unique", "UniqueV2", "UniqueWithCounts"})


def check_strict(plan: Plan, strict: bool, finished: bool = False) -> None:
    """Raise `StrictError` if more of the work on the batch runs once than is allowed.

    Args:
      plan: the decisions.
      strict: whether to: nothing may that reads rows of the shards, but for their ids, and of all floating-point
        operations a hundredth.
      finished: whether it is of a finished model, for the advice.
    """
    if not strict:
        return
    stayed = [(op, reason) for op, reason in plan.unsharded_ops if not _finds_ids(op, plan.program)]
    if stayed or shares_of(plan).run_once > _LARGEST_SHARE:
        from graphsplit.inspect.plans.strictness import why_refused  # imported when a plan is refused

        raise StrictError(why_refused(plan, stayed, _LARGEST_SHARE, finished))


def _finds_ids(op: Op, program: Program) -> bool:
    """Return whether an operation that runs once reads integers, and finds which of them differ, for what changes
    variables.

    Which rows of a table a batch has, for the sparse gradient of an embedding, is known where all ids are; the values
    stay on the shards. What follows from it and runs once counts with everything else.
    """
    return op.type in _OF_IDS and op.out_dtypes[0].is_integer and op.index not in behind_results(program)
