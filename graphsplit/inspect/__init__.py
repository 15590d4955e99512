"""Which operation of a graph runs on which device, asked for and actual: tables, a page, questions, a timeline.

What enters: a graph, a plan, or a recorded call. What leaves: placements and timelines to be printed, saved or asked.
"""

from graphsplit.api.verification import Difference, Report
from graphsplit.inspect.placements import Placement, placement, placement_of_graph
from graphsplit.inspect.recorded import Timeline, timeline
from graphsplit.inspect.records import Change, DeviceTotals, Edge, PlacedOp, Transfer
from graphsplit.planning.plan import Plan

__all__ = [
    "Change",
    "DeviceTotals",
    "Difference",
    "Edge",
    "PlacedOp",
    "Placement",
    "Plan",
    "Report",
    "Timeline",
    "Transfer",
    "placement",
    "placement_of_graph",
    "timeline",
]
