"""Bucketing: small tensors that can travel at the same time travel as one.

A copy between devices costs some microseconds whatever it carries, and two nodes in the graph that TensorFlow prepares.
Biases and scales, and their gradients, are many and small. What the shards read whole and is known before any of them
has run is joined on the default device and sent once; what is reduced and then read on the default device only is
joined on each shard and reduced as one. Neither waits for the other way round: that is why only the first and the last
of a step are put into buckets. Among the last are numbers that an owner sends to all owners: those of one bucket have
as many such ways before them, so none follows from another.

A bucket of sums waits for its last one. So they are put into buckets as they become ready, and a bucket that is full is
reduced while the backward pass goes on. (DDP calls its size `bucket_cap_mb`.)

Sums that the shards send each other, in the middle of a step, are joined if they are ready at the same time: the two of
a BatchNormalization's backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import tensorflow as tf

from graphsplit.core.gpus import can_be_cut
from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Layout, Partial, Replicate, SingleDevice, group_of
from graphsplit.errors import CheckError
from graphsplit.planning.communication.transfers import Collective
from graphsplit.planning.costs.families import MATRIX, family_of
from graphsplit.planning.costs.work import BUCKET_BYTES, BUCKET_BYTES_BETWEEN_HOSTS, FEWEST_IN_BUCKET, SMALL_BYTES
from graphsplit.planning.steps import Move, Step
from graphsplit.program.graph.graph import reached, readers_of
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.sides import Side, sides_of


def find_buckets(
    program: Program,
    steps: Sequence[Step],
    moves: Sequence[Move],
    leading: Collection[Tensor],
    devices: Collection[str],
    most: int | None = None,
    few_bytes: int = 0,
    levels: Sequence[int] = (),
) -> tuple[tuple[Move, ...], ...]:
    """Return which moves are made as one: of tensors of one axis, one dtype, known sizes, between the same places.

    Args:
      program, steps: what runs where.
      moves: all moves.
      leading: see `leading_to_shards`.
      devices: those of the shards, and the default device; where they are one, nothing travels.
      most: of how many bytes a bucket of sums is full; 0 for no buckets, None for as many as pay between the devices.
      few_bytes: see `Mesh.few_bytes`; that many bytes are in a bucket of sums that the shards send each other.
      levels: how often all shards have waited before each operation, by position.
    """
    if most is None:
        most = BUCKET_BYTES if len(set(map(host_name, devices))) == 1 else BUCKET_BYTES_BETWEEN_HOSTS
    if len(devices) < 2 or not most or program.symbols or program.seeds or program.stages:
        return ()  # shards may be absent; what comes from outside comes when it likes; stages have their own devices
    moves = [move for move in moves if _can_be_joined(_dtype(program, move), devices)]
    first, last = _sent_first(program, steps, moves), _reduced_last(moves, leading)
    numbers = _sent_to_owners(program, [move for move in moves if move.tensor not in leading])
    ready = sorted(last, key=lambda move: move.tensor.op)  # (moves are in the order in which they are read)
    full = [part for alike in _alike(program, ready) for part in _filled(program, alike, most)]
    many = [moves for moves in (*_alike(program, first), *numbers, *full) if len(moves) >= FEWEST_IN_BUCKET]
    return tuple(map(tuple, [*many, *_exchanged_at_once(program, moves, few_bytes, levels)]))


def _exchanged_at_once(
    program: Program, moves: Iterable[Move], few_bytes: int, levels: Sequence[int]
) -> list[list[Move]]:
    """Return sums that the shards send each other, those together that are ready at the same time.

    That is where as many exchanges, one after the other, and as many products lead to them. So none follows from
    another one, and none waits for a product that another one needs. Nor do they wait for each other through what runs
    later to save memory, or in turns: all shards have waited as often before each. (Each column of a mesh has devices
    of its own.)
    """
    exchanged = {move.tensor: move for move in moves if move.source == PARTIAL_SUM and move.target == REPLICATE}
    counts_before: list[tuple[int, int]] = []  # of each operation, how many exchanges and products lead to its results
    ready: dict[tuple[object, ...], list[Move]] = {}
    sides = sides_of(program)
    for op in program.ops if exchanged else ():
        exchange_counts = [counts_before[tensor.op][0] + (tensor in exchanged) for tensor in op.inputs]
        exchanges = max([*exchange_counts, *[counts_before[i][0] for i in op.controls]], default=0)
        is_product = family_of(op.type) in (*MATRIX, "depthwise")
        counts_before.append((exchanges, max([counts_before[i][1] for i in op.sources], default=0) + is_product))
        for k, dtype in enumerate(op.out_dtypes):
            if (tensor := Tensor(op.index, k)) in exchanged:
                is_number = program.shape(tensor) == ()
                alike = (counts_before[-1], levels[op.index], dtype, is_number, op.provenance.column, sides.of(tensor))
                ready.setdefault(alike, []).append(exchanged[tensor])
    full = [part for together in ready.values() for part in _filled(program, together, few_bytes)]
    return [together for together in full if len(together) > 1]


def _can_be_joined(dtype: tf.DType, devices: Collection[str]) -> bool:
    """Return whether the devices join and cut numbers of a type themselves: GPUs have no kernel for some integers.

    (A TensorFlow that is built for CPUs does not know the kernels of GPUs, and plans for them all the same.)
    """
    on_gpus = any("device:GPU:" in device for device in devices) and can_be_cut(tf.float32, "GPU")
    return (dtype.is_floating or dtype.is_integer) and (not on_gpus or can_be_cut(dtype, "GPU"))


def _dtype(program: Program, move: Move) -> tf.DType:
    return program.ops[move.tensor.op].out_dtypes[move.tensor.index]


def _filled(program: Program, moves: Iterable[Move], most: int) -> list[list[Move]]:
    """Return moves in order, in buckets of at most so many bytes; a larger tensor has one for itself."""
    filled: list[list[Move]] = []
    size = most
    for move in moves:
        size_of_tensor = program.bytes(move.tensor)
        size += size_of_tensor
        if size > most:
            filled.append([])
            size = size_of_tensor
        filled[-1].append(move)
    return filled


def check_buckets(program: Program, steps: Sequence[Step], buckets: Iterable[Collective]) -> None:
    """Raise `CheckError` if a move of a bucket waits for another one of it, through what runs on the shards."""
    readers = readers_of(dict.fromkeys(op.sources) for op in program.ops)
    for bucket in buckets:
        tensors = [move.tensor for move in bucket.moves]
        if bucket.moves[0].target == REPLICATE and bucket.kind == "all-reduce":
            reading = [i for t in tensors for i in readers[t.op] if _reads_whole(program.ops[i], steps[i], t)]
            after = reached(reading, readers.__getitem__)
            wrong = [program.ops[t.op].name for t in tensors if t.op in after]
            if wrong:
                raise CheckError(f"{wrong[0]!r} follows from what it is exchanged with.")
            continue
        if program.shape(tensors[0]) == ():  # of owners
            behind = reached([i for tensor in tensors for i in readers[tensor.op]], readers.__getitem__)
            if set(behind) & {tensor.op for tensor in tensors}:
                raise CheckError("Numbers in a bucket follow from each other.")
            continue
        if bucket.kind == "broadcast":
            waiting_for = reached([tensor.op for tensor in tensors], lambda i: program.ops[i].sources)
        else:
            reading = [i for t in tensors for i in readers[t.op] if _reads_whole(program.ops[i], steps[i], t)]
            waiting_for = reached(reading, readers.__getitem__)
        wrong = [program.ops[i].name for i in waiting_for if steps[i].shards]
        if wrong:
            raise CheckError(f"Tensors in a bucket of {bucket.kind} moves wait for each other through {wrong[0]!r}.")


def _reads_whole(op: Op, step: Step, tensor: Tensor) -> bool:
    wants = step.shards.wants if step.shards else (PARTIAL_SUM,) * len(op.inputs)
    layouts_wanted = [want for t, want in zip(op.inputs, wants, strict=True) if t == tensor]
    return bool(layouts_wanted) and (step.once or any(want != PARTIAL_SUM for want in layouts_wanted))


def _alike(program: Program, moves: Iterable[Move]) -> list[list[Move]]:
    """Return the moves of small tensors, those together that can be made as one, as all are there or none."""
    alike: dict[tuple[str, Layout, Layout, Side], list[Move]] = {}
    sides = sides_of(program)
    for move in moves:
        shape = program.shape(move.tensor)
        if shape is not None and len(shape) == 1 and 0 < program.bytes(move.tensor) <= SMALL_BYTES:
            key = (_dtype(program, move).name, move.source, move.target, sides.of(move.tensor))
            alike.setdefault(key, []).append(move)
    return list(alike.values())


def _sent_first(program: Program, steps: Sequence[Step], moves: Iterable[Move]) -> list[Move]:
    """Return the broadcasts of what does not depend on anything that ran on the shards."""
    after: set[int] = set()
    for op in program.ops:
        if steps[op.index].shards or steps[op.index].bodies or any(source in after for source in op.sources):
            after.add(op.index)
    return [move for move in moves if move.kind == "broadcast" and move.tensor.op not in after]


def _sent_to_owners(program: Program, moves: Iterable[Move]) -> list[list[Move]]:
    """Return the moves of numbers from one owner to all owners, those together before which are as many such ways."""
    moves = [move for move in moves if isinstance(move.source, SingleDevice) and group_of(move.target)]
    sent = {move.tensor: move for move in moves if program.shape(move.tensor) == ()}
    ways_before = [0] * len(program.ops)
    for op in program.ops if sent else ():
        ways = [ways_before[tensor.op] + (tensor in sent) for tensor in op.inputs]
        ways_before[op.index] = max([*ways, *[ways_before[i] for i in op.sources]], default=0)
    alike: dict[tuple[object, ...], list[Move]] = {}
    sides = sides_of(program)
    for tensor, move in sent.items():
        key = _dtype(program, move).name, move.source, move.target, ways_before[tensor.op], sides.of(tensor)
        alike.setdefault(key, []).append(move)
    return list(alike.values())


def _reduced_last(moves: Iterable[Move], leading: Collection[Tensor]) -> list[Move]:
    """Return the sums over the shards that are read on the default device, with nothing following on the shards."""
    sums = [move for move in moves if move.source == PARTIAL_SUM and _is_added_up_whole(move.target)]
    return [move for move in sums if move.tensor not in leading]


def _is_added_up_whole(target: Layout) -> bool:
    """Return whether what is small is added up in one place, or in each of several that have a copy of it."""
    return isinstance(target, SingleDevice) or (
        isinstance(target, Replicate) and target.devices != () and not target.readers
    )


def leading_to_shards(program: Program, steps: Sequence[Step]) -> set[Tensor]:
    """Return the tensors from which, once they are reduced if they were sums, something follows on the shards."""
    leading_ops: set[int] = set()  # operations from which something follows on the shards
    leading: set[Tensor] = set()
    for op in reversed(program.ops):
        shards = steps[op.index].shards
        if shards:
            for tensor, want in zip(op.inputs, shards.wants, strict=True):
                if want is not PARTIAL_SUM and (type(want) is not Partial or want != PARTIAL_SUM):
                    leading.add(tensor)
        if steps[op.index].once and op.index in leading_ops:
            leading.update(op.inputs)
        if shards or op.index in leading_ops or steps[op.index].bodies:
            leading_ops.update(op.sources)
    return leading
