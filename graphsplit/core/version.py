"""The version of graphsplit."""

__version__ = "0.3.0"
