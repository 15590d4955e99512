"""Finished models for several devices: a SavedModel becomes a SavedModel, a GraphDef a GraphDef.

What enters: a SavedModel or a `GraphDef`. What leaves: one whose nodes name several devices, and a report.
"""

from graphsplit.serving.graphs import transpile_graph_def
from graphsplit.serving.reports import SignatureReport, TranspileReport
from graphsplit.serving.transpiling import strip_devices, transpile_saved_model

__all__ = ["SignatureReport", "TranspileReport", "strip_devices", "transpile_graph_def", "transpile_saved_model"]
