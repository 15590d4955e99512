"""What was made of a SavedModel, as a table that fits a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphsplit.core.devices import short_name
from graphsplit.core.layouts import Shard
from graphsplit.inspect.plans.advice import advice_on
from graphsplit.planning.amounts import aligned, format_bytes
from graphsplit.planning.plan import Plan

_HEADERS = ("signature", "split", "on every shard", "once", "batch on one device", "resharded", "sent whole")


@dataclass(frozen=True)
class SignatureReport:
    """What became of one signature.

    Attributes:
      name: its key.
      plan: what runs where; None where nothing was planned.
      kept: why the signature is as it was, on one device; "" if it runs on several.
      sent_bytes: what goes whole from the default device to other devices in every request: weights, unless each has a
        copy.
    """

    name: str
    plan: Plan | None = field(repr=False)
    kept: str = ""
    sent_bytes: int = 0

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        plan = self.plan
        if self.kept or plan is None:
            return (self.name, "kept as it is", "-", "-", "-", "-", "-")
        names = zip(plan.program.input_names, plan.input_layouts, strict=True)
        split = ", ".join(name for name, layout in names if isinstance(layout, Shard))
        return (
            self.name,
            split,
            str(sum(op.type != "Const" for op in plan.sharded_ops)),
            str(sum(op.type not in ("Const", "Placeholder") for op in plan.ops_once)),
            str(len(plan.unsharded_ops)),
            plan.size_text([move.tensor for move in plan.moves if move.kind not in ("broadcast", "local slice")]),
            format_bytes(self.sent_bytes),
        )

    def notes(self) -> list[str]:
        """Return one sentence for each thing that a user would not expect."""
        plan = self.plan
        if plan is None:
            return [f"kept as it is: {self.kept}"]
        stayed = [
            f"{op.type} {op.name!r} runs on one device: {reason}; {advice_on(reason, finished=True)}"
            for op, reason in plan.unsharded_ops[:6]
        ]
        more = len(plan.unsharded_ops) - len(stayed)
        plan_notes = [f"kept as it is: {self.kept}"] if self.kept else [*plan.program.notes, *plan.notes]
        return [*plan_notes, *stayed, *([f"... and {more} more"] if more > 0 else [])]


@dataclass(frozen=True)
class TranspileReport:
    """What `transpile_saved_model` did. `print` it.

    Attributes:
      devices: the full names of the devices; the first is the default device.
      signatures: one report for each signature.
      bytes_before, bytes_after: of all files.
      graph_bytes_before, graph_bytes_after: of the graph alone.
      mirrored_bytes: the size of the weights that are copied to every device, counted once; 0 if there are none.
    """

    devices: tuple[str, ...]
    signatures: tuple[SignatureReport, ...]
    bytes_before: int
    bytes_after: int
    graph_bytes_before: int
    graph_bytes_after: int
    mirrored_bytes: int = 0

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of each signature that runs on several devices."""
        return {s.name: s.plan for s in self.signatures if s.plan is not None and not s.kept}

    def __str__(self) -> str:
        names = ", ".join(map(short_name, self.devices))
        lines = [f"Transpiled for {len(self.devices)} devices: {names}"]
        lines += [f"  {line}" for line in aligned([_HEADERS, *[s.cells() for s in self.signatures]], left=2)]
        lines += [f"  {s.name}: {note}" for s in self.signatures for note in s.notes()]
        if self.mirrored_bytes:
            total = self.mirrored_bytes * len(self.devices)
            lines.append(
                f"  weights: {format_bytes(self.mirrored_bytes)}, a copy on every device, {format_bytes(total)} of "
                "memory in all; no weight is sent per request"
            )
        graph = f"{format_bytes(self.graph_bytes_before)} -> {format_bytes(self.graph_bytes_after)}"
        whole = f"{format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)}"
        return "\n".join([*lines, f"  size: graph {graph}, all files {whole}"])


def why_whole(plan: Plan) -> str:
    """Return why nothing of a signature runs on the shards."""
    return "; ".join(plan.notes) or "nothing in it can be split"
