"""Reshapes, blocks and shares of rows against plain numpy: what each device receives, which rows in which order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from graphsplit.core.layouts import Shard
from graphsplit.core.sizes import apportion
from graphsplit.emission.shards.shard_copies import own_rows
from graphsplit.rules.answers import _axis_of, _factor_at
from graphsplit.rules.families.reshapes import factor_shapes

pytestmark = pytest.mark.sampled(quick=23)

SEEDS = range(400)


def own_entries(layout: Shard, rows: tuple[int, ...], device: int) -> list[int]:
    """Return the positions along the axis that belong to a device, by the definition: entry by entry."""
    owner = np.repeat(np.arange(len(rows)), rows)
    entries, position = [], 0
    for block in layout.blocks:
        for row in range(sum(rows)):
            entries += [position + i for i in range(block) if owner[row] == device]
            position += block
    return entries


def piece(value: np.ndarray, layout: Shard, rows: tuple[int, ...], device: int) -> np.ndarray:
    return np.take(value, own_entries(layout, rows, device), layout.axis)


def random_rows(rng: np.random.Generator) -> tuple[int, ...]:
    shares = apportion(int(rng.integers(1, 8)), [1] * int(rng.integers(1, 5)))
    return tuple(share for share in shares if share)


def random_groups(rng: np.random.Generator, sizes: list[int], batch: int) -> tuple[tuple[int, ...], Shard]:
    """Merge neighbours among `sizes` at random, with axes of size 1 thrown in: a shape, and the layout of its batch."""
    cuts = sorted({0, len(sizes), *rng.integers(0, len(sizes) + 1, rng.integers(0, 4)).tolist()})
    shape: list[int] = []
    layout = None
    for first, last in itertools.pairwise(cuts):
        shape += [1] * int(rng.random() < 0.2)
        if first <= batch < last:
            outer, inner = int(np.prod(sizes[first:batch])), int(np.prod(sizes[batch + 1 : last]))
            layout = Shard(len(shape), (inner,) * outer)
        shape.append(int(np.prod(sizes[first:last])))
    shape += [1] * int(rng.random() < 0.2)
    assert layout is not None
    return tuple(shape), layout


def through_reshape(before: tuple[int, ...], after: tuple[int, ...], layout: Shard) -> Shard | None:
    dims_before, dims_after = factor_shapes(before, after)
    assert dims_before is not None
    found = _factor_at(dims_before[layout.axis], layout)
    return None if found is None else _axis_of(dims_after, found)


def assert_reshapes_locally(
    before: tuple[int, ...], after: tuple[int, ...], given: Shard, result: Shard, rows: tuple[int, ...]
) -> None:
    whole = np.arange(np.prod(before)).reshape(before)
    for device, count in enumerate(rows):
        local = list(after)
        local[result.axis] = result.size(count)
        np.testing.assert_array_equal(
            piece(whole, given, rows, device).reshape(local), piece(whole.reshape(after), result, rows, device)
        )


@pytest.mark.parametrize("seeds", np.array_split(SEEDS, 4), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_reshape_that_keeps_rows_together_is_local(seeds: np.ndarray) -> None:
    """Both shapes merge the same axes in different ways, so the rows can always be followed."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        rows = random_rows(rng)
        sizes = rng.integers(2, 4, rng.integers(1, 5)).tolist()
        batch = int(rng.integers(0, len(sizes) + 1))
        sizes.insert(batch, sum(rows))
        before, given = random_groups(rng, sizes, batch)
        after, _ = random_groups(rng, sizes, batch)
        result = through_reshape(before, after, given)
        assert result is not None, f"seed {seed}: {before} -> {after} from {given}, {rows}"
        assert_reshapes_locally(before, after, given, result, rows)


@pytest.mark.parametrize("seeds", np.array_split(SEEDS, 4), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_any_reshape_is_local_or_declined(seeds: np.ndarray) -> None:
    """The second shape is any that has the same size: what is answered must be right, and some is."""
    answered = 0
    for seed in seeds:
        rng = np.random.default_rng(1000 + int(seed))
        rows = random_rows(rng)
        sizes = rng.integers(1, 5, rng.integers(1, 4)).tolist()
        batch = int(rng.integers(0, len(sizes) + 1))
        sizes.insert(batch, sum(rows))
        before, given = random_groups(rng, sizes, batch)
        primes = [p for size in sizes for p in {1: [], 4: [2, 2], 6: [2, 3]}.get(size, [size])]
        after, _ = random_groups(rng, rng.permutation(primes or [1]).tolist(), 0)
        result = through_reshape(before, after, given)
        if result is not None:
            assert_reshapes_locally(before, after, given, result, rows)
            answered += 1
    assert len(seeds) / 4 < answered < len(seeds)


@pytest.mark.parametrize(
    ("before", "after", "given", "result"),
    [
        ((6, 4), (24,), Shard(0), Shard(0, (4,))),
        ((3, 6, 2), (18, 2), Shard(1), Shard(0, (1, 1, 1))),
        ((18, 2), (3, 6, 2), Shard(0, (1, 1, 1)), Shard(1)),
        ((18, 2), (3, 6, 2), Shard(0, (3,)), None),
        ((6, 6, 4), (24, 6), Shard(0), Shard(0, (4,))),
        ((6, 6, 4), (24, 6), Shard(1), None),
        ((6, 4), (4, 6), Shard(0), None),
        ((12,), (2, 6), Shard(0, (1, 1)), Shard(1)),
        ((None, 6, 4), (None, 24), Shard(1), Shard(1, (4,))),
        ((1, 5), (5,), Shard(0), Shard(0, (5,))),
    ],
)
def test_layout_through_reshape(
    before: tuple[int, ...], after: tuple[int, ...], given: Shard, result: Shard | None
) -> None:
    assert through_reshape(before, after, given) == result


def test_pieces_cover_the_axis_in_order() -> None:
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        rows = random_rows(rng)
        layout = Shard(int(rng.integers(2)), tuple(rng.integers(1, 4, rng.integers(1, 4)).tolist()))
        shape = [3, 3]
        shape[layout.axis] = layout.size(sum(rows))
        value = rng.standard_normal(shape)
        entries = [own_entries(layout, rows, device) for device in range(len(rows))]
        assert sorted(itertools.chain(*entries)) == list(range(shape[layout.axis]))
        sizes = [size for block in layout.pieces(rows) for size in block]
        cut = np.split(np.arange(shape[layout.axis]), np.cumsum(sizes)[:-1])
        for device, own in enumerate(entries):
            assert np.concatenate(cut[device :: len(rows)]).tolist() == own == sorted(own)
            assert len(own) == layout.size(rows[device])
            np.testing.assert_array_equal(own_rows(value, layout, rows, device), piece(value, layout, rows, device))


def test_apportion() -> None:
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        rows = int(rng.integers(0, 40))
        weights = rng.choice([0, 0.1, 1, 1, 2, 3.7], rng.integers(1, 6)).tolist()
        weights[int(rng.integers(len(weights)))] += 1
        shares = apportion(rows, weights)
        exact = [rows * weight / sum(weights) for weight in weights]
        assert sum(shares) == rows
        assert all(abs(share - wanted) < 1 for share, wanted in zip(shares, exact, strict=True))
        assert all(share == 0 for share, weight in zip(shares, weights, strict=True) if weight == 0)
        assert apportion(rows, [2 * weight for weight in weights]) == shares


@pytest.mark.parametrize("devices", range(1, 6))
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 33])
def test_equal_shares(rows: int, devices: int) -> None:
    shares = apportion(rows, [1] * devices)
    assert sum(shares) == rows
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)
