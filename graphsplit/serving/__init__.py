"""Finished models for several devices: a SavedModel becomes a SavedModel, a GraphDef a GraphDef."""

from graphsplit.serving.graphs import transpile_graph_def
from graphsplit.serving.reports import SignatureReport, TranspileReport
from graphsplit.serving.stripping import strip_devices
from graphsplit.serving.transpiling import transpile_saved_model

__all__ = ["SignatureReport", "TranspileReport", "strip_devices", "transpile_graph_def", "transpile_saved_model"]
