"""Names and options that changed before 1.0, and how they are written now; `CHANGELOG.md` has the table."""

from __future__ import annotations

NAMES = {
    "ArgumentError": "errors.ArgumentError",
    "CheckError": "errors.CheckError",
    "Cluster": "workers.Cluster",
    "DeviceError": "errors.DeviceError",
    "Difference": "inspect.Difference",
    "KerasDistribution": "keras.KerasDistribution",
    "LocalWorkers": "workers.LocalWorkers",
    "Machine": "simulate.Machine",
    "OutputError": "errors.OutputError",
    "Placement": "inspect.Placement",
    "Plan": "inspect.Plan",
    "Prediction": "simulate.Prediction",
    "Report": "inspect.Report",
    "Resilient": "workers.Resilient",
    "RetracingWarning": "errors.RetracingWarning",
    "Scaling": "simulate.Scaling",
    "StorageError": "errors.StorageError",
    "StrictError": "errors.StrictError",
    "Timeline": "inspect.Timeline",
    "TranspileReport": "serving.TranspileReport",
    "UnsupportedError": "errors.UnsupportedError",
    "WorkerLostError": "errors.WorkerLostError",
    "calibrate": "simulate.calibrate",
    "enable_keras_distribution": "keras.enable_distribution",
    "initialize": "keras.initialize",
    "placement_of": "placement",
    "resilient": "workers.resilient",
    "strip_devices": "serving.strip_devices",
    "timeline_of": "inspect.timeline",
    "transpile_graph_def": "serving.transpile_graph_def",
    "transpile_saved_model": "serving.transpile_saved_model",
    "without_values": "keras.without_values",
}
"""Public names of `graphsplit`."""

OPTIONS = {
    "bucket_bytes": "tuning={{'bucket_bytes': {0!r}}}",
    "home": "tuning={{'default_device': {0!r}}}",
    "reduce_retracing": "tuning={{'reduce_retracing': {0!r}}}",
    "batch_axis": "the axis of mesh= that is called 'batch' or 'data', mesh={{'batch': 2, 'model': 4}}",
    "machine": "plan={0!r}",
    "weights": "shares={0!r}",
}
"""How old options are written now, with the value that was given."""

REMOVED = {"random": "Random numbers are always those of one device: leave random out."}
"""Options, and keys of `tuning`, that are gone, and what holds instead."""


def renamed(option: str, value: object) -> str:
    """Return how an old option is written now; "" if it is none.

    >>> renamed("weights", [3, 1])
    'weights= is now shares=[3, 1].'
    """
    return f"{option}= is now {OPTIONS[option].format(value)}." if option in OPTIONS else ""
