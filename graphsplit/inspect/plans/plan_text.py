"""A plan in words.

What enters: a plan. What leaves: the text that `print(plan)` shows, section by section.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from graphsplit.core.device_mesh import MeshAxes
from graphsplit.core.devices import short_name
from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import Cut, MeshDivision, Nested, Replicate, along_axis, axis_of
from graphsplit.inspect.plans.advice import advice_on
from graphsplit.inspect.plans.headlines import headline, is_divided
from graphsplit.inspect.plans.held_text import held_text
from graphsplit.inspect.plans.sections import (
    compiled_text,
    host_kernels_text,
    rows_in_place_text,
    stages_text,
    whole_sums_text,
)
from graphsplit.planning.amounts import count_text, format_bytes, size_text
from graphsplit.planning.burdens import burden_of_variables
from graphsplit.planning.chains import longest_chain
from graphsplit.planning.communication.transfers import is_total
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.device_bytes import (
    STAGES,
    Traffic,
    alive_on,
    along,
    giving_devices,
    held_bytes,
    traffic_of_call,
)
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.propagation.flow import meeting_points
from graphsplit.planning.state import devices_of_handles, state_on
from graphsplit.planning.tasks import COPY, Tasks, few_tasks_of
from graphsplit.planning.work_shares import Cause, Shares, shares_of
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.graph.graph import reached, readers_of
from graphsplit.program.program import Op
from graphsplit.program.reading.trip_counts import times_run

_FINEST_SHARE = 100  # shares of an unknown number of rows are printed as fractions with at most this denominator
_SENT = (
    "scatter",
    "broadcast",
    "send",
    "zero-fill",
    "gather",
    "all-gather",
    "all-to-all",
    "reduce",
    "all-reduce",
    "reduce-scatter",
)
_KEEP_COLUMNS = frozenset({"AddV2", "BiasAdd", "Cast", "Identity", "ReadVariableOp", "Reshape"})
_PRODUCTS = frozenset({"BatchMatMulV2", "Einsum", "MatMul"})
_MOST_LISTED = 12
_MOST_MET = 4


@collection_paused()
def describe(plan: Decisions) -> str:
    """Return what runs where, what moves, what stayed on one device and why."""
    notes = [f"  note: {note}" for note in (*first_move_text(plan), *plan.program.notes, *plan.notes)]
    shares, tasks = shares_of(plan), few_tasks_of(plan)
    sends = traffic_of_call(plan, tasks)
    once = [*_for_rows(plan), *_rows_kept(plan)]
    how = "sharded" if is_divided(plan) else "in one shard, on one device"
    nothing = [f"  all {'other ' * bool(once)}work on the batch is {how}"] if plan.mesh.shards else []
    run_once = [*once, *([*_run_once(plan), *_following(plan, shares)] or nothing), *_without_rows(plan, shares)]
    burden = burden_of_variables(plan, tasks)
    burden_lines = [f"  {burden}"] if burden is not None else []
    named = [*rows_in_place_text(plan), *whole_sums_text(plan)]
    lines = [*_header(plan, shares, sends), *_communication(plan, sends), *named, *burden_lines, *run_once]
    return "\n".join([*lines, *_turns(plan), *_held(plan, tasks), *_split_loops(plan), *notes])


_LONG_CHAIN = 20  # exchanges: of some 20 us each over GPUs' links that is a tenth of a step of 4 ms


def explain(plan: Decisions) -> str:
    """Return one line for each thing about a plan that a user might not expect."""
    notes = (*first_move_text(plan), *plan.program.notes, *plan.notes)
    chain = longest_chain(plan)
    if len(chain) >= _LONG_CHAIN:
        notes += (
            f"devices wait for each other in a chain of {chain}: each takes at least the latency of a link, however "
            "few bytes it sends. gs.predict says how much of a step that is",
        )
    if not any(note.startswith("chosen automatically") for note in notes):
        notes += ('no other plan was compared: give parallelize, or multi_gpu_model, plan="auto" to compare some',)
    return "\n".join(notes)


def first_move_text(plan: Decisions) -> list[str]:
    """Return what is to be said of the variables that the first call moves."""
    move = plan.first_move
    if move is None:
        return []
    what = f"{count_text(move.variables, 'variable')}, {format_bytes(move.bytes)}"
    most = f"variables take up to {format_bytes(move.most_bytes)} on {short_name(move.device)}"
    return [f"the first call moves {what}; while it does, {most}"]


def cause_text(plan: Decisions, cause: Cause, shares: Shares) -> str:
    """Return what keeps work on the batch on one device, and how much, for people."""
    where = plan.program.line_of(cause.op)
    text = f"{cause.op.label} runs on one device"
    if cause.followers:
        text += f", and so does what follows it ({_kinds(cause.followers, 3)})"
    if shares.flops:
        bound = "at least " if cause.uncounted else "up to " * cause.is_most
        text += f": {bound}{100 * cause.flops / shares.flops:.4g} % of the FLOPs"
    if cause.uncounted:
        text += f", not counting {_kinds(cause.uncounted, 3)} of unknown rank"
    return f"{text}; {cause.reason}" + (f" ({where})" if where else "")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4g} %" if whole else "none"


def _header(plan: Decisions, shares: Shares, sends: Traffic) -> list[str]:
    program, steps, mesh = plan.program, plan.steps, plan.mesh
    lines = [headline(plan, shares, sends), f"  {_counts(plan)}"]
    if mesh.shards:
        flops, size = _share(shares.sharded_flops, shares.flops), _share(shares.sharded_bytes, shares.bytes)
        bound = "at most " * shares.are_most
        lines.append(f"  on the shards: {bound}{flops} of the FLOPs, {size} of the computed bytes")
    lines += _shards(mesh)
    for name, position, layout in zip(program.input_names, program.inputs, plan.input_layouts, strict=True):
        shape, dtype = program.ops[position].out_shapes[0], program.ops[position].out_dtypes[0].name
        device = plan.places.once(program.ops[position])[0]
        lies = f", from {short_name(device)}" if device != plan.default_device else ""
        lines.append(f"  argument {name}: {dtype}{list(shape) if shape is not None else ''} {layout}{lies}")
    live = [op for op, step in zip(program.ops, steps, strict=True) if step.once or step.shards]
    operations_of_stage = Counter(op.stage for op in live if op.stage)
    lines += [f"  stage {stage}: {count_text(count, 'operation')}" for stage, count in operations_of_stage.items()]
    lines += [*stages_text(plan), *_in_parts(plan), *_only_held(plan, sends)]
    elsewhere = ", outside of loops and branches" if plan.loops_split else ""
    lines.append(f"  on every shard: {_count(plan.sharded_ops)}{elsewhere}")
    for device, ops in _once(plan).items():
        if not _working(ops) and device != plan.default_device:  # it only has arguments
            continue
        lines.append(f"  once, on {short_name(device)}: {_count(ops)}")
    lines += compiled_text(plan)
    without = host_kernels_text(plan)
    return [*lines, f"  on the host, as they have no GPU kernel: {without}"] if without else lines


def _shards(mesh: Mesh) -> list[str]:
    """Say where each shard is, and how many rows it has; of shards that take turns, in one line."""
    lines = []
    for _, group in itertools.groupby(range(mesh.shards), key=lambda d: mesh.positions[d]):
        shards = list(group)
        position, first = mesh.positions[shards[0]], mesh.devices[shards[0]]
        place = " and ".join(map(short_name, dict.fromkeys([first, *[column[position] for column in mesh.columns]])))
        if len(shards) == 1:
            lines.append(f"  shard {shards[0]}: {place}, {_rows_text(mesh, shards)}")
        else:
            counts = " + ".join([str(mesh.rows[d]) for d in shards]) if mesh.rows else "equal parts"
            rows = f"{_rows_text(mesh, shards)} ({counts})"
            lines.append(f"  shards {shards[0]} to {shards[-1]}: {place}, {len(shards)} micro-batches, {rows}")
    return lines


def _in_parts(plan: Decisions) -> list[str]:
    """Say which variables are cut or copied, and which are gathered for each call."""
    state = plan.state
    counts = Counter(k for k, _ in state.parts)
    copied = state.copied & counts.keys()
    divided = {k for k, count in counts.items() if count > 1} - copied
    lines = []
    longest = sorted(state.in_place, key=lambda name: -_length_cut(plan, name))
    axes = plan.asked.axes
    if plan.mesh.others or axes.copies > 1:
        rows = {axes.copies_axis: axes.copies} if axes.copies > 1 else {}
        sizes = {**rows, axes.batch_axis: axes.rows // axes.copies, **axes.others}
        lines.append(f"  mesh: {', '.join([f'{axis}={size}' for axis, size in sizes.items()])}")
    ranks = {captured.placeholder: captured.rank for captured in state.captured}
    heads = _whole_heads(plan)
    texts = [_on_mesh(state.divisions[n], ranks[n], axes, n in state.gathered, heads.get(n, 1)) for n in longest]
    lines += _variable_lines([state.in_place[name] for name in longest], texts)
    for what, chosen in (("sharded", divided), ("replicated", copied)):
        if chosen:
            device_and_part = zip(devices_of_handles(plan.program, state), state.parts, strict=True)
            devices = sorted({short_name(device) for device, (k, _) in device_and_part if k in chosen})
            lines.append(f"  variables {what}: {len(chosen)}, on {', '.join(devices)}")
    if used := [name for name, why in state.staying.items() if not why]:
        more = f" and {len(used) - _MOST_LISTED} more" if len(used) > _MOST_LISTED else ""
        lines.append(f"  computed in place, rows are sent to them: {', '.join(used[:_MOST_LISTED])}{more}")
    lines += [f"  variable {n} is gathered before it is used: {why}" for n, why in state.staying.items() if why]
    return lines + [f"  variable {name} is gathered for each call: {why}" for name, why in state.whole.items()]


def _whole_heads(plan: Decisions) -> dict[str, int]:
    """Return how wide heads are, by the even cuts that leave them whole: a reshape takes what a part makes apart."""
    state, program, width_by_name = plan.state, plan.program, dict[str, int]()
    readers = readers_of([[tensor.op for tensor in op.inputs] for op in program.ops]) if state.in_place else []

    def keeping(i: int) -> list[int]:
        return [r for r in readers[i] if program.ops[r].type in _KEEP_COLUMNS]

    for capture, (k, part) in zip(program.captures, state.parts, strict=False):
        name = state.captured[k].placeholder if part == 0 and state.captured else ""
        cut = along_axis(state.divisions[name]) if name in state.in_place else None
        if isinstance(cut, Cut) and cut.block == cut.blocks == 1:
            values = {capture, *reached([capture], keeping)}
            products = [r for i in values for r in readers[i] if program.ops[r].type in _PRODUCTS]
            for op in [program.ops[i] for i in sorted(reached(products, keeping)) if program.ops[i].type == "Reshape"]:
                in_shape, out_shape = op.in_shapes[0] or (), [size or 0 for size in op.out_shapes[0] or ()]
                if in_shape[-1:] == cut.lengths[:1] == (math.prod(out_shape[-2:]),) and len(out_shape) > len(in_shape):
                    width_by_name.setdefault(name, out_shape[-1])
    return width_by_name


def _variable_lines(names: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Return a line for each variable.

    If there are more than `_MOST_LISTED`, those with equal texts whose names differ only in numbers share one:
    `3 of block_*/kernel: ...`.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in zip(names, texts, strict=True):
        pattern = re.sub(r"\d+", "*", name) if len(names) > _MOST_LISTED else name
        groups.setdefault((pattern, text), []).append(name)
    lines = []
    for (_, text), members in groups.items():
        scopes = zip(*[name.split("/") for name in members], strict=True)
        name = "/".join([words[0] if len(set(words)) == 1 else re.sub(r"\d+", "*", words[0]) for words in scopes])
        lines.append(f"    {f'{len(members)} of ' if len(members) > 1 else ''}{name}: {text}")
    return lines


def _only_held(plan: Decisions, sends: Traffic) -> list[str]:
    """Say what devices hold that compute nothing else, the hosts of GPUs, and what they send and receive for that."""
    lines, computing = [], plan.places.computing(plan.program)
    held_by_device: dict[str, dict[str, int]] = {}
    for device, part in state_on(plan.program, plan.state, plan.default_device):
        if device not in computing and part.placeholder in plan.state.divisions:
            bytes_by_variable = held_by_device.setdefault(device, {})
            bytes_by_variable[part.placeholder] = bytes_by_variable.get(part.placeholder, 0) + part.bytes
    for device, bytes_by_variable in held_by_device.items():
        count, size = len(bytes_by_variable), format_bytes(sum(bytes_by_variable.values()))
        received, sent = (format_bytes(by.get(device, 0)) for by in (sends.received, sends.sent))
        travels = "" if plan.program.symbols else f"; it receives {received} and sends {sent} a call"
        lines.append(f"  variables in the memory of {short_name(device)}: {count}, {size}{travels}")
    return lines


def _on_mesh(division: MeshDivision, rank: int, axes: MeshAxes, is_gathered: bool, head: int = 1) -> str:
    """Say how a variable is cut or copied along each axis of a mesh: `[-, model], 4 + 4, computed in place`."""
    columns, axis = along_axis(division), axis_of(division) or axes.batch_axis
    if isinstance(columns, Replicate):
        text = f"replicated along {axis!r}" + (f" ({columns.why})" if columns.why else "")
    elif columns.parts == 1 and not columns.along:
        text = f"on one device along {axis!r}, and sent"
    else:
        how = "computed in place" if columns.along and not is_gathered else "gathered before it is used"
        dimensions = ", ".join([axis if k == columns.axis else "-" for k in range(rank)])
        text = f"[{dimensions}], {_lengths(columns, head)}, {'see below' if columns.stays else how}"
    if not isinstance(division, Nested):
        return text
    if not division.axis:
        return f"{text}, replicated along {axes.copies_axis!r}"
    return f"{text}; {_on_mesh(division.rows[0], rank, axes, is_gathered)}"  # (of the first column)


def _lengths(cut: Cut, head: int) -> str:
    units = [f"units of {max(cut.block, head)}"] if max(cut.block, head) > 1 else []
    blocks = [f"{cut.blocks} blocks"] if cut.blocks > 1 else []
    blocks = [f"blocks of {', '.join([str(times * cut.length) for times in cut.times])}"] if cut.times else blocks
    details = f" ({'; '.join([*units, *blocks])})" if units or blocks else ""
    return f"{' + '.join(map(str, cut.lengths))}{details}"


def _length_cut(plan: Decisions, name: str) -> int:
    """Return the length of the dimension of a variable that is cut along an axis."""
    columns = along_axis(plan.state.divisions[name])
    return sum(columns.lengths) if isinstance(columns, Cut) else 0


def _counts(plan: Decisions) -> str:
    """Return how many operations there are, and how many of them are where; the parts add up."""
    live = [op for op, step in zip(plan.program.ops, plan.steps, strict=True) if step.once or step.shards]
    once = [(len(_working(ops)), f"once on {short_name(device)}") for device, ops in _once(plan).items()]
    shards = "on the shard" if plan.mesh.shards == 1 else f"on each of {plan.mesh.shards} shards"
    parts = [(len(_working(plan.sharded_ops)), shards), *once]
    texts = [f"{count} {where}" for count, where in parts if count]
    for kind, what in (("Placeholder", "input"), ("Const", "constant")):
        count_of_kind = sum(op.type == kind for op in live)
        texts += [count_text(count_of_kind, what)] if count_of_kind else []
    return f"{count_text(len(live), 'operation')}: {', '.join(texts)}"


def _once(plan: Decisions) -> dict[str, tuple[Op, ...]]:
    """Return what runs once and not on the shards, by device, the default device first.

    What is beside a variable, wherever that is, counts as on the default device.
    """
    sharded = {op.index for op in plan.sharded_ops}
    ops_by_device: dict[str, list[Op]] = {plan.default_device: []}
    for op in plan.ops_once:
        if op.index not in sharded:
            devices = plan.places.once(op)
            where = f"each of {', '.join(map(short_name, devices))}" if len(devices) > 1 else devices[0]
            ops_by_device.setdefault(where, []).append(op)
    return {
        device: tuple(ops_by_device[device])
        for device in [plan.default_device, *sorted(set(ops_by_device) - {plan.default_device})]
    }


def _working(ops: Iterable[Op]) -> list[Op]:
    return [op for op in ops if op.type not in ("Const", "Placeholder")]


def _communication(plan: Decisions, sends: Traffic) -> list[str]:
    lines = []
    by_kind = {} if plan.program.symbols else sends.by_kind
    for kind in _SENT:
        tensors = [move.tensor for move in plan.moves if move.kind == kind]
        if tensors:
            sending = f", {_sent(sends, kind)}" if not plan.program.symbols else ""
            size = size_text(plan.program, tensors)
            lines.append(f"  {kind}: {count_text(len(tensors), 'tensor')}, {size}{sending}{_by_hosts(plan, kind)}")
    lines += _along_axes(plan, sends)
    lines += [
        f"  {kind}: {_sent(sends, kind)}" for kind in (COPY, STAGES) if by_kind.get(kind) or kind in sends.unknown
    ]
    for bucket in plan.buckets:
        tensors = [move.tensor for move in bucket.moves]
        many = count_text(len(tensors), "tensor")
        lines.append(f"  bucketed {bucket.kind}: {many}, {size_text(plan.program, tensors)}")
    if sends.between_hosts and not plan.program.symbols:
        within = format_bytes(sends.within_hosts, is_least=bool(sends.unknown))
        between = format_bytes(sends.between_hosts, is_least=bool(sends.unknown))
        lines.append(f"  between {len(_hosts(plan))} hosts: {between} a call; within them: {within}")
    device, sent, received = sends.busiest
    if device and not plan.program.symbols:
        is_least = bool(sends.unknown)
        amounts = f"sends {format_bytes(sent, is_least=is_least)}, receives {format_bytes(received, is_least=is_least)}"
        lines.append(f"  busiest device: {short_name(device)} {amounts} a call")
    chain = longest_chain(plan)
    lines += [f"  longest chain: {chain}"] if chain.exchanges else []
    if plan.order:
        runs = "1 operation runs" if len(plan.order) == 1 else f"{len(plan.order)} operations run"
        lines.append(f"  {runs} late, so that other devices need not wait")
    return lines


def _sent(sends: Traffic, kind: str) -> str:
    """Say how many bytes one kind of move sends, as far as that does not follow from data."""
    size, is_least = sends.by_kind.get(kind, 0), kind in sends.unknown
    return (
        "an unknown number of bytes sent" if is_least and not size else f"{format_bytes(size, is_least=is_least)} sent"
    )


def _along_axes(plan: Decisions, sends: Traffic) -> list[str]:
    """Say what moves along each axis that is not the batch's, and in iterations of the loops that run in columns."""
    axes = [axis for axis, _ in plan.mesh.others]
    live = [op for op, step in zip(plan.program.ops, plan.steps, strict=True) if step.once or step.shards]
    lines = []
    for axis in axes:
        text = _sent(sends, along(axis)) if not plan.program.symbols else "of unknown size"
        lines.append(f"  {along(axis)}: {_kinds_of_moves(live, axis) or 'values for other columns'}, {text}")
    joint = {along(*joined) for count in range(2, len(axes) + 1) for joined in itertools.combinations(axes, count)}
    lines += [f"  {kind}: {_sent(sends, kind)}" for kind in sends.by_kind if kind in joint and not plan.program.symbols]
    for op in [op for op in live if op.has_columns]:
        inside = [inner for body in op.bodies.values() for inner in body.ops]
        kinds = [(axis, text) for axis in axes if (text := _kinds_of_moves(inside, axis))]
        named = [f"{text} {along(axis)}" if len(axes) > 1 else text for axis, text in kinds]
        when = "in each iteration of" if CONTROL_FLOW[op.type].loops else "in"
        lines.append(f"    {when} {op.label}: {', '.join(named) or 'no moves'}")
    return lines


def _kinds_of_moves(ops: Iterable[Op], axis: str) -> str:
    """Return how many moves operations are along an axis, by kind, the most first.

    What is reduced in parts and put together again of the same tensor is an all-reduce.
    """
    roles: dict[str, set[str]] = {}
    for op in ops:
        if op.provenance.axis == axis and op.provenance.role in _SENT:
            roles.setdefault(op.provenance.origin, set()).add(op.provenance.role)
    count_by_kind: Counter[str] = Counter()
    for roles_of_tensor in roles.values():
        both = roles_of_tensor & {"reduce-scatter", "all-gather"}
        count_by_kind.update(["all-reduce", *roles_of_tensor - both] if len(both) > 1 else roles_of_tensor)
    return ", ".join([count_text(count, kind) for kind, count in count_by_kind.most_common()])


def _by_hosts(plan: Decisions, kind: str) -> str:
    """Say in which order moves of a kind pass between devices of one host and between hosts, where that matters."""
    through_gateways = [c for c in plan.collectives if c.kind == kind and c.gateways]
    if not through_gateways:
        return ""
    making = [value.device for collective in through_gateways for value in collective.values]
    reading = [read.device for collective in through_gateways for reads in collective.reads for read in reads]
    count = f"{len(set(map(host_name, [*making, *reading])))} hosts"
    adds_up = any(map(is_total, through_gateways[0].values))
    return f", within each host, then between {count}" if adds_up else f", once to each of {count}"


def _hosts(plan: Decisions) -> set[str]:
    """Return the hosts of the shards, of the default device, of arguments and of variables."""
    handle_devices = devices_of_handles(plan.program, plan.state)
    devices = [plan.default_device, *plan.devices, *plan.places.all_once, *plan.state.devices.values(), *handle_devices]
    return {host_name(device) for device in devices if device}


def _rows_text(mesh: Mesh, shards: Sequence[int]) -> str:
    if mesh.rows:
        return count_text(sum([mesh.rows[d] for d in shards]), "row")
    share = Fraction(sum([mesh.share(d) for d in shards])).limit_denominator(_FINEST_SHARE)
    return "all rows" if share == 1 else f"{share} of the rows"


def _run_once(plan: Decisions) -> list[str]:
    stayed = sorted(plan.unsharded_ops, key=lambda pair: -plan.gathered_bytes(pair[0]))
    if not stayed:
        return []
    lines = [f"  operations on the batch that run on one device: {len(stayed)}"]
    for op, reason in stayed[:_MOST_LISTED]:
        where = plan.program.line_of(op)
        gathered = plan.gathered_text(op)
        lines.append(f"    {op.label}: {gathered} gathered; {reason}" + (f" ({where})" if where else ""))
        lines.append(f"      -> {advice_on(reason)}")
    more = len(stayed) - _MOST_LISTED
    return lines + ([f"    ... and {more} more"] if more > 0 else [])


def _rows_kept(plan: Decisions) -> list[str]:
    """Say what brings rows into variables that keep them."""
    bringing_most_first = sorted(plan.rows_kept, key=lambda op: -plan.gathered_bytes(op))
    gathering = [op for op in bringing_most_first if plan.gathered(op)]
    lines = [f"  rows that variables keep, each written once, on their devices: {len(gathering)}"] if gathering else []
    for op in gathering[:_MOST_LISTED]:
        where = plan.program.line_of(op)
        lines.append(f"    {op.label}: {plan.gathered_text(op)}" + (f" ({where})" if where else ""))
    more = len(gathering) - _MOST_LISTED
    return lines + ([f"    ... and {more} more"] if more > 0 else [])


def _for_rows(plan: Decisions) -> list[str]:
    """Say which lookups run where their table is, as that is fewer bytes to send."""
    lookups = run_for_rows(plan)
    lines = [f"  lookups that run once, on the device of the table, to send less: {len(lookups)}"] if lookups else []
    for op, sent in lookups[:_MOST_LISTED]:
        where = plan.program.line_of(op)
        lines.append(f"    {op.label}: {sent}" + (f" ({where})" if where else ""))
    more = len(lookups) - _MOST_LISTED
    return lines + ([f"    ... and {more} more"] if more > 0 else [])


def run_for_rows(plan: Decisions) -> list[tuple[Op, str]]:
    """Return a plan's operations that run once as rows are fewer bytes than a table, and what moves, for people."""
    lookups = []
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        if step.for_rows:
            rows, table, adds = step.for_rows
            sent, table_size = plan.size_text(rows), plan.size_text([table])
            lookups.append((op, f"{sent} of rows sent instead of {table_size} {'from' if adds else 'to'} each device"))
        for body in step.bodies.values():
            lookups += run_for_rows(body)
    return lookups


def _following(plan: Decisions, shares: Shares) -> list[str]:
    """Say what follows on one device from each operation that has rows there, where it is any work."""
    named = {id(op) for op, _ in plan.unsharded_ops}
    causes = [cause for cause in shares.causes if cause.counts and (cause.followers or id(cause.op) not in named)]
    lines = [
        line
        for cause in causes[:_MOST_LISTED]
        for line in (f"    {cause_text(plan, cause, shares)}", f"      -> {advice_on(cause.reason)}")
    ]
    more = len(causes) - _MOST_LISTED
    lines += [f"    ... and {more} more"] if more > 0 else []
    if not shares.run_once and not shares.are_most:
        return []
    bound = "at least " * shares.are_most
    total = f"  {bound}{100 * shares.run_once:.4g} % of the FLOPs work on the batch and run on one device"
    return [f"{total}:", *lines] if lines else [total]


_LEAST_SUM = 0.01  # of the FLOPs, for which a line says what else runs once
_MOST_KINDS = 3
_MOSTLY = 0.9  # of what runs once: if one device runs less than that, it is divided


def _without_rows(plan: Decisions, shares: Shares) -> list[str]:
    """Say how much runs once and follows from no rows there."""
    total = sum(shares.without_rows.values())
    if not plan.mesh.shards or total <= _LEAST_SUM * shares.flops:
        return []
    most = sorted(shares.without_rows.items(), key=lambda pair: -pair[1])[:_MOST_KINDS]
    texts = [f"{kind} {100 * flops / shares.flops:.2g} %" for kind, flops in most]
    most_on_one = max(shares.without_rows_on.values(), default=total) / total
    spread = f", at most {100 * most_on_one:.2g} % of these on one device" if most_on_one < _MOSTLY else ""
    return [f"  {100 * total / shares.flops:.4g} % of the FLOPs run once, and on no rows{spread}: {', '.join(texts)}"]


def _turns(plan: Decisions) -> list[str]:
    """Say where the shards of a device synchronize, and what memory that takes."""
    if not plan.mesh.has_turns:
        return []
    met = meeting_points(plan.flow)
    lines = [f"  {line}" for schedule in plan.schedules.values() for line in f"schedule {schedule}".splitlines()]
    if met:
        names = [op.label for op in met[:_MOST_MET]]
        more = [f"{len(met) - _MOST_MET} more"] if len(met) > _MOST_MET else []
        memory_text = "" if plan.program.symbols else f", holding up to {format_bytes(held_bytes(plan))}"
        lines.append(f"  all shards synchronize{memory_text}: at {', '.join([*names, *more])}")
    return lines


def _held(plan: Decisions, tasks: Tasks) -> list[str]:
    """Say what each device holds at its peak: of activations and what it receives, and in total."""
    if plan.program.symbols:
        return []
    alive, giving = alive_on(plan, tasks), giving_devices(plan)
    working = [device for device in alive if device not in giving]
    others_working = [device for device in working if device != plan.default_device]
    fullest = max(others_working, key=lambda device: alive[device].bytes, default=plan.default_device)
    shown = [device for device in working if device in (plan.default_device, fullest)]
    most = [f"{format_bytes(alive[device].bytes)} on {short_name(device)}" for device in shown]
    most += [f"no more on {count_text(len(working) - len(shown), 'other')}"] if len(working) > len(shown) else []
    return [*([f"  peak of activations: {', '.join(most)}"] if most else []), *held_text(plan, tasks, alive)]


def _split_loops(plan: Decisions) -> list[str]:
    """Say which loops and branches run once for all shards and why, and what an iteration runs on shards and moves."""
    lines = []
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        if step.once and step.bodies and step.reason:
            lines.append(f"  runs once for all shards, which synchronize in every iteration: {op.label}; {step.reason}")
            body = _run_most(op, step.bodies)
            sends = traffic_of_call(body)
            moved = "" if body.program.symbols else f"; {_sent_in_all(sends)} sent"
            moves = Counter(move.kind for move in body.moves)
            kinds = ", ".join([count_text(moves[kind], kind) for kind in _SENT if kind in moves]) or "no moves"
            lines.append(f"    {_each_iteration(op)}: {_count(body.sharded_ops)} on every shard; {kinds}{moved}")
    return lines


def _run_most(op: Op, bodies: Mapping[str, Decisions]) -> Decisions:
    """Return the plan of a loop's body, or of the branch that runs most on the shards."""
    if CONTROL_FLOW[op.type].loops:
        return bodies[function_names(op.node)[-1]]
    return max(bodies.values(), key=lambda body: len(body.sharded_ops))


def _each_iteration(op: Op) -> str:
    times = times_run(op)
    if not CONTROL_FLOW[op.type].loops:
        return "one of its branches"
    return (
        "each iteration, of which nobody knows how many there are" if times is None else f"each of {times} iterations"
    )


def _sent_in_all(sends: Traffic) -> str:
    return format_bytes(sum(sends.sent.values()), is_least=bool(sends.unknown))


def _count(ops: tuple[Op, ...]) -> str:
    kinds = _working(ops)
    return count_text(len(kinds), "operation") + (f" ({_kinds(kinds, 6)})" if kinds else "")


def _kinds(ops: Iterable[Op], most: int) -> str:
    kinds = Counter(op.type for op in ops)
    common = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(most))
    return common + (", ..." if len(kinds) > most else "")
