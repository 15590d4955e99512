"""Transpiling what is already finished: SavedModel in, SavedModel out; GraphDef in, GraphDef out."""

from graphsplit.saved_models.graphs import transpile_graph_def
from graphsplit.saved_models.reports import SignatureReport, TranspileReport
from graphsplit.saved_models.stripping import strip_devices
from graphsplit.saved_models.transpiling import transpile_saved_model

__all__ = ["SignatureReport", "TranspileReport", "strip_devices", "transpile_graph_def", "transpile_saved_model"]
