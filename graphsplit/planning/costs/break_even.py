"""Break-even points of planning: from where on it pays to spread work, or to send something packed.

Planning decides these before it knows a machine, by measurements that are named here. What follows for a machine is
told by prediction: `gs.predict`, `plan="auto"`.
"""

from __future__ import annotations

SMALL_BYTES = 16_384
"""Up to this size tensors travel packed. `python -m benchmarks.packing`: a fifth faster on 8 devices; of four times the
size, even. Nor is what is smaller sent in another way to save bytes: rows of a table, columns in exchange for rows."""

BUCKET_BYTES = 65_536
"""The most bytes of a bucket of sums, unless somebody asks for another size. `python -m benchmarks.packing
--buckets`, 32 layers on 4 devices: without buckets 1.18 of the time, with those of 8 kB 1.00, of 1 MB 1.03."""

BUCKET_BYTES_BETWEEN_HOSTS = 524_288
"""The most of one whose sums pass from host to host. Between two processes on loopback a transfer takes 0.15 to 0.2 ms
whatever it carries, and then 500 to 800 MB/s pass: it costs as much as 114 kB (0.175 ms at 650 MB/s). Of a transfer of
4.6 times that, 18 % is the start; and it takes 1 ms, little to wait for of a step that takes at least 7 there."""

FEWEST_IN_BUCKET = 4
"""A bucket of fewer takes as many nodes as it saves."""

FLOPS_PER_BYTE = 1
"""That must be spread for each byte moved: a product with four columns pays, with one it does not."""

LEAST_OTHER_FLOPS = 1_000_000
"""For which anything is cut that has neither the batch's rows nor an argument's."""

LEAST_OTHER_BYTES = 65_536
"""As many bytes of such a thing."""

LEAST_SHARE = 0.01
"""Of all work: where less is done whole, nobody looks for what could be cut of it."""

COPY_BYTES = 1024
"""Less than this is not worth a thought: the copy of a tensor between devices costs as much, whatever it carries. So
each shard makes it by itself, a sum of it is added up in one place, and it decides nothing along an axis of a mesh."""
