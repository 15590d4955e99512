"""The default home where devices, or variables, are on several hosts: what is near the variables is not sent there."""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.core.devices import short_name
from graphsplit.core.hosts import host_name
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.state import State
from graphsplit.prediction.state_bytes import state_bytes
from graphsplit.program.program import Program
from graphsplit.tracing.trace import Trace


def default_home(trace: Trace, program: Program, state: State, devices: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the device of whole values that belong to nobody, and what a plan says of it.

    On one host it is the first of the devices. On several it is the one, be it none of these, that has most bytes of
    the captured variables; unless the first has half as many: slices of variables are not all of one size.

    Args:
      trace: whose variables.
      program, state: the function with its variables in parts, and where these are.
      devices: of the shards, full names.
    """
    first = devices[0]
    held = state_bytes(trace, program, state, first)
    most = max([first, *held], key=lambda device: held.get(device, 0))
    is_one_host = len({host_name(device) for device in (*devices, *held)}) == 1
    if is_one_host or 2 * held.get(first, 0) >= held.get(most, 0):
        return first, ()
    return most, (f"home: {short_name(most)}, where the variables are ({format_bytes(held[most])})",)
