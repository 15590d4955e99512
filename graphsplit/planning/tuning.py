"""`tuning={...}`: what few need to set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from graphsplit.core.devices import canonical_name
from graphsplit.core.patterns import meant
from graphsplit.errors import ArgumentError
from graphsplit.planning.option_checks import check_flag, is_count


class Tuning(TypedDict, total=False):
    """The keys of `tuning={...}`, of `parallelize`.

    Attributes:
      bucket_bytes: small gradients travel together, in buckets of at most so many bytes, each as soon as it is full. 0
        lets each travel alone. None means 64 kB, and 512 kB between hosts.
      default_device: the device for work that is not sharded, `"CPU:0"`. None means the first device; if devices or
        variables are on several hosts, the device with most bytes of variables. A variable is updated on its device,
        though.
      random: `"exact"` gives one device's random numbers, row by row. `"independent"` lets each shard draw other
        numbers, the same in each run; it also splits stateful random operations (`tf.random.normal`), which otherwise
        run on one device.
      reduce_retracing: when calls differ in sizes only, trace once more with these sizes left open, as `tf.function`
        does, the batch size included. A `tf.function` that was made with `reduce_retracing=True` keeps it; one with an
        `input_signature` is traced like that at once.
    """

    bucket_bytes: int | None
    default_device: str | None
    random: str
    reduce_retracing: bool


USUAL: Tuning = {"bucket_bytes": None, "default_device": None, "random": "exact", "reduce_retracing": False}
"""What holds for keys that are left out."""


def tuning_asked(asked: object) -> Tuning:
    """Return all keys, checked.

    Raises:
      ArgumentError: for a key that there is not, or a value that cannot be meant.
    """
    if asked is not None and not isinstance(asked, Mapping):
        raise ArgumentError(f"tuning must map names to values, {{'reduce_retracing': True}}, got {asked!r}.")
    for key in asked or ():
        if key not in USUAL:
            raise ArgumentError(f"tuning has no key {key!r}.{meant(key, USUAL)} It has {', '.join(map(repr, USUAL))}.")
    found: Tuning = {**USUAL, **(asked or {})}  # type: ignore[typeddict-item]  # (checked below)
    count, device, random = found["bucket_bytes"], found["default_device"], found["random"]
    if count is not None and not is_count(count, 0):
        raise ArgumentError(
            f"bucket_bytes must be a number of bytes, at least 0, got {count!r}. Small gradients are sent together in "
            "buckets of at most that size; 0 sends each alone, None chooses."
        )
    if device is not None:
        canonical_name(device, "default_device")
    if random not in ("exact", "independent"):
        raise ArgumentError(f"random must be 'exact' or 'independent', got {random!r}.")
    check_flag("reduce_retracing", found["reduce_retracing"])
    return found
