"""Placement: which operation of a graph runs on which device, requested and actual; tables, pictures, questions."""

from __future__ import annotations

from graphsplit.inspect.builders import placement_of, placement_of_graph, placement_of_plan
from graphsplit.inspect.graph import PlacementError
from graphsplit.inspect.placements import Placement
from graphsplit.inspect.recorded.recorded_steps import Timeline
from graphsplit.inspect.recorded.timeline import timeline_of
from graphsplit.inspect.records import Change, CriticalPath, DeviceTotals, Edge, PlacedOp, Transfer

__all__ = [
    "Change",
    "CriticalPath",
    "DeviceTotals",
    "Edge",
    "PlacedOp",
    "Placement",
    "PlacementError",
    "Timeline",
    "Transfer",
    "placement_of",
    "placement_of_graph",
    "placement_of_plan",
    "timeline_of",
]
